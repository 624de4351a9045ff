"""REINFORCE with a leave-one-out baseline (Eq. 7): two pure functions of tensors.

The N samples of one question are each other's baseline. With one update per batch, on the weights
that sampled it, the importance ratio pi_theta / pi_old is 1 (up to rounding): so there are no old
log-probabilities, no clipping, and the gradient of -A log pi is the whole of the policy gradient.
"""


def leave_one_out(R):
    """R [N] -> A [N], A_i = R_i - mean of the other rewards (Eq. 7). N >= 2; [..., N] works too.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0]))
    tensor([ 1.0000, -0.5000, -0.5000])
    """
    N = R.shape[-1]
    if N < 2:
        raise ValueError(f"leave-one-out needs at least 2 samples of a question, got {N}")
    return R - (R.sum(-1, keepdim=True) - R) / (N - 1)


def policy_gradient_loss(logprobs, weights):
    """-sum over tokens of weight * log pi (both of one shape). The weights are constants: A_i /
    (number of samples) on every token of sample i gives Eq. 7, a sum over tokens and a mean over
    samples. There is no division by the standard deviation or by the length, no KL term and no
    entropy term.
    """
    return -(weights.detach() * logprobs).sum()
