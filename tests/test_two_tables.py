"""Two tables: the example and the batched figure script take the same step, and what it learns."""

import contextlib
import io
import runpy
from pathlib import Path

import pytest
import torch
import two_tables_figure
from two_tables_figure import judge, two_tables

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


def test_a_smaller_m_takes_the_solutions_that_gave_the_answer_first():
    torch.manual_seed(0)
    theta, phi = torch.randn(50, 6), torch.randn(50, 6, 8)
    s = torch.randint(6, (50, 4, 8))
    a = torch.randint(4, s.shape)
    reference = torch.randint(8, s.shape[:2])
    P, _ = judge("VeriFree", theta, phi, s, a, reference, M=8)
    R, _ = judge("CER", theta, phi, s, a, reference, M=1)
    same = a[..., None] == a[..., None, :]  # the samples with the answer of each sample
    its_own = ((R[..., None] == P[..., None, :]) & same).any(-1)
    assert same.sum(-1).max() > 2 and (R != P).any() and its_own.all()
    torch.testing.assert_close(R, R.gather(-1, same.int().argmax(-1)))  # equal answers, equal R


def test_the_figure(script):
    small = "--forms 2 --lr .05 .1 --steps 4 --seeds 2"
    code, printed, _ = script(two_tables_figure, small)
    assert code == 0 and "forms: 2, lr: 0.1" in printed and Path("runs/two_tables.png").is_file()
