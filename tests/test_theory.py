"""The claims and numbers of docs/theory.md, on policies small enough to enumerate. Those about the
two tables are in test_two_tables.py.

    python -m pytest -q -s tests/test_theory.py      # prints the numbers
"""

import itertools
from functools import partial

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
    """The policy gradient, by the logits of prior and likelihood -> [S + S A]. weight [S, A], a
    constant: the probability of the pair (s, a) times its reward."""
    logits = prior.log().requires_grad_(), likelihood.log().requires_grad_()
    log_pi = logits[0].log_softmax(0)[:, None] + logits[1].log_softmax(1)
    gradients = torch.autograd.grad((weight * log_pi).sum(), logits)
    return torch.cat([each.flatten() for each in gradients])


def tuples_of_solutions(prior, likelihood, N):
    """All N-tuples of solutions, each with its probability."""
    for s in itertools.product(range(len(prior)), repeat=N):
        yield prior[list(s)].prod(), likelihood[list(s)]  # [N, A]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("N", [1, 2, 3])
def test_the_own_column_makes_cer_unbiased_given_the_answer(seed, N):
    """E[R_i | a_i = a] = rho(a, a*) at every N, by enumeration of all tuples of solutions. It takes
    the sample's own solution among the columns: with N other solutions it is a ratio of means."""
    prior, likelihood = policy(seed)
    prior, likelihood = prior[:4] / prior[:4].sum(), likelihood[:4]
    marginal, rho = prior @ likelihood, exact_cer(prior, likelihood)[:, 0]
    mean, independent = torch.zeros(2, A, dtype=torch.float64)
    for p, W in tuples_of_solutions(prior, likelihood, N):
        R = cer(W.T.log(), W[:, 0].log())  # of every answer, over these N columns  [A]
        mean += p * W[0] * R  # sample 0 gives the answer with probability W[0]
        independent += p * R
    assert (mean / marginal - rho).abs().max() < 1e-12
    assert (independent - rho).abs().max() > 0.005


def test_cer_is_bounded_by_the_solutions_that_lead_to_the_answer():
    for seed in range(20):
        prior, likelihood = policy(seed)
        likelihood = torch.where(likelihood < 0.05, 0.0, likelihood)
        likelihood = likelihood / likelihood.sum(1, keepdim=True)
        rho = exact_cer(prior, likelihood)[:, 0]
        for a in range(A):
            P = likelihood[likelihood[:, a] > 0, 0]  # of the solutions that can lead to a
            assert len(P) == 0 or P.min() - 1e-12 <= rho[a] <= P.max() + 1e-12
    assert reward([0.5, 0.5], [[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]]).tolist() == [1.0, 0.0, 0.0]


def test_cer_never_tells_solutions_further_apart_than_verifree():
    """E[R | s] = sum_a pi(a|s) rho(a, a*) has the mean of P_s over the solutions, and no larger
    variance."""
    for seed in range(100):
        prior, likelihood = policy(seed)
        P, smoothed = likelihood[:, 0], likelihood @ exact_cer(prior, likelihood)[:, 0]
        mean = prior @ P
        assert prior @ smoothed == pytest.approx(mean.item(), abs=1e-12)
        assert prior @ (smoothed - mean) ** 2 <= prior @ (P - mean) ** 2 + 1e-15


def test_verifree_has_the_expected_gradient_of_exact_match():
    """grad E[P_s], differentiated through P_s too, is the policy gradient of exact match."""
    prior, likelihood = policy(0)
    exact = gradient(prior, likelihood, prior[:, None] * likelihood * (torch.arange(A) == 0))
    logits = prior.log().requires_grad_(), likelihood.log().requires_grad_()
    value = logits[0].softmax(0) @ logits[1].softmax(1)[:, 0]
    verifree = torch.cat([each.flatten() for each in torch.autograd.grad(value, logits)])
    assert (verifree - exact).abs().max() < 1e-14


def two_tables(slip, form):
    """examples/two_tables.py before training: 6 solutions and 6 values, each in the forms of form
    [F], all with the same probabilities."""
    prior = torch.tensor([0.2] + [0.16] * 5, dtype=torch.float64)
    value = torch.full((6, 6), slip / 5, dtype=torch.float64).fill_diagonal_(1 - slip)
    return prior, (value[:, :, None] * form).flatten(1)  # [6], [6, 6 F]


def test_without_slips_cer_is_the_perfect_verifier_times_the_references_form():
    form = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    prior, likelihood = two_tables(0.0, form)
    right = (torch.arange(18) < 3).double()
    rho = exact_cer(prior, likelihood)
    for b in range(3):
        assert (rho[:, b] - right * form[b]).abs().max() < 1e-15
    # Averaged over the references, exact match and CER have the same expected gradient there.
    even = torch.full((3,), 1 / 3, dtype=torch.float64)
    prior, likelihood = two_tables(1e-12, even)
    joint, rho = prior[:, None] * likelihood, exact_cer(prior, likelihood)
    exact = sum(gradient(prior, likelihood, joint * (torch.arange(18) == b)) for b in range(3))
    ours = sum(gradient(prior, likelihood, joint * rho[:, b]) for b in range(3))
    assert (exact - ours).abs().max() < 1e-10 and exact.abs().max() > 0.1


def test_the_reward_of_a_slip():
    """With slips of 30%, in units of the form's probability: before training a right value receives
    .54 and a slip .11. Once the right solution has probability .99 it is .70 and .68."""
    prior, likelihood = two_tables(0.3, torch.ones(1, dtype=torch.float64))
    before = exact_cer(prior, likelihood)[:, 0]
    late = exact_cer(torch.tensor([0.99] + [0.002] * 5, dtype=torch.float64), likelihood)[:, 0]
    assert before[:2].tolist() == pytest.approx([0.54, 0.11], abs=0.005)
    assert late[:2].tolist() == pytest.approx([0.70, 0.68], abs=0.005)


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


def sampled_gradient(prior, likelihood, s, a, weights):
    """The mean over samples of weight * grad log pi(s, a). s, a and weights [groups, N]."""
    total = torch.zeros(S * A, dtype=torch.float64)
    total.index_add_(0, (s * A + a).flatten(), weights.flatten())
    return gradient(prior, likelihood, total.view(S, A) / s.numel())


COSINES = {  # policy: RLOO's and that of R without a baseline, at N = 4, 8 and 16
    0: ([0.978, 0.994, 0.998], [0.968, 0.989, 0.997]),
    2: ([0.867, 0.944, 0.983], [0.810, 0.908, 0.970]),
}


@pytest.mark.parametrize("seed", COSINES)
def test_the_own_column_bends_the_gradient_and_the_baseline_bends_it_back(seed, groups=40_000):
    """The mean of RLOO's gradient against the intended one (R = rho), by Monte Carlo. R_i leans
    towards P of its own solution. That is most of the deviation, and the baseline, which depends on
    the sample too, cancels part of it."""
    prior, likelihood = policy(seed)
    rho, p_right = exact_cer(prior, likelihood)[:, 0], (prior @ likelihood)[0]
    intended, cosines = gradient(prior, likelihood, prior[:, None] * likelihood * rho), []
    for N in 4, 8, 16:
        s = torch.multinomial(prior, groups * N, replacement=True).view(groups, N)
        a = torch.multinomial(likelihood[s.flatten()], 1).view(groups, N)
        W = likelihood[s[:, None, :].expand(-1, N, -1), a[:, :, None].expand(-1, -1, N)]
        R = cer(W.log(), likelihood[s, 0].log())

        mean_gradient = partial(sampled_gradient, prior, likelihood, s, a)
        advantages = leave_one_out(R)
        ours, reward_alone = mean_gradient(advantages), mean_gradient(R - p_right)
        own_column, baseline = reward_alone - intended, mean_gradient(p_right - (R - advantages))
        cosines.append([cosine_similarity(g, intended, dim=0).item() for g in (ours, reward_alone)])
        opposed = cosine_similarity(own_column, baseline, dim=0).item()
        projection = (ours @ intended / intended.square().sum()).item()
        sizes = [(g.norm() / intended.norm()).item() for g in (own_column, baseline)]
        print(f"\nP(a*) = {p_right:.2f}, N = {N}: cosine {cosines[-1]}, opposed {opposed:.2f},")
        print(f"    projection {projection:.3f}, norms of own column and baseline {sizes}")
        assert -0.92 < opposed < -0.72 and sizes[0] > 1.8 * sizes[1] and 0.9 < projection < 1.1
        of_rho = mean_gradient(leave_one_out(rho[a]))
        assert cosine_similarity(of_rho, intended, dim=0) > 0.998  # 1, but for the sampling error
    for found, expected in zip(zip(*cosines), COSINES[seed]):
        assert list(found) == pytest.approx(expected, abs=0.005)


def reward(prior, likelihood):
    return exact_cer(*(torch.tensor(x, dtype=torch.float64) for x in (prior, likelihood)))[:, 0]


def test_when_it_fails():
    # Solutions that say nothing: all answers receive the same reward.
    assert reward([0.5, 0.5], [[0.3, 0.7], [0.3, 0.7]]).tolist() == pytest.approx([0.3, 0.3])
    # A slip after right work: the third answer comes from the solution that leads to a*.
    slip = reward([0.6, 0.4], [[0.85, 0.05, 0.10], [0.05, 0.94, 0.01]])
    assert slip[2] == pytest.approx(0.8 * 0.6 * 0.1 / 0.064 + 0.05, abs=1e-9) and slip[2] > 0.79
    # A long reference: tiny rewards, but their order and the advantages are not lost.
    long = reward([0.6, 0.4], [[1e-9, 1 - 1e-9], [1e-12, 1 - 1e-12]])
    assert long.max() < 1.1e-9 and leave_one_out(long).abs().min() > 1e-10
    # A majority that is wrong together: half of the right answers come by chance from solutions
    # that lead elsewhere, which halves their reward.
    wrong = reward([0.1, 0.9], [[0.9, 0.1], [0.1, 0.9]])
    assert wrong.tolist() == pytest.approx([0.5, 0.1 + 0.8 * 0.01 / 0.82])
    # M = 1 with one solution for all answers: all rewards are its P, and all advantages 0.
    shared = cer(torch.tensor([[-1.0], [-5.0], [-9.0]]), torch.tensor([-2.0]))
    assert not leave_one_out(shared).any()
