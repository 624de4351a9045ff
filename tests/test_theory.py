"""The numbers of docs/theory.md, on softmax policies small enough to enumerate: what the detached
reward and the leave-one-out baseline do to the gradient, and when CER fails.

    python -m pytest -q -s tests/test_theory.py      # prints them
"""

import pytest
import torch
from torch.nn.functional import cosine_similarity

from cer import cer, exact_cer
from rloo import leave_one_out

S, A = 12, 6  # solutions, answers; a* is answer 0


def policy(seed):
    """prior [S] and likelihood [S, A], fp64: peaked enough that solutions differ."""
    torch.manual_seed(seed)
    prior = torch.distributions.Dirichlet(torch.ones(S, dtype=torch.float64)).sample()
    likelihood = torch.distributions.Dirichlet(torch.full((A,), 0.3, dtype=torch.float64))
    return prior, likelihood.sample((S,))


def gradient(prior, likelihood, weight):
    """The policy gradient, by the logits of prior and likelihood -> [S + S A]. weight [S, A]: how
    often (s, a) is sampled, times what it is paid, a constant."""
    logits = prior.log().requires_grad_(), likelihood.log().requires_grad_()
    log_pi = logits[0].log_softmax(0)[:, None] + logits[1].log_softmax(1)
    gradients = torch.autograd.grad((weight * log_pi).sum(), logits)
    return torch.cat([each.flatten() for each in gradients])


def test_cers_value_is_exact_matchs_but_its_gradient_is_not():
    """rho depends on the weights, and that dependence is dropped: cosine and ratio of norms between
    the two gradients, over 100 random policies."""
    cosines, ratios = [], []
    for seed in range(100):
        prior, likelihood = policy(seed)
        joint, rho = prior[:, None] * likelihood, exact_cer(prior, likelihood)[:, 0]
        ours = gradient(prior, likelihood, joint * rho)
        exact = gradient(prior, likelihood, joint * (torch.arange(A) == 0))
        cosines.append(cosine_similarity(ours, exact, dim=0).item())
        ratios.append((ours.norm() / exact.norm()).item())
    quantiles = torch.tensor([0.05, 0.5, 0.95])
    cosines, ratios = (torch.tensor(x).quantile(quantiles).tolist() for x in (cosines, ratios))
    print(f"\ncosine {cosines}, norm ratio {ratios} (5, 50, 95%)")
    assert cosines == pytest.approx([0.63, 0.93, 0.99], abs=0.01)
    assert ratios == pytest.approx([0.16, 0.34, 0.62], abs=0.01)


@pytest.mark.parametrize("seed, cosines", [(0, [0.978, 0.994, 0.998]), (2, [0.867, 0.944, 0.983])])
def test_the_baseline_is_not_independent_and_hardly_matters(seed, cosines, groups=40_000):
    """Solution i is a column of every R_k, so the baseline of sample i depends on it: the mean of
    RLOO's gradient against the intended one (R = rho), by Monte Carlo."""
    prior, likelihood = policy(seed)
    rho = exact_cer(prior, likelihood)[:, 0]
    intended, found = gradient(prior, likelihood, prior[:, None] * likelihood * rho), {}
    for N in 4, 8, 16:
        s = torch.multinomial(prior, groups * N, replacement=True).view(groups, N)
        a = torch.multinomial(likelihood[s.flatten()], 1).view(groups, N)
        W = likelihood[s[:, None, :].expand(-1, N, -1), a[:, :, None].expand(-1, -1, N)]
        R = (W / W.sum(2, keepdim=True) @ likelihood[s, 0][..., None])[..., 0]
        weight = torch.zeros(S * A, dtype=torch.float64)  # the mean of A_i of each (s, a)
        weight.index_add_(0, (s * A + a).flatten(), leave_one_out(R).flatten())
        mean = gradient(prior, likelihood, weight.view(S, A) / (groups * N))
        projection = (mean @ intended / intended.square().sum()).item()
        found[N] = cosine_similarity(mean, intended, dim=0).item(), projection
    print(f"\nP(a*) = {(prior @ likelihood)[0]:.2f}: N -> (cosine, projection) {found}")
    assert [cosine for cosine, _ in found.values()] == pytest.approx(cosines, abs=0.005)
    assert all(0.9 < projection < 1.1 for _, projection in found.values())


def reward(prior, likelihood):
    return exact_cer(*(torch.tensor(x, dtype=torch.float64) for x in (prior, likelihood)))[:, 0]


def test_when_it_fails():
    # Solutions that say nothing: all answers are paid alike.
    assert reward([0.5, 0.5], [[0.3, 0.7], [0.3, 0.7]]).tolist() == pytest.approx([0.3, 0.3])
    # A slip after right work: the third answer comes from the solution that leads to a*.
    slip = reward([0.6, 0.4], [[0.85, 0.05, 0.10], [0.05, 0.94, 0.01]])
    assert slip[2] == pytest.approx(0.8 * 0.6 * 0.1 / 0.064 + 0.05, abs=1e-9) and slip[2] > 0.79
    # A long reference: next to no pay, but the order and RLOO's signal are those of any other.
    long = reward([0.6, 0.4], [[1e-9, 1 - 1e-9], [1e-12, 1 - 1e-12]])
    assert long.max() < 1.1e-9 and leave_one_out(long).abs().min() > 1e-10
    # A majority that is wrong together: the right answer is mostly said by chance, after solutions
    # that lead elsewhere, and earns little more than half of what its own solutions would pay.
    wrong = reward([0.1, 0.9], [[0.9, 0.1], [0.1, 0.9]])
    assert wrong.tolist() == pytest.approx([0.5, 0.1 + 0.8 * 0.01 / 0.82])
    # M = 1 with one solution for all answers: all rewards are its P, and all advantages 0.
    shared = cer(torch.tensor([[-1.0], [-5.0], [-9.0]]), torch.tensor([-2.0]))
    assert not leave_one_out(shared).any()
