"""Two tables: the example and the batched figure script take the same step, and what it learns."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from experiments.two_tables import two_tables_figure
from experiments.two_tables.two_tables_figure import COPIES, judge, train, two_tables

EXAMPLE = ROOT / "examples" / "two_tables.py"


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


def test_copies_of_the_working_grow_with_cer_alone():
    """The rows of experiments/copies are those of its results, whose first 100 steps are taken
    again with 10%."""
    text = (ROOT / "experiments/copies/two-tables-copies.txt").read_text()
    line = r"^([\d.]+)% at the start, (\w+).*?  +(\S.*?)  +([\d. ]+)  \((.*) to (.*)\)$"
    found = {}
    for share, what, reward, means, low, high in re.findall(line, text, re.M):
        found[float(share), reward, what] = [*map(float, means.split()), float(low), float(high)]
    page = (ROOT / "experiments/copies/README.md").read_text()
    rows = re.findall(r"^\| ([\w ]+) \| (\d+)% \|(.* to .*)\|$", page, re.M)
    assert len(rows) == 7
    for reward, share, numbers in rows:
        right, copies = (found[float(share), reward, of] for of in ("pass", "answers"))
        expected = [right[0], right[1], right[3], right[4], *right[5:], copies[4]]
        shown = [float(x) for x in re.findall(r"[.\d]+", numbers)]
        assert shown == pytest.approx(expected, abs=0.0051), (reward, share)
        if share == "10":
            again = train(reward, seeds=50, more=0.1 * COPIES).mean(1)
            first = [again[0, 0], again[0, -1], again[2, -1]]
            assert first == pytest.approx([*right[:2], copies[1]], abs=0.02), reward
            assert reward != "CER" or again[0].max() == pytest.approx(0.73, abs=0.01)
    others = [of for (_, reward, what), of in found.items() if reward != "CER" and what == "pass"]
    assert min(of[4] for of in others) > 0.99
