r"""Conditional Expectation Reward: the model that answers is also the judge.

    q           a question
    s           a solution, sampled from pi(s | q); it ends with `\boxed`
    a           the answer in the box after it, sampled from pi(a | s, q)
    a*          the reference answer
    rho(a, a*)  how likely a* is after the solutions that lead to a: E[ pi(a*|s,q) | a, q ]  (Eq. 3)

With N samples (s_i, a_i) of one question, and M of the solutions to average over:

    W [N, M]    W_ij = pi(a_i | s_j, q)     how surely solution j leads to answer i
    P [M]       P_j  = pi(a*  | s_j, q)     how surely solution j leads to the reference
    D           the row sums of W (diagonal)
    R [N]       R = D^-1 W P                the reward of each sample, in [0, 1]             (Eq. 8)

Why this estimates Eq. 3: by Bayes the posterior pi(s|a,q) is proportional to pi(s|q) pi(a|s,q). As
the s_j are samples of pi(s|q), the posterior over *them* is row i of W divided by its sum, D^-1 W.
The expectation of pi(a*|s,q) under it is that row times P. With M = N, a sample's own solution
included, the reward is unbiased at every N: E[ R_i | a_i = a ] = rho(a, a*) (docs/theory.md).
(Where M < N each answer has its own M of the N columns: choose_solutions.)

A right answer in other words ("14 eggs" for "14") comes from solutions that also lead to a*, and
gets a similar reward. A wrong answer mostly comes from other solutions, and gets a small one. In
expectation over the model's answers the reward equals that of exact match (Theorem 2): CER moves
reward from the literal match to its paraphrases (and a little to wrong answers).

The file has three parts: the mathematics, pure functions of tensors; `rewards`, from the sampled
tokens of one question to R; and W and P from a model. `python cer.py` shows the mathematics on a
question small enough to check by hand. In the code, samples that gave the same answer share a row,
so W has U <= N rows, and it has a column for each sample that gave any answer.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.tokens import LOGITS_AT_ONCE, batches, pad, vocabulary

# ---------------------------------------------------------------------------------- the mathematics


def exact_cer(prior, likelihood):
    """CER of every pair of answers on a finite distribution (Eq. 3).

    prior [S] = pi(s|q), likelihood [S, A] = pi(a|s,q) -> rho [A, A], rho[a, b] = rho(a, a* = b).
    An answer that no solution leads to has rho = 0.
    """
    joint = prior[:, None] * likelihood  # pi(s, a | q)  [S, A]
    marginal = joint.sum(0)  # pi(a | q)  [A]
    posterior = torch.where(marginal > 0, joint / marginal, 0.0)  # pi(s | a, q)  [S, A]
    return posterior.T @ likelihood


def cer(log_W, log_P):
    """R = D^-1 W P in log space (Eq. 8): log_W [N, M], log_P [M] -> R [N]; of several questions at
    once: [..., N, M], [..., M] -> [..., N].

    D^-1 W divides each row of W by its sum, and W = exp(log_W), so D^-1 W is a softmax: a row of
    numbers near exp(-1000) keeps its proportions. log_W = -inf leaves a solution out; a row that
    leaves out all of them gets reward 0.
    """
    empty = (log_W == -torch.inf).all(-1, keepdim=True)  # the softmax of such a row is nan
    posterior = log_W.softmax(-1).masked_fill(empty, 0.0)  # D^-1 W, pi(s_j | a_i, q)  [..., N, M]
    return (posterior * log_P.exp()[..., None, :]).sum(-1)


def choose_solutions(U, answer_of_solution, M):
    """Which M solutions each of U distinct answers is averaged over -> bool [U, solutions].

    Eq. 8 leaves this open. For each answer the solutions that produced it come first, then others
    at random. So with M = 1 the reward of an answer is P of a solution that led to it. If all
    answers shared the same M solutions, M = 1 would give them all the same reward, and every
    advantage would be 0. With M = 1 and with all solutions the mean reward is pi(a*|q), as in
    Theorem 2. In between it is slightly biased: the columns are no longer i.i.d. samples of the
    prior.
    """
    produced = torch.arange(U)[:, None] == torch.tensor(answer_of_solution)  # [U, solutions]
    key = produced + torch.rand(produced.shape)  # in [1, 2) for those that produced it, else [0, 1)
    return torch.zeros_like(produced).scatter(1, key.topk(M, dim=1).indices, True)


# ------------------------------------------------------------------------------------- one question


@dataclass(frozen=True)
class Matrices:
    """What the rewards of one question are computed from (drawn in the paper's Fig. 2)."""

    answers: list[str]  # the U distinct answers: the rows of W
    columns: list[int]  # the samples that have an answer: their solutions are the columns of W
    log_W: torch.Tensor  # [U, columns]; -inf: not among the M solutions of this answer
    log_P: torch.Tensor  # [columns]


def rewards(model, tokenizer, prompt, completions, reference, M=None):
    """CER of the N samples of one question -> (R [N], fp32, on the CPU; Matrices).

    prompt: token ids. completions: N lists of token ids, as they were sampled, never tokenised
    again. Each answer is averaged over M of the solutions, or over all by default.

    R is a constant: no gradient flows through it. A sample without an answer (no closed box) gets
    reward 0, and its solution is no column. An empty box gets 0 too, unless the reference is empty,
    but it keeps its row and column.

    model: see answer_logprobs. The samples must be the model's own, at temperature 1 without top-k
    or top-p, or they are no samples of the prior.
    """
    boxes = [vocabulary(tokenizer).locate_answer(ids) for ids in completions]
    columns = [i for i, box in enumerate(boxes) if box is not None]
    contexts = [prompt + completions[i][: boxes[i].solution_length] for i in columns]
    given = [boxes[i].answer for i in columns]
    answers = list(dict.fromkeys(given))  # a distinct answer is scored once
    scored = answers if reference in answers else [*answers, reference]
    log_pi = answer_logprobs(model, tokenizer, contexts, scored).cpu()
    log_W, log_P = log_pi[: len(answers)], log_pi[scored.index(reference)]

    row_of = [answers.index(answer) for answer in given]  # of each column's sample
    if M is not None and M < len(columns):
        log_W = log_W.masked_fill(~choose_solutions(len(answers), row_of, M), -torch.inf)
    R = torch.zeros(len(completions))
    R[columns] = cer(log_W, log_P)[row_of]
    if reference:
        R[[i for i, answer in zip(columns, given) if answer == ""]] = 0.0
    return R, Matrices(answers, columns, log_W, log_P)


# ----------------------------------------------------------------------------- W and P from a model


@torch.no_grad()
def answer_logprobs(model, tokenizer, contexts, answers):
    r"""log pi("{answer}" | context) -> fp32 [len(answers), len(contexts)], on the model's device.

    contexts: token ids of question and solution, up to just before the brace of `\boxed{`.

    What is scored is a *finished* answer, "{14}" with its closing brace. Without the brace "1"
    would collect the probability of "14", "15" and "10/3"; the sum over answers could pass 1 and
    Theorem 2 would not hold. The brace often shares its token with what follows (`}$`, `4}.`). So:
    let t_1..t_k be the tokens of "{14", without the closing brace. The box may be closed after any
    i of them, by any token v that begins with all that is still missing (and may go on after it):

        log pi = logsumexp over i = 0..k of [ log pi(t_1..t_i) + log sum_v pi(v | t_1..t_i) ]
                 v: all tokens whose bytes begin with  bytes(t_(i+1)..t_k) + "}"

    Other ways to cut "{14" itself into tokens are left out, which makes this a lower bound; how
    near it comes to what a real model samples is in docs/measurements.md.

    Cost: one forward pass over the contexts, which keeps their keys and values, and one over all
    answers behind each of them (see read_answers). A naive scorer runs len(contexts) x len(answers)
    full passes instead.

    model: a Hugging Face model in eval mode with sdpa attention over the whole context, whose
    logits are lm_head of the last hidden state (engine.policy.check_model checks all of that).
    ValueError: another attention, an empty context, or a tokenizer that cannot be cut.
    """
    if model.config._attn_implementation != "sdpa":
        raise ValueError('scoring needs a model with attn_implementation="sdpa"')
    if not all(contexts):
        raise ValueError("a context needs at least one token")
    vocab = vocabulary(tokenizer)
    spelled = [vocab.encode("{" + answer) for answer in answers]  # t_1..t_k of each
    closers = [closing_tokens(vocab, tokens) for tokens in spelled]
    # Mostly one pass reads all answers. Its mask has T^2 entries, so many long ones get several.
    passes = list(batches([len(tokens) for tokens in spelled], ANSWER_TOKENS_AT_ONCE))
    most = max((sum(len(spelled[u]) for u in together) for together in passes), default=0)

    scores = torch.empty(len(answers), len(contexts), device=model.device)
    for batch in batches([len(context) + most for context in contexts], TOKENS_AT_ONCE):
        ids = pad([contexts[j] for j in batch]).to(model.device)  # [n, C]
        length = torch.tensor([len(contexts[j]) for j in batch], device=model.device)  # [n]
        # Padded on the right: causal attention sees no padding and needs no mask.
        read = model.base_model(input_ids=ids, use_cache=True)
        first = read.last_hidden_state[range(len(batch)), length - 1]  # predicts t_1  [n, H]
        for together in passes:
            tokens = [spelled[u] for u in together]
            hidden = read_answers(model, tokens, length, ids.shape[1], read.past_key_values)
            for u, states in zip(together, hidden):
                states = torch.cat([first[:, None], states], dim=1)  # [n, k + 1, H]
                scores[u, batch] = log_finished(model.lm_head, states, spelled[u], closers[u])
    return scores


TOKENS_AT_ONCE = 4096  # in one pass over contexts; larger batches would mostly add padding
ANSWER_TOKENS_AT_ONCE = 1024  # in one pass over answers, except when one answer is longer


def read_answers(model, answers, length, C, cache):
    r"""One pass over all answers (lists of token ids, T tokens together) behind n contexts, whose
    keys and values are in the cache -> the last hidden states [n, k, H] of each answer.

    The answers lie end to end in one row. A token sees its context and its own answer up to
    itself. Positions restart behind the context. For the answers 14 and 9 behind the context
    "so \boxed" (x: the token on the left sees this):

                 so \boxed    { 1 4    { 9
        {         x    x      x . .    . .
        1         x    x      x x .    . .
        4         x    x      x x x    . .
        {         x    x      . . .    x .
        9         x    x      . . .    x x

    length [n]: of the contexts, which are padded to C. The cache is left as it was.
    """
    n, sizes, device = len(length), [len(answer) for answer in answers], length.device
    tokens = torch.tensor([t for answer in answers for t in answer], device=device)  # [T]
    answer_of = torch.repeat_interleave(torch.tensor(sizes, device=device))  # [T]
    depth = torch.cat([torch.arange(size, device=device) for size in sizes])  # in its answer  [T]
    in_context = torch.arange(C, device=device) < length[:, None]  # [n, C]
    in_answer = (answer_of[:, None] == answer_of) & (depth[:, None] >= depth)  # [T, T]
    T = len(tokens)
    mask = torch.cat([in_context[:, None].expand(n, T, C), in_answer.expand(n, T, T)], dim=2)
    hidden = model.base_model(
        input_ids=tokens.expand(n, T),
        attention_mask=mask[:, None],  # [n, 1, T, C + T]
        position_ids=length[:, None] + depth,  # [n, T]
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state  # [n, T, H]
    cache.crop(-T)  # takes the last T away: back to the contexts
    return hidden.split(sizes, dim=1)


def closing_tokens(vocab, tokens):
    """The tokens that close the box after t_1..t_i, for i = 0..k -> k + 1 lists of token ids."""
    missing = [vocab.join(tokens[i:]) + b"}" for i in range(len(tokens) + 1)]
    return [vocab.beginning_with(rest) for rest in missing]


def log_finished(lm_head, states, tokens, closers):
    """The sum over all ways to close the box, as in answer_logprobs. states [n, k + 1, H]: the last
    hidden states after t_1..t_i, i = 0..k -> log pi [n]."""
    onward, closing = [], []
    at_once = max(1, LOGITS_AT_ONCE // len(states))  # positions
    for start in range(0, len(closers), at_once):
        logp = lm_head(states[:, start : start + at_once]).float().log_softmax(-1)
        for i, after in enumerate(logp.unbind(1), start):  # after t_1..t_i  [n, vocabulary]
            closing.append(after[:, closers[i]].logsumexp(1))
            if i < len(tokens):
                onward.append(after[:, tokens[i]])  # log pi(t_(i+1) | t_1..t_i)
    so_far = F.pad(torch.stack(onward, 1).cumsum(1), (1, 0))  # log pi(t_1..t_i)  [n, k + 1]
    return (so_far + torch.stack(closing, 1)).logsumexp(1)


# ------------------------------------------------------------------------------- a worked example


def worked_example():
    """CER on three kinds of solution and four answers, small enough to check by hand."""
    answers = ["14", "14 eggs", "18", "9"]
    prior = torch.tensor([0.5, 0.3, 0.2])
    likelihood = torch.tensor(
        [
            [0.50, 0.40, 0.05, 0.05],  # A: 3*4=12; 12+2=14
            [0.05, 0.09, 0.81, 0.05],  # B: 4+2=6; 3*6=18
            [0.03, 0.01, 0.06, 0.90],  # C: 3+4=7; 7+2=9
        ]
    )
    joint, rho = prior[:, None] * likelihood, exact_cer(prior, likelihood)[:, 0]
    p_answer = joint.sum(0)

    def show(name, values):
        cells = ("-" if value is None else f"{value:.3f}" for value in values)
        print(f"{name:34}", *(f"{cell:>8}" for cell in cells))

    print('q = "3 bags of 4 eggs and 2 more eggs. How many eggs?"    a* = 14\n')
    print(f"{'kind of solution s':34}", *(f"{s:>8}" for s in "ABC"))
    show("prior      pi(s|q)", prior)
    for u, answer in enumerate(answers):
        show(f"likelihood pi({answer}|s,q)" + "  = P" * (u == 0), likelihood[:, u])
    for answer, posterior in zip(answers, (joint / p_answer).T):
        show(f"posterior  pi(s|{answer},q)", posterior)
    p, P = (joint / p_answer)[:, 1].tolist(), likelihood[:, 0].tolist()
    product = " + ".join(f"{a:.3f} * {b:.2f}" for a, b in zip(p, P))
    print(f"rho(14 eggs, 14) = posterior . P = {product} = {rho[1]:.3f}")

    print(f"\n{'answer a':34}", *(f"{answer:>8}" for answer in answers))
    show("pi(a|q)", p_answer)
    show("exact match with a*", torch.eye(4)[0])
    show("CER, rho(a, a*)            (Eq. 3)", rho)
    torch.manual_seed(0)
    for N in 16, 1024:  # samples, as training draws them: a solution, and an answer after it
        s = torch.multinomial(prior, N, replacement=True)
        a = torch.multinomial(likelihood[s], 1).squeeze(1)
        W, P = likelihood[s][:, a].T, likelihood[s, 0]  # [N, N], [N]
        R = cer(W.log(), P.log())
        received = [R[a == u][0] if (a == u).any() else None for u in range(4)]
        show(f"R = D^-1 W P, {N:4} samples  (Eq. 8)", received)  # "-": nobody gave that answer
    print("\nTheorem 2: over the model's own answers both have the same mean,")
    print(f"    exact match {p_answer[0]:.6f}    CER {p_answer @ rho:.6f}")

    # A group in which CER fails: the third sample slips, a wrong answer after a right solution.
    for title, group in (
        (
            "A group of four samples (s, a)",
            [("A", "14"), ("A", "14 eggs"), ("B", "18"), ("C", "9")],
        ),
        ("With a slip, (A, 18)", [("A", "14"), ("A", "14 eggs"), ("A", "18"), ("C", "9")]),
    ):
        s = torch.tensor(["ABC".index(kind) for kind, _ in group])
        a = torch.tensor([answers.index(answer) for _, answer in group])
        R = cer(likelihood[s][:, a].T.log(), likelihood[s, 0].log())
        baseline = (R.sum() - R) / 3  # leave-one-out: the mean of the other rewards
        print(f"\n{title:34}", *(f"{f'{kind}, {answer}':>10}" for kind, answer in group))
        for name, values in ("R", R), ("A = R - mean of the others", R - baseline):
            print(f"{name:34}", *(f"{value:10.3f}" for value in values))


if __name__ == "__main__":
    worked_example()
