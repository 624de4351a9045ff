"""What a run says: a line a step, warnings by their cause, a summary."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from conftest import group_of, steps_of, tiny_model

import train
from reward_functions import Judged, ask_judges
from runtime import cli, report
from runtime.files import append_rows
from runtime.sampled import group_line, of_step, sample_table

HEALTHY = {"answered": 0.9, "truncated": 0.1, "zero_advantage_groups": 0.2, "grad_norm": 0.1}
HEALTHY |= {"tiny_reward_groups": 0.5}
WARNINGS = [
    ({}, "None"),
    ({"grad_norm": float("nan")}, "so no weight changed; .* lower --lr"),
    ({"zero_advantage_groups": 1.0}, "None"),  # VeriFree teaches the reference all the same
    ({"answered": 0.0, "truncated": 0.9}, "read some. .* raise --max-new-tokens; .*sft.py"),
    ({"answered": 0.01}, "stops without a box. Fine-tune it first .sft.py."),
    ({"zero_advantage_groups": 1.0, "grad_norm": 0.0}, "so this step had no gradient"),
    ({"tiny_reward_groups": 0.6}, "no reward over 1e-06: shorten"),
]


@pytest.mark.parametrize("numbers, says", WARNINGS)
def test_a_warning_names_the_cause(numbers, says):
    assert re.search(says, str(report.warning(HEALTHY | numbers)))


TEXTS = [r"so \boxed{7}", r"\boxed{}", "no box", r"3*4 \boxed{12} eggs", r"\boxed{7}"]


def step_of(group, R, A, **judged):
    """What metrics.jsonl says of one group."""
    judged = Judged(group, **{"scores": None, "right": None} | judged)
    return of_step(sample_table([group_line(judged, R=R, A=A)]))


def test_a_steps_numbers_by_hand(tokenizer):
    group = group_of(tokenizer, TEXTS, "7")
    cut_off, entropies = [False, False, True, False, False], [1.0, 2.0, 3.0, 4.0, 5.0]
    group = dataclasses.replace(group, truncated=cut_off, entropies=entropies)
    R, right = [0.5, 0.0, 0.0, 0.25, 0.0], torch.tensor([True, False, False, False, False])
    of_completion = [len(ids) for ids in group.completions]
    expected = {"reward": 0.15, "exact_match": 0.4, "answered": 0.6, "truncated": 0.2}
    expected |= {"zero_advantage_groups": 0, "tiny_reward_groups": 0, "right": 0.2, "entropy": 3}
    of_solution = [len(tokenizer.encode(s)) for s in (r"so \boxed", r"\boxed", "no box")]
    of_solution += [len(tokenizer.encode(s)) for s in (r"3*4 \boxed", r"\boxed")]
    of_solution[2] = of_completion[2]  # all of it, with the stop token
    expected |= {"completion_tokens": sum(of_completion) / 5, "unique_answers": 2}
    expected |= {"solution_tokens": sum(of_solution) / 5, "answer_tokens": 4 / 3}  # of 7, 12, 7
    assert step_of(group, R, [0.1, 0, 0, 0, 0], right=right) == pytest.approx(expected)
    several = group_of(tokenizer, TEXTS, ["seven", "7", "12"])
    assert step_of(several, R, R)["exact_match"] == pytest.approx(0.6)


@pytest.mark.parametrize("scale, share", [(1e-9, 1), (1e-3, 0), (0.0, 0)])
def test_tiny_rewards_are_counted_but_not_those_that_nobody_gave(tokenizer, scale, share):
    group = group_of(tokenizer, TEXTS, "7")
    numbers = step_of(group, [0.5 * scale, 0, 0, 0.25 * scale, 0], [0] * 5)
    assert (numbers["tiny_reward_groups"], numbers["zero_advantage_groups"]) == (share, 1)
    [scored] = ask_judges([group], {"actor"}, tiny_model(len(tokenizer)), tokenizer)
    numbers = step_of(group, [0] * 5, [0] * 5, scores=scored.scores)
    assert numbers["tiny_reward_groups"] == 1  # underflow


def test_a_log_has_a_line_a_step(finished_run):
    err = (finished_run.parent / "stderr").read_text()
    first, second, third, disk, *lines = err[err.index("cer on ") :].splitlines()
    assert "8 questions, verifier toy-rule; 4 steps of 4 questions x 4 samples" in first
    assert "1 x cpu" in second and third.startswith("memory: 4,096 tokens in a micro-batch")
    assert disk.startswith("disk: 2 more checkpoints")  # of 3 that it may keep
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 4 and "\r" not in err
    for line in steps_of(finished_run):
        assert line["answer_tokens"] >= line["answered"] > 0  # a token or more in each box
    numbers = "  ".join(rf"{name} \S+" for name in report.IN_THE_LOG)
    assert re.fullmatch(rf"step 4/4  {numbers}  \S+ s/step  eta 0:00:00", steps[3])
    assert re.search(r"before training  pass@1 \S+ ± \S+\n  a sample: .* -> .*\((righ|wron)", err)


def test_a_run_that_learns_nothing_says_so(script, quick, long_model_dir):
    """Three new tokens are too few for a box. The questions come after one long passage."""
    rows = [{"question": "passage " * 40 + f"Q{k}?", "answer": "7"} for k in range(8)]
    append_rows(Path("mine.jsonl"), rows)
    flags = f"{quick} --model {long_model_dir} --dataset mine.jsonl --eval-dataset mine.jsonl"
    flags += " --eval-limit 1 --verifier math --max-new-tokens 3 --out run"
    code, out, err = script(train, flags)
    assert code == 0, err
    assert "change 0\n" in out and "nan" not in out  # one question has no standard error
    assert "warning at step 1: many samples are cut off without an answer: read some." in err
    assert "warning at step 2" not in err  # once is enough


def test_a_log_that_nobody_reads_ends_no_run(monkeypatch, capsys):
    """Neither by its lines nor by its bars, which print a line a minute."""
    bar = cli.progress("sample", total=4)
    bar.start_t, bar.last_print_t = bar.start_t - 70, bar.last_print_t - 70
    bar.update(3)
    assert re.fullmatch(r"sample:  75%.*\n", capsys.readouterr().err)

    def gone(*args, **kwargs):
        raise BrokenPipeError

    monkeypatch.setattr(cli.tqdm, "write", gone)
    cli.say("step 1")
    bar.last_print_t -= 70
    bar.update(1)
