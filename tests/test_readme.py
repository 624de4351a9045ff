"""What the README and docs/ say of files, flags, lines and imports is so. .ci/run runs the ```sh
blocks."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import group_of, tiny_model
from test_theory import EGGS, PRIOR

from cer import cer, exact_cer
from reward_functions import judge
from rloo import leave_one_out
from tasks import verifiers
from tasks.data import Problem

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
COMMAND = re.compile(r"^(?:python|torchrun)\b[^\n]*?([\w/]+)\.py([^\n]*)$", re.MULTILINE)


def blocks(page, language):
    """The code blocks of a page in this language, joined."""
    found = re.findall(rf"^```(?:{language})\n(.*?)^```", page.read_text(), re.M | re.S)
    return "\n".join(found)


def commands():
    """(script, flags) of every command in a block or between backquotes."""
    found = set()
    for page in PAGES:
        quoted = re.findall(r"`([^`\n]*)`", page.read_text())
        found.update(COMMAND.findall("\n".join([blocks(page, "sh|bash"), *quoted])))
    assert {"train", "evaluate", "plot", "judge"} <= {name for name, _ in found}
    return sorted(found)


@pytest.mark.parametrize("name, flags", commands())
def test_every_command_names_real_scripts_and_flags(name, flags):
    defined = re.findall(r'"(--[a-z][\w-]*)"', (ROOT / f"{name}.py").read_text())
    assert set(re.findall(r"--[a-z][\w-]*", flags)) <= set(defined)


def test_every_file_and_heading_that_is_linked_is_there():
    for page in PAGES:
        for path, anchor in re.findall(r"\]\(((?!http)[^)#]*)#?([^)]*)", page.read_text()):
            linked = page.parent / path if path else page
            assert linked.exists(), (page.name, path)
            headings = re.findall("^#+ (.*)", linked.read_text(), re.M) if anchor else []
            slugs = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in headings]
            assert anchor in ["", *slugs], (page.name, path, anchor)


def test_the_reward_in_the_readme_is_that_of_cer():
    shapes = {"log_W": (4, 4), "log_P": 4, "log_prob": 4}
    names = {name: torch.randn(shape) for name, shape in shapes.items()} | {"N": 4}
    exec(blocks(PAGES[0], "python"), names)
    torch.testing.assert_close(names["R"], cer(names["log_W"], names["log_P"]))
    torch.testing.assert_close(names["advantage"], leave_one_out(names["R"]))


def imports(path):
    pattern = r"^(?:from|import) ([\w.]+)(?: import .*)?$"
    return set(re.findall(pattern, (ROOT / path).read_text(), re.MULTILINE))


def test_cer_needs_torch_transformers_and_one_file():
    assert imports("cer.py") == {"dataclasses", "os", "typing", "torch", "engine.tokens"}
    needed = {name.split(".")[0] for name in imports("engine/tokens.py")}
    assert needed - sys.stdlib_module_names == {"torch", "transformers"}


def test_the_verifier_and_the_reward_of_the_pages_do_what_is_said(tokenizer, monkeypatch):
    """running.md: a number within one percent; a reward."""
    page, names = ROOT / "docs" / "running.md", {"math": math, "torch": torch}
    for code in re.findall(r"```python\n(# In .*?)```", page.read_text(), re.S):
        exec(code, names)
    monkeypatch.setitem(verifiers.VERIFIERS, "one-percent", names["within_one_percent"])
    about = Problem("Q", "100", "one-percent")
    pairs = [(about, answer) for answer in ("100.9", "102", "about 3")]
    assert verifiers.verify(pairs) == [True, False, False]
    group = group_of(tokenizer, [r"\boxed{7}", "none", r"so \boxed{8}"], ["7", "7 eggs"])
    [judged] = judge([group], {"actor"}, tiny_model(len(tokenizer)), tokenizer)
    both = judged.scores.log_references.tolist()  # [2 references, 2 columns]
    expected = [math.exp(max(both[0][c], both[1][c] / 2)) for c in (0, 1)]
    assert names["per_word"](judged).tolist() == pytest.approx([expected[0], 0, expected[1]])


def test_the_picture_of_the_readme(redrawn):
    """Its means are those of the runs."""
    drawn = redrawn("toy_figure.py", "toy.svg")
    means = drawn["lines"].groupby("name")[drawn["MEASURED"]].mean()
    told = [
        f"{said} " + "{:.2f}, {:.2f} and {:.2f}".format(*means.loc[name]).replace("0.", ".")
        for name, said in drawn["labels"].items()
    ]
    assert ", ".join(told) in " ".join(PAGES[0].read_text().split())


def by_hand():
    """README's five samples, of which three reason like the first row, as in the lesson's section 6
    -> the table's numbers [3, 5], R of each sample, and R without the fourth."""
    likelihood = [[0.50, 0.40, 0.05, 0.05], [0.05, 0.09, 0.81, 0.05], [0.03, 0.01, 0.06, 0.90]]
    likelihood = torch.tensor(likelihood)
    solutions, answers = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 2, 3]])
    W = likelihood[solutions][:, answers].T
    P = likelihood[solutions, 0]
    rows = torch.stack([W[1:3, :3].sum(1), W[1:3, 3], W[1:3, 4]], 1)  # of "14 eggs" and "18"
    both = torch.stack([rows, rows / rows.sum(1, keepdim=True)], 1)  # and their shares
    some = torch.tensor([0, 1, 2, 4])
    without = cer(W[some][:, some].log(), P[some].log())
    numbers = torch.cat([likelihood[:, :1], both.flatten(0, 1).T], 1)
    return numbers, cer(W.log(), P.log()), without


def test_the_reward_by_hand_in_the_readme():
    numbers, R, without = by_hand()
    page = " ".join(PAGES[0].read_text().split())
    rows = re.findall(r"^\| 3 ?[·+].*? \| .+? \| (.*) \|$", PAGES[0].read_text(), re.M)
    cells = [[math.prod(map(float, cell.split("·"))) for cell in row.split("|")] for row in rows]
    torch.testing.assert_close(torch.tensor(cells), numbers, atol=0.00051, rtol=0)
    sums = f"| {numbers[:, 1].sum():.2f} | 1 | {numbers[:, 3].sum():.2f} | 1 |"
    assert sums in page
    for said in (
        f"| **{R[1]:.3f}** | | **{R[2]:.3f}** |",
        f'as much as "14" ({R[0]:.3f})',
        f'above the mean, {R.mean():.3f}, become likelier ("9" gets {R[4]:.3f})',
        f"the slip gets [{without[2]:.3f}]",
    ):
        assert said.replace("0.", ".") in page, said
    assert without[2] > (without.sum() - without[2]) / 3


def test_every_decimal_of_the_readme_is_on_a_page_or_in_a_result():
    known = "".join(path.read_text() for path in PAGES[1:])
    known += "".join(path.read_text() for path in (ROOT / "benchmarks/results").glob("*.md"))
    known = [float(x) for x in re.findall(r"\d*\.\d+", known)]
    numbers, R, _ = by_hand()
    known += [*numbers.flatten().tolist(), *R.tolist(), R.mean().item(), *numbers.sum(0).tolist()]
    readme = re.sub(r"```.*?```|^    .*?$", "", PAGES[0].read_text(), flags=re.S | re.M)
    for number in re.findall(r"(?<![\w.])\d*\.\d+(?![\w.])", readme):
        digits = len(number.split(".")[1])
        assert any(f"{x:.{digits}f}".lstrip("0") == number.lstrip("0") for x in known), number


def test_the_eggs_have_one_set_of_rewards():
    """.465, .443, .089 and .085, and no others: a paragraph or table that quotes one of the four
    answers holds, with three decimals, only numbers of the square (PRIOR, EGGS, and the lesson's
    A'). Exempt are groups, which stand in the lesson from section 4 on, sections whose heading says
    that they change the square, and paper.md, which has the paper's example."""
    A_prime = torch.tensor([[0.04, 0.86, 0.05, 0.05]], dtype=torch.float64)
    joint, rho = PRIOR[:, None] * EGGS, exact_cer(PRIOR, EGGS)[:, 0]
    p, P = joint.sum(0), EGGS[:, :1]
    square = rho, P, joint, p, joint / p, joint / p * P, p * rho / (p @ rho), EGGS @ rho
    known = {f"{x:.3f}"[1:] for table in (*square, A_prime @ rho) for x in table.flatten().tolist()}
    found = set()
    for page in [*PAGES, ROOT / "docs" / "explore.html"]:
        text = re.sub(r"^```.*?^```|<script.*", "", page.read_text(), flags=re.M | re.S)
        for section in re.split("^(?=#+ )", text.split("\n## 4. From the table")[0], flags=re.M):
            changed = re.match("#.*(says nothing|flatter|cop(y|ies))", section)
            for block in re.split(r"\n\s*\n|<p\b", section):
                quoted = re.search('["“](14|14 eggs|18|9)["”]', block)
                if quoted and not changed and page.name != "paper.md":
                    found.update(re.findall(r"(?<![\d.])\.\d{3}\b", block))
    assert {f"{x:.3f}"[1:] for x in rho.tolist()} <= found <= known, found - known
