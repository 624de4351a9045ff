"""experiments/random_policies: the tables of its page, and what docs/failures.md says of them."""

import re

import torch
from conftest import ROOT
from pytest import approx
from test_theory import EGGS, PRIOR, SHIFTED, progress, table

from experiments.random_policies import random_policies


def test_progress_for_its_noise_over_random_policies():
    """How often CER is ahead of exact match and of the verifier, and VeriFree of CER. VeriFree's
    step is exact match's, averaged over the answers, so it is never smaller for its noise."""
    for references, told in ([0], [133, 82, 180, 200]), ([0, 1], [139, 21, 165, 200]):
        ahead = []
        for policy in zip(*random_policies.policies(1, 200)):
            of = {name: along for name, (along, _) in progress(*policy, references).items()}
            pairs = ("cer", "exact"), ("cer", "verifier"), ("VeriFree", "cer")
            ahead.append([of[x] > of[y] for x, y in pairs])
            ahead[-1].append(abs(of["VeriFree"]) > abs(of["exact"]) - 1e-9)
        assert torch.tensor(ahead).sum(0).tolist() == approx(told, abs=1)


def test_a_slip_that_is_ahead_of_a_right_wording():
    """As tests/test_theory.py counts it, over all groups of four."""
    eggs = torch.cat([EGGS[:2], table([0.03, 0.30, 0.02, 0.65])])
    assert random_policies.slip_to_18(PRIOR, eggs)[0][0] == 448
    assert random_policies.slip_to_18(PRIOR, EGGS)[0].tolist() == [0, 0]


def test_the_tables_over_random_policies():
    """The rows of the stored file, and those that the page tells: P of a right solution alone,
    against what rho gives right answers; and a slip to "18"."""
    stored = (ROOT / "experiments/random_policies/README.md").read_text()
    page = (ROOT / "docs/failures.md").read_text()
    for K in 1, 2, 3, 5:
        cells = " | ".join(f"{x:.2f}".lstrip("0") for x in random_policies.of_its_own(K))
        assert f"| `{K}` | {cells} |" in stored and f"| {K} | {cells} |" in page, cells
    for name, prior in zip((".05 .50 .45", ".50 .30 .20", ".90 .05 .05"), SHIFTED):
        cells = [f"{x:.2f}".lstrip("0") for x in random_policies.slip_to_18(prior, EGGS)[1]]
        assert f"| `eggs, {prior.tolist()}` | {' | '.join(cells)} |" in stored
        assert re.search(rf"\| {name} \|.* \({cells[0]}\).* \({cells[1]}\).* \({cells[2]}\)", page)
    found = [random_policies.slip_to_18(*each) for each in zip(*random_policies.policies(1, 50))]
    ahead, shares = (torch.stack(each).double() for each in zip(*found))
    rough = [*(ahead > 0).double().mean(0), *shares.mean(0)]  # of fewer policies than are stored
    assert rough == approx([0.44, 0.28, 0.17, 0.32, 0.47], abs=0.15)
    for cells in ".44 | .28", ".17 | .32 | .47":
        assert f"1,000 policies` | {cells} |" in stored
    assert "1,000 random policies | | (.17) | (.32) | (.47) |" in page
    assert "in 44% of the 1,000 random policies, and in 28% one" in " ".join(page.split())
