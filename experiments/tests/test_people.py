"""experiments/people: the numbers of its page are those of its CSV."""

import functools
import json
import re
from pathlib import Path

import numpy
import pandas
import pytest
from conftest import ROOT

import judge
import measure
from experiments.asking import asked
from experiments.people import own_case
from experiments.tests.told import near, page_of, section, shown, words_of
from runtime.files import read_rows

PAGE = page_of("people")


LABELS = {"cer": "`cer`", "verifree": "$P$ (`verifree`)", "exact": "`exact`"}
LABELS |= {"text": "equal as text", "overlap": "`overlap`", "overlap+cer": "`overlap+cer`"}
NAMES = list(own_case.NAMES)


@functools.cache
def own_case_samples(data):
    samples = own_case.read_csv(ROOT / "experiments/people/own-case.csv")
    return samples[samples.data == data]


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
    """AUC and aim , and the pairs that CER and P order differently."""
    samples = own_case_samples("squad")
    columns = []
    for which in (0, "all"):
        frame = own_case.with_rewards(samples, which)
        table = measure.rate_rewards(frame, NAMES)[1]
        columns += [table[name] for name in ("AUC", "low", "high")]
        products = own_case.advantage_products(frame[frame.answered], NAMES)
        columns += measure.interval(products, own_case.aim)
    table = PAGE.split("\n\nAUC is that of")[0]
    for k, label in enumerate(LABELS.values()):
        assert shown(table, label) == near(numpy.array(columns)[:, k])
    there, new = (
        own_case_samples("fairytaleqa"),
        asked.read_csv(ROOT / "experiments/asking/asked.csv"),
    )
    for of, said in (frame, "CER is right in 45 and $P$ in 16"), (new, "questions in 7 and 10."):
        found = own_case.ordered_differently(of)
        assert said in PAGE and [*found] == [int(x) for x in re.findall(r"\d+", said)]
    found = own_case.ordered_differently(own_case.with_rewards(there, "all"))
    said = "(On FairytaleQA it is right in 12 and $P$ in 17"
    assert found == (12, 17) and said in words_of(PAGE)
    frame = own_case.with_rewards(own_case_samples("math500"), "all")
    rewards = ["cer", "verifree", "exact", "overlap"]
    aucs = measure.question_aucs(frame[frame.answered], rewards)
    shown_there = re.findall(r"\| ([\d.]+) \([\d., ]+\) \|\n", page_of("mathematics"))
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
    """Its table; 1 for any box; and the differences."""
    samples, page = own_case_samples("squad"), PAGE
    assert f"{1 - samples.answered.mean():.0%} of the samples have no box" in page
    columns = []
    for which, stated in (0, [-0.160, -0.230, -0.094]), ("all", [0.042, -0.006, 0.093]):
        frame = own_case.with_rewards(samples, which)
        products = own_case.advantage_products(frame, NAMES)
        columns += measure.interval(products, own_case.aim)
        box, difference = own_case.any_box(frame)
        assert shown(PAGE, "1 for any box")[-2:] == near([box, box])
        assert stated == near(difference, 0.00051)
        assert "{:.3f} ({:.3f} to {:.3f})".format(*stated).replace("0.", ".") in PAGE
    words = words_of(page)
    assert "is higher by .042 (-.006 to .093)" in words and "an aim of .69" in words
    for k, label in enumerate(LABELS.values()):
        label = label.replace("$P$ (`verifree`)", "`verifree`")
        table = section(PAGE, "Aim over all samples")
        assert shown(table, label) == near(numpy.array(columns)[:, k])
    aucs = measure.question_aucs(frame[frame.answered], NAMES)
    _, table = page.split("\n| `cer` minus |")
    aims = own_case.advantage_products(frame[frame.answered], NAMES)
    of_aims = measure.interval(aims, lambda drawn: own_case.aim(drawn)[:1] - own_case.aim(drawn))
    columns = numpy.array([*measure.interval(aucs[:, :1] - aucs), *of_aims])
    for k, label in (1, "$P$"), (2, "`exact`"), (3, "equal as text"), (4, "`overlap`"):
        assert shown(table.split("\n\n")[0], label) == near(columns[:, k], 0.00051)
    both = measure.interval(aucs[:, 5] - aucs[:, 4])
    assert [0.013, -0.005, 0.031] == near(both, 0.00051) and ".013 (-.005 to .031)" in page


def test_cer_is_ahead_of_P_on_answers_that_equal_a_reference():
    """The table of kinds of right answers, with FairytaleQA, and each reference in turn."""
    squad, fairytale = own_case_samples("squad"), own_case_samples("fairytaleqa")
    found = {
        kind: own_case.aucs_of(kind, squad)
        for kind in ("equal as text", "not equal as text", "no word in common")
    }
    frame = own_case.with_rewards(squad, "all")
    found["all"] = measure.question_aucs(frame[frame.answered], NAMES)
    there = own_case.aucs_of("not equal as text", fairytale)
    found["the same on FairytaleQA"] = there
    found["the same on both"] = numpy.concatenate([there, found["not equal as text"]])
    table = section(PAGE, "Where is CER ahead of P?")
    for label, aucs in found.items():
        means = [aucs[:, NAMES.index(x)].mean() for x in ("exact", "verifree", "cer", "overlap")]
        numbers = shown(table, label)
        assert numbers[0] == len(aucs) and numbers[1:5] == near(means)
        assert numbers[5:] == near(measure.interval(aucs[:, 0] - aucs[:, 1]), 0.00051)
    page = section(PAGE, "And where a right answer")
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
    assert numbers in words_of(PAGE)
    group = own_case.with_rewards(own_case_samples("squad"), "all").loc[115].query("answered")
    [least] = group[group.answer == "revolution"].cer
    assert [0.34, 0.50] == near([least, group.verifree.mean()])
