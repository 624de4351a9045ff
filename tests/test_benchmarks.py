"""The benchmarks run end to end, in their smallest shape."""

import functools
import json
import re
import shutil
import sys
from pathlib import Path

import compare_rewards
import gpu
import own_case
import pandas
import pytest

import judge
import train
from runtime.files import read_rows
from tasks import toy_model


def test_speed(script, monkeypatch):
    for part, sizes in ("scoring", {"N": 2}), ("sampling", {"rows": 8, "prompt": 16}):
        monkeypatch.setitem(gpu.PARTS, part, functools.partial(gpu.PARTS[part], **sizes))
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


def test_the_csv_of_the_own_case_is_what_judge_wrote(script, toy_model_dir, capsys):
    """Of each reference by itself; their sums are the rewards of the list."""
    question = "Ana has 3 bags of 4 eggs and 2 more eggs. How many eggs?"
    row = {"question": question, "answer": ["14", "9 eggs", "it is 14"], "verifier": "text"}
    Path("q.jsonl").write_text(json.dumps(row))
    flags = f"--model {toy_model_dir} --dataset q.jsonl --samples 16 --max-new-tokens 32"
    code, _, err = script(judge, f"{flags} --rewards cer,verifree,exact,overlap --out j")
    assert code == 0, err
    [group] = read_rows("j/samples.jsonl")
    lines = list(own_case.sample_lines(Path("j"), "toy", "7", "nobody"))
    assert [line["answer"] for line in lines] == [answer or "" for answer in group["answers"]]
    for name, over in {"cer": sum, "verifree": sum, "exact": max, "overlap": max}.items():
        assert [over(line[name]) for line in lines] == pytest.approx(
            group["rewards"][name], abs=1e-6
        )
    assert [max(line["text"]) == 1 for line in lines] == group["right"]
    graded = [{k: own_case.written(x) for k, x in line.items()} for line in lines]
    for line in graded:  # as if 9 were the truth
        line["right"] = int("9" in line["answer"])
    pandas.DataFrame(graded).to_csv("own.csv", index=False)
    for part in own_case.PARTS:
        part(own_case.read_csv("own.csv"))
    assert "1 questions, 16 samples" in capsys.readouterr().out


def test_the_numbers_of_the_own_case_are_those_of_its_csv():
    """The table of docs/measurements.md, and the pairs that CER and P order differently."""
    root = Path(own_case.__file__).parents[1]
    samples = own_case.read_csv(root / "benchmarks/results/own-case.csv")
    text = (root / "docs/measurements.md").read_text()
    mathematics, page = text.split("\n## Does it tell right from wrong ")[1:]
    math500 = own_case.with_rewards(samples[samples.data == "math500"], "all")
    samples = samples[samples.data == "squad"]
    labels = {"cer": "`cer`", "verifree": "`verifree` ($P$)", "exact": "`exact`"}
    labels |= {name: f"`{name}`" for name in ("overlap", "overlap+cer")} | {"text": "equal as text"}
    tables = []
    for which in (0, "all"):
        frame = own_case.with_rewards(samples, which)
        tables.append(judge.judge_rewards(frame, list(own_case.NAMES))[1])
    for name, label in labels.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {label} |"))
        shown = [float(x) for x in re.findall(r"\.\d+", row)]
        ends = [f"{of}{end}" for of in ("AUC", "aim") for end in ("", ", low", ", high")]
        assert shown == pytest.approx([t[end][name] for t in tables for end in ends], abs=0.0051)
    assert "CER is right in 46 and $P$ in 16" in page
    frame = own_case.with_rewards(samples, "all")
    shown = re.findall(r"\| ([\d.]+) \([\d., ]+\) \|\n", mathematics)
    aucs = judge.question_aucs(math500, ["cer", "verifree", "exact", "overlap"])
    assert [float(x) for x in shown] == pytest.approx(list(aucs.mean(0)), abs=0.0051)
    for row, reward in ("not verbatim", "exact"), ("no word in common", "overlap"):
        some = frame[~frame.right | (frame[reward] == 0)]
        aucs = judge.question_aucs(some, ["exact", "verifree", "cer", "overlap", "overlap+cer"])
        [line] = [line for line in page.splitlines() if line.startswith(f"| {row} |")]
        shown = [float(x) for x in re.findall(r"\d*\.?\d+", line)]
        assert shown == pytest.approx([len(aucs), *aucs.mean(0)], abs=0.0051)


def test_the_numbers_of_training_on_people_s_questions_are_those_of_its_csv(monkeypatch):
    monkeypatch.chdir(Path(own_case.__file__).parents[1])
    page = Path("benchmarks/results/squad-train.md").read_text()
    names = {}
    exec(re.findall(r"```python\n(import pandas\n.*?)```", page, re.S)[0], names)
    of_truth = r" (\.\d+) \| (?:(\.\d+) ± (\.\d+))? ?\|"  # pass@1, its change and standard error
    rows = re.findall(rf"^\| `?(\w+)`? \|{2 * of_truth}$", page, re.M)
    assert [run for run, *_ in rows] == ["before", "cer", "exact", "verifree", "overlap"]
    for run, *shown in rows:
        found = []
        for truth in "text", "right":
            of_run, before = (names["by_question"][truth][each] for each in (run, "before"))
            change = of_run - before
            found += [of_run.mean(), change.mean(), change.sem()]
        shown = [float(x or 0) for x in shown]
        assert shown == pytest.approx(found, abs=0.00056)


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
