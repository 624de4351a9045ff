"""The figures are drawn from a run's files, and what cannot be drawn is refused in one line."""

import json
import shutil

import matplotlib.pyplot as plt
import pytest

import plot

GROUP = {
    "step": 3,
    "question": "How many?\nIn $ and % of \\frac{1}{2}",
    "reference": "14",
    "answers": ["15", "14 eggs", None, "14", "14 eggs", ""],
    "R": [0.1, 0.6, 0.0, 0.7, 0.6, 0.0],
    "distinct_answers": ["15", "14 eggs", "14", ""],
    "columns": [0, 1, 3, 4, 5],
    "log_W": [
        [-0.1, None, None, None, None],
        [-900.0, -901.6, -902.3, -901.6, -900.0],  # too small for a float, but not for a softmax
        [None, -2.3, -0.7, -2.3, None],
        [None, None, None, None, -3.0],
    ],
    "log_P": [-900.0, -0.7, -0.5, -0.7, -900.0],
}


@pytest.fixture
def run(tmp_path):
    """Two runs that differ in the seed, and one of another reward."""
    for name, reward, seed in ("a", "cer", 0), ("b", "cer", 1), ("c", "exact", 0):
        directory = tmp_path / name
        directory.mkdir()
        config = {"flags": {"reward": reward, "seed": seed, "m": 8}}
        (directory / "config.json").write_text(json.dumps(config))
        lines = [{"step": 0, "pass_at_1": 0.3}]
        for step in range(1, 21):
            line = {
                "step": step,
                "reward": 0.1 + seed,
                "exact_match": 0.1,
                "zero_advantage_groups": 0,
                "seconds": {"sample": 60 + 60 * seed, "reward": 0, "update": 60},
            }
            lines.append(line | ({"pass_at_1": 0.4} if step % 10 == 0 else {}))
        (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        group = GROUP if reward == "cer" else {k: v for k, v in GROUP.items() if k != "log_W"}
        (directory / "samples.jsonl").write_text(json.dumps(group) + "\n")
    for empty in "d", "e":
        (tmp_path / empty).mkdir()
    shutil.copy(tmp_path / "a" / "config.json", tmp_path / "e")
    (tmp_path / "e" / "metrics.jsonl").touch()
    (tmp_path / "e" / "samples.jsonl").touch()
    nothing = GROUP | dict(answers=[None] * 6, R=[0.0] * 6, columns=[], log_W=[], log_P=[])
    (tmp_path / "d" / "samples.jsonl").write_text(json.dumps(nothing) + "\n")
    return tmp_path


def drawn(monkeypatch):
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    return figures


def test_the_matrices_of_a_question(script, run, monkeypatch):
    figures = drawn(monkeypatch)
    code, out, err = script(plot, "a --question -1")
    assert code == 0 and out.strip() == "a/question--1.svg", err
    assert 5_000 < (run / "a" / "question--1.svg").stat().st_size < 300_000
    P, W, R = figures[0].axes
    labels = [label.get_text() for label in W.get_yticklabels()]
    assert labels == ["=  14", "14 eggs", "14 eggs", "15", "(empty)", "(no answer)"]
    shown = [text.get_text() for text in R.texts]
    assert shown == [".700", ".600", ".600", ".100", ".000", ".000"]
    first_row = [text.get_text() for text in W.texts[:5]]  # of "14": .5 .1 .1 of .7, columns sorted
    assert first_row == [".71", ".14", ".14", ".00", ".00"]
    assert len(W.texts) == 5 * 5 and len(P.texts) == 5  # nothing in the row without an answer


def test_learning_curves_join_the_seeds(script, run, monkeypatch):
    figures = drawn(monkeypatch)
    code, out, err = script(plot, "a b c --out curves.png")
    assert code == 0 and (run / "curves.png").stat().st_size < 200_000, err
    reward, pass_at_1, by_time, *_ = figures[0].axes
    assert [text.get_text() for text in figures[0].legends[0].texts] == ["cer", "exact"]
    assert reward.lines[0].get_ydata()[-1] == pytest.approx(0.6)  # the mean of .1 and 1.1
    assert list(pass_at_1.lines[0].get_xdata()) == [0, 10, 20]
    assert list(by_time.lines[0].get_xdata()) == [0, 25, 50]  # 2 and 3 minutes a step


def test_runs_are_named_by_the_flags_in_which_they_differ(tmp_path):
    for name, steps in ("a", 200), ("b", None):
        (tmp_path / name).mkdir()
        flags = {"reward": "cer", "model": "m", "steps": steps, "seed": 0}
        (tmp_path / name / "config.json").write_text(json.dumps({"flags": flags}))
    names = plot.names_of([tmp_path / "a", tmp_path / "b"])
    assert names == ["cer, steps 200", "cer, steps None"]


@pytest.mark.parametrize("line", [{"step": 0, "pass_at_1": 0.3}, {"step": 1, "reward": 0.1}])
def test_curves_of_a_run_without_an_evaluation_or_a_step(script, run, line):
    (run / "a" / "metrics.jsonl").write_text(json.dumps(line))
    code, _, err = script(plot, "a")
    assert code == 0 and (run / "a" / "curves.svg").exists(), err


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("nowhere", "nowhere: no such directory"),
        ("e", "e/metrics.jsonl is empty: the run has no step yet"),
        ("e --question 0", "e/samples.jsonl is empty: the run has no step yet"),
        ("nowhere --question 0", "nowhere/samples.jsonl: no such file"),
        ("a --question 1", "--question must be from 0 to 0, got 1"),
        ("a b --question 0", "--question takes one RUN"),
        ("c --question 0", "this group has no matrices"),
        ("d --question 0", "no sample of this group has an answer"),
        ("a --out picture.xyz", "expected a name that ends in .svg or .png"),
    ],
)
def test_bad_input_to_plot(script, run, arguments, says):
    before = sorted(run.rglob("*"))
    code, out, err = script(plot, arguments)
    assert code == 2 and says in err and len(err.splitlines()) == 1
    assert sorted(run.rglob("*")) == before
