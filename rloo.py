"""REINFORCE with a leave-one-out baseline (section 3.1): from rewards to one optimizer step.

The N samples of one question are each other's baseline. With one update per batch, on the weights
that sampled it, the importance ratio pi_theta / pi_old is 1 (up to rounding): so there are no old
log-probabilities, no clipping, and the gradient of -A log pi is the whole of the policy gradient.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engine.cli import progress
from engine.run import compute_device
from engine.tokens import batches, pad, vocabulary


def leave_one_out(R):
    """R [N] -> A [N], A_i = R_i - mean of the other rewards. N >= 2; [..., N] works too.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0]))
    tensor([ 1.0000, -0.5000, -0.5000])

    An advantage that is rounding is 0. That is judged against the group's own rewards: those of a
    long reference may all be near 1e-9, and still tell its samples apart.
    """
    N = R.shape[-1]
    if N < 2:
        raise ValueError(f"leave-one-out needs at least 2 samples of a question, got {N}")
    A = R - (R.sum(-1, keepdim=True) - R) / (N - 1)
    return A.masked_fill(A.abs() <= 1e-6 * R.abs().amax(-1, keepdim=True), 0.0)


# ------------------------------------------------------------------------- a weight on every token


@dataclass(frozen=True)
class Row:
    """One training row. The loss is -sum(weights * log pi(ids)), with one weight for each token."""

    ids: list[int]
    weights: list[float]


def rloo_rows(rollout, R, A, tokenizer):
    """The rows of one question: every sampled token of sample i weighs A_i, what follows the box
    included; the prompt's tokens weigh nothing."""
    prompt = rollout.prompt
    for ids, A_i in zip(rollout.completions, A.tolist()):
        yield Row(prompt + ids, [0.0] * len(prompt) + [A_i] * len(ids))


def verifree_rows(rollout, R, A, tokenizer):
    """VeriFree's rows: after the solution come the reference's tokens, "{a*}" as the tokenizer
    spells it, instead of the answer that was sampled. The solution's tokens weigh A_i, the
    reference's R_i = pi(a*|s_i):

        grad E[ pi(a*|s) ] = E[ pi(a*|s) grad log pi(s) + pi(a*|s) grad log pi(a*|s) ]

    R_i counts every token that closes the box; what is taught is one spelling.
    """
    prompt, reference = rollout.prompt, "{" + rollout.problem.reference + "}"
    reference = vocabulary(tokenizer).encode(reference)
    samples = zip(rollout.completions, rollout.cuts, rollout.answers, R.tolist(), A.tolist())
    for ids, cut, answer, R_i, A_i in samples:
        taught = [] if answer is None else reference
        weights = [0.0] * len(prompt) + [A_i] * cut + [R_i] * len(taught)
        yield Row(prompt + ids[:cut] + taught, weights)


# ------------------------------------------------------------------------------ the optimizer step


def policy_gradient_loss(logprobs, weights):
    """-sum over tokens of weight * log pi (both of one shape). The weights are constants.

    With A_i / (number of samples) on every token of sample i this is the paper's objective: a sum
    over tokens and a mean over samples. There is no division by the standard deviation or by the
    length, no KL term and no entropy term.
    """
    return -(weights.detach() * logprobs).sum()


def update(policy, optimizer, rows, lr, microbatch_tokens):
    """One optimizer step on all ranks' rows (the same list on every rank) -> (loss, gradient norm).
    If the gradient is not finite, nothing is changed."""
    device, world, samples = compute_device(), dist.get_world_size(), len(rows)
    # A sample that earned what the others did teaches nothing. If none of them teaches, one is kept
    # for a gradient of 0, with which Adam's step, its momentum, still goes on.
    rows = [row for row in rows if any(row.weights)] or rows[:1]
    loss = torch.zeros((), device=device)
    bar = progress("update", total=len(rows), unit="row")
    todo = list(microbatches(rows, microbatch_tokens))
    for number, (ids, weights) in enumerate(todo, start=1):
        policy.set_requires_gradient_sync(policy.sync_every_batch or number == len(todo))
        logprobs = policy.logprobs(ids.to(device))
        part = policy_gradient_loss(logprobs, weights.to(device)) / samples
        (part * world).backward()  # FSDP averages gradients over the ranks, and this is a sum
        loss = loss + part.detach()
        bar.update(len(ids) * world)
    bar.close()
    dist.all_reduce(loss)
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).full_tensor().item()
    for group in optimizer.param_groups:
        group["lr"] = lr
    if math.isfinite(grad_norm):
        optimizer.step()
    optimizer.zero_grad()
    return loss.item(), grad_norm


def microbatches(rows, token_budget):
    """This rank's share of the rows, in padded batches of ids [b, L] and weights [b, L].

    All rows (the same list on every rank) are sorted by length and dealt round-robin, and batches
    are cut by the length of the longest row dealt to any rank. So all ranks run equally many
    batches of nearly equal size, as FSDP's collective calls need, and hardly anything is padding.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    blank = Row(rows[0].ids[:1], [0.0])
    rows = sorted(rows + [blank] * (-len(rows) % world), key=lambda row: len(row.ids))
    mine, longest = rows[rank::world], [len(row.ids) for row in rows[world - 1 :: world]]
    for start, end in batches(longest, token_budget):
        batch = mine[start:end]
        yield pad([row.ids for row in batch]), pad([row.weights for row in batch])
