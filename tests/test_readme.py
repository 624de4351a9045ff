"""What the README and docs/ say of files, flags, lines and imports is so. .ci/run runs the ```sh
blocks."""

import math
import re
import sys

import pytest
import torch
from conftest import ROOT, group_of, tiny_model
from test_theory import EGGS, PRIOR

from cer import cer, exact_cer
from reward_functions import ask_judges
from rloo import leave_one_out
from tasks import data, verifiers
from tasks.data import Problem

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
    source = (ROOT / f"{name}.py").read_text()
    source += (ROOT / "measure.py").read_text() if "add_model_and_data" in source else ""
    source += (ROOT / "engine/load.py").read_text() if "add_flags" in source else ""
    defined = re.findall(r'"(--[a-z][\w-]*)"', source)
    assert set(re.findall(r"--[a-z][\w-]*", flags)) <= set(defined)


def pages():
    """Every page of the repository."""
    return [page for page in ROOT.glob("**/*.md") if not {".venv", "runs"} & {*page.parts}]


def slugs(page):
    """The anchors of a page's headings, as GitHub makes them. What is in a block is no heading."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall("^#+ (.*)", text, re.M)
    return [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in headings]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_heading_that_is_linked_is_there(page):
    for path, anchor in re.findall(r"\]\(((?!http)[^)#]*)#?([^)]*)", page.read_text()):
        linked = page.parent / path if path else page
        assert linked.exists(), path
        assert not anchor or anchor in slugs(linked), (path, anchor)


def test_every_page_that_a_program_names_is_there():
    programs = [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py"), *ROOT.glob("docs/*.html")]
    named = set()
    for program in [*programs, ROOT / ".ci" / "run"]:
        pattern = r"\b(?:docs|experiments|benchmarks|examples)/[\w/]+\.md\b"
        named.update(re.findall(pattern, program.read_text()))
    assert {"docs/rewards.md", "docs/reference.md"} <= named
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_no_page_of_docs_is_long():
    """Whoever looks something up should not have to page. The lesson and the theory are read."""
    lines = {page.name: page.read_text().count("\n") for page in PAGES}
    assert {name for name, count in lines.items() if count > 300} == {"lesson.md", "theory.md"}


def test_contributing_draws_the_house_and_names_tests_that_are_there():
    """The tests are those of the table of what may be changed."""
    table = (ROOT / "docs" / "extending.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", table)
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), (file, name)
    assert len(named) > 30
    page = (ROOT / "CONTRIBUTING.md").read_text()
    drawn = set(re.findall(r"^    (\S+?)/? ", page, re.MULTILINE))
    there = {path.name for path in ROOT.glob("*.py")} | {"tasks", "engine", "runtime", "tests"}
    assert drawn - there == {"examples", "docs", "experiments", "benchmarks", ".ci"}
    assert there <= drawn


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
    """extending.md: a number within one percent; a reward."""
    page, names = ROOT / "docs" / "extending.md", {"math": math, "torch": torch}
    for code in re.findall(r"```python\n(# In .*?)```", page.read_text(), re.S):
        exec(code, names)
    monkeypatch.setitem(verifiers.VERIFIERS, "one-percent", names["within_one_percent"])
    about = Problem("Q", "100", "one-percent")
    pairs = [(about, answer) for answer in ("100.9", "102", "about 3")]
    assert verifiers.verify(pairs) == [True, False, False]
    group = group_of(tokenizer, [r"\boxed{7}", "none", r"so \boxed{8}"], ["7", "7 eggs"])
    [judged] = ask_judges([group], {"actor"}, tiny_model(len(tokenizer)), tokenizer)
    both = judged.scores.log_references.tolist()  # [2 references, 2 columns]
    expected = [math.exp(max(both[0][c], both[1][c] / 2)) for c in (0, 1)]
    assert names["per_word"](judged).tolist() == pytest.approx([expected[0], 0, expected[1]])


def test_columns_of_other_names_are_added_as_the_page_says(monkeypatch, tmp_path):
    page = (ROOT / "docs" / "extending.md").read_text()
    added = re.findall(r'^    ("prompt": .*)$', page, re.M)
    for name, meaning in eval("{" + added[0] + "}").items():
        monkeypatch.setitem(data.SAME, name, meaning)
    monkeypatch.setattr(data, "COLUMNS", data.COLUMNS | {*data.SAME})  # as when it is imported
    (tmp_path / "odd.jsonl").write_text('{"prompt": "1 + 1?", "gold": "2"}\n')
    [problem] = data.load_problems(tmp_path / "odd.jsonl")
    assert (problem.question, problem.reference) == ("1 + 1?", "2")


def test_the_reward_by_hand_in_the_readme():
    """Of "14 eggs", in the square of test_theory."""
    page = PAGES[0].read_text()
    joint, P = PRIOR * EGGS[:, 1], EGGS[:, 0]
    for name, *numbers in zip("ABC", PRIOR, EGGS[:, 1], joint, joint / joint.sum(), P):
        row = "| {:.2f} | {:.2f} | {:.3f} | {:.3f} | {:.2f} |".format(*numbers)
        assert re.search(rf"^\| {name}: .* {re.escape(row.replace('0.', '.'))}$", page, re.M), row
    assert f"divided by their sum {joint.sum():.3f},".replace("0.", ".") in page
    rho = [f"{x:.3f}"[1:] for x in exact_cer(PRIOR, EGGS)[:, 0]]
    assert f"**{rho[1]}**" in page
    assert f'receives {rho[0]}, and "18" {rho[2]}' in " ".join(page.split())
