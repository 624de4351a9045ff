"""experiments/toy, and what is trained like it with LoRA: the comparison and its intervals."""

import functools
import re
import shutil
import sys
from pathlib import Path

import pandas
from conftest import ROOT

import train
from experiments.tests.told import near, page_of
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


def rows_of(table):
    """A table in Markdown -> {its first column: the numbers after it}."""
    rows = re.findall(r"^\| ([^|]+) \|(.*)\|$", table.split("\n\n")[0], re.M)
    return {label: [float(x) for x in re.findall(r"-?\d*\.\d+", row)] for label, row in rows}


def test_the_tables_of_the_toy_are_those_of_its_csvs():
    page, folder = page_of("toy"), ROOT / "experiments" / "toy"
    seeds = pandas.read_csv(folder / "toy-seeds-0-19.csv")
    of = seeds.groupby("name")
    for name, found in rows_of(page.split("| step 200 |\n|---|---|---|---|\n")[1]).items():
        ends = of[["pass@1 middle", "pass@1 end"]].agg(["mean", "min", "max"])
        numbers = [of["pass@1 start"].mean()[name.strip("`")], *ends.loc[name.strip("`")]]
        assert found == near(numbers), name
    table = rows_of(page.split("| seeds higher at 200 |\n|---|---|---|---|\n")[1])
    for name, found in table.items():
        one, other = name.replace("`", "").split(" - ")
        numbers = []
        for when in "middle", "end":
            by_seed = seeds.pivot(index="seed", columns="name", values=f"pass@1 {when}")
            ahead = by_seed[one] - by_seed[other]
            half = compare_rewards.T[len(ahead) - 2] * ahead.sem()
            numbers += [ahead.mean(), ahead.mean() - half, ahead.mean() + half]
        assert found == near(numbers, 0.00056), name
    rates = pandas.read_csv(folder / "toy-rates.csv").groupby("name")["pass@1 end"].mean()
    for name, found in rows_of(
        page.split("| 1.5e-3 |\n|---|---|---|---|---|---|---|\n")[1]
    ).items():
        columns = ("1e-4", "2e-4", "3e-4", "6e-4", "1e-3", "1.5e-3")
        assert found == near([rates[f"{name.strip('`')}@{rate}"] for rate in columns])
    earlier = pandas.read_csv(folder / "toy.csv").groupby("name")
    for name, found in rows_of(page.split("| step 200 |\n|---|---|---|\n")[1]).items():
        ends = earlier[["pass@1 middle", "pass@1 end"]].agg(["mean", "min", "max"])
        assert found == near(ends.loc[name.strip("`")]), name


def test_the_levels_of_the_real_model_are_those_of_its_csv():
    page = page_of("real_model")
    ends = pandas.read_csv(ROOT / "experiments/real_model/smollm2-seeds-5-9.csv")
    means = ends.groupby("name")[["pass@1 middle", "pass@1 end"]].mean()
    for label, found in rows_of(page.split("| step 30 |\n|---|---|---|\n")[1]).items():
        name = label.replace("`", "").replace(" at ", "@").replace("@1e-5", "")
        assert found == near(means.loc[name]), name


def test_the_aucs_of_slips_are_those_of_their_csv():
    page = page_of("slips")
    lines = pandas.read_csv(ROOT / "experiments/slips/judge.csv")
    means = lines.set_index(["model", "statistic", "which"])["mean"]
    models = {"before": "warm start", "after the rule": "after rule"}
    split = rows_of(page.split("| slips: `verifree` | `cer` | `rule+cer` |\n")[1])
    whole = rows_of(page.split("| `verifree` | `cer` | `rule+cer` |\n")[1])
    assert len(split) == len(whole) == 7
    for label in split:
        network, when = label.split(", ")
        of = means[f"{network}, {models.get(when, when)}"]
        rewards = "verifree", "cer", "rule+cer"
        expected = [of["slips among the wrong", "samples"]]
        expected += [of["AUC, wrong work", name] for name in rewards]
        expected += [of["AUC, slips", name] for name in rewards]
        assert split[label] == near(expected), label
        assert whole[label] == near([of["AUC", name] for name in ("exact", "rule", *rewards)])
