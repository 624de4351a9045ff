"""What a run says: a line a step, warnings by their cause, a summary."""

import re

import pytest
import torch
from conftest import FAST, group_of

import train
import warm_start
from engine import log
from engine.files import read_rows

HEALTHY = {"answered": 0.9, "truncated": 0.1, "zero_advantage_groups": 0.2, "grad_norm": 0.1}


@pytest.mark.parametrize(
    "numbers, says",
    [
        ({}, "None"),
        ({"answered": 0.0, "truncated": 0.9}, "most were cut off: raise --max-new-tokens"),
        ({"answered": 0.01}, "stops without a box. It needs a supervised start"),
        ({"zero_advantage_groups": 1.0, "grad_norm": 0.0}, "so this step had no gradient"),
    ],
)
def test_a_warning_names_the_cause(numbers, says):
    assert says in str(log.warning(HEALTHY | numbers))


def test_an_empty_box_is_no_answer(tokenizer):
    texts, R = [r"\boxed{}", r"\boxed{7}", "no box", r"\boxed{"], torch.zeros(4)
    numbers = log.describe(group_of(tokenizer, texts, "7"), R, R, {})
    assert numbers["answered"] == 0.25 and numbers["unique_answers"] == 1


def test_numbers_have_three_significant_digits():
    shown = {0.08274: ".0827", 0.9995: "1", 1.0: "1", 0.0: "0", 3.14159: "3.14"}
    assert {x: log.brief(x) for x in shown} == shown


def test_a_log_has_a_line_a_step(script, toy_model_dir):
    flags = f"--model {toy_model_dir} {FAST} --steps 3 --out run --eval-every 3"
    code, out, err = script(train, flags)
    lines = [line for line in err.splitlines() if line.startswith("step")]
    assert code == 0 and len(lines) == 3 and "\r" not in err
    assert re.fullmatch(
        r"step 3/3  reward \S+  pass@1 \S+  answered \S+  cut \S+  zero-adv \S+  entropy \S+"
        r"  \S+ s/step  eta 0:00:00",
        lines[2],
    )
    header = err.splitlines()[:3]
    assert header[0].startswith(
        "cer on toy: 2,000 questions, verifier toy-rule; 3 steps of 4 quest"
    )
    assert "1 x cpu" in header[1] and header[2].startswith("memory: 4,096 tokens in a micro-batch")
    assert re.search(r"reward +first \S+, last \S+", out) and "not changed" not in out


def test_a_run_that_learns_nothing_says_so(script, tmp_path, toy_model_dir):
    """Three new tokens are too few for a box."""
    flags = f"--model {toy_model_dir} {FAST} --out run --max-new-tokens 3"
    code, out, err = script(train, flags)
    assert code == 0 and "The weights have not changed" in out
    assert err.count("warning at step 1: almost no sample has an answer, and most were cut") == 1
    assert "warning at step 2" not in err  # once is enough


def test_a_supervised_start(script, tmp_path, toy_model_dir):
    (tmp_path / "demos.jsonl").write_text('{"question": "Q?", "solution": "so \\\\boxed{7}"}\n' * 4)
    (tmp_path / "bare.jsonl").write_text('{"question": "Q?", "solution": "so 7"}\n')
    flags = f"--model {toy_model_dir} --out warm --epochs 30 --batch 4 --lr 1e-2 --data"
    code, _, err = script(warm_start, f"{flags} bare.jsonl")
    assert code == 2 and r"bare.jsonl, row 1: expected a `solution` with a closed \boxed" in err
    code, out, err = script(warm_start, f"{flags} demos.jsonl")
    assert code == 0 and "4 demonstrations, 30 steps of 4" in out, err
    (tmp_path / "mine.jsonl").write_text('{"question": "Q?", "answer": "seven"}\n')
    flags = "--model warm --dataset mine.jsonl --steps 1 --questions 2 --samples 4 --out run"
    code, _, err = script(train, f"{flags} --max-new-tokens 16")
    assert code == 0 and "verifier text" in err
    assert read_rows(tmp_path / "run" / "metrics.jsonl")[0]["answered"] > 0.5
