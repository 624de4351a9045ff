"""experiments/rare_reference: its rows, its declared comparison, and the numbers of its page."""

import numpy
import pandas
import pytest
from conftest import ROOT, SHARED

from experiments.rare_reference import rare_reference
from experiments.tests.told import in_words, over_questions_and_seeds, page_of, words_of
from runtime.files import read_rows


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
    path = ROOT / "experiments/rare_reference/rare-reference.csv"
    page = page_of("rare_reference")
    for table in rare_reference.tables(path):
        assert table in page
    steps = pandas.read_csv(path.with_name("rare-reference-steps.csv"))
    means = steps[steps.run == "cer"][["reward", "exact_match"]].mean()
    said = "were {:.3f} and {:.3f}".format(*means).replace("0.", ".")
    assert said in words_of(page) and len(steps) == 12 * 30
    samples = pandas.read_csv(path)
    seeds = samples.pivot_table("read", "run", "seed")
    found = ", ".join(f"{x:.3f}"[1:] for x in (seeds.loc["cer"] - seeds.loc["exact"])[:2])
    assert f"by {found} and" in page
    shares = samples.groupby(["run", "seed", "data", "line"])["read"].mean()
    for run in shares.index.unique("run"):
        level = in_words(*over_questions_and_seeds(shares[run]))
        text = f"{samples[samples.run == run].text.mean():.3f}"[1:]
        label = "nothing" if run == "before" else f"`{run}`"
        assert f"| {label} | {level} | {text} |\n" in page, run
