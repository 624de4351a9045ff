"""experiments/toy, and what is trained like it with LoRA: the comparison and its intervals."""

import functools
import shutil
import sys
from pathlib import Path

import pandas
from conftest import ROOT

import train
from experiments.tests.told import page_of
from experiments.toy import compare_rewards
from tasks import toy_model


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


def test_the_toy_with_lora():
    """The table and the primary comparison of lora.md: paired by seed, by a t-test."""

    def shown(x):
        return f"{x:.3f}".replace("0.", ".", 1)

    told = page_of("lora")
    lines = pandas.read_csv(ROOT / "experiments/lora/lora.csv")
    by_seed = lines.pivot(index="trained", columns="seed", values="pass@1")
    ahead = by_seed.loc["lora"] - by_seed.loc["full"]
    mean, half = ahead.mean(), compare_rewards.T[len(ahead) - 2] * ahead.sem()
    numbers = f"{shown(mean)} ({shown(mean - half)} to {shown(mean + half)})"
    assert f"**`--lora 8` minus full training is {numbers}.**" in told
    for name, row in ("full training", "full"), ("`--lora 8`", "lora"):
        of_seeds = [*by_seed.loc[row], by_seed.loc[row].mean()]
        assert f"| {name} | {' | '.join(map(shown, of_seeds))} |" in told
