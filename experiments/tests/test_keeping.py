"""The claims and numbers of docs/keeping.md: exact sums over all groups of four, on the eggs and
over random policies, and its proofs as checks."""

import math

import pytest
import torch
from conftest import ROOT
from pytest import approx
from test_theory import EGGS, PRIOR, SHIFTED, copying, counts, gradient, policies, rho_of, table
from torch.nn.functional import cosine_similarity

from cer import cer
from experiments.random_policies import random_policies
from experiments.tests.told import words_of
from rloo import leave_one_out

PAGE = (ROOT / "docs/keeping.md").read_text()
RIGHT = table(1, 1, 0, 0)  # "14" and "14 eggs"
HOW = {  # a sample's weight, from the rewards and advantages of its group
    "advantage": lambda R, A: A,
    "positive": lambda R, A: A.clamp(min=0),
    "above": lambda R, A: (A > 0).double(),
    "reward": lambda R, A: R,
    "over .3": lambda R, A: (R > 0.3).double(),
}


def short(x, digits=2):
    return f"{x:.{digits}f}".replace("0.", ".", 1) if abs(x) < 1 else f"{x:.{digits}f}"


def groups(prior, likelihood, reward):
    """A sample with each solution and answer, and three others -> the probability of the others
    [S A, K], and the rewards of all four [S A, K, 4], the sample's own first."""
    S, A = likelihood.shape
    others = torch.combinations(torch.arange(S * A), 3, with_replacement=True)  # [K, 3]
    times = torch.stack([(others == pair).sum(1) for pair in range(S * A)])
    orders = 6 / (times + 1).lgamma().exp().prod(0)
    p = orders * (prior[:, None] * likelihood).flatten()[others].prod(1)
    own = torch.arange(S * A)[:, None, None].expand(-1, len(others), 1)
    pairs = torch.cat([own, others.expand(S * A, -1, 3)], -1)
    s, a = pairs // A, pairs % A
    of = likelihood[s]  # after each solution of a group  [S A, K, 4, A]
    if reward == "exact":
        return p, (a == 0).double()
    if reward == "verifier":
        return p, RIGHT[a]
    return p, of[..., 0] if reward == "P" else cer(of.mT.log(), of[..., 0].log()).gather(-1, a)


def weights(prior, likelihood, reward, *names):
    """The mean weight of a sample (s, a) [S, A], for each of these names in HOW."""
    p, R = groups(prior, likelihood, reward)
    A = leave_one_out(R)
    return [(p * HOW[how](R, A)[..., 0]).sum(1).view_as(likelihood) for how in names]


def after_a_round(prior, likelihood, weight):
    """Fine-tuned to the end: the policy is the distribution of what was kept."""
    joint = prior[:, None] * likelihood * weight
    joint = joint / joint.sum()
    own = joint.sum(1, keepdim=True)
    return own[:, 0], torch.where(own > 0, joint / own, likelihood)


ROWS = {
    "exact match: all that are right": ("exact", "reward"),
    "a perfect verifier: all that are right": ("verifier", "reward"),
    r"CER: $A_i \gt 0$, equal weights": ("cer", "above"),
    r"CER: $A_i$ as the weight, where it is above 0": ("cer", "positive"),
    r"CER above .3": ("cer", "over .3"),
    r"$P$: $A_i \gt 0$, equal weights": ("P", "above"),
    r"$P$: $A_i$ as the weight, where it is above 0": ("P", "positive"),
}


@pytest.mark.parametrize("when", [0, 1])
def test_what_is_kept_on_the_eggs(when):
    """The two tables: what the kept weight goes to, and the share of right samples left out."""
    prior = SHIFTED[when]
    joint = prior[:, None] * EGGS
    part = PAGE.split("| what is kept |")[1 + when].split("\n\n")[0]
    for name, (reward, how) in {"(all samples)": ("verifier", None), **ROWS}.items():
        [weight] = weights(prior, EGGS, reward, how) if how else [torch.ones_like(EGGS)]
        kept = joint * weight
        share = kept / kept.sum()
        cells = [share[0, 0], share[0, 1], share[0, 2:].sum(), share[1:, :2].sum()]
        cells = [short(x.item()) for x in [*cells, share[1:, 2:].sum()]]
        left_out = 1 - kept[:, :2].sum() / joint[:, :2].sum()
        cells.append("" if how == "positive" else short(abs(left_out.item())))
        row = f"| {name} | {' | '.join(cells)} |".replace("|  |", "| |")
        assert row in part, row


def test_for_rewards_of_0_and_1_a_step_on_what_is_kept_is_a_part_of_rloos():
    """In groups of four, for every policy: 1 - p of it with A_i, 1 - p^3 with equal weights."""
    exact = torch.eye(5).double()[0]
    for prior, likelihood, _ in policies()[:6]:
        p = (prior @ likelihood)[0]
        full, half, equal, all_right = (
            gradient(prior, likelihood, weight)
            for weight in weights(
                prior, likelihood, "exact", "advantage", "positive", "above", "reward"
            )
        )
        assert torch.allclose(full, gradient(prior, likelihood, exact))
        assert torch.allclose(half, (1 - p) * full) and torch.allclose(equal, (1 - p**3) * full)
        assert torch.allclose(all_right, full)


def test_a_step_on_the_eggs_in_standard_deviations():
    """Of the mean step along the gradient of right answers, at three priors, and how far CER's
    kept samples turn it early."""
    S, A = EGGS.shape
    pairs = torch.combinations(torch.arange(S * A), 4, with_replacement=True)
    s, a = pairs // A, pairs % A
    times = torch.stack([(pairs == pair).sum(1) for pair in range(S * A)])
    orders = 24 / (times + 1).lgamma().exp().prod(0)
    by_answer = torch.zeros(S, A, S, A, dtype=torch.float64)
    for k in range(S):
        by_answer[k, :, k] = torch.eye(A) - EGGS[k]
    of = EGGS[s]
    R_of = {"exact": (a == 0).double(), "verifier": RIGHT[a]}
    R_of["cer"] = cer(of.mT.log(), of[..., 0].log()).gather(1, a)
    names = {"exact": "exact match", "verifier": "a perfect verifier", "cer": "CER"}
    labels = {"advantage": "RLOO", "above": "equal weights", "positive": "positive half"}
    for reward, how in ((reward, how) for reward in R_of for how in labels):
        found, R = [], R_of[reward]
        for prior in SHIFTED:
            p = orders * (prior[s] * EGGS[s, a]).prod(1)
            weight = HOW[how](R, leave_one_out(R))[..., None]
            by_solution = torch.eye(S) - prior
            gradients = torch.cat([by_solution[s], by_answer.flatten(2)[s, a]], -1)
            steps = (weight * gradients).mean(1)
            mean, up = p @ steps, gradient(prior, EGGS, RIGHT)
            SD = (p @ (steps - mean).pow(2).sum(1)).sqrt()
            cosine = cosine_similarity(mean, up, 0).item()
            found.append(f"{short((mean @ up / up.norm() / SD).item())} ({short(cosine)})")
        row = f"| {names[reward]}, {labels[how]} | {' | '.join(found)} |".replace("(1.00)", "(1)")
        assert row in PAGE, row
    early = SHIFTED[0]
    full, equal = (
        gradient(early, EGGS, weight)
        for weight in weights(early, EGGS, "cer", "advantage", "above")
    )
    assert equal.norm() / full.norm() == approx(12, abs=0.5) and "12 times as long" in PAGE
    assert cosine_similarity(equal, full, 0) == approx(0.48, abs=0.005) and "cosine of .48" in PAGE


def test_over_random_policies():
    """A round on what CER keeps raises the mean of rho, held fixed, in all, and right answers in
    most. A step of RLOO lowers them as often."""
    falls, reference_falls = torch.zeros(5, 2, dtype=torch.long), 0
    for prior, likelihood in zip(*random_policies.policies(1, 100)):
        rho, of = rho_of(prior, likelihood), prior @ likelihood
        values = torch.stack([RIGHT, rho])  # [2, A]
        by_how = weights(prior, likelihood, "cer", "above", "positive", "advantage")
        for k, weight in enumerate(by_how):
            if k < 2:
                new, answers = after_a_round(prior, likelihood, weight)
                falls[k] += values @ (new @ answers - of) < -1e-9
                reference_falls += k == 1 and (new @ answers)[0] < of[0] - 1e-9
            step = gradient(prior, likelihood, weight)
            along = [step @ gradient(prior, likelihood, value) for value in values]
            falls[2 + k] += torch.stack(along) < -1e-12
    names = "a round, equal weights", r"a round, $A_i$ as the weight", "a step, equal weights"
    names += r"a step, $A_i$ as the weight", "a step of RLOO"
    for name, (right, mean) in zip(names, falls.tolist()):
        assert f"| {name} | {right} | {mean} |" in PAGE, (name, right, mean)
    assert f"lowers $\\pi(a^\\ast)$ in {reference_falls} of the 100" in words_of(PAGE)


def test_a_round_raises_the_mean_of_what_the_weight_rises_with():
    """E[R w] / E[w] >= E[R], if w is a rising function of R."""
    torch.manual_seed(0)
    for prior, likelihood, rho in policies():
        levels = rho.sort().values
        rising = torch.rand(5).double().cumsum(0)[torch.searchsorted(levels, rho)]
        new, answers = after_a_round(prior, likelihood, rising)
        assert (new @ answers) @ rho > (prior @ likelihood) @ rho


def em(prior, likelihood, references):
    """A step of expectation maximisation: of each reference the posterior of the solutions, each
    followed by the reference."""
    joint = torch.zeros_like(likelihood)
    for r in references:
        joint[:, r] += prior * likelihood[:, r] / (prior @ likelihood[:, r]) / len(references)
    return joint.sum(1), joint / joint.sum(1, keepdim=True)


def test_keeping_exact_matches_is_a_step_of_expectation_maximisation():
    """What is kept is the reference after the posterior. And a step between the old policy and the
    new one, a mixture of the two, raises the mean log-probability of several references."""
    for prior, likelihood, _ in policies():
        [weight] = weights(prior, likelihood, "exact", "reward")
        kept = after_a_round(prior, likelihood, weight)
        for found, expected in zip(kept, em(prior, likelihood, [0])):
            assert torch.allclose(found, expected)
    for prior, likelihood, _ in policies(1000):
        old = (prior @ likelihood)[:2].log().mean()
        new, answers = em(prior, likelihood, [0, 1])
        for part in 0.1, 1.0:
            joint = (1 - part) * prior[:, None] * likelihood + part * new[:, None] * answers
            assert joint.sum(0)[:2].log().mean() > old - 1e-12


def test_a_draw_from_a_group_is_near_the_posterior_if_the_group_is_large():
    """By how much of the probability a solution drawn with P_i / sum P is A's, on the eggs."""
    for prior, label in zip(SHIFTED, (".05 .50 .45", ".50 .30 .20")):
        shares = []
        for N in 1, 4, 8, 16, 64:
            n = counts(N, 3)
            p = (math.lgamma(N + 1) - (n + 1).lgamma().sum(1) + torch.xlogy(n, prior).sum(1)).exp()
            drawn = n * EGGS[:, 0]
            shares.append((p @ (drawn / drawn.sum(1, keepdim=True)))[0].item())
        posterior = prior * EGGS[:, 0]
        shares.append((posterior / posterior.sum())[0].item())
        row = f"| {label} | {' | '.join(map(short, shares))} |"
        assert row in PAGE, row


def test_where_keeping_fails_on_the_eggs():
    """Copies, the other form of the answer, and wrong work that says 14, over three rounds."""
    [above, positive] = weights(PRIOR, copying(0.1), "cer", "above", "positive")
    shares = [
        (new @ answers)[4:].sum().item()
        for new, answers in (after_a_round(PRIOR, copying(0.1), w) for w in (above, positive))
    ]
    assert f"{short(shares[0], 3)} with equal weights and {short(shares[1], 3)} with" in PAGE
    policy, found = (PRIOR, EGGS), []
    for _ in range(4):
        prior, likelihood = policy
        answers = prior @ likelihood
        found.append([answers[:2].sum(), answers[0], answers[1], prior[0]])
        policy = after_a_round(prior, likelihood, *weights(prior, likelihood, "cer", "above"))
    names = "right answers", '"14"', '"14 eggs"', "solution A"
    for name, values in zip(names, torch.tensor(found).T.tolist()):
        assert f"| {name} | {' | '.join(map(short, values))} |" in PAGE, (name, values)
    for k, prior in enumerate(SHIFTED[:2]):
        new, _ = em(prior, EGGS, [0])
        assert f"{short(1 - new[0].item())} of" in words_of(PAGE), (k, new)
