"""experiments/people_trained: the numbers of its page are those of its CSVs."""

import re

import pandas
import pytest
from conftest import ROOT

from experiments.tests.told import (
    in_words,
    names_of,
    near,
    over_questions_and_seeds,
    page_of,
    section,
    shown,
    with_error,
)

PAGE = page_of("people_trained")


def test_the_numbers_of_training_on_people_s_questions_are_those_of_its_csv():
    first = (ROOT / "experiments" / "people_trained" / "first-runs.md").read_text()
    page = section(first, "What came out of the first runs")
    by_question = names_of(page)["by_question"]
    table = page.split("| reward | by `text` |")[1]
    for run in "before", "cer", "exact", "verifree", "overlap":
        expected = means_and_changes(by_question, run, "text", "right")
        label = run if run == "before" else f"`{run}`"
        assert shown(table.split("\n\n")[0], label) == near(expected, 0.00056), run


def means_and_changes(by_question, run, *columns):
    """The mean of each column, and except before training its paired change with standard error."""
    numbers = []
    for column in columns:
        change = by_question[column][run] - by_question[column]["before"]
        numbers.append(by_question[column][run].mean())
        numbers += [change.mean(), change.sem()] if run != "before" else []
    return numbers


def label_of(run):
    return run if run == "before" else f"`{run[:-1]}`, seed {run[-1]}"


def test_the_control_of_training_is_that_of_its_csv():
    """pass@1, answers and their changes, on the page of the run."""
    page, second = (section(PAGE, f"What came out{of}\n") for of in ("", " of the second round"))
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
    """Their tables and the primary comparisons."""
    page = section(PAGE, "What came out on the GPU")
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
    """All rewards with 1.5B."""
    page = section(PAGE, "What came out of the rivals")
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


def test_what_training_found_counts_questions_and_seeds():
    """Levels and differences with their standard errors, at the top of the page."""
    on_gpu = names_of(section(PAGE, "What came out on the GPU"))
    rivals = names_of(section(PAGE, "What came out of the rivals"))
    keys = ["model", "run", "seed", "line"]
    small = on_gpu["read"].groupby(keys)["read"].mean()
    large = rivals["read"].groupby(keys[1:])["read"].mean()
    large = pandas.concat([large, small["1.5B"].loc[["any-box"]]])
    small, text = small["135M"], on_gpu["by_text"]["text"].groupby("model").mean().T
    text["1.5B"] = rivals["by_text"]["text"].mean().combine_first(text["1.5B"])
    page = PAGE
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
