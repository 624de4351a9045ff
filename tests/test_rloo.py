import pytest
import torch

from rloo import leave_one_out, policy_gradient_loss


def test_each_sample_is_compared_with_the_mean_of_the_others():
    A = leave_one_out(torch.tensor([1.0, 0.0, 0.5]))
    assert A.tolist() == [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5]


def test_advantages_sum_to_zero_and_vanish_where_all_earn_the_same():
    R = torch.rand(16, dtype=torch.float64)
    assert abs(leave_one_out(R).sum()) < 1e-12
    assert leave_one_out(torch.full((16,), 0.3)).abs().max() < 1e-6


def test_it_is_the_mean_baseline_scaled_by_n_over_n_minus_1():
    R = torch.rand(8, dtype=torch.float64)
    assert torch.allclose(leave_one_out(R), (R - R.mean()) * 8 / 7)


def test_one_sample_has_no_baseline():
    with pytest.raises(ValueError, match="at least 2"):
        leave_one_out(torch.tensor([1.0]))


def test_the_baseline_is_independent_of_the_sample_so_the_gradient_is_unbiased():
    """E[A_i grad log pi(i)] over all draws of N samples equals the gradient of the mean reward."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([1.0, 0.0, 0.4], dtype=torch.float64)
    true = torch.autograd.grad(logits.softmax(0) @ reward, logits)[0]
    logp, expected = logits.log_softmax(0), torch.zeros(3, dtype=torch.float64)
    for i in range(3):
        for j in range(3):  # N = 2
            draw = torch.tensor([i, j])
            weights = leave_one_out(reward[draw]) / 2
            grad = torch.autograd.grad(
                -policy_gradient_loss(logp[draw], weights), logits, retain_graph=True
            )[0]
            expected += logp[draw].sum().exp().detach() * grad
    assert torch.allclose(expected, true, atol=1e-12)


def test_a_clipped_ratio_would_change_nothing():
    """One update per batch on the weights that sampled it: the ratio is 1 and PPO's gradient is
    RLOO's, which is why there is no pass for old log-probabilities."""
    logp = torch.randn(8, dtype=torch.float64, requires_grad=True)
    A = leave_one_out(torch.rand(8, dtype=torch.float64))
    plain = torch.autograd.grad(policy_gradient_loss(logp, A), logp)[0]
    ratio = (logp - logp.detach()).exp()
    clipped = torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
    assert torch.equal(torch.autograd.grad(-clipped.sum(), logp)[0], plain)


def test_no_gradient_reaches_the_weights():
    logp, weights = torch.randn(3, requires_grad=True), torch.rand(3, requires_grad=True)
    policy_gradient_loss(logp, weights).backward()
    assert weights.grad is None and torch.equal(logp.grad, -weights.detach())
