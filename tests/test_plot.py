"""The figures are drawn from a run's files."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import plot
from runtime.files import append_rows

GROUP = {"step": 3, "question": "How\x0b many?\nIn $ and % of \\frac{1}{2}", "reference": "14"}
GROUP |= {"answers": ["15\x00", "14 eggs", None, "14", ""], "R": [0.1, 0.6, 0.0, 0.7, 0.0]}
GROUP |= {"distinct_answers": ["15\x00", "14 eggs", "14", ""], "columns": [0, 1, 3, 4]}
GROUP["log_W"] = [
    [-0.1, None, None, None],
    [-902.3, -900.0, -900.0, -901.6],  # too small for a float, but not for a softmax
    [None, -2.3, -0.7, None],
    [None, None, None, -3.0],
]
GROUP |= {"log_P": [-900.0, -0.7, -0.5, -900.0], "right": [False] * 5}
GROUP |= {"references": ["14", "14 eggs"]}


def write_run(name, metrics, groups, **flags):
    """The files of a run, in a directory of this name."""
    directory = Path(name)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"flags": {"reward": "cer", **flags}}))
    append_rows(directory / "metrics.jsonl", metrics)
    append_rows(directory / "samples.jsonl", groups)


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn."""
    drawn, save = [], plot.save

    def keep(figure, out):
        drawn.append(figure)
        save(figure, out)

    monkeypatch.setattr(plot, "save", keep)
    return drawn


def test_the_matrices_of_a_question(script, figures):
    write_run("a", [], [GROUP])
    code, out, err = script(plot, "a --question -1")
    assert code == 0 and out.strip() == "a/question--1.svg", err
    ElementTree.parse(out.strip())  # is valid XML
    P, W, R = figures[0].axes
    assert R.get_title() == "R"
    labels = [label.get_text() for label in W.get_yticklabels()]
    assert labels == ["14 = a*", "14 eggs = a*", "15\ufffd", "(empty)", "(no answer)"]
    assert figures[0].get_suptitle().endswith("a* = 14 or 14 eggs")
    assert [text.get_text() for text in R.texts] == [".700", ".600", ".100", ".000", ".000"]
    cells = [text.get_text() for text in W.texts]  # masked ones are blank
    assert cells == [".83", ".17", ".43", ".43", ".04", ".09", "1.00", "1.00"]
    assert [text.get_text() for text in P.texts] == [".607", ".497", ".000", ".000"]


def test_learning_curves_join_the_seeds(script, figures):
    for name, reward, seed in ("a", "cer", 0), ("b", "cer", 1), ("c", "exact", 0):
        lines = [{"step": k, "reward": 0.1 + seed} for k in range(1, 5)]
        lines[1]["pass_at_1"], lines[3]["pass_at_1"], lines[3]["truncated"] = 0.4, 0.4, 0.003
        write_run(name, [{"step": 0, "pass_at_1": 0.3}, *lines], [], reward=reward, seed=seed)
    code, _, err = script(plot, "a b c --out curves.png")
    assert code == 0 and Path("curves.png").exists(), err
    reward, pass_at_1, _ = figures[0].axes
    assert [text.get_text() for text in figures[0].legends[0].texts] == ["cer", "exact"]
    assert reward.lines[0].get_ydata()[-1] == pytest.approx(0.6)  # the mean of .1 and 1.1
    assert reward.collections[0].get_datalim(reward.transData).height == pytest.approx(1)  # a band
    assert list(pass_at_1.lines[0].get_xdata()) == [0, 2, 4]


def test_a_seed_that_ended_early_ends_its_own_curve_only(script, figures):
    for name, last in ("a", 40), ("b", 40), ("c", 2):
        value = {"a": 0.2, "b": 0.4, "c": 0.9}[name]
        lines = [{"step": k, "reward": value} for k in range(1, last + 1)]
        lines += [{"step": k, "pass_at_1": value} for k in range(0, last + 1, 10)]
        write_run(name, lines, [], seed=name)
    code, _, err = script(plot, "a b c --out curves.png")
    assert (code, err) == (0, "c ends at step 2 of 40: later steps are drawn without it\n")
    reward, pass_at_1 = figures[0].axes
    assert list(reward.lines[0].get_xdata()) == [*range(10, 41)]
    assert reward.lines[0].get_ydata() == pytest.approx([0.3] * 31)
    assert list(pass_at_1.lines[0].get_xdata()) == [0, 10, 20, 30, 40]
    assert pass_at_1.lines[0].get_ydata() == pytest.approx([0.5] + [0.3] * 4)


def test_curves_of_several_runs_do_not_replace_those_of_the_first(script):
    for name in "a", "b":
        write_run(name, [{"step": 1, "reward": 0.1}], [])
    Path("a/curves.svg").write_text("mine")
    code, _, err = script(plot, "a b")
    assert (code, err) == (2, "plot.py: where do curves of several runs go? --out FILE.svg\n")
    assert Path("a/curves.svg").read_text() == "mine"


def test_runs_are_named_by_the_flags_in_which_they_differ(script):
    write_run("a", [], [], model="m", steps=200, seed=0)
    write_run("b", [], [], model="m", steps=None, seed=1)
    assert plot.names_of(["a", "b"]) == ["cer, steps 200", "cer, steps None"]


@pytest.mark.parametrize("line", [{"step": 0, "pass_at_1": 0.3}, {"step": 1, "reward": 0.1}])
def test_curves_of_a_run_without_an_evaluation_or_a_step(script, line):
    write_run("a", [line], [])
    code, _, err = script(plot, "a")
    assert code == 0 and Path("a/curves.svg").exists(), err


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_a_figure_that_cannot_be_written_leaves_the_one_before(script, monkeypatch, ending):
    write_run("a", [], [GROUP])
    flags = f"a --question 0 --out a/of.{ending}"
    assert script(plot, flags)[0] == 0
    before = Path(f"a/of.{ending}").read_bytes()

    def fill(path, content):
        with open(path, "wb") as file:
            file.write(content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    code, _, err = script(plot, flags)
    says = f"plot.py: cannot write a/of.{ending} ([Errno 28] No space left on device)\n"
    assert (code, err) == (2, says) and Path(f"a/of.{ending}").read_bytes() == before


def test_it_draws_whatever_the_user_has_set(tmp_path):
    """A notebook's backend, which may not be installed, and a matplotlibrc."""
    write_run(tmp_path / "a", [], [GROUP])
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    mine = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    command = [sys.executable, plot.__file__, "a", "--question", "0"]
    subprocess.run(command, env=mine, cwd=tmp_path, check=True)
