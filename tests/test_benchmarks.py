"""The benchmarks run end to end, in their smallest shape."""

import json
import shutil
import sys
from pathlib import Path

import compare_rewards
import gpu
import judge
import pandas
import pytest
import torch

import train
from engine.files import read_rows


def test_speed(script, monkeypatch):
    monkeypatch.setattr(gpu.scoring, "__defaults__", (2,))  # samples
    monkeypatch.setattr(gpu.sampling, "__defaults__", (8, 16))  # rows, prompt
    code, out, err = script(gpu, "--shape tiny --repeats 1")
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert {line["part"] for line in lines} == {"scoring", "decoding", "sampling", "updating"}
    assert max(line.get("largest_difference", 0) for line in lines) < 1e-4
    assert all(line["seconds"] > 0 and line["commit"] and line["torch"] for line in lines)


def test_differences_are_paired_by_seed():
    """.3 and .2 for the two seeds that both have; Student's t for one degree of freedom."""
    ends = [("cer", 0, 0.8), ("cer", 1, 0.9), ("cer", 2, 0.1), ("exact", 1, 0.7), ("exact", 0, 0.5)]
    lines = pandas.DataFrame(ends, columns=["name", "seed", "pass@1 end"])
    table = compare_rewards.by_seed(lines, "pass@1 end")
    assert "| `exact` | 0.500 | 0.700 |  |" in table
    table = compare_rewards.differences(lines, ["pass@1 end"])
    assert "| `cer - exact` | +0.250 (-0.385 to +0.885), 2 seeds |" in table


def test_a_comparison_resumes(script, tmp_path, monkeypatch, finished_run):
    """Copies of a finished run take the place of the runs."""
    commands = []

    def run_script(command, out):
        commands.append(command)
        monkeypatch.setattr(sys, "argv", command.split())
        shutil.copytree(finished_run, train.parse_args().out, dirs_exist_ok=True)

    monkeypatch.setattr(compare_rewards, "run_script", run_script)
    monkeypatch.setattr(compare_rewards, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(compare_rewards.toy.warm_start, "__defaults__", (3,))  # steps
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the script sets
    flags = "--rewards cer --seeds 0 --steps 4 --out table.csv"
    for _ in range(2):  # the second time there is nothing to do
        code, _, err = script(compare_rewards, flags)
        assert code == 0 and len(commands) == 1, err
    shutil.rmtree("runs/toy-cer-0/checkpoints")  # as if killed before the first one
    Path("table.csv").unlink()
    code, _, err = script(compare_rewards, flags)
    assert commands[1].endswith("toy-cer-0 --resume") and Path("table.png").exists(), err
    [line] = compare_rewards.read(Path("table.csv"))
    lines = pandas.DataFrame([line | {"pass@1 end": 0.8}, line | {"pass@1 end": 0.9, "seed": 1}])
    table = compare_rewards.report(lines)
    assert "0.85 (0.80 to 0.90)" in table and "Seeds [0, 1], commit" in table


def test_how_well_rewards_tell_right_from_wrong(script, tmp_path, monkeypatch, toy_model_dir):
    """Five questions; a model that is measured again replaces its lines."""
    monkeypatch.setattr(judge, "ROOT", tmp_path)
    flags = f"--model {toy_model_dir} --name toy --questions 5 --samples 4 --out j.csv"
    for seed in 0, 1:
        code, out, err = script(judge, f"{flags} --seed {seed}")
        assert code == 0, err
    assert "| `rule+cer` | " in Path("j.md").read_text() and Path("j.png").exists()
    lines = pandas.read_csv("j.csv").set_index(["statistic", "which"])
    assert lines.index.is_unique and set(lines.seed) == {1}
    assert len(read_rows("runs/judge/toy-1/samples.jsonl")) == 5


def test_statistics_of_one_question_by_hand():
    """Two right samples, a slip after right work, and one without an answer."""
    question = "Ana has 3 bags of 4 eggs and 2 more eggs. How many eggs?"
    texts = ["3*4=12; 12+2=14", "3*4=12; 12+2", "3*4=12; 12+2=14", "3+4=7; 7+2=9"]
    group = dict(question=question, reference="14", texts=texts, correct=[True, True, False, False])
    group |= dict(answers=["14", "14 eggs", "18", None], columns=[0, 1, 2])
    log_W = torch.tensor([[0.5, 0.2, 0.3], [0.4, 0.3, 0.1], [0.1, 0.1, 0.8]]).log()
    group |= dict(distinct_answers=["14", "14 eggs", "18"], log_W=log_W.tolist())
    group |= dict(log_P=log_W[0].tolist(), R=[0.38, 0.3625, 0.31, 0.0])  # D^-1 W P of these
    found = judge.statistics(group)
    assert found["AUC", "exact"] == 0.75 and found["AUC", "rule"] == 1.0
    assert found["AUC", "verifree"] == 0.75  # of .5 and .2 against .3 and 0
    assert found["a wrong one ahead", "verifree"] == 0.25
    assert found["a wrong one ahead", "exact"] == 0  # its errors are ties
    assert found["mean reward", "rule+cer"] == pytest.approx((2 + 0.38 + 0.3625 + 0.31) / 8)
    assert found["P after right work", "{n}"] == pytest.approx(1 / 3)
    assert found["slips among the wrong", "samples"] == 0.5
    assert found["AUC, slips", "verifree"] == 0.5 and found["AUC, wrong work", "verifree"] == 1.0
    assert found["share of answers", "{n} {unit}"] == 0.25
