r"""Conditional Expectation Reward: the model that answers is also the judge.

    q           a question
    s           a solution sampled from pi(s | q)
    a           the answer boxed after it, sampled from pi(a | s, q)
    a*          the reference answer
    rho(a, a*)  how likely a* is after the solutions that lead to a: E[ pi(a*|s,q) | a, q ]  (Eq. 3)

With N samples (s_i, a_i) of one question, and M of the solutions to average over:

    W [N, M]    W_ij = pi(a_i | s_j, q)     how surely solution j leads to answer i
    P [M]       P_j  = pi(a*  | s_j, q)     how surely solution j leads to the reference
    D           the row sums of W (diagonal)
    R [N]       R = D^-1 W P                the reward of each sample, in [0, 1]             (Eq. 8)

A right answer in other words ("14 eggs" for "14") comes from solutions that also lead to a*, and
is paid; a wrong answer mostly comes from others, and is paid little. In expectation over the
model's answers the reward equals that of exact match (Theorem 2): CER pays no more, it spreads the
pay over all the answers that deserve it.

The first half of this file is the mathematics, pure functions of tensors. The second half fills W
and P from a model.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from policy import batches, pad
from vocabulary import vocabulary

# ---------------------------------------------------------------------------------- the mathematics


def exact_cer(prior, likelihood):
    """CER of every pair of answers on a finite distribution (Eq. 3).

    prior [S] = pi(s|q), likelihood [S, A] = pi(a|s,q) -> rho [A, A], rho[a, b] = rho(a, a* = b).
    An answer that no solution leads to has rho = 0.
    """
    joint = prior[:, None] * likelihood  # pi(s, a | q)  [S, A]
    marginal = joint.sum(0).clamp(min=torch.finfo(joint.dtype).tiny)  # pi(a | q)  [A]
    return (joint / marginal).T @ likelihood  # sum over s of pi(s | a, q) pi(a* | s, q)


def cer(log_W, log_P):
    """R = D^-1 W P in log space (Eq. 8): log_W [N, M], log_P [M] -> R [N].

    D^-1 W divides each row of W by its sum, and W = exp(log_W), so D^-1 W is a softmax: answers as
    improbable as exp(-1000) keep their proportions. log_W = -inf leaves a solution out; a row of
    nothing else earns 0.
    """
    share = log_W.softmax(dim=1).nan_to_num(0.0)  # softmax of an all -inf row is nan
    return share @ log_P.exp()


def choose_columns(U, answer_of_column, M):
    """Which M solutions each of U distinct answers is averaged over -> bool [U, columns].

    Eq. 8 leaves this open. For each answer the solutions that produced it come first, then others
    at random. If all answers shared the same M solutions, M = 1 would give them all the same reward
    and every advantage would be 0. (With M = N the reward's expectation over the answers
    sampled after these solutions is exactly the mean of P, as Theorem 2 wants; with 1 < M < N
    preferring an answer's own solutions lifts it a little.)
    """
    own = torch.arange(U)[:, None] == torch.tensor(answer_of_column)  # [U, columns]
    rank = (own + torch.rand(own.shape)).argsort(dim=1, descending=True).argsort(dim=1)
    return rank < M


# ----------------------------------------------------------------------------- W and P from a model


@torch.no_grad()
def answer_logprobs(model, tokenizer, contexts, answers):
    r"""log pi("{answer}" | context) -> fp32 [len(answers), len(contexts)], on the model's device.

    contexts: token ids of question and solution, up to just before the brace of `\boxed{`.

    What is scored is a *finished* answer, "{14}" with its closing brace. Without the brace "1"
    would collect the probability of "14", "15" and "10/3"; the sum over answers could pass 1 and
    Theorem 2 would not hold. The brace often shares its token with what follows (`}$`, `}.`). So:
    let t_1..t_k be the tokens of "{answer". The box may be closed after any i of them, by any token
    v that spells what is still missing, and then whatever it likes:

        log pi = logsumexp over i = 0..k of  log pi(t_1..t_i) + log sum_v pi(v | t_1..t_i),
                 v: all tokens whose bytes begin with  bytes(t_i+1..t_k) + "}"

    (Other ways to cut the same text into tokens are left out: a model hardly ever takes them.)

    Cost: one forward pass over the contexts, which keeps their keys and values, and one over all
    answers laid end to end behind each of them. An answer's tokens see the context and their own
    answer only (a 4-D mask), and their positions restart at the context's end. A naive scorer runs
    len(contexts) x len(answers) full passes instead.
    """
    if not all(contexts):
        raise ValueError("a context needs at least one token")
    out = torch.empty(len(answers), len(contexts), device=model.device)
    if out.numel() == 0:
        return out
    vocab = vocabulary(tokenizer)
    paths = [vocab.encode("{" + answer) for answer in answers]
    # One tree, unless the answers are very long, since its mask has T^2 entries: answers whose
    # branches end within the same 1,024 columns share one.
    ends = itertools.accumulate(len(path) + 1 for path in paths)
    shared = itertools.groupby(zip(ends, paths), key=lambda branch: branch[0] // TREE_COLUMNS)
    trees = [AnswerTree(vocab, [path for _, path in tree], model.device) for _, tree in shared]

    order = sorted(range(len(contexts)), key=lambda j: len(contexts[j]))
    lengths = [len(contexts[j]) + max(len(tree.tokens) for tree in trees) for j in order]
    for start, end in batches(lengths, TOKENS_AT_ONCE):
        rows = order[start:end]
        out[:, rows] = score_contexts(model, [contexts[j] for j in rows], trees)
    return out


TREE_COLUMNS = 1024  # 16 answers of 64 tokens
TOKENS_AT_ONCE = 4096  # enough to keep a GPU busy; more would be padding, and memory


class AnswerTree:
    """Answers laid end to end, in T columns: the same for every context.

    Answer u's branch has k + 1 columns: the context's last token once more (so that its logits,
    which predict t_1, come from this pass and not from the one over the contexts), then t_1..t_k.
    """

    def __init__(self, vocab, paths, device):
        columns = [(u, i) for u, path in enumerate(paths) for i in range(len(path) + 1)]
        # The tokens that would finish answer u after t_1..t_i.
        closers = [vocab.beginning_with(vocab.join(paths[u][i:]) + b"}") for u, i in columns]

        def tensor(values):
            return torch.tensor(values, device=device)

        self.sizes = [len(path) + 1 for path in paths]  # columns of each branch
        self.branch = tensor([u for u, _ in columns])  # [T] the answer
        self.depth = tensor([i for _, i in columns])  # [T] 0 at the context's last token
        self.tokens = tensor([paths[u][i - 1] if i else 0 for u, i in columns])  # [T] 0: see above
        self.next = tensor([(paths[u] + [0])[i] for u, i in columns])  # [T] t_i+1; 0 at the end
        self.closers = pad(closers).to(device)  # [T, most]
        self.is_closer = pad([[1] * len(c) for c in closers]).to(device).bool()  # [T, most]


def score_contexts(model, contexts, trees):
    """answer_logprobs for as many contexts as fit in memory at once -> [answers, n]."""
    ids = pad(contexts).to(model.device)  # [n, C], on the right: causal attention needs no mask
    length = torch.tensor([len(context) for context in contexts], device=model.device)  # [n]
    cache = model.base_model(input_ids=ids, use_cache=True).past_key_values
    scores = []
    for tree in trees:
        scores.append(score_tree(model, ids, length, cache, tree))
        cache.crop(-len(tree.tokens))  # the last T columns: back to the contexts
    return torch.cat(scores)


def score_tree(model, ids, length, cache, tree):
    """One pass of a tree over contexts ids [n, C] of given lengths [n] -> log pi [answers, n]."""
    n, T, device = len(ids), len(tree.tokens), model.device
    # Each column of the tree sees the context but for its last token, which its branch repeats,
    # and its own branch up to itself.
    in_context = torch.arange(ids.shape[1], device=device) < length[:, None] - 1  # [n, C]
    same_branch, not_later = tree.branch[:, None] == tree.branch, tree.depth[:, None] >= tree.depth
    in_branch = same_branch & not_later  # [T, T]
    visible = torch.cat([in_context[:, None].expand(-1, T, -1), in_branch.expand(n, -1, -1)], dim=2)
    # A mask to add: sdpa would take a bool mask too, but eager attention would add its 0s and 1s.
    mask = torch.zeros(visible.shape, dtype=model.dtype, device=device)  # [n, T, C + T]
    mask.masked_fill_(~visible, torch.finfo(model.dtype).min)

    last = ids[torch.arange(n, device=device), length - 1]  # [n]
    hidden = model.base_model(
        input_ids=torch.where(tree.depth == 0, last[:, None], tree.tokens),  # [n, T]
        attention_mask=mask[:, None],
        position_ids=length[:, None] - 1 + tree.depth,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state  # [n, T, D]

    onward, closing = [], []  # log pi of t_i+1, and of any token that closes the box here
    for t in torch.arange(T, device=device).split(max(1, 1024 // n)):  # never all logits at once
        logp = model.lm_head(hidden[:, t]).float().log_softmax(-1)  # [n, t, vocabulary]
        onward.append(logp.gather(2, tree.next[t].expand(n, -1)[..., None])[..., 0])
        closer = logp.gather(2, tree.closers[t].expand(n, -1, -1))  # [n, t, most]
        closing.append(closer.masked_fill(~tree.is_closer[t], -torch.inf).logsumexp(2))
    onward, closing = torch.cat(onward, 1), torch.cat(closing, 1)  # [n, T]

    log_pi = []
    for to_next, to_close in zip(onward.split(tree.sizes, 1), closing.split(tree.sizes, 1)):
        so_far = F.pad(to_next[:, :-1].cumsum(1), (1, 0))  # log pi(t_1..t_i), i = 0..k  [n, k + 1]
        log_pi.append((so_far + to_close).logsumexp(1))
    return torch.stack(log_pi)


@dataclass(frozen=True)
class Group:
    """What the rewards of one question come from: the matrices that the paper's Fig. 2 draws."""

    answers: list[str]  # U distinct answers, the rows
    columns: list[int]  # which samples' solutions are the columns
    log_W: torch.Tensor  # [U, columns]; -inf: not among the M solutions of this answer
    log_P: torch.Tensor  # [columns]


def cer_reward(model, tokenizer, rollout, M):
    """Eq. 8 for one question -> (R [N], Group). Constants: no gradient flows through a reward.

    A sample without an answer earns 0, and its solution is no column: it never says any answer, so
    pi(a|s) = 0. A distinct answer is scored once and its reward shared by the samples that gave it.
    """
    a_star, columns = rollout.problem.reference, rollout.answered
    answers = list(dict.fromkeys(rollout.answers[i] for i in columns))
    row = {answer: u for u, answer in enumerate(answers)}
    # a* is one more row to score, unless some sample gave just that answer.
    to_score = answers if a_star in row else [*answers, a_star]
    contexts = [rollout.context(j) for j in columns]
    log_pi = answer_logprobs(model, tokenizer, contexts, to_score).cpu()
    log_W, log_P = log_pi[: len(answers)], log_pi[to_score.index(a_star)]
    if M < len(columns):
        chosen = choose_columns(len(answers), [row[rollout.answers[j]] for j in columns], M)
        log_W = log_W.masked_fill(~chosen, -torch.inf)

    reward = cer(log_W, log_P)  # [U]
    R = torch.zeros(len(rollout.answers))
    for i in columns:
        # An empty box says nothing and earns nothing, unless nothing is what a* says.
        if rollout.answers[i] or not a_star:
            R[i] = reward[row[rollout.answers[i]]]
    return R, Group(answers, columns, log_W, log_P)


# ------------------------------------------------------------------------------- a demonstration


def demonstration():
    """CER on three solutions and four answers, small enough to check by hand."""
    torch.manual_seed(0)
    answers = ["14", "14 eggs", "18", "9"]
    prior = torch.tensor([0.5, 0.3, 0.2])
    likelihood = torch.tensor(
        [
            [0.45, 0.45, 0.05, 0.05],  # s_1: 3*4=12; 12+2=14
            [0.05, 0.05, 0.85, 0.05],  # s_2: 4+2=6; 3*6=18
            [0.02, 0.02, 0.06, 0.90],  # s_3: 3+4=7; 7+2=9
        ]
    )
    rho, p_answer = exact_cer(prior, likelihood)[:, 0], prior @ likelihood

    def show(name, values):
        print(f"{name:36}", *(f"{value:>8.3f}" for value in values.tolist()))

    print('q = "3 bags of 4 eggs and 2 more eggs. How many eggs?"    a* = 14\n')
    show("prior pi(s|q)", prior)
    show("likelihood pi(a*|s,q)", likelihood[:, 0])
    print(f"\n{'answer a':36}", *(f"{answer:>8}" for answer in answers))
    show("pi(a|q)", p_answer)
    show("exact match with a*", torch.eye(4)[0])
    show("CER rho(a, a*)             (Eq. 3)", rho)
    for M in 4, 16, 1024:
        s = torch.multinomial(prior, M, replacement=True)  # solutions, sampled
        show(
            f"D^-1 W P, {M:4} samples    (Eq. 8)",
            cer(likelihood[s].T.log(), likelihood[s, 0].log()),
        )
    print("\nTheorem 2: over the model's own answers both pay the same,")
    print(f"    mean exact match {p_answer[0]:.6f}    mean CER {p_answer @ rho:.6f}")


if __name__ == "__main__":
    demonstration()
