"""REINFORCE with a leave-one-out baseline (section 3.1): from rewards to one optimizer step.

The baseline of a sample is the mean reward of the other samples of its question. R is a constant,
for the reason that cer.py gives.

There is one update per batch, on the weights that sampled it, so the importance ratio pi_theta /
pi_old is 1 (up to rounding) and clipping the ratio would do nothing. Hence there are no old
log-probabilities. The gradient norm is clipped, which is another matter.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engine.tokens import batches, pad, vocabulary
from runtime.cli import progress


def leave_one_out(R):
    """R [..., N] -> A [..., N], A_i = R_i - mean of the other rewards. N >= 2, or ValueError.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0]))
    tensor([ 1.0000, -0.5000, -0.5000])

    Advantages within rounding error of 0 are set to 0. The tolerance is relative to the group's
    largest reward: the rewards of a long reference may all be near 1e-9 and still differ.
    """
    N = R.shape[-1]
    if N < 2:
        raise ValueError(f"leave-one-out needs at least 2 samples of a question, got {N}")
    A = R - (R.sum(-1, keepdim=True) - R) / (N - 1)
    return A.masked_fill(A.abs() <= 1e-6 * R.abs().amax(-1, keepdim=True), 0.0)


# ------------------------------------------------------------------------- a weight on every token


@dataclass(frozen=True)
class TrainingRow:
    """One sample as the loss sees it, -sum(weights * log pi(ids)), with one weight per token."""

    ids: list[int]
    weights: list[float]  # 0: left out of the loss


def completion_row(prompt, ids, weight):
    """A prompt, and a completion of which each token has this weight, also the stop token.

    >>> completion_row([5, 6], [7, 8, 0], 0.5)  # 0 is the stop token
    TrainingRow(ids=[5, 6, 7, 8, 0], weights=[0.0, 0.0, 0.5, 0.5, 0.5])
    """
    return TrainingRow(prompt + ids, [0.0] * len(prompt) + [weight] * len(ids))


def rloo_rows(judged, R, A, tokenizer):
    """The training rows of one question. Every sampled token of sample i has weight A_i, also those
    after the box. The prompt's tokens have weight 0. R, A [N] -> N rows. R and the tokenizer are
    for verifree_rows, which is called in the same way."""
    prompt, pairs = judged.group.prompt, zip(judged.group.completions, A.tolist())
    return [completion_row(prompt, ids, A_i) for ids, A_i in pairs]


def verifree_rows(judged, R, A, tokenizer):
    """VeriFree's training rows. The solution is followed by the reference's tokens, "{a*}", in
    place of the sampled answer. The solution's tokens have weight A_i, and the reference's
    R_i = pi(a*|s_i):

        grad E[ pi(a*|s) ] = E[ pi(a*|s) grad log pi(s) + pi(a*|s) grad log pi(a*|s) ]

    R_i is a sum over all tokens that can close the box. The row closes it with the text of the
    token that closed the sample's own box, so each closing token is taught as often as the model
    uses it. In the same way, of several references each is taught as often as the model uses it:
    their sum is R_i, and a row teaches one of them, drawn in proportion.
    """
    group, references, rows = judged.group, judged.scores.sample_references(), []
    for i, (box, R_i, A_i) in enumerate(zip(group.boxes, R.tolist(), A.tolist())):
        solution, reference = group.solution(i), []
        if box:
            reference = vocabulary(tokenizer).encode("{" + references[i] + box.closing)
        weights = [0.0] * len(group.prompt) + [A_i] * len(solution) + [R_i] * len(reference)
        rows.append(TrainingRow(group.prompt + solution + reference, weights))
    return rows


# ------------------------------------------------------------------------------ the optimizer step


def update(policy, optimizer, rows, lr, token_budget):
    """One optimizer step on all ranks' rows (the same list on every rank) -> (loss, gradient norm).

    The loss is, for N rows of samples,

        loss = -1/N sum_i sum_t weight[i, t] * log pi(ids[i, t] | all ids before it)

    With the weight A_i on every token of sample i this is the paper's objective: a sum over tokens
    and a mean over samples. There is no division by the standard deviation or by the length, no KL
    term and no entropy term. The gradient norm is clipped to 1. If the gradient is not finite, no
    weight changes."""
    world = dist.get_world_size()
    N = len(rows)  # samples; the loss is a mean over all of them, also those dropped below
    # A row whose weights are all 0 has no gradient. If every row is like that, keep one: the step
    # is then what it would be without dropping any, since Adam moves by its momentum all the same.
    rows = [row for row in rows if any(row.weights)] or rows[:1]
    loss = torch.zeros((), device=policy.device)
    todo = list(microbatches(rows, token_budget))
    for count, (ids, weights) in enumerate(progress("update", todo), start=1):
        ids, weights = ids.to(policy.device), weights.to(policy.device)  # [b, L] each
        policy.set_requires_gradient_sync(policy.sync_every_batch or count == len(todo))
        logprobs = policy(ids, weights != 0)  # of the tokens with a weight
        part = -(weights[weights != 0] * logprobs).sum() / N
        (part * world).backward()  # FSDP averages gradients over the ranks; * world sums them
        loss = loss + part.detach()
    dist.all_reduce(loss)
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).full_tensor().item()
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if math.isfinite(grad_norm):
        optimizer.step()
    optimizer.zero_grad()
    return loss.item(), grad_norm


def microbatches(rows, token_budget):
    """This rank's share of the rows, in padded batches of ids [b, L] and weights [b, L].

    All rows (the same list on every rank) are sorted by length and dealt out like cards: a turn
    gives every rank one row, all of about equal length. A batch is some turns, and its size is
    counted with the longest row of each turn. So all ranks run the same number of batches, as
    FSDP's collective calls need, and there is little padding.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    blank = TrainingRow(rows[0].ids[:1], [0.0])
    rows = sorted(rows + [blank] * (-len(rows) % world), key=lambda row: len(row.ids))
    turns = [rows[i : i + world] for i in range(0, len(rows), world)]
    for batch in batches(turns, lambda turn: len(turn[-1].ids), token_budget):
        mine = [turn[rank] for turn in batch]
        yield pad([row.ids for row in mine]), pad([row.weights for row in mine])
