"""Two tables: the example and the batched figure script take the same step, and what it learns."""

import contextlib
import io
import itertools
import runpy
from pathlib import Path

import pytest
import torch
import two_tables_figure
from two_tables_figure import judge, train, two_tables

EXAMPLE = Path(two_tables_figure.__file__).parents[1] / "examples" / "two_tables.py"


@pytest.fixture(scope="module")
def example():
    """The example, run as a script -> its names, with what it printed as "printed"."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return runpy.run_path(str(EXAMPLE)) | {"printed": printed.getvalue()}


def test_with_16_forms_cer_follows_the_verifier_and_exact_match_falls_behind(example):
    lines = example["printed"].splitlines()[1:4]  # pass@1 at steps 0, 25 and 50, then slips
    exact, cer, verifier = ([float(x) for x in line.split()[-3:-1]] for line in lines)
    assert verifier[1] > 0.85
    assert all(abs(x - y) < 0.02 for x, y in zip(cer, verifier)), (cer, verifier)
    assert all(x < y - 0.25 for x, y in zip(exact, verifier)), (exact, verifier)


@pytest.mark.parametrize("reward", ["exact match", "CER", "perfect verifier"])
def test_the_batched_step_is_that_of_the_example(example, reward):
    for tables in zip(example["policy"](), two_tables(K=1, F=16, slip=0.3)):
        torch.testing.assert_close(tables[0], tables[1][0])
    theta, phi = torch.randn(1, 6), torch.randn(1, 6, 96)
    phi[..., 3] += 4  # so that some samples give the reference
    s, a, W, P, R, A = example["group"](reward, theta[0], phi[0], a_star=3)
    assert A.abs().max() > 0.01
    log_pi = theta[0].log_softmax(0)[s] + phi[0].log_softmax(1)[s, a]
    s, a = torch.tensor([[s]]), torch.tensor([[a]])
    found, losses = judge(reward, theta, phi, s, a, reference=torch.tensor([[3]]), M=8)
    torch.testing.assert_close(found[0, 0], R)
    torch.testing.assert_close(losses[0, 0], -(A * log_pi).mean())


def test_the_expected_step_is_the_gradient_of_the_objective():
    """Over all groups of two samples (s, a), with 2 solutions and 2 values in 2 forms, a* = 1: the
    expected step of exact match and VeriFree is the gradient of pi(a*), the verifier's that of
    pass@1, and CER's mean reward of an answer is Eq. 3."""
    theta = torch.randn(2, dtype=torch.float64, requires_grad=True)
    phi = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    samples = itertools.product(range(2), range(4))
    groups = torch.tensor(list(itertools.product(samples, repeat=2)))  # [64, 2, (s, a)]
    s, a, reference = groups[None, ..., 0], groups[None, ..., 1], torch.ones(1, 64).long()
    joint = theta.softmax(0)[:, None] * phi.softmax(1)  # pi(s, a)
    probability = joint.detach()[s, a].prod(-1)  # [1, 64]
    group = theta[None], phi[None], s, a, reference
    right, verbatim = joint[:, :2].sum(), joint[:, 1].sum()
    objectives = {"exact match": verbatim, "VeriFree": verbatim, "perfect verifier": right}
    for reward, objective in objectives.items():
        loss = (probability * judge(reward, *group, M=2)[1]).sum()
        found = torch.autograd.grad(loss + objective, [theta, phi], retain_graph=True)
        assert max(table.abs().max() for table in found) < 1e-6, reward
    alone = judge("CER", *group, M=1)[0]  # the only column is the sample's own solution
    torch.testing.assert_close(alone, phi.softmax(1)[s, 1])
    plain, divided = (judge("exact match", *group, M=2, by_std=d)[1] for d in (False, True))
    torch.testing.assert_close(divided, 2**0.5 * plain, rtol=1e-5, atol=0)  # A is 1, 0 or -1


def test_a_larger_m_leaves_fewer_slips():
    slips = [train("CER", M=M, seeds=20, steps=60)[1][:, -1].mean() for M in (8, 2, 1)]
    assert slips[0] < 0.06 < 0.09 < slips[1] < 0.15 < 0.18 < slips[2]


def test_the_figure_and_what_it_refuses(script):
    small = "--forms 2 --lr .05 .1 --steps 4 --seeds 2"
    code, printed, _ = script(two_tables_figure, small)
    assert code == 0 and "forms: 2, lr: 0.1" in printed and Path("runs/two_tables.png").is_file()
    for wrong in "--seeds 1", "--lr=-1", "--forms 0":
        code, printed, error = script(two_tables_figure, f"{small} {wrong}")
        assert code == 2 and not printed and error.count("\n") == 1
