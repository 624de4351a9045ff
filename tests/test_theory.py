"""The claims and numbers of docs/theory.md and docs/failures.md, by enumeration. Those about
training two tables are in test_two_tables.py."""

import itertools
import math
from functools import cache

import torch
from pytest import approx
from torch.autograd.functional import jacobian
from torch.distributions import Dirichlet
from torch.nn.functional import cosine_similarity

from cer import cer, exact_cer
from rloo import leave_one_out

S, A = 5, 5  # solutions, answers; a* is answer 0


def table(*rows):
    return torch.tensor(rows, dtype=torch.float64)


# The lesson's eggs: pi(s|q), and pi(a|s,q) of "14", "14 eggs", "18" and "9".
PRIOR = table(0.5, 0.3, 0.2)
EGGS = table([0.50, 0.40, 0.05, 0.05], [0.05, 0.09, 0.81, 0.05], [0.03, 0.01, 0.06, 0.90])
SHIFTED = table(0.05, 0.5, 0.45), PRIOR, table(0.9, 0.05, 0.05)  # early, and late in training


def assert_medians(rows, expected, within):
    found = torch.as_tensor(rows).quantile(0.5, dim=0)
    assert (found - table(*expected)).abs().max() < within, found


def rho_of(prior, likelihood):
    return exact_cer(prior, likelihood)[:, 0]


@cache
def policies(number=50, seed=0):
    """Random policies -> list of (prior [S], likelihood [S, A], rho [A])."""
    torch.manual_seed(seed)
    priors = Dirichlet(table(*[1.0] * S)).sample((number,))
    likelihoods = Dirichlet(table(*[0.3] * A)).sample((number, S))  # peaked: solutions differ
    return [(p, W, rho_of(p, W)) for p, W in zip(priors, likelihoods)]


def gradient(prior, likelihood, reward):
    """The expected policy gradient, by the logits of prior and likelihood -> [S + S A], where the
    pair (s, a) has the mean reward [A] or [S, A], a constant."""
    weight = prior[:, None] * likelihood * reward
    by_solution = weight.sum(1)
    by_answer = weight - likelihood * by_solution[:, None]
    return torch.cat([by_solution - prior * by_solution.sum(), by_answer.flatten()])


@cache
def counts(N, S):
    """How often each solution is in a group of N, for all groups -> [K, S]."""
    ends = itertools.combinations_with_replacement(range(N + 1), S - 1)
    return torch.tensor([(0, *at, N) for at in ends], dtype=torch.float64).diff()


def in_groups(prior, likelihood, N):
    """-> the probability of each group, given the solution of sample i [K, S], and the rewards of
    all answers in that group [K, A], with its N solutions as the columns."""
    n = counts(N, len(prior))
    ways = math.lgamma(N + 1) - (n + 1).lgamma().sum(1)
    p = (ways + torch.xlogy(n, prior).sum(1)).exp()  # multinomial
    R = cer(likelihood.T.log() + n.log()[:, None], likelihood[:, 0].log())
    return p[:, None] * n / N / prior, R


def given_the_solution(prior, likelihood, N):
    """-> E[R_i | s_i, a_i] [S, A], and RLOO's mean baseline, given s_i [S, 1]."""
    given_s, R = in_groups(prior, likelihood, N)
    n, by_solution = counts(N, len(prior)), R @ likelihood.T  # a sample's mean reward  [K, S]
    others = ((n * by_solution).sum(1, keepdim=True) - by_solution) / (N - 1)
    return given_s.T @ R, (given_s * others).sum(0)[:, None]


def given_the_answer(prior, likelihood, N, closes=1.0):
    """-> E[R_i | a_i = a] and the variance, both [A]."""
    given_s, R = in_groups(prior, likelihood, N)
    p = given_s @ (prior[:, None] * likelihood / closes)  # of the group and a_i = a  [K, A]
    mean, square = ((p * x).sum(0) / p.sum(0) for x in (R, R**2))
    return mean, square - mean**2


def test_an_answer_that_says_nothing_takes_from_the_reference():
    """With probability eps after every solution: rewards shrink by 1 - eps, their mean is still
    the reference's probability, and the empty answer receives the mean of P."""
    eps = 0.3
    for prior, likelihood, rho in policies():
        more = torch.cat([(1 - eps) * likelihood, torch.full((S, 1), eps).double()], 1)
        with_nothing = rho_of(prior, more)
        assert torch.allclose(with_nothing[:A], (1 - eps) * rho)
        of_reference = (prior @ more)[0]
        assert torch.allclose((prior @ more) @ with_nothing, of_reference)
        assert torch.allclose(with_nothing[A], of_reference)
    # The eggs, where nothing comes mostly after right work: then it is a wording of the answer.
    silent = table([0.3], [0.02], [0.02])
    more = torch.cat([(1 - silent) * EGGS, silent], 1)
    rho = rho_of(PRIOR, more)
    assert [rho[4].item(), rho[0].item()] == approx([0.331, 0.318], abs=5e-4)
    assert (PRIOR @ more[:, 0]).item() == approx(0.196, abs=5e-4)


def test_the_own_column_makes_cer_unbiased_given_the_answer():
    """At every N, with a variance that falls with N. The own solution and M - 1 random ones are a
    group of M. Samples without a box change nothing. With N columns that are independent of the
    sample, the reward is a ratio of means, and biased."""
    for (prior, likelihood, _), boxed in itertools.product(policies()[:4], (1, 0)):
        likelihood = likelihood * table(boxed, 1, 1, 1, 1)[:, None]
        by_N = zip(*(given_the_answer(prior, likelihood, N) for N in (1, 2, 3, 8)))
        rho, means, variances = rho_of(prior, likelihood), *map(torch.stack, by_N)
        assert (means - rho).abs().max() < 1e-12 and (variances.diff(dim=0) < 0).all()
        given_s, R = in_groups(prior, likelihood, 3)
        assert (given_s @ prior @ R - rho).abs().max() > 1e-3


def of_references(prior, likelihood, K):
    """-> rho [A] and P [S] for the set of the first K answers, and their probabilities [K]."""
    P = likelihood[:, :K].sum(1)
    return exact_cer(prior, likelihood)[:, :K].sum(1), P, (prior @ likelihood)[:K]


def test_a_reference_among_several_may_receive_less_than_the_mean():
    """The columns are "three", "3" and a wrong answer. Theorem 1 holds for the references' mean."""
    prior, likelihood = table(0.5, 0.5), table([0.1, 0.0, 0.9], [0.0, 0.9, 0.1])
    rho, P, _ = of_references(prior, likelihood, 2)
    assert [*rho, prior @ P] == approx([0.10, 0.90, 0.18, 0.50])
    below = {1: 0, 2: 0}
    for (prior, likelihood, _), K in itertools.product(policies(2000), below):
        rho, P, of = of_references(prior, likelihood, K)
        mean, square = prior @ P, prior @ P**2
        assert of @ rho[:K] / mean == approx((square / mean).item()) and square / mean > mean
        covariance = (prior * P) @ likelihood[:, :K] - of * mean
        assert (rho[:K] - mean - covariance / of).abs().max() < 1e-9
        below[K] += bool((rho[:K] < mean - 1e-12).any())
    assert below == {1: 0, 2: 610}


def test_boxes_that_stay_open_bias_the_reward_and_lower_its_mean():
    """The box closes one time in ten after solution 1, and all three samples have an answer. Then
    the columns are no samples of the prior. Theorem 2 needs closed boxes too."""
    prior, likelihood = table(0.4, 0.6), table([0.9, 0.1], [0.0, 0.1])
    closes = likelihood.sum(1, keepdim=True)
    mean, _ = given_the_answer(prior * closes[:, 0], likelihood, 3, closes)
    assert [rho_of(prior, likelihood)[1], mean[1]] == approx([0.36, 0.64], abs=0.005)
    half = likelihood / 2  # half of the boxes stay open: half the mean of exact match
    assert (prior @ half) @ rho_of(prior, half) == approx(0.5 * (prior @ half)[0].item())


def test_the_producing_solutions_first_bias_the_reward():
    """N = 4, M = 2: two random solutions that produced the answer or, if only the own one did, the
    own one and one of the others."""
    found = []
    for prior, W, rho in policies():
        marginal, WP, others = prior @ W, W * W[:, :1], prior[:, None] * (1 - W)
        own, alone = prior[:, None] * W / marginal, (1 - marginal) ** 3
        second = (1 - alone) * own + alone * others / others.sum(0)  # [S, A]
        R = (WP[:, None] + WP) / (W[:, None] + W)  # over two columns  [S, S, A]
        bias = torch.einsum("sa,ta,sta->a", own, second, R) / rho - 1
        found.append([*bias, marginal * rho @ bias / marginal[0]])  # of each answer, of the mean
    changes = torch.tensor(found).abs()
    wrong, mean = changes[:, 1:-1].quantile(0.5), changes[:, -1].quantile(0.5)
    assert wrong == approx(0.03, abs=0.005) and mean == approx(0.017, abs=0.0005)


def test_averaging_keeps_the_mean_over_solutions_and_lowers_the_variance():
    """Compared with P, as VeriFree gives it: E[rho | s] = sum_a pi(a|s) rho(a, a*), and
    E[R_i | the solutions of a group] = (K P)_i with a doubly stochastic K."""
    for prior, likelihood, rho in policies():
        P = likelihood[:, 0]
        K = likelihood @ (likelihood / likelihood.sum(0)).T  # the group of all solutions
        in_a_group = likelihood @ cer(likelihood.T.log(), P.log())
        assert (K @ P - in_a_group).abs().max() < 1e-12 and (K.sum(0) - 1).abs().max() < 1e-12
        for weights, smoothed in (prior, likelihood @ rho), (torch.ones_like(P) / S, in_a_group):
            assert weights @ (smoothed - P) == approx(0, abs=1e-12)
            assert weights @ smoothed**2 < weights @ P**2
        assert P.min() <= rho.min() and rho.max() <= P.max()


def test_paraphrases_let_cer_order_solutions_that_verifree_does_not():
    """A' is right and prefers "14 eggs". P places it below the wrong B, and CER does not."""
    of = torch.cat([EGGS[:2], table([0.04, 0.86, 0.05, 0.05])])  # A, B, A'
    assert of[2, 0] < of[1, 0]
    assert (of @ rho_of(PRIOR, EGGS)).tolist() == approx([0.418, 0.140, 0.408], abs=0.0005)


def progress(prior, likelihood, references):
    """One step of RLOO in groups of four, where each question has one of these references -> for
    each update: its mean along the gradient of the share of right answers, in standard deviations
    of the step, and the cosine of the two."""
    S, A = likelihood.shape
    pairs = torch.combinations(torch.arange(S * A), 4, with_replacement=True)
    s, a = pairs // A, pairs % A  # of the samples of each group [K, 4]
    orders = 24 / torch.stack([(pairs == k).sum(1) for k in range(S * A)]).add(
        1
    ).lgamma().exp().prod(0)
    weight = orders * (prior[s] * likelihood[s, a]).prod(1)
    by_solution = torch.eye(S) - prior  # the gradients of log pi(s), by the logits of the prior
    by_answer = torch.zeros(S, A, S, A, dtype=torch.float64)  # and of log pi(a | s)
    for k in range(S):
        by_answer[k, :, k] = torch.eye(A) - likelihood[k]
    by_answer = by_answer.flatten(2)

    right = table(1, 1, 0, 0)
    up = gradient(prior, likelihood, right)
    of = likelihood[s]  # after each of the four solutions [K, 4, A]
    R_of_all = [cer(of.mT.log(), of[..., r].log()).gather(1, a) for r in references]
    found = {}
    for name in "exact", "P", "VeriFree", "cer", "verifier":
        steps = []
        for r, ours in zip(references, R_of_all):
            R = {"exact": (a == r).double(), "cer": ours, "verifier": right[a]}.get(
                name, of[..., r]
            )
            advantage = leave_one_out(R)[..., None]
            of_answer = advantage * by_answer[s, a]
            if name == "VeriFree":  # the reference is taught in the answer's place
                of_answer = R[..., None] * by_answer[s, r]
            steps.append(torch.cat([advantage * by_solution[s], of_answer], -1).mean(1))
        steps, p = torch.cat(steps), weight.repeat(len(references)) / len(references)
        mean = p @ steps
        SD = (p @ (steps - mean).pow(2).sum(1)).sqrt()
        found[name] = [(mean @ up / up.norm() / SD).item(), cosine_similarity(mean, up, 0).item()]
    return found


def test_progress_for_its_noise_on_the_eggs():
    """For "14", and for "14" or "14 eggs" by a coin, each at three priors."""
    told = {
        "exact": [0.20, 0.61, 0.40, 0.25, 0.44, 0.17],
        "P": [0.21, 1.11, 0.38, 0.26, 1.07, 0.38],
        "VeriFree": [0.50, 1.21, 0.84, 0.62, 0.65, 0.20],
        "cer": [0.25, 0.96, 0.41, 0.29, 0.93, 0.40],
        "verifier": [0.39, 0.91, 0.50, 0.39, 0.91, 0.50],
    }
    cosines = {
        "exact": [0.75, 0.68, 0.28, 1, 1, 1],
        "P": [0.56, 0.97, 0.74, 0.60, 0.97, 0.74],
        "cer": [0.72, 1.00, 0.84, 0.69, 0.99, 0.84],
    }
    cosines["VeriFree"] = cosines["exact"]
    cases = [progress(prior, EGGS, of) for of in ([0], [0, 1]) for prior in SHIFTED]
    for name, along in told.items():
        assert [case[name][0] for case in cases] == approx(along, abs=0.005), name
        assert [case[name][1] for case in cases] == approx(cosines.get(name, [1] * 6), abs=0.005)


def beside(others, answer, eggs):
    """A with this answer in K groups with these other samples, pairs (s, a)  [K, N - 1, 2] -> its
    rewards and advantages  [K]."""
    own = torch.tensor([0, answer]).expand(len(others), 1, 2)
    s, a = torch.cat([own, others], 1).unbind(-1)
    of = eggs[s]  # after each solution of a group  [K, N, A]
    R = cer(of.mT.log(), of[..., 0].log()).gather(1, a)
    return R[:, 0], leave_one_out(R)[:, 0]


def slip_beside(*others, answer=2, eggs=EGGS):
    """(A, "18") in one group -> its reward and advantage."""
    R, advantage = beside(torch.tensor([others]), answer, eggs)
    return R.item(), advantage.item()


def in_all_groups(answer, eggs=EGGS):
    """The other three samples of all groups of four, s and a [1728, 3], and the reward and the
    advantage of A with this answer beside them."""
    pairs = eggs.nonzero()
    groups = pairs[torch.cartesian_prod(*[torch.arange(len(pairs))] * 3)]
    return *groups.unbind(-1), *beside(groups, answer, eggs)


def test_a_slip_is_taught_while_most_solutions_are_wrong_and_hardly_moved_late():
    """In a group of K A, one of which slips to "18", and 8 - K C. Of K = 6 is the lesson's section
    6: about the mean of the others."""
    A, C = [(0, 0)], [(2, 3)]
    pushes = {K: slip_beside(*A * (K - 1), *C * (8 - K))[1] for K in (2, 6, 7, 8)}
    assert pushes[2] > 0.03 > 0.02 > max(abs(pushes[6]), abs(pushes[7])) and pushes[8] == 0


def test_a_slip_is_pushed_down_where_right_work_meets_a_b():
    A, B, C = (0, 0), (1, 2), (2, 3)  # "14", "18" and "9"
    found = [slip_beside(*others) for others in ([A, B, C], [C] * 3, [A] * 3)]
    told = table([0.095, -0.117], [0.132, 0.094], [0.5, 0])  # by the lesson
    assert (torch.tensor(found) - told).abs().max() < 0.0005
    others = [R - advantage for R, advantage in found]
    assert others == approx([0.212, 0.039, 0.5], abs=0.0005)

    assert slip_beside(C, C, C, answer=0)[1] == approx(0.39, abs=0.0005)
    between = [slip_beside(A, A, C, answer=answer)[0] for answer in (2, 0)]  # "18" and "14"
    assert between == approx([0.366, 0.491], abs=0.0005)

    s, a, R, pushes = in_all_groups(2)
    assert (PRIOR[s] * EGGS[s, a]).prod(1) @ R == approx(0.195, abs=0.0005)  # the lesson's
    for answer in 0, 1:  # a right one in its place
        assert (in_all_groups(answer)[3] > pushes - 1e-12).all() and len(pushes) == 1728
    with_B, with_A = (s == 1).any(1), (s == 0).any(1)
    found = []
    for prior in SHIFTED:
        weight = (prior[s] * EGGS[s, a]).prod(1)
        kept = with_B & with_A, with_B & ~with_A, ~with_B
        means = [(weight * pushes)[each].sum() / weight[each].sum() for each in kept]
        up = weight[with_B & (pushes > 1e-12)].sum() / weight[with_B].sum()
        found.append([weight @ pushes, *means, up])
    early = -0.026, -0.138, -0.024, 0.062, 0.539
    example = -0.097, -0.181, -0.027, 0.0135, 0.120
    late = -0.031, -0.229, -0.023, 0.002, 0.011
    assert (table(*found) - table(early, example, late)).abs().max() < 0.0006, found


def test_a_slip_may_be_ahead_of_a_right_wording_that_wrong_work_writes_more_often():
    """C writes "14 eggs" with .30, and "18" with .02: in 448 groups "18" tells A more surely."""
    eggs = torch.cat([EGGS[:2], table([0.03, 0.30, 0.02, 0.65])])
    (*_, slip), (*_, right) = (in_all_groups(answer, eggs) for answer in (2, 1))
    assert (slip > right + 1e-12).sum() == 448 and len(slip) == 1728


def test_an_answer_of_one_solution_receives_the_p_of_this_solution():
    """On the eggs A's P is the largest. A' is right, and gives "14" with .04: a slip to "17", which
    it alone gives, receives this P, and a copy of A' receives it, too."""
    eggs = torch.cat([EGGS, torch.zeros(3, 1)], 1)
    eggs = torch.cat([eggs, table([0.04, 0.86, 0.00, 0.05, 0.05])])
    s, a = torch.tensor([(3, 4), (0, 0), (1, 2), (2, 3)]).T
    R = cer(eggs[s][:, a].T.log(), eggs[s, 0].log())
    assert R[:2].tolist() == approx([0.040, 0.411], abs=0.0005)
    assert leave_one_out(R)[0] == approx(-0.139, abs=0.0005)
    four = torch.cat([EGGS, table([0.04, 0.86, 0.05, 0.05])])
    likelihood = torch.cat([0.98 * four, 0.02 * torch.eye(4)], 1)
    prior = table(0.3, 0.3, 0.2, 0.2)
    rho = rho_of(prior, likelihood)
    assert rho[[0, 4, 7]].tolist() == approx([0.417, 0.490, 0.039], abs=0.0006)
    assert (prior @ likelihood)[0] == approx(0.175, abs=0.0005)


def test_on_the_eggs_a_slip_to_an_answer_of_its_own_receives_no_less_than_right_answers():
    """A slips to "17" in place of "18", and B and C never answer "17". A's P is the largest."""
    eggs = torch.cat([EGGS, torch.zeros(3, 1)], 1)
    eggs[0, [2, 4]] = eggs[0, [4, 2]]
    assert slip_beside((1, 2), (2, 3), (2, 3), answer=4, eggs=eggs)[0] == approx(EGGS[0, 0])
    (s, a, _, right), (*_, slip) = (in_all_groups(answer, eggs) for answer in (0, 4))
    assert (slip > right - 1e-12).all() and len(slip) == 1728
    weights = [(prior[s] * eggs[s, a]).prod(1) for prior in SHIFTED]
    found = [[weight @ slip, weight @ right] for weight in weights]
    told = table([0.401, 0.320], [0.214, 0.184], [0.043, 0.039])
    assert (torch.tensor(found) - told).abs().max() < 0.0005


def test_verifree_has_the_expected_gradient_of_exact_match_and_cer_another():
    """VeriFree's is that of E[P], differentiated through P too. With equal P CER's is 0."""
    found = []
    for prior, likelihood, rho in policies():
        exact, ours = (gradient(prior, likelihood, R) for R in (torch.eye(A)[0], rho))
        found.append([cosine_similarity(ours, exact, dim=0), ours.norm() / exact.norm()])
        logits = prior.log(), likelihood.log()
        verifree = jacobian(lambda x, y: x.softmax(0) @ y.softmax(1)[:, 0], logits)
        assert (torch.cat([g.flatten() for g in verifree]) - exact).abs().max() < 1e-14
    assert_medians(found, [0.84, 0.38], 0.005)
    same_P = table(0.5, 0.5), table([0.3, 0.7], [0.3, 0.7])
    exact = gradient(*same_P, torch.eye(2)[0])
    assert exact.tolist() == approx([0, 0, 0.105, -0.105, 0.105, -0.105])
    assert gradient(*same_P, rho_of(*same_P)).abs().max() < 1e-15


def test_verifree_is_fine_tuning_on_the_posterior_weighted_with_the_references_probability():
    """grad pi(a*) = pi(a*) E[ grad log pi(s) pi(a*|s) ], s from the posterior of a*."""
    exact_match = torch.eye(A).double()[0]
    for prior, likelihood, _ in policies():
        of_reference = prior @ likelihood[:, 0]
        posterior = prior * likelihood[:, 0] / of_reference
        # The gradient of log pi(s) pi(a*|s) by the logits, for each s, weighted with the posterior.
        by_answer = posterior[:, None] * (exact_match - likelihood)
        fine_tuning = torch.cat([posterior - prior, by_answer.flatten()])
        assert torch.allclose(gradient(prior, likelihood, exact_match), of_reference * fine_tuning)

        def log_reference(logits):
            s, a = logits[:S].softmax(0), logits[S:].view(S, A).softmax(1)
            return (s @ a[:, 0]).log()

        logits = torch.cat([prior.log(), likelihood.log().flatten()])
        assert torch.allclose(jacobian(log_reference, logits), fine_tuning)


def test_the_baseline_leans_like_the_reward_in_the_lessons_example():
    """On the eggs, four samples: by how much the reward and the others' lean, and for (A, "18")."""
    alone, baseline = given_the_solution(PRIOR, EGGS, 4)
    lean = alone - rho_of(PRIOR, EGGS)
    own = (lean * EGGS).sum(1)
    others = baseline[:, 0] - (PRIOR @ EGGS)[0]
    assert own.tolist() == approx([0.020, -0.018, -0.023], abs=0.0006)
    assert others.tolist() == approx([0.021, -0.024, -0.016], abs=0.0006)
    assert lean[0, 2].item() == approx(0.106, abs=0.0006)


def flow(prior, likelihood, steps=4000, reward=rho_of, rate=1):
    """Exact steps, with the reward, [A] or [S, A], held fixed in each -> the policies
    [steps + 1, S] and [.., S, A]."""
    logits, policies = (prior.log(), likelihood.clamp_min(1e-9).log()), []
    for _ in range(steps + 1):
        prior, likelihood = (x.softmax(-1) for x in logits)
        policies.append((prior, likelihood))
        R = reward(prior, likelihood)
        advantage = R - (prior[:, None] * likelihood * R).sum()
        of_solution = (likelihood * advantage).sum(1)  # and, given it, of each answer:
        of_answer = advantage - of_solution[:, None]
        change = prior * of_solution, prior[:, None] * likelihood * of_answer
        logits = tuple(x + rate * step for x, step in zip(logits, change))
    return map(torch.stack, zip(*policies))


def in_fours(prior, likelihood):
    """In groups of four a sample's reward, less the mean of the others'  [S, A]."""
    alone, baseline = given_the_solution(prior, likelihood, 4)
    return alone - baseline


def test_an_answer_that_says_nothing_can_grow_while_nearly_all_work_is_wrong():
    """In the end it dies out, right work nearly, too, and wrong work has learned to say "14". But
    in groups of four right work takes over."""
    empty = torch.cat([0.98 * EGGS, torch.full((3, 1), 0.02)], 1)
    prior, likelihood = flow(table(0.05, 0.9, 0.05), empty)
    of_four, _ = flow(table(0.05, 0.9, 0.05), empty, 100, in_fours)
    assert of_four[-1, 0] == approx(0.91, abs=0.005)
    shares = (prior[:, None] @ likelihood)[:, 0, 4]
    assert [*shares[[0, -1]], shares.max()] == approx([0.020, 0.007, 0.032], abs=0.0005)
    A, B, says_14 = prior[:, 0], prior[:, 1], likelihood[:, 1, 0]
    assert [A[0], A.max(), A[-1], B[-1]] == approx([0.05, 0.090, 0.009, 0.990], abs=0.0005)
    assert [says_14[0], says_14[-1]] == approx([0.049, 0.764], abs=0.0005)
    exact, verifier = table([1, 0, 0, 0, 0], [1, 1, 0, 0, 0]).double()
    for right, reward in (exact, lambda *policy: exact), (verifier, lambda *policy: verifier):
        prior, likelihood = flow(table(0.05, 0.9, 0.05), empty, reward=reward)
        assert prior[-1, 1] > 0.99 and likelihood[-1, 1] @ right > 0.99


def test_14_eggs_rises_at_first():
    prior, likelihood = flow(PRIOR, EGGS)
    shares = (prior[:, None] @ likelihood)[[0, 30, 300, 4000], 0, 1]
    assert shares.tolist() == approx([0.23, 0.34, 0.20, 0.02], abs=0.005)
    assert prior[300, 0] == approx(0.99, abs=0.005)


def test_an_answer_that_says_nothing_gains_where_other_samples_have_no_box():
    """All groups of three whose first sample says nothing; the others have no box (None), or one
    with any answer. It gains what they lack: 40% of the mean, if 60% have one."""
    likelihood = torch.cat([0.98 * EGGS, torch.full((3, 1), 0.02)], 1)
    mean = (PRIOR @ likelihood)[0].item()
    for boxed, gained in (1.0, 0.0), (0.6, 0.106):
        probability = {None: 1 - boxed} | {s: boxed * PRIOR[s] for s in range(3)}
        advantage = 0.0
        for own, *others in itertools.product(range(3), probability, probability):
            p = PRIOR[own] * probability[others[0]] * probability[others[1]]
            others = [s for s in others if s is not None]
            columns = likelihood[[own, *others]]
            R = cer(columns.T.log(), columns[:, 0].log())  # of every answer
            advantage += p * (R[4] - sum(likelihood[s] @ R for s in others) / 2)
        assert (1 - boxed) * mean == approx(gained, abs=0.0005)
        assert advantage == approx((1 - boxed) * mean, abs=1e-6)


def copying(share):
    """The eggs with answers that copy the working: so many after A, B and C, each its own."""
    return torch.cat([(1 - share) * EGGS, share * torch.eye(3)], 1)


def test_on_the_eggs_a_copy_of_right_working_receives_more_than_the_reference():
    """Its solution's P, as with VeriFree. Also without the own column, where another A explains it,
    but not beside exact match. In exact steps copies then die out, or grow, while the mean reward,
    that is, the reference, rises with right work."""
    expected = {0.02: [0.455, 0.434, 0.490, 0.266], 0.1: [0.418, 0.399, 0.450, 0.244]}
    ends = {0.02: [0.001, 0.977], 0.1: [0.008, 0.954], 0.3: [0.455, 0.406]}
    for share, numbers in (expected | {0.3: [0.325, 0.310, 0.350, 0.190]}).items():
        likelihood = copying(share)
        rho, mean = rho_of(PRIOR, likelihood), (PRIOR @ likelihood)[0]
        assert [*rho[[0, 1, 4]], mean] == approx(numbers, abs=0.0005)
        assert rho[4:] == approx(likelihood[:, 0])  # P
        *_, last = zip(*flow(PRIOR, likelihood))
        prior, after = last
        assert [(prior @ after)[4:].sum(), (prior @ after)[0]] == approx(ends[share], abs=0.0005)
    *_, (prior, after) = zip(*flow(*last, 1800, rate=20))  # nearly as 36,000 more steps
    assert [(prior @ after)[4:].sum(), (prior @ after)[0]] == approx([0.62, 0.33], abs=0.005)
    for share, after in (0.1, 0.092), (0.3, 0.351):
        *_, (prior, likelihood) = zip(*flow(PRIOR, copying(share), 1000, in_fours))
        assert (prior @ likelihood)[4:].sum() == approx(after, abs=0.0005)
    with_exact = (rho_of(PRIOR, copying(0.02)) + torch.eye(7)[0]) / 2
    assert with_exact[[0, 4]].tolist() == approx([0.728, 0.245], abs=0.0005)
    columns = copying(0.02)[[0, 1]]  # of another A and of B, for a sample with A
    R = cer(columns.T.log(), columns[:, 0].log())
    assert [R[0], R[4]] == approx([0.450, 0.490], abs=0.0005)


def test_between_1_and_N_columns_the_mean_is_a_little_off():
    """The lesson's groups of four with M = 2: those that gave the answer first, then others."""
    torch.manual_seed(0)
    s = torch.multinomial(PRIOR, 400_000, replacement=True)
    a = torch.multinomial(EGGS[s], 1).view(-1, 4)
    s = s.view(-1, 4)
    W = EGGS[s[:, None], a[..., None]]
    first = (a[:, :, None] == a[:, None]) + torch.rand(len(s), 1, 4)
    chosen = torch.zeros_like(W).scatter(2, first.topk(2).indices, 1)
    R = cer((W * chosen).log(), EGGS[s, 0].log())
    assert [R[a == u].mean().item() for u in (0, 2)] == approx([0.478, 0.075], abs=0.001)


def cosines(prior, likelihood, N):
    """Of RLOO's expected gradient, and that of R without a baseline, with the gradient of rho
    -> [2]."""
    alone, baseline = given_the_solution(prior, likelihood, N)
    rewards = rho_of(prior, likelihood), alone - baseline, alone
    intended, *both = (gradient(prior, likelihood, x) for x in rewards)
    return torch.stack([cosine_similarity(g, intended, dim=0) for g in both])


def cosines_of(policies, N):
    """The same for each of many policies -> [.., 2]."""
    priors, likelihoods, _ = map(torch.stack, zip(*policies))
    return torch.vmap(cosines, (0, 0, None))(priors, likelihoods, N)


def test_the_own_column_bends_the_gradient_and_the_baseline_usually_bends_it_back():
    found = torch.cat([cosines_of(policies(), N) for N in (2, 3, 4, 8, 16)], 1)
    # N = 2: RLOO, R alone; N = 3: ...
    told = [0.935, 0.904, 0.968, 0.933, 0.977, 0.951, 0.993, 0.983, 0.998, 0.995]
    assert_medians(found, told, 0.0006)
    # Of 1,000 others: the lowest twentieth, and how many the baseline bends further; each machine
    # rounds, so about.
    for N, low, further in (2, 0.68, 41), (3, 0.76, 29), (4, 0.81, 22), (8, 0.92, 14):
        rloo, alone = cosines_of(policies(1000, seed=1), N).T
        assert (rloo < alone).sum() == approx(further, abs=1)
        assert rloo.quantile(0.05).item() == approx(low, abs=0.005)
    case = table(0.1, 0.7, 0.2), table([0.0, 0.76, 0.24], [1.0, 0.0, 0.0], [0.59, 0.28, 0.13])
    assert cosines(*case, 4) == approx([0.968, 0.975], abs=0.0005)
    case = table(0.4, 0.5, 0.1), table([0.7, 0.2, 0.1], [1.0, 0.0, 0.0], [0.0, 0.7, 0.3])
    assert cosines(*case, 2) == approx([0.839, 0.862], abs=0.0005)


def two_tables(slip, form, right=0.2):
    """The two tables before training: 6 solutions and 6 values, each in the forms of form [F]
    -> [6], [6, 6 F]."""
    value = torch.full((6, 6), slip / 5, dtype=torch.float64).fill_diagonal_(1 - slip)
    return table(right, *[(1 - right) / 5] * 5), (value[:, :, None] * form).flatten(1)


def test_two_tables():
    """Without slips CER is the perfect verifier times the form of the reference. Averaged over
    equally likely references it is exact match."""
    form, right, exact = table(0.5, 0.3, 0.2), torch.arange(18) < 3, torch.eye(18)[:, :3].double()
    rho = exact_cer(*two_tables(0.0, form))[:, :3]
    assert (rho - right[:, None] * form).abs().max() < 1e-15
    even, uneven = (((rho - exact) @ share).abs().max() for share in (form**0, form))
    assert even < 1e-15 < 0.1 < uneven


def test_two_tables_with_slips():
    """In units of the form's probability. Before training all wrong values receive the same, so the
    expected gradient is parallel to the verifier's."""
    before = two_tables(0.3, table(1))
    late = [rho_of(*two_tables(slip, table(1), right=0.99))[:2] for slip in (0.3, 0.05)]
    found = torch.cat([rho_of(*before), *late]).tolist()
    assert found == approx([0.54] + [0.11] * 5 + [0.70, 0.68, 0.95, 0.79], abs=0.005)
    ours, verifier = gradient(*before, rho_of(*before)), gradient(*before, torch.eye(6)[0])
    assert (ours - 0.4293051 * verifier).abs().max() < 1e-8


def test_when_it_fails():
    """A majority that is wrong together, and a long reference, whose rewards are tiny and keep
    their order. Divided by the standard deviation, a tiny pair in the wrong order counts fully."""
    majority = rho_of(table(0.1, 0.9), table([0.9, 0.1], [0.1, 0.9]))
    long = rho_of(table(0.6, 0.4), table([1e-9, 1 - 1e-9], [1e-12, 1 - 1e-12]))
    assert [*majority] == approx([0.50, 0.11], abs=0.005)
    assert long[1] < long[0] < 1.1e-9 and leave_one_out(long)[0] > 1e-10
    pairs = table([0.5, 0.1], [1e-6, 3e-6])  # of a right and a wrong sample
    advantage = leave_one_out(pairs)[:, 0]
    assert advantage.tolist() == approx([0.4, -2e-6])
    assert (advantage / pairs.std(1)).tolist() == approx([1.41, -1.41], abs=0.005)
