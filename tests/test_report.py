"""What a run says: a line a step, warnings by their cause, a summary."""

import re

import pytest
import torch
from conftest import group_of

import report
import train
import warm_start
from runtime import console
from runtime.files import read_rows

HEALTHY = {"answered": 0.9, "truncated": 0.1, "zero_advantage_groups": 0.2, "grad_norm": 0.1}
HEALTHY |= {"tiny_reward_groups": 0.5}
WARNINGS = [
    ({}, "None"),
    ({"answered": 0.0, "truncated": 0.9}, "samples are cut off: raise --max-new-tokens"),
    ({"answered": 0.01}, "stops without a box. Give it a warm_start.py"),
    ({"zero_advantage_groups": 1.0, "grad_norm": 0.0}, "so this step had no gradient"),
    ({"tiny_reward_groups": 0.6}, "no reward over 1e-06: shorten"),
]


@pytest.mark.parametrize("numbers, says", WARNINGS)
def test_a_warning_names_the_cause(numbers, says):
    assert re.search(says, str(report.warning(HEALTHY | numbers)))


def test_almost_zero_rewards_are_counted_and_an_empty_box_is_no_answer(tokenizer):
    group = group_of(tokenizer, [r"\boxed{}", r"\boxed{7}", "no box", r"\boxed{"], "7")
    for scale, share in (1e-9, 1), (1e-3, 0), (0.0, 0):
        R = torch.tensor([0.0, 1.0, 0.0, 0.0]) * scale
        numbers = report.describe(group, R, R, {})
        assert numbers["tiny_reward_groups"] == share
        assert numbers["answered"] == 0.25 and numbers["unique_answers"] == 1


def test_a_log_has_a_line_a_step(finished_run):
    out, err = ((finished_run.parent / name).read_text() for name in ("stdout", "stderr"))
    first, second, third, *lines = err.splitlines()
    assert "8 questions, verifier toy-rule; 4 steps of 4 questions x 4 samples" in first
    assert "1 x cpu" in second and third.startswith("memory: 4,096 tokens in a micro-batch")
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 4 and "\r" not in err
    numbers = "  ".join(rf"{name} \S+" for name in report.IN_THE_LOG)
    assert re.fullmatch(rf"step 4/4  {numbers}  \S+ s/step  eta 0:00:00", steps[3])
    assert re.search(r"reward +first \S+, last \S+ \(mean of 2 of 4 steps\)", out)
    assert re.search(r"pass@1 +first \S+ ± \S+, last \S+ ± \S+, change \S+ ± \S+ \(", out)
    assert re.search(r"before training  pass@1 \S+ ± \S+\n  a sample: .* -> .*\((righ|wron)", err)
    assert re.search(r"never had a reward > 0.0001, such as\n    .* How many \w+\?", out)


def test_a_run_that_learns_nothing_says_so(script, quick):
    """Three new tokens are too few for a box."""
    code, out, err = script(train, f"{quick} --out run --max-new-tokens 3")
    assert code == 0 and "8 of 8 questions never had a reward" in out
    assert "warning at step 1: almost no answers, and most samples are cut off: raise" in err
    assert "warning at step 2" not in err  # once is enough


def test_a_supervised_start(script, tmp_path, toy_model_dir):
    (tmp_path / "demos.jsonl").write_text('{"question": "Q?", "solution": "so \\\\boxed{7}"}\n' * 4)
    (tmp_path / "mine.jsonl").write_text('{"question": "Q?", "answer": "seven"}\n')
    flags = f"--model {toy_model_dir} --out warm --epochs 20 --batch 4 --lr 1e-2"
    code, out, err = script(warm_start, f"{flags} --data demos.jsonl")
    assert code == 0 and "4 demonstrations, 20 steps of 4" in out, err
    flags = "--model warm --dataset mine.jsonl --steps 1 --questions 2 --samples 4 --out run"
    code, _, err = script(train, f"{flags} --max-new-tokens 16")
    assert code == 0 and "verifier text" in err
    assert read_rows("run/metrics.jsonl")[0]["answered"] > 0.5


def test_a_log_that_nobody_reads_ends_no_run(monkeypatch):
    def gone(*args, **kwargs):
        raise BrokenPipeError

    monkeypatch.setattr(console.tqdm, "write", gone)
    console.say("step 1")


def test_long_work_shows_signs_of_life(monkeypatch, capsys):
    """A line a minute where there is no terminal."""
    bar = console.progress("sample", total=4)
    bar.start_t -= 70
    bar.last_print_t -= 70
    bar.update(3)
    assert "sample:  75%" in capsys.readouterr().err
