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
the s_j are samples of pi(s|q), the posterior over *them* is row i of W divided by its sum, D^-1 W;
and the expectation of pi(a*|s,q) under it is that row times P. It converges as N grows, with M = N.
(Where M < N each answer has its own M of the N columns: choose_solutions.)

A right answer in other words ("14 eggs" for "14") comes from solutions that also lead to a*, and
is paid like it; a wrong answer mostly comes from others, and is paid little. In expectation over
the model's answers the reward equals that of exact match (Theorem 2): CER pays no more, it takes
from the literal hit and gives to its paraphrases (and a little to wrong answers).

The first half of this file is the mathematics, pure functions of tensors; `python cer.py` shows it
on a question small enough to check by hand. The second half fills W and P from a model. There,
samples that gave the same answer share a row, so W has U <= N rows, and a column for each sample
that gave any answer.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.policy import LOGITS_AT_ONCE
from engine.tokens import batches, pad, vocabulary

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
    leaves out all of them earns 0.
    """
    empty = (log_W == -torch.inf).all(-1, keepdim=True)  # the softmax of such a row is nan
    posterior = log_W.softmax(-1).masked_fill(empty, 0.0)  # D^-1 W, pi(s_j | a_i, q)  [..., N, M]
    return (posterior @ log_P.exp()[..., None])[..., 0]


def choose_solutions(U, answer_of_solution, M):
    """Which M solutions each of U distinct answers is averaged over -> bool [U, solutions].

    Eq. 8 leaves this open. For each answer the solutions that produced it come first, then others
    at random. So M = 1 judges an answer by P of a solution that really led to it. If all answers
    shared the same M solutions, M = 1 would give them all the same reward, and every advantage
    would be 0. With M = 1 and with all solutions the mean reward is pi(a*|q), as Theorem 2 wants;
    in between it shifts a little, up or down, since the columns are no plain samples then.
    """
    own = torch.arange(U)[:, None] == torch.tensor(answer_of_solution)  # [U, solutions]
    order = own + torch.rand(own.shape)  # own solutions lie over 1, the others under
    return torch.zeros_like(own).scatter(1, order.topk(M, dim=1).indices, True)


# ----------------------------------------------------------------------------- W and P from a model


@torch.no_grad()
def answer_logprobs(model, tokenizer, contexts, answers):
    r"""log pi("{answer}" | context) -> fp32 [len(answers), len(contexts)], on the model's device.

    contexts: token ids of question and solution, up to just before the brace of `\boxed{` (a
    tokenizer that joins the two is refused, engine/tokens.py).

    What is scored is a *finished* answer, "{14}" with its closing brace. Without the brace "1"
    would collect the probability of "14", "15" and "10/3"; the sum over answers could pass 1 and
    Theorem 2 would not hold. The brace often shares its token with what follows (`}$`, `4}.`). So:
    let t_1..t_k be the tokens of "{14", without the closing brace. The box may be closed after any
    i of them, by any token v that begins with all that is still missing (and may go on after it):

        log pi = logsumexp over i = 0..k of [ log pi(t_1..t_i) + log sum_v pi(v | t_1..t_i) ]
                 v: all tokens whose bytes begin with  bytes(t_(i+1)..t_k) + "}"

    Other ways to cut "{14" itself into tokens are left out, which makes this a lower bound; how
    near it comes to what a real model samples is in docs/measurements.md.

    The model must be in eval mode and pass engine.policy.check_model: full attention, a cache that
    can be cropped, logits that are lm_head of the last hidden state.

    Cost: one forward pass over the contexts, which keeps their keys and values, and one over all
    answers packed side by side behind each of them (see Packing). A naive scorer runs
    len(contexts) x len(answers) full passes instead.
    """
    if not all(contexts):
        raise ValueError("a context needs at least one token")
    scores = torch.empty(len(answers), len(contexts), device=model.device)
    if scores.numel() == 0:
        return scores
    vocab = vocabulary(tokenizer)
    packings = []
    for answer in answers:
        tokens = vocab.encode("{" + answer)
        # Mostly one packing holds all. Its mask has T^2 entries, so many long answers get several.
        if not packings or len(packings[-1].slots) + len(tokens) + 1 > SLOTS_AT_ONCE:
            packings.append(Packing())
        packings[-1].add(tokens, vocab)

    # Tokens in one pass; larger batches would mostly add padding and memory.
    at_once = 16384 if model.device.type == "cuda" else 4096
    by_length = sorted(range(len(contexts)), key=lambda j: len(contexts[j]))
    most_slots = max(len(packing.slots) for packing in packings)
    for start, end in batches([len(contexts[j]) + most_slots for j in by_length], at_once):
        batch = by_length[start:end]
        scores[:, batch] = score_contexts(model, [contexts[j] for j in batch], packings)
    return scores


SLOTS_AT_ONCE = 1024  # the most slots of a packing, except when one answer is longer


class Packing:
    r"""Answers packed into the T slots of one row, the same row for every context.

    Answer u takes k + 1 slots: the context's last token once more, then t_1..t_k. (The repeated
    token predicts t_1. Contexts end in different columns of their batch; like this all predictions
    stand side by side.) A slot sees the context except its last token, and its own answer up to
    itself; positions restart at the context's last token. For the answers 14 and 9 behind the
    context "so \boxed" (x: the slot on the left sees this):

        slot reads    so \boxed    \boxed { 1 4    \boxed { 9
        \boxed         x    .         x   . . .       .   . .
        {              x    .         x   x . .       .   . .
        1              x    .         x   x x .       .   . .
        4              x    .         x   x x x       .   . .
        \boxed         x    .         .   . . .       x   . .
        {              x    .         .   . . .       x   x .
        9              x    .         .   . . .       x   x x
    """

    def __init__(self):
        self.answers = []  # (first slot, t_1..t_k, the tokens that would close the box after each)
        self.slots = []  # T pairs: (number of the answer, depth: 0 at the repeated token, to k)

    def add(self, tokens, vocab):
        rest = [vocab.join(tokens[i:]) + b"}" for i in range(len(tokens) + 1)]
        closers = [vocab.beginning_with(missing) for missing in rest]  # k + 1 lists of token ids
        first, answer = len(self.slots), len(self.answers)
        self.slots += [(answer, i) for i in range(len(tokens) + 1)]
        self.answers.append((first, tokens, closers))

    def ids(self, last):
        """What the slots read behind contexts that end in the tokens last [n] -> [n, T]."""
        pieces = []
        for _, tokens, _ in self.answers:
            answer = torch.tensor(tokens, device=last.device)
            pieces += [last[:, None], answer.expand(len(last), -1)]
        return torch.cat(pieces, dim=1)


def score_contexts(model, contexts, packings):
    """answer_logprobs for as many contexts as fit in memory at once -> [answers, n]."""
    ids = pad(contexts).to(model.device)  # [n, C], on the right: causal attention needs no mask
    length = torch.tensor([len(context) for context in contexts], device=model.device)  # [n]
    cache = model.base_model(input_ids=ids, use_cache=True).past_key_values
    scores = [score_packing(model, ids, length, cache, packing) for packing in packings]
    return torch.cat(scores)


def score_packing(model, ids, length, cache, packing):
    """One pass of a packing over contexts ids [n, C] of given lengths [n], whose keys and values
    are in the cache (before and after) -> log pi [answers of the packing, n]."""
    n, T, device = len(ids), len(packing.slots), model.device
    owner, depth = torch.tensor(packing.slots, device=device).T  # [T] each: which answer's, where
    in_context = torch.arange(ids.shape[1], device=device) < length[:, None] - 1  # [n, C]
    in_answer = (owner[:, None] == owner) & (depth[:, None] >= depth)  # [T, T]
    seen = torch.cat([in_context[:, None].expand(-1, T, -1), in_answer.expand(n, -1, -1)], dim=2)
    # A mask to add: sdpa would take a bool mask too, but eager attention would add its 0s and 1s.
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=device)  # [n, T, C + T]
    mask.masked_fill_(~seen, torch.finfo(model.dtype).min)

    hidden = model.base_model(
        input_ids=packing.ids(last=ids[torch.arange(n, device=device), length - 1]),  # [n, T]
        attention_mask=mask[:, None],
        position_ids=length[:, None] - 1 + depth,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state  # [n, T, H]
    cache.crop(-T)  # takes the last T away: back to the contexts

    log_pi = []
    for first, tokens, closers in packing.answers:
        states = hidden[:, first : first + len(tokens) + 1]  # [n, k + 1, H]
        chunks = states.split(max(1, LOGITS_AT_ONCE // states.shape[1]))
        logps = (model.lm_head(chunk).float().log_softmax(-1) for chunk in chunks)
        log_pi.append(torch.cat([log_finished(logp, tokens, closers) for logp in logps]))
    return torch.stack(log_pi)


def log_finished(logp, tokens, closers):
    """The sum over all ways to close the box, as in answer_logprobs. logp [n, k + 1, vocabulary]:
    of every token after t_1..t_i, i = 0..k -> log pi [n]."""
    onward = logp[:, range(len(tokens)), tokens]  # log pi(t_(i+1) | t_1..t_i), i < k  [n, k]
    so_far = F.pad(onward.cumsum(1), (1, 0))  # log pi(t_1..t_i)  [n, k + 1]
    closing = [logp[:, i, v].logsumexp(1) for i, v in enumerate(closers)]
    return (so_far + torch.stack(closing, 1)).logsumexp(1)


# ------------------------------------------------------------------------------------- one question


@dataclass(frozen=True)
class Group:
    """What the rewards of one question come from: the matrices that the paper's Fig. 2 draws."""

    reference: str  # a*
    answers: list[str | None]  # N; None: no closed box
    distinct_answers: list[str]  # U, the rows of W
    solutions: list[int]  # the samples whose solutions are the columns of W: those with an answer
    log_W: torch.Tensor  # [U, solutions]; -inf: not among the M solutions of this answer
    log_P: torch.Tensor  # [solutions]


def score_rollout(model, tokenizer, rollout):
    """W and P of one question, of all its solutions -> Group. A distinct answer is scored once, and
    a* is one more row to score, unless some sample gave just that answer."""
    a_star, solutions = rollout.problem.reference, rollout.answered
    distinct = list(dict.fromkeys(rollout.answers[i] for i in solutions))
    to_score = distinct if a_star in distinct else [*distinct, a_star]
    contexts = [rollout.context(j) for j in solutions]
    log_pi = answer_logprobs(model, tokenizer, contexts, to_score).cpu()
    log_W, log_P = log_pi[: len(distinct)], log_pi[to_score.index(a_star)]
    return Group(a_star, rollout.answers, distinct, solutions, log_W, log_P)


def reward_group(group, M):
    """Eq. 8 for the N samples of a question, each answer averaged over M of the solutions, or over
    all if there are no more -> (R [N]; the group with -inf for the others, for the log and Fig. 2).

    R is a constant: no gradient flows through a reward. By convention a sample without an answer
    earns 0. An empty box says nothing and earns 0 too, unless a* is empty; it keeps its row and its
    column.
    """
    answer_of_solution = [group.distinct_answers.index(group.answers[j]) for j in group.solutions]
    if M < len(group.solutions):
        chosen = choose_solutions(len(group.distinct_answers), answer_of_solution, M)
        group = replace(group, log_W=group.log_W.masked_fill(~chosen, -torch.inf))
    R = torch.zeros(len(group.answers))
    R[group.solutions] = cer(group.log_W, group.log_P)[answer_of_solution]
    if group.reference:
        R[torch.tensor([answer == "" for answer in group.answers])] = 0.0
    return R, group


# ------------------------------------------------------------------------------- a worked example


def worked_example():
    """CER on three solutions and four answers, small enough to check by hand."""
    answers = ["14", "14 eggs", "18", "9"]
    prior = torch.tensor([0.5, 0.3, 0.2])
    likelihood = torch.tensor(
        [
            [0.50, 0.40, 0.05, 0.05],  # s_1: 3*4=12; 12+2=14
            [0.05, 0.09, 0.81, 0.05],  # s_2: 4+2=6; 3*6=18
            [0.03, 0.01, 0.06, 0.90],  # s_3: 3+4=7; 7+2=9
        ]
    )
    joint, rho = prior[:, None] * likelihood, exact_cer(prior, likelihood)[:, 0]
    p_answer = joint.sum(0)

    def show(name, values):
        cells = ("-" if value is None else f"{value:.3f}" for value in values)
        print(f"{name:34}", *(f"{cell:>8}" for cell in cells))

    print('q = "3 bags of 4 eggs and 2 more eggs. How many eggs?"    a* = 14\n')
    print(f"{'solution s':34}", *(f"{s:>8}" for s in ("s_1", "s_2", "s_3")))
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
    for N in 4, 16, 1024:  # N samples, as training draws them: a solution, and an answer after it
        s = torch.multinomial(prior, N, replacement=True)
        a = torch.multinomial(likelihood[s], 1).squeeze(1)
        W, P = likelihood[s][:, a].T, likelihood[s, 0]  # [N, N], [N]
        R = cer(W.log(), P.log())
        earned = [R[a == u][0] if (a == u).any() else None for u in range(4)]
        show(f"R = D^-1 W P, {N:4} samples  (Eq. 8)", earned)  # "-": nobody gave that answer
        if N == 4:
            pairs = (f"(s_{i + 1}, {answers[j]})" for i, j in zip(s.tolist(), a.tolist()))
            print(f"{'':4}the 4 samples (s, a):", *pairs)
    print("\nTheorem 2: over the model's own answers both pay the same,")
    print(f"    mean exact match {p_answer[0]:.6f}    mean CER {p_answer @ rho:.6f}")


if __name__ == "__main__":
    worked_example()
