r"""Conditional Expectation Reward: the model that answers is also the judge.

    q           a question
    s           a solution sampled from pi(s | q)
    a           the answer boxed after it, sampled from pi(a | s, q)
    a*          the reference answer
    rho(a, a*)  how likely a* is after the solutions that lead to a:   E[ pi(a*|s,q) | a, q ]           (Eq. 3)

With N samples (s_i, a_i) of one question, and M of the solutions to average over:

    W [N, M]    W_ij = pi(a_i | s_j, q)     does solution j lead to answer i?
    P [M]       P_j  = pi(a*  | s_j, q)     does solution j lead to the reference?
    D           the row sums of W (diagonal)
    R [N]       R = D^-1 W P                the reward of each sample, in [0, 1]                        (Eq. 8)

A wrong answer is one whose solutions do not lead to a*. A right answer in other words ("14 eggs"
for "14") is one whose solutions do, so it is paid by how likely they make a*. The expected reward
over the samples equals that of exact match (Theorem 2): CER pays no more, it spreads the pay over
all the answers that deserve it.

The first half of this file is the mathematics, pure functions of tensors. The second half fills W
and P from a model.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from policy import tokens_that_fit, vocabulary

# ------------------------------------------------------------------------------------------ the mathematics


def exact_cer(prior, likelihood):
    """CER of every pair of answers on a finite distribution (Eq. 3).

    prior [S] = pi(s|q), likelihood [S, A] = pi(a|s,q) -> rho [A, A], rho[a, b] = rho(a, a* = b).
    An answer that no solution leads to has rho = 0.
    """
    joint = prior[:, None] * likelihood  # pi(s, a | q)  [S, A]
    posterior = joint / joint.sum(0).clamp(
        min=torch.finfo(joint.dtype).tiny
    )  # pi(s | a, q)  [S, A]
    return posterior.T @ likelihood


def cer(log_W, log_P):
    """R = D^-1 W P in log space (Eq. 8): log_W [N, M], log_P [M] -> R [N].

    D^-1 W divides each row of W by its sum, and W = exp(log_W), so D^-1 W is a softmax: answers as
    improbable as exp(-1000) keep their proportions. log_W = -inf leaves a solution out; a row of
    nothing else earns 0.
    """
    share = log_W.softmax(dim=1).nan_to_num(0.0)  # softmax of an all -inf row is nan
    return share @ log_P.exp()


def choose_columns(N_answers, answer_of_column, M):
    """Which M of the solutions each distinct answer is averaged over: bool [N_answers, columns],
    for M < N.

    Eq. 8 leaves this open. For each answer the solutions that produced it come first, then others
    at random. If all answers shared the same M solutions, M = 1 would give them all the same reward
    and every advantage would be 0.
    """
    own = torch.arange(N_answers)[:, None] == torch.tensor(answer_of_column)  # [N_answers, columns]
    rank = (own + torch.rand(own.shape)).argsort(dim=1, descending=True).argsort(dim=1)
    return rank < M


# ------------------------------------------------------------------------------------------ W and P from a model


@torch.no_grad()
def answer_logprobs(model, tokenizer, contexts, answers):
    r"""log pi("{answer}" | context), fp32 [len(answers), len(contexts)], on the model's device.

    contexts: token ids of question and solution, up to just before the brace of `\boxed{`; answers:
    texts.

    What is scored is a *finished* answer: "14" followed by its closing brace. Without the brace,
    "1" would collect the probability of "14", "15", "10/3"; the sum over answers could pass 1 and
    Theorem 2 would not hold. The brace often shares its token with what follows (`}$`, `}.`), so:
    let t_1..t_k be the tokens of "{answer". The box may be closed after any i of them, by any token
    v that spells what is missing and then whatever it likes:

        log pi = logsumexp over i = 0..k of   log pi(t_1..t_i) + log sum_v pi(v | t_1..t_i),
                 v: all tokens whose bytes begin with  bytes(t_i+1..t_k) + "}"

    Cost: one forward pass over the contexts, which keeps their keys and values, and one over all
    answers laid end to end behind each of them. An answer's tokens see the context and their own
    answer only (a 4-D mask), and their positions restart at the context's end. A naive scorer runs
    contexts x answers full passes instead.
    """
    if not all(contexts):
        raise ValueError("a context needs at least one token")
    if not contexts or not answers:
        return torch.empty(len(answers), len(contexts), device=model.device)
    tree = AnswerTree(vocabulary(tokenizer), answers, model.device)
    out = torch.empty(len(answers), len(contexts), device=model.device)
    order = sorted(range(len(contexts)), key=lambda j: len(contexts[j]))
    budget, start = tokens_that_fit(model), 0
    for end in range(
        1, len(order) + 1
    ):  # micro-batches: as many contexts as their caches fit in memory
        size = len(tree.tokens) + len(contexts[order[min(end, len(order) - 1)]])
        if end == len(order) or (end + 1 - start) * size > budget:
            batch = order[start:end]
            out[:, batch] = score_batch(model, [contexts[j] for j in batch], tree)
            start = end
    return out


class AnswerTree:
    """All answers laid end to end, T columns. Answer u's branch is a repetition of the context's
    last token (whose logits predict the first token, so the pass over the contexts needs no
    logits), then t_1..t_k of "{answer"."""

    def __init__(self, vocab, answers, device):
        paths = [vocab.encode("{" + answer) for answer in answers]
        columns = [(u, i) for u, path in enumerate(paths) for i in range(len(path) + 1)]
        closers = []  # for each column (u, i): the tokens that would finish answer u after t_1..t_i
        for u, i in columns:
            closers.append(vocab.beginning_with(vocab.join(paths[u][i:]) + b"}"))
        most = max(map(len, closers))
        self.sizes = [len(path) + 1 for path in paths]
        self.branch = torch.tensor([u for u, _ in columns], device=device)  # [T]
        self.depth = torch.tensor(
            [i for _, i in columns], device=device
        )  # [T], 0 at the repeated token
        self.tokens = torch.tensor(
            [paths[u][i - 1] if i else 0 for u, i in columns], device=device
        )  # [T]
        self.next = torch.tensor(
            [(paths[u] + [0])[i] for u, i in columns], device=device
        )  # [T], unused at the end
        self.closers = torch.tensor(
            [c + [0] * (most - len(c)) for c in closers], device=device
        )  # [T, most]
        unused = [[0.0] * len(c) + [-torch.inf] * (most - len(c)) for c in closers]
        self.unused = torch.tensor(unused, device=device)  # [T, most], added to a closer's log-prob


def score_batch(model, contexts, tree):
    """answer_logprobs of one micro-batch of contexts -> [answers, contexts]."""
    n, T = len(contexts), len(tree.tokens)
    length = torch.tensor([len(c) for c in contexts], device=model.device)  # [n]
    C = max(map(len, contexts))
    ids = torch.tensor(
        [c + [0] * (C - len(c)) for c in contexts], device=model.device
    )  # padded on the right
    cache = model.base_model(
        input_ids=ids, use_cache=True
    ).past_key_values  # causal, so it needs no mask

    # Which keys each token of the tree sees: of the context all but its last token, which the
    # branch repeats ...
    context = torch.arange(C, device=model.device) < length[:, None] - 1  # [n, C]
    # ... and of the tree its own branch, up to itself.
    own = (tree.branch[:, None] == tree.branch) & (tree.depth[:, None] >= tree.depth)  # [T, T]
    visible = torch.cat(
        [context[:, None].expand(n, T, C), own.expand(n, T, T)], dim=2
    )  # [n, T, C + T]
    # As numbers to add: eager attention would add a bool mask as 0 and 1.
    mask = torch.zeros(n, 1, T, C + T, dtype=model.dtype, device=model.device)
    mask.masked_fill_(~visible[:, None], torch.finfo(model.dtype).min)

    last = ids[torch.arange(n, device=model.device), length - 1]  # [n]
    hidden = model.base_model(
        input_ids=torch.where(tree.depth == 0, last[:, None], tree.tokens),
        attention_mask=mask,
        position_ids=length[:, None] - 1 + tree.depth,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state  # [n, T, D]

    step, close = (
        [],
        [],
    )  # log pi of the next token of the path; of a token that closes the box here
    for columns in torch.arange(T, device=model.device).split(
        max(1, 1024 // n)
    ):  # never all logits at once
        logp = model.lm_head(hidden[:, columns]).float().log_softmax(-1)  # [n, c, vocabulary]
        step.append(logp.gather(2, tree.next[columns].expand(n, -1)[:, :, None])[:, :, 0])
        closing = logp.gather(2, tree.closers[columns].expand(n, -1, -1)) + tree.unused[columns]
        close.append(closing.logsumexp(2))
    step, close = torch.cat(step, 1), torch.cat(close, 1)  # [n, T]

    out = []
    for s, c in zip(step.split(tree.sizes, 1), close.split(tree.sizes, 1)):  # [n, k + 1]
        before = F.pad(s[:, :-1].cumsum(1), (1, 0))  # log pi(t_1..t_i), i = 0..k
        out.append((before + c).logsumexp(1))
    return torch.stack(out)


@dataclass(frozen=True)
class Group:
    """The matrices behind one question's rewards (the paper's Fig. 2), one row for each distinct
    answer."""

    answers: list[str]  # U
    columns: list[int]  # which samples' solutions the columns are
    log_W: torch.Tensor  # [U, columns]; -inf: not among the M solutions of this answer
    log_P: torch.Tensor  # [columns]


def cer_reward(model, tokenizer, rollout, M):
    """Eq. 8 for one question -> (R [N], Group). Constants: no gradient flows through a reward.

    A sample without an answer earns 0, and its solution is no column: it never says any answer, so
    pi(a|s) = 0. A distinct answer is scored once and its reward shared by the samples that gave it.
    """
    a_star, answered = rollout.problem.reference, rollout.answered
    answers = list(dict.fromkeys(rollout.answers[i] for i in answered))
    index = {answer: u for u, answer in enumerate(answers)}
    # a* in the place it has if some sample gave it, else as one more row.
    rows = answers if a_star in index else [*answers, a_star]
    log_pi = answer_logprobs(model, tokenizer, [rollout.context(j) for j in answered], rows).cpu()
    log_W, log_P = log_pi[: len(answers)], log_pi[rows.index(a_star)]
    if M < len(answered):
        chosen = choose_columns(len(answers), [index[rollout.answers[j]] for j in answered], M)
        log_W = log_W.masked_fill(~chosen, -torch.inf)

    R_distinct = cer(log_W, log_P)  # [U]
    R = torch.zeros(len(rollout.answers))
    for i in answered:
        # An empty box says nothing and earns nothing, unless nothing is what a* says.
        if rollout.answers[i] or not a_star:
            R[i] = R_distinct[index[rollout.answers[i]]]
    return R, Group(answers, answered, log_W, log_P)
