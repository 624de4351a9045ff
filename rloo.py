"""REINFORCE with a leave-one-out baseline (Eq. 7): from rewards to a weight on every token, and to
the loss.

The N samples of one question are each other's baseline. With one update per batch, on the weights
that sampled it, the importance ratio pi_theta / pi_old is 1 (up to rounding): so there are no old
log-probabilities, no clipping, and the gradient of -A log pi is the whole of the policy gradient.
"""

from policy import Row

NEGLIGIBLE = 1e-6  # advantages of samples that all earn the same differ from 0 by rounding


def leave_one_out(R):
    """R [N] -> A [N], A_i = R_i - mean of the other rewards (Eq. 7). N >= 2; [..., N] works too.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0]))
    tensor([ 1.0000, -0.5000, -0.5000])
    """
    N = R.shape[-1]
    if N < 2:
        raise ValueError(f"leave-one-out needs at least 2 samples of a question, got {N}")
    return R - (R.sum(-1, keepdim=True) - R) / (N - 1)


def rloo_rows(rollout, A):
    """The training rows of one question: every sampled token of sample i weighs A_i, what follows
    the box included; the prompt's tokens weigh nothing."""
    prompt = rollout.prompt
    for ids, A_i in zip(rollout.completions, A.tolist()):
        yield Row(prompt + ids, [0.0] * len(prompt) + [A_i] * len(ids))


def verifree_rows(rollout, A, R, reference):
    """VeriFree's rows: after the solution come the reference's tokens, ids of "{a*}", instead of
    the answer that was sampled. The solution's tokens weigh A_i, the reference's R_i = pi(a*|s_i):

        grad E[ pi(a*|s) ] = E[ pi(a*|s) grad log pi(s) + pi(a*|s) grad log pi(a*|s) ]

    R_i counts every token that closes the box; what is taught is one spelling, the tokenizer's.
    """
    prompt = rollout.prompt
    samples = zip(rollout.completions, rollout.cuts, rollout.answers, A.tolist(), R.tolist())
    for ids, cut, answer, A_i, R_i in samples:
        taught = [] if answer is None else reference
        weights = [0.0] * len(prompt) + [A_i] * cut + [R_i] * len(taught)
        yield Row(prompt + ids[:cut] + taught, weights)


def policy_gradient_loss(logprobs, weights):
    """-sum over tokens of weight * log pi (both of one shape). The weights are constants: A_i /
    (number of samples) on every token of sample i gives Eq. 7, a sum over tokens and a mean over
    samples. There is no division by the standard deviation or by the length, no KL term and no
    entropy term.
    """
    return -(weights.detach() * logprobs).sum()
