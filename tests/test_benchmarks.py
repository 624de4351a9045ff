"""The benchmarks run end to end, in their smallest shape."""

import functools
import json
import shutil
import sys
from pathlib import Path

import compare_rewards
import gpu
import pandas

import train
from tasks import toy_model


def test_speed(script, monkeypatch):
    for part, sizes in ("scoring", {"N": 2}), ("sampling", {"rows": 8, "prompt": 16}):
        whole = getattr(gpu, part)
        short = functools.partial(whole, **sizes)
        monkeypatch.setattr(gpu, part, functools.update_wrapper(short, whole))
    code, out, err = script(gpu, "--shape tiny --repeats 1")
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert {line["part"] for line in lines} == {
        "scoring",
        "decoding",
        "sampling",
        "passages",
        "updating",
    }
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


def test_a_comparison(script, tmp_path, monkeypatch, finished_run):
    """Copies of a finished run take the place of the runs."""
    commands = []

    def run_script(command, out):
        commands.append(command)
        monkeypatch.setattr(sys, "argv", command.split())
        shutil.copytree(finished_run, train.parse_args().out, dirs_exist_ok=True)

    monkeypatch.setattr(compare_rewards, "run_script", run_script)
    monkeypatch.setattr(compare_rewards, "RUNS", tmp_path / "runs")
    short = functools.partial(toy_model.warm_start, steps=3)
    monkeypatch.setattr(toy_model, "warm_start", short)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the script sets
    flags = "--rewards cer --seeds 0 --steps 4 --out table.csv"
    for _ in range(2):  # the second time there is nothing to do
        code, _, err = script(compare_rewards, flags)
        assert code == 0 and len(commands) == 1, err
    assert Path("table.png").exists()
    [line] = compare_rewards.read(Path("table.csv"))
    assert "Seeds [0], commit" in compare_rewards.report(pandas.DataFrame([line]))
