"""The benchmarks run end to end, in their smallest shape."""

import contextlib
import functools
import json
import re
import shutil
import sys
from pathlib import Path

import asked
import compare_rewards
import copies
import gpu
import numpy
import own_case
import pandas
import pytest
import rare_reference
import rounding
import torch
from conftest import ROOT, SHARED, tiny_model

import judge
import train
from engine.tokens import vocabulary
from runtime.files import read_rows
from runtime.samples import sample_table
from tasks import toy_model
from tasks.data import Problem
from tasks.prompts import encode_prompt


def test_the_toy_with_lora():
    """The table and the primary comparison of lora.md: paired by seed, by a t-test."""

    def shown(x):
        return f"{x:.3f}".replace("0.", ".", 1)

    told = (ROOT / "benchmarks/results/lora.md").read_text()
    lines = pandas.read_csv(ROOT / "benchmarks/results/lora.csv")
    by_seed = lines.pivot(index="trained", columns="seed", values="pass@1")
    ahead = by_seed.loc["lora"] - by_seed.loc["full"]
    mean, half = ahead.mean(), compare_rewards.T[len(ahead) - 2] * ahead.sem()
    numbers = f"{shown(mean)} ({shown(mean - half)} to {shown(mean + half)})"
    assert f"**`--lora 8` minus full training is {numbers}.**" in told
    for name, row in ("full training", "full"), ("`--lora 8`", "lora"):
        of_seeds = [*by_seed.loc[row], by_seed.loc[row].mean()]
        assert f"| {name} | {' | '.join(map(shown, of_seeds))} |" in told


def test_speed(script, monkeypatch):
    few = {"scoring": {"N": 2}, "sampling": {"rows": 8}, "flagship": {"rows": 8, "prompt": 16}}
    for part, sizes in few.items():
        monkeypatch.setitem(gpu.PARTS, part, functools.partial(gpu.PARTS[part], **sizes))
    code, out, err = script(gpu, "--shape tiny --repeats 1")
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert {line["part"] for line in lines} == {*gpu.PARTS}
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


PAGE = (ROOT / "docs/measurements.md").read_text()
PEOPLE = PAGE.split("\n## Does it tell right from wrong ")[2]
MATHEMATICS = (ROOT / "benchmarks/results/judge-real.md").read_text()
OWN_CASE_PAGE = (ROOT / "benchmarks/results/own-case.md").read_text()
CONTROL = (ROOT / "benchmarks/results/squad-control.md").read_text()


@functools.cache
def own_case_samples(data):
    samples = own_case.read_csv(ROOT / "benchmarks/results/own-case.csv")
    return samples[samples.data == data]


def section(page, heading):
    """What is under the heading that begins so."""
    return page.split(f"\n## {heading}")[1].split("\n## ")[0]


def names_of(page, begins="import pandas\n", **names):
    """Run the block of code that begins so -> its names, and those that are given."""
    with contextlib.chdir(ROOT):
        exec(re.search(rf"```python\n({begins}.*?)```", page, re.S)[1], names)
    return names


def shown(page, label):
    """The decimals and whole numbers of the row of a table whose first cell begins with label."""
    [row] = re.findall(rf"^\| {re.escape(label)}[^|]*(\|.*)", page, re.M)
    return [float(x) for x in re.findall(r"(?<![\w.])-?\d*\.?\d+", row)]


def near(found, within=0.0051):
    return pytest.approx([float(x) for x in found], abs=within)


LABELS = {"cer": "`cer`", "verifree": "$P$ (`verifree`)", "exact": "`exact`"}
LABELS |= {"text": "equal as text", "overlap": "`overlap`", "overlap+cer": "`overlap+cer`"}
NAMES = list(own_case.NAMES)


def test_the_numbers_of_the_own_case_are_those_of_its_csv():
    """AUC and aim of docs/measurements.md, and the pairs that CER and P order differently."""
    samples = own_case_samples("squad")
    columns = []
    for which in (0, "all"):
        frame = own_case.with_rewards(samples, which)
        table = judge.judge_rewards(frame, NAMES)[1]
        columns += [table[name] for name in ("AUC", "low", "high")]
        products = own_case.advantage_products(frame[frame.answered], NAMES)
        columns += judge.interval(products, own_case.aim)
    table = PEOPLE.split("\n\nAUC is that of")[0]
    for k, label in enumerate(LABELS.values()):
        assert shown(table, label) == near(numpy.array(columns)[:, k])
    there, new = own_case_samples("fairytaleqa"), asked.read_csv(ASKED)
    for of, said in (frame, "CER is right in 45 and $P$ in 16"), (new, "questions in 7 and 10."):
        found = own_case.ordered_differently(of)
        assert said in PEOPLE and [*found] == [int(x) for x in re.findall(r"\d+", said)]
    found = own_case.ordered_differently(own_case.with_rewards(there, "all"))
    said = "(On FairytaleQA it is right in 12 and $P$ in 17"
    assert found == (12, 17) and said in " ".join(PEOPLE.split())
    frame = own_case.with_rewards(own_case_samples("math500"), "all")
    rewards = ["cer", "verifree", "exact", "overlap"]
    aucs = judge.question_aucs(frame[frame.answered], rewards)
    shown_there = re.findall(r"\| ([\d.]+) \([\d., ]+\) \|\n", MATHEMATICS)
    assert [float(x) for x in shown_there] == near(aucs.mean(0))


def test_aim_is_the_cosine_of_all_advantages():
    """On the people's questions, with a reward that is CER's opposite; a question with one answer
    has no others."""
    frame = own_case.with_rewards(own_case_samples("squad"), "all")
    frame["cer"] *= -1
    for kept in frame, frame[frame.answered]:
        A = []
        T = []
        for _, group in kept.groupby(level=0):
            for advantages, of in (A, group.cer), (T, group.right):
                of = of.astype(float).tolist() if len(group) > 1 else []
                advantages += [x - (sum(of) - x) / (len(of) - 1) for x in of]
        [found] = own_case.aim(own_case.advantage_products(kept, ["cer"]))
        norms = sum(x * x for x in A) * sum(x * x for x in T)
        assert found == pytest.approx(sum(x * y for x, y in zip(A, T)) / norms**0.5)


def test_aim_over_all_samples_measures_boxing():
    """The table of own-case.md; 1 for any box; and the differences in docs/measurements.md."""
    samples, page = own_case_samples("squad"), PEOPLE
    assert f"{1 - samples.answered.mean():.0%} of the samples have no box" in page
    columns = []
    for which, stated in (0, [-0.160, -0.230, -0.094]), ("all", [0.042, -0.006, 0.093]):
        frame = own_case.with_rewards(samples, which)
        products = own_case.advantage_products(frame, NAMES)
        columns += judge.interval(products, own_case.aim)
        box, difference = own_case.any_box(frame)
        assert shown(OWN_CASE_PAGE, "1 for any box")[-2:] == near([box, box])
        assert stated == near(difference, 0.00051)
        assert "{:.3f} ({:.3f} to {:.3f})".format(*stated).replace("0.", ".") in OWN_CASE_PAGE
    words = " ".join(page.split())
    assert "is higher by .042 (-.006 to .093)" in words and "an aim of .69" in words
    for k, label in enumerate(LABELS.values()):
        label = label.replace("$P$ (`verifree`)", "`verifree`")
        table = section(OWN_CASE_PAGE, "Aim over all samples")
        assert shown(table, label) == near(numpy.array(columns)[:, k])
    aucs = judge.question_aucs(frame[frame.answered], NAMES)
    _, table = page.split("\n| `cer` minus |")
    aims = own_case.advantage_products(frame[frame.answered], NAMES)
    of_aims = judge.interval(aims, lambda drawn: own_case.aim(drawn)[:1] - own_case.aim(drawn))
    columns = numpy.array([*judge.interval(aucs[:, :1] - aucs), *of_aims])
    for k, label in (1, "$P$"), (2, "`exact`"), (3, "equal as text"), (4, "`overlap`"):
        assert shown(table.split("\n\n")[0], label) == near(columns[:, k], 0.00051)
    both = judge.interval(aucs[:, 5] - aucs[:, 4])
    assert [0.013, -0.005, 0.031] == near(both, 0.00051) and ".013 (-.005 to .031)" in page


def test_cer_is_ahead_of_P_on_answers_that_equal_a_reference():
    """The table of kinds of right answers, with FairytaleQA, and each reference in turn."""
    squad, fairytale = own_case_samples("squad"), own_case_samples("fairytaleqa")
    found = {
        kind: own_case.aucs_of(kind, squad)
        for kind in ("equal as text", "not equal as text", "no word in common")
    }
    frame = own_case.with_rewards(squad, "all")
    found["all"] = judge.question_aucs(frame[frame.answered], NAMES)
    there = own_case.aucs_of("not equal as text", fairytale)
    found["the same on FairytaleQA"] = there
    found["the same on both"] = numpy.concatenate([there, found["not equal as text"]])
    table = PEOPLE.split("### Where is CER ahead of P?")[1].split("\n### ")[0]
    for label, aucs in found.items():
        means = [aucs[:, NAMES.index(x)].mean() for x in ("exact", "verifree", "cer", "overlap")]
        numbers = shown(table, label)
        assert numbers[0] == len(aucs) and numbers[1:5] == near(means)
        assert numbers[5:] == near(judge.interval(aucs[:, 0] - aucs[:, 1]), 0.00051)
    page = section(OWN_CASE_PAGE, "And where a right answer")
    spread = found["no word in common"].std(0, ddof=1)
    assert [0.43, 0.38] == near(spread[:2]) and ".43, and that of $P$ with .38" in page
    turns = own_case.aucs_in_turn("no word in common", squad)
    error = turns.std(0, ddof=1) / len(turns) ** 0.5
    each = re.findall(r"-?(?:\.\d+|(?<=gives )\d+)", page[page.index("Each") :])
    numbers = [float(x) for x in each]
    difference = turns[:, 0] - turns[:, 1]
    expected = [len(turns), turns[:, 0].mean(), error[0], turns[:, 1].mean(), error[1]]
    assert numbers[:5] == near(expected)
    both = [difference.mean(), difference.std(ddof=1) / len(turns) ** 0.5]
    assert numbers[5:] == near(both, 0.00051)


def test_verbatim_samples_that_receive_less_than_the_mean(capsys):
    own_case.less_than_the_mean(own_case_samples("squad"))
    numbers = "18 of 270 verbatim samples, in 10 of 103 questions"
    assert numbers in capsys.readouterr().out
    assert numbers in " ".join(OWN_CASE_PAGE.split())
    group = own_case.with_rewards(own_case_samples("squad"), "all").loc[115].query("answered")
    [least] = group[group.answer == "revolution"].cer
    assert [0.34, 0.50] == near([least, group.verifree.mean()])


def test_the_numbers_of_training_on_people_s_questions_are_those_of_its_csv():
    page = (ROOT / "benchmarks/results/squad-train.md").read_text()
    by_question = names_of(page)["by_question"]
    table = page.split("| reward | by `text` |")[1]
    for run in "before", "cer", "exact", "verifree", "overlap":
        expected = means_and_changes(by_question, run, "text", "right")
        label = run if run == "before" else f"`{run}`"
        assert shown(table.split("\n\n")[0], label) == near(expected, 0.00056), run


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


ASKED = ROOT / "benchmarks/results/asked.csv"


def test_the_mean_of_token_probabilities_is_that_of_plain_passes(tokenizer):
    """RLPR's reward, on solutions of unequal length, one sample without a box."""
    texts = [r"so \boxed{7}", "none", r"it is much longer, so \boxed{8}"]
    group = {"question": "How many eggs?", "references": ["7", "14 eggs"], "texts": texts}
    model = tiny_model(len(tokenizer))
    encode = vocabulary(tokenizer).encode
    prompt = encode_prompt(tokenizer, Problem(group["question"], "7"))
    expected = []
    for text in texts:
        context = prompt + encode(text.split("{")[0])
        means = [0.0]
        for reference in group["references"] if "{" in text else ():
            tokens = encode("{" + reference + "}")
            with torch.no_grad():
                logits = model(torch.tensor([context + tokens])).logits[0, -len(tokens) - 1 : -1]
            own = logits.softmax(-1)[torch.arange(len(tokens)), tokens]
            means.append(own.mean().item())
        expected.append(max(means))
    found = asked.token_means(model, tokenizer, group)
    assert found == pytest.approx(expected, abs=1e-6) and found[1] == 0 < found[0]


def test_what_asking_found_is_in_its_csv():
    """AUC by kind of right answer, the primary comparison, and what saying nothing received."""
    page = section(PAGE, "Why not ask the model?")
    tables = asked.table_of(asked.read_csv(ASKED))
    labels = {
        "$P$ (": "verifree",
        "`cer`": "cer",
        "`overlap`": "overlap",
        "$P$ to": "per word",
        "mean probability": "asked-1.5B-tokens",
        "`asked`, the 1.5B": "asked-1.5B",
        "`asked`, the same": "asked-1.5B-passage",
        "`asked`, a 0.5B": "asked-0.5B",
        "`asked`, SmolLM2": "asked-135M",
        "the 1.5B, in a written reply": "asked-1.5B-written",
    }
    for label, name in labels.items():
        found = []
        for _, table in tables.values():
            found += table.loc[name, ["AUC", "low", "high"]].tolist()
        assert shown(page, label) == near(found), label
    assert [questions for questions, _ in tables.values()] == [35, 25]
    others = tables["not equal as text"][1]
    for name, said in ("cer", ".230 (.113 to\n.363)"), ("overlap", ".050 (-.070 to .183)"):
        numbers = others.loc[name, ["asked-1.5B minus it", "from", "to"]].tolist()
        assert [float(x) for x in re.findall(r"-?\.\d+", said)] == near(numbers, 0.00051)
        assert said in page
    nothing = pandas.read_csv(ASKED.with_name("asked-nothing.csv"))
    shown_passage = nothing[nothing.asked == "asked-1.5B-passage"]["the question, repeated"].mean()
    samples = asked.read_csv(ASKED)
    wrong = samples[samples.answered & ~samples.right]["asked-1.5B-passage"].mean()
    assert f"{wrong:.2f} to wrong answers, {shown_passage:.2f}".replace("0.", ".") in page
    said = nothing.groupby("asked").mean().loc[["asked-1.5B", "asked-1.5B-written"]]
    kinds = [kind for kind in said.columns[1:] if kind not in (":", "an injected instruction")]
    for kind in kinds:
        assert shown(page.replace('| "', "| "), kind) == near(said[kind].tolist()), kind
    means = samples[samples.answered].groupby(["right", "text"])[[*said.index]].mean()
    by_judge = {
        "right answers: equal": [*means.loc[[(True, 1), (True, 0)]].to_numpy().T.flat],
        "wrong answers": means.loc[False, 0].tolist(),
    }
    for label, expected in by_judge.items():
        assert shown(page, label) == near(expected), label
    of = nothing[nothing.asked == "asked-1.5B"]
    above = (of["the question, repeated"] > of["the reference"]).sum()
    assert f"In {above} of {len(of)} questions" in page


def means_and_changes(by_question, run, *columns):
    """The mean of each column, and except before training its paired change with standard error."""
    numbers = []
    for column in columns:
        change = by_question[column][run] - by_question[column]["before"]
        numbers.append(by_question[column][run].mean())
        numbers += [change.mean(), change.sem()] if run != "before" else []
    return numbers


def with_error(difference):
    """The mean over questions and its standard error, as the pages write them."""
    return f"{difference.mean():.3f} ± {difference.sem():.3f}".replace("0.", ".")


def over_questions_and_seeds(shares):
    """Of shares by seed and question: their mean, and its standard error over both."""
    table = shares.unstack("seed")
    questions, seeds = table.mean(axis=1), table.mean()
    squared = questions.var() / len(questions)
    squared += seeds.var() / len(seeds) if len(seeds) > 1 else 0
    return [questions.mean(), squared**0.5]


def label_of(run):
    return run if run == "before" else f"`{run[:-1]}`, seed {run[-1]}"


def test_the_control_of_training_is_that_of_its_csv():
    """pass@1, answers and their changes, on the page of the run."""
    page, second = (section(CONTROL, f"What came out{of}\n") for of in ("", " of the second round"))
    names = names_of(page)
    by_question = names["by_question"]
    for run in "before", "any-box0", "any-box1", "cer0", "asked0", "exact0":
        expected = means_and_changes(by_question, run, "text", "answered")
        assert shown(page, label_of(run))[: len(expected)] == near(expected, 0.00051)
    difference = names["difference"]
    assert [0.035, 0.021] == near([difference.mean(), difference.sem()], 0.00051)
    assert ".035 ± .021" in page
    read = names_of(second, "known = ", **names)["read"]
    frozen = names["by_question"]["text"]["frozen0"] - names["by_question"]["text"]["asked0"]
    assert with_error(frozen) in second
    for run in read["read"]:
        label = label_of(run).replace("`frozen`", "`asked` by the frozen 1.5B")
        expected = means_and_changes(read, run, "read", "other words")
        assert shown(second, label) == near(expected, 0.00051)
    assert with_error(read["read"]["cer0"] - read["read"]["any-box0"]) in second


def check_runs(page, text, reading):
    """The rows of a table of runs."""
    for run in text["text"]:
        expected = [*means_and_changes(text, run, "text"), text["answered"][run].mean()]
        expected += means_and_changes(reading, run, "read")
        expected.append(reading["other words"][run].mean())
        label = run if run == "before" else f"`{run}`"
        assert shown(page, label) == near(expected, 0.00051), run


def test_the_runs_on_a_gpu_are_those_of_their_csv():
    """The tables of their page, and the primary comparisons, there and in docs/measurements.md."""
    page = section(CONTROL, "What came out on the GPU")
    names = names_of(page)
    for model, part in zip(("135M", "1.5B"), page.split("**Qwen2.5-Coder-1.5B")):
        text, reading = (names[of].loc[model].dropna(axis=1) for of in ("by_text", "by_reading"))
        assert f"{len(reading)} " in page
        check_runs(part, text, reading)
        ahead = reading["read"].sub(reading["read"]["any-box"], axis=0)
        for run in {"cer", "verifree", "overlap", "frozen"} & {*ahead}:
            assert with_error(ahead[run]) in part.replace("\n", " "), (model, run)
    assert with_error(names["by_reading"]["read"].loc["135M"].eval("cer - `any-box`")) in PAGE


def test_the_rivals_of_cer_are_those_of_their_csv():
    """All rewards with 1.5B, there and in docs/measurements.md."""
    page = section(CONTROL, "What came out of the rivals")
    names = names_of(page)
    text, reading = names["by_text"], names["by_reading"]
    assert f"{len(reading)} questions are left" in page
    check_runs(page, text, reading)
    for run in "exact", "verifree", "overlap", "frozen":
        of = reading["read"]["cer"] - reading["read"][run]
        assert with_error(of) in page.replace("\n", " "), run
    of = text["text"]["cer"] - text["text"]["verifree"]
    assert with_error(of) in page
    read = names["read"]
    of = read.groupby(["run", "seed", "line"]).read.mean()
    assert with_error(of["asked", 0] - of["before", 0]) in page
    # How much of it is boxing.
    means = read.groupby("run")[["answered", "read"]].mean()
    table = PAGE.split("| of these, right |")[1].split("\n\n")[0]
    for run in "before", "cer", "exact", "verifree":
        label = "nothing" if run == "before" else f"`{run}`"
        answered, right = means.loc[run]
        assert shown(table, label) == near([answered, right / answered], 0.00051)
    more = (means.answered["cer"] - means.answered["before"]) * means.read["before"]
    assert more / means.answered["before"] == pytest.approx(0.25, abs=0.005)
    assert with_error(names["of_all"]) in PAGE and with_error(names["of_all"]) in page


def in_words(mean, error):
    return f"{mean:.3f} ± {error:.3f}".replace("0.", ".")


def test_what_training_found_counts_questions_and_seeds():
    """Levels and differences with their standard errors, of docs/measurements.md."""
    on_gpu = names_of(section(CONTROL, "What came out on the GPU"))
    rivals = names_of(section(CONTROL, "What came out of the rivals"))
    keys = ["model", "run", "seed", "line"]
    small = on_gpu["read"].groupby(keys)["read"].mean()
    large = rivals["read"].groupby(keys[1:])["read"].mean()
    large = pandas.concat([large, small["1.5B"].loc[["any-box"]]])
    small, text = small["135M"], on_gpu["by_text"]["text"].groupby("model").mean().T
    text["1.5B"] = rivals["by_text"]["text"].mean().combine_first(text["1.5B"])
    page = section(PAGE, "Does training on such questions work?")
    table = page.split("| minus `any-box` |")[1].split("\n\n")[0]
    labels = {"nothing": "before", "`any-box`": "any-box", "`asked`, of a frozen 1.5B": "frozen"}
    labels |= {f"`{run}`": run for run in ("cer", "overlap", "exact", "verifree")}
    for label, run in (labels | {"`asked`, of the policy": "asked"}).items():
        expected = []
        for model, levels in ("1.5B", large), ("135M", small):
            level = levels[run]
            if run == "before":  # the same model for all seeds
                level = pandas.concat({0: level.groupby("line").mean()}, names=["seed"])
            expected += [*over_questions_and_seeds(level), text[model][run]]
        if run not in ("before", "any-box"):
            ahead, error = over_questions_and_seeds(small[run] - small["any-box"])
            expected += [ahead, error]
            bold = "**" if ahead > 2 * error else ""
            assert f"| {bold}{ahead:.3f}{bold} ± ".replace("0.", ".") in table, run
        found = shown(table.replace(" (from .407)", "").replace(" (from .440)", ""), label)
        assert found == near(expected, 0.00051), run
    words = " ".join(page.split())
    for said, difference in (
        ("CER minus exact match, which was declared next, is {}", large["cer"] - large["exact"]),
        ("If the seeds are counted it is {}", small["cer"] - small["any-box"]),
        ("one of 1.5B teaches {} more", small["frozen"] - small["asked"]),
    ):
        assert said.format(in_words(*over_questions_and_seeds(difference))) in words, said
    for run in "verifree", "overlap", "frozen":
        ahead, error = over_questions_and_seeds(small[run] - small["cer"])
        assert abs(ahead) < 2 * error
    ahead = large["verifree"] - large["cer"]
    mean, error = over_questions_and_seeds(ahead)
    numbers = [mean, ahead.groupby("line").mean().sem(), *ahead.groupby("seed").mean(), error]
    told = words.split("*VeriFree ends above CER*")[1]
    assert [float(x) for x in re.findall(r"(?<!\d)\.\d+", told)[:5]] == near(numbers, 0.00051)


COPIES = (ROOT / "benchmarks/results/copies.md").read_text()


def test_long_boxes_are_counted_in_the_stored_samples():
    counts = copies.of_runs()
    assert copies.markdown(counts, "boxes over six words") in COPIES
    assert copies.with_solutions() in COPIES and "9 of\n372 boxes are long" in PAGE
    labels = {"nothing": "before", "`cer`": "cer", "`verifree`": "verifree", "`exact`": "exact"}
    labels |= {"`overlap`": "overlap", "`asked`, of the policy itself": "asked"}
    for label, run in (labels | {"`asked`, of a frozen 1.5B": "frozen"}).items():
        share = counts["squad-rivals, 1.5B"][run].split()[-1]
        assert f"| {label} | {share} |\n" in PAGE, label


def test_the_toy_with_copies_is_that_of_its_csv():
    table, difference = copies.of_toy(ROOT / "benchmarks/results/copies-toy.csv")
    assert table in COPIES and table in PAGE and difference in COPIES
    primary = re.search(r"`cer - exact` \| (.*), 5 seeds", difference)[1]
    assert primary.replace("+", "").replace("0.", ".") in " ".join(PAGE.split())
    paths = [ROOT / f"benchmarks/results/{name}.csv" for name in ("copies-toy", "toy-seeds-0-19")]
    copying, others = (
        pandas.read_csv(path).pivot(index="seed", columns="name", values="pass@1 end")[:5]
        for path in paths
    )
    assert others[["cer", "exact"]].mean().tolist() == near([0.92, 0.71])
    words = " ".join(PAGE.split())
    cost = others - copying
    both = copying["overlap+cer"] - copying["cer"]  # three seeds
    for said, differences in (
        ("So copies cost CER ", cost["cer"]),
        ("the difference of the costs is ", cost["cer"] - cost["exact"]),
        ("it ends at .762. That is ", both),
    ):
        differences = differences.dropna()
        mean, half = differences.mean(), compare_rewards.T[len(differences) - 2] * differences.sem()
        found = re.findall(r"-?\.\d+", words.split(said)[1])[:3]
        assert [float(x) for x in found] == near([mean, mean - half, mean + half], 0.00056), said
    levels = copying[both.notna()][["overlap+cer", "cer"]].mean()
    assert (
        "ends at {:.3f} where alone, on the same three seeds, it ends at {:.3f}.".format(
            *levels
        ).replace("0.", ".")
        in words
    )
    declared = (ROOT / "benchmarks/results/declared.md").read_text()
    assert declared.count("](copies.md)") == 1


def test_the_first_hour_on_a_gpu_is_as_it_was_measured():
    of = pandas.read_json(ROOT / "benchmarks/results/gpu-h100.jsonl", lines=True).set_index("part")
    page = (ROOT / "docs/running.md").read_text()
    fast = pandas.read_json(ROOT / "benchmarks/results/gpu-h100-slots.jsonl", lines=True)
    decoding = fast[(fast.part == "decoding") & (fast.commit == "956b4fd")]
    for name, sampler in ("generate()", "generate"), ("engine/slots.py", "auto"):
        steps = decoding[decoding.command.str.endswith(sampler)].seconds
        assert f"| `{name}` | {' | '.join(f'{x:.3f}'.lstrip('0') for x in steps)} |" in page
    away, there = fast[fast.part == "flagship"].seconds
    moments = fast[fast.what == "moments back"].seconds.item()  # from the first copy on
    # Scoring, between contexts of 1,000 and of 2,000 tokens, for a prompt of 110 and 1,250 more.
    ten = of.loc["scoring"].query("U == 10").groupby("context").seconds.first()
    one = ten[1000] + (110 + 1250 - 1000) / 1000 * (ten[2000] - ten[1000])
    said = f"32 times {one:.2f} s, between {ten[1000]:.2f} s at contexts of 1,000 tokens and "
    said = f"| scoring | {32 * one:.0f} | {said}{ten[2000]:.2f} s at 2,000 |"
    assert re.sub(r"\b0\.", ".", said) in page
    step = away + moments + 32 * one + 61
    assert f"| {away:.0f} |" in page and f"a step takes {step:.0f} s" in page
    assert f"about {step * 1171 / 3600:.0f} hours" in page
    assert f"[about {32 * one / step:.0%}](#hours)" in page
    paper = 67.4 * 3600 * 4 / 1560  # GPU-seconds of a step
    times = f"620 GPU-seconds, {paper / step:.1f} times"
    assert round(paper, -1) == 620 and times in " ".join(page.split())
    speed = " ".join((ROOT / "benchmarks/results/speed.md").read_text().split())
    assert f"in place sampling took {there:.0f} s" in speed and f"of the host {away:.0f} s" in speed
    rates = fast[fast.how.notna() & fast["length"].eq(1000) & (fast.rows == 256)].tb_per_s
    assert [f"{x:.1f}" for x in rates] == ["2.1", "2.9"] and "read 2.1 TB/s" in speed
    update = of.loc["updating"]
    assert f"| {update.tokens_per_second:,.0f} |" in page
    assert f"| {update.policy_peak_gib:.1f}, {update.policy_estimate_gib:.1f} |" in page
    scored = of.loc["scoring"].query("U == 10 and context == 1000").iloc[0]
    assert f"| {scored.seconds:.2f} ({scored.ratio:.1f} times".replace("0.", ".", 1) in page


def test_the_table_of_choices_is_that_of_the_trainings():
    """docs/running.md: differences of levels, with seeds counted, as measurements.md has them."""
    page = (ROOT / "docs/running.md").read_text()
    page = " ".join(section(page, "Which reward?").split())
    rivals = names_of(section(CONTROL, "What came out of the rivals"))["read"]
    small = names_of(section(CONTROL, "What came out on the GPU"))["read"]
    keys = ["run", "seed", "line"]
    several = rivals.groupby(keys)["read"].mean()
    small = small[small.model == "135M"].groupby(keys)["read"].mean()
    on_small = over_questions_and_seeds(small["verifree"] - small["exact"])
    samples = pandas.read_csv(ROOT / "benchmarks/results/rare-reference.csv")
    # As declared: "cer" is compared with the others, so the one in its place is called "cer".
    other = {"verifree": "cer", "cer": "verifree"}
    rare = list(rare_reference.comparisons(samples.replace({"run": other})))[1][1:3]
    over_cer = list(rare_reference.comparisons(samples))[1][1:3]
    for said, numbers in (
        ("it is {} above `overlap`", rare),
        ("and {} with several", over_questions_and_seeds(several["verifree"] - several["overlap"])),
        ("It ended {} above `cer` with one", [-over_cer[0], over_cer[1]]),
        ("[{}](measurements", over_questions_and_seeds(several["verifree"] - several["cer"])),
        ("`verifree` ended {} above it", on_small),
    ):
        assert said.format(in_words(*numbers)) in page, said
    for levels in several, small, samples.groupby(["run", "seed"])["read"].mean():
        mean = levels.groupby("run").mean()
        assert mean["verifree"] == mean.max() and mean["overlap"] >= mean["cer"]


def test_who_asks_about_the_own_case_finds_what_is_shown():
    """AUC of asking the model, on the samples of own-case.csv."""
    asked = names_of(OWN_CASE_PAGE, "import own_case")["asked"]
    kinds = own_case.KINDS["not equal as text"], own_case.KINDS["no word in common"]
    for of, said in zip((lambda frame: frame.right, *kinds), (".95", ".91", ".88")):
        kept = asked[asked.answered & (~asked.right | of(asked))]
        found = judge.question_aucs(kept, ["asked"]).mean()
        assert f"{found:.2f}".lstrip("0") == said and said in OWN_CASE_PAGE


def test_the_printed_table_of_judge_is_that_of_its_samples(capsys):
    lines = read_rows(ROOT / "benchmarks/results/judge-example.jsonl")
    judge.say_judgement(sample_table([{"question": k} | line for k, line in enumerate(lines)]))
    printed = "".join(f"    {line}\n" for line in capsys.readouterr().out.splitlines())
    assert printed in (ROOT / "docs/running.md").read_text()


def test_by_cer_answers_that_say_nothing_receive_the_mean():
    """Their reward minus the mean of the question's answers, and the standard error."""
    lines = read_rows(ROOT / "benchmarks/results/judge-example.jsonl")
    page = (ROOT / "docs/theory.md").read_text()
    for name in "cer", "asked":
        of_answers = [
            [R for R, answer in zip(line["rewards"][name], line["answers"]) if answer]
            for line in lines
        ]
        more = [line["nothing"][name] - sum(R) / len(R) for line, R in zip(lines, of_answers) if R]
        said = f"{numpy.mean(more):.3f} ± {pandas.Series(more).sem():.3f}".replace("0.", ".")
        assert said in " ".join(page.split()), said


def test_the_rare_reference_is_the_one_that_others_word_least_alike():
    """By hand: "red fox" has 2 of 2 and of 7 tokens, so an F1 of 4/9. The long one is none, and two
    that are equal as text are one. And the counts that are declared."""
    told = ["red fox", "the red fox jumped over it all", "the red fox", "A dog", "a dog."]
    assert rare_reference.rare_reference(told) == (0, "A dog")
    assert rare_reference.rare_reference(told[:2]) == (pytest.approx(4 / 9), "red fox")
    assert rare_reference.rare_reference(["a dog", "A dog."]) is None
    if not (SHARED / "data").exists():
        return
    names = "squad", "fairytaleqa"
    lines = {name: read_rows(SHARED / f"data/{name}_human.jsonl") for name in names}
    made = rare_reference.make_rows(lines)
    sizes = {name: [row.get("data") for row in rows] for name, rows in made.items()}
    sizes = {name: [of.count(each) for each in names] for name, of in sizes.items()}
    assert sizes.pop("start") == [0, 0] and len(made["start"]) == 372
    assert sizes == {"train": [38, 122], "train-all": [38, 122], "held-out": [75, 51]}
    questions = {row["question"] for row in made["train"] + made["start"]}
    assert not questions & {row["question"] for row in made["held-out"]}
    assert all(isinstance(row["answer"], str) for row in made["train"])


def test_the_comparison_with_one_reference_is_the_declared_one():
    """On made-up readings, against plain sums; a seed that lacks a reward is left out."""
    generator = numpy.random.default_rng(0)
    mean = {"cer": 0.8, "exact": 0.4, "overlap": 0.75, "verifree": 0.1}
    keys = [(r, s, q, i) for r in mean for s in range(4) for q in range(9) for i in range(4)]
    lines = [("d", *key, float(generator.random() < mean[key[0]])) for key in keys]
    frame = pandas.DataFrame(lines, columns=["data", "run", "seed", "line", "sample", "read"])
    frame = frame[(frame.seed < 3) | (frame.run != "cer")]
    share = frame.groupby(["run", "seed", "line"])["read"].mean()
    cell = {(r, s): sum(share[r, s, q] for q in range(9)) / 9 for r in mean for s in range(3)}
    of_run = {r: sum(cell[r, s] for s in range(3)) / 3 for r in mean}
    of_seed = [sum(cell[r, s] for r in mean) / 4 for s in range(3)]
    grand = sum(of_seed) / 3
    v = sum((cell[r, s] - of_run[r] - of_seed[s] + grand) ** 2 for r, s in cell) / 6
    compared = [*rare_reference.comparisons(frame)]
    for name, d, error, in_errors, _ in compared:
        other = name.split(" - ")[1]
        own = [sum(share["cer", s, q] - share[other, s, q] for s in range(3)) / 3 for q in range(9)]
        squared = 2 * v / 3 + sum((x - d) ** 2 for x in own) / 8 / 9
        expected = [of_run["cer"] - of_run[other], squared**0.5, d / squared**0.5]
        assert [d, error, in_errors] == pytest.approx(expected)
    assert [verdict for *_, verdict in compared] == ["above 0", "undecided", "not tested"]
    few = frame[frame.seed < 2]
    assert {verdict for *_, verdict in rare_reference.comparisons(few)} == {"not tested"}


def test_the_page_of_the_rare_reference_is_that_of_its_csv():
    path = ROOT / "benchmarks/results/rare-reference.csv"
    page = path.with_suffix(".md").read_text()
    for table in rare_reference.tables(path):
        assert table in page
    steps = pandas.read_csv(path.with_name("rare-reference-steps.csv"))
    means = steps[steps.run == "cer"][["reward", "exact_match"]].mean()
    said = "were {:.3f} and {:.3f}".format(*means).replace("0.", ".")
    assert said in " ".join(page.split()) and len(steps) == 12 * 30
    samples = pandas.read_csv(path)
    seeds = samples.pivot_table("read", "run", "seed")
    found = ", ".join(f"{x:.3f}"[1:] for x in (seeds.loc["cer"] - seeds.loc["exact"])[:2])
    assert f"by {found} and" in page
    shares = samples.groupby(["run", "seed", "data", "line"])["read"].mean()
    for run in shares.index.unique("run"):
        level = in_words(*over_questions_and_seeds(shares[run]))
        text = f"{samples[samples.run == run].text.mean():.3f}"[1:]
        label = "nothing" if run == "before" else f"`{run}`"
        assert f"| {label} | {level} | {text} |\n" in PAGE, run


def test_what_is_said_of_the_paper_s_table_follows_from_it():
    page = (ROOT / "docs/paper.md").read_text()
    rows = section(page, "What the paper reports")
    names = "exact match", "a rule", "VeriFree", "CER", "Rule+CER", "General-verifier"
    exact, rule, verifree, cer, both, judged = (numpy.array(shown(rows, of)[-4:]) for of in names)
    assert (both > numpy.maximum.reduce([exact, rule, verifree, cer, judged])).all()
    said = "CER alone is ahead of exact match in each, by {:.1f} to {:.1f} points, and of VeriFree,"
    ahead = [x for other in (exact, verifree) for x in (min(cer - other), max(cer - other))]
    words = " ".join(rows.split())
    assert (said + " by {:.1f} to {:.1f}.").format(*ahead) in words
    said = "the rule is {:.1f} and {:.1f} points ahead of CER".format(*(rule - cer)[2:])
    assert said.replace("0.", ".") in words


def test_the_trainings_with_two_roundings():
    """The table and the primary comparison of rounding.md, and what measurements.md says of it."""
    lines = pandas.read_csv(ROOT / "benchmarks/results/rounding.csv")
    told = (ROOT / "benchmarks/results/rounding.md").read_text()
    for kind, own in lines.groupby("rounding"):
        cells = [f"{x:.3f}"[1:] for x in own["pass@1 end"]]
        cells += [
            ", ".join(f"{x:.3f}"[1:] for x in own[f"{of} end"]) for of in ("right work", "slips")
        ]
        assert f"| pass@1 with `{kind}` | {' | '.join(cells)} |" in told
    ahead = re.search(
        r"dither minus nearest: \+0(.+) \(\+0(.+) to \+0(.+)\)", rounding.report(lines)
    )
    numbers = "{} ({} to {}".format(*ahead.groups())
    means = [f"{x:.3f}"[1:] for x in lines.groupby("rounding")["pass@1 end"].mean()]
    assert f"`dither` minus `nearest` is {numbers})" in told
    words = " ".join(section(PAGE, "What does rounding to bf16 leave of a step?").split())
    assert (
        numbers in words and f"of {means[0]} after ten steps with `dither`, and {means[1]}" in words
    )


def test_how_far_a_weight_is_from_the_next_bf16_number():
    x = torch.tensor(0.02).bfloat16()
    apart = torch.nextafter(x, torch.ones_like(x)).float() - x.float()
    words = " ".join(section(PAGE, "What does rounding to bf16 leave of a step?").split())
    assert f"{apart.item():.1e} apart".replace("e-0", "e-") in words
    assert f"has {apart.item() / 2:.0e} to go".replace("e-0", "e-") in words


def test_the_table_of_rounding_is_that_of_its_csv():
    """Shares of a step that arrive, and falls of the loss, after 1, 3, 10 and 40 steps."""
    steps = pandas.read_csv(ROOT / "benchmarks/results/rounding-steps.csv", index_col="step")
    page = section(PAGE, "What does rounding to bf16 leave of a step?")
    for step, line in steps.iterrows():
        left = [line[f"movement left, {name}"] for name in ("nearest", "dither")]
        falls = [line[f"loss falls by, {name}"] for name in ("exact", "nearest", "dither")]
        cells = "{:.1f}% | {:.3f} | {:.2f}".format(100 * line.changed, *left)
        cells += "".join(f" | {fall:.5f}" for fall in falls)
        cells = cells.replace(" 0.", " .")
        assert f"| {step} | {cells} |" in page, cells
