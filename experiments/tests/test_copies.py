"""experiments/copies: the numbers of its page are those of its CSV and of stored samples."""

import re

import pandas
from conftest import ROOT

from experiments.copies import copies
from experiments.tests.told import near, page_of, words_of
from experiments.toy import compare_rewards

PAGE = page_of("copies")


def test_long_boxes_are_counted_in_the_stored_samples():
    counts = copies.of_runs()
    assert copies.markdown(counts, "boxes over six words") in PAGE
    assert copies.with_solutions() in words_of(PAGE)


def test_the_toy_with_copies_is_that_of_its_csv():
    table, difference = copies.of_toy(ROOT / "experiments/copies/copies-toy.csv")
    assert table in PAGE and difference in PAGE
    primary = re.search(r"`cer - exact` \| (.*), 5 seeds", difference)[1]
    assert primary.replace("+", "").replace("0.", ".") in words_of(PAGE)
    paths = "copies/copies-toy.csv", "toy/toy-seeds-0-19.csv"
    copying, others = (
        pandas.read_csv(ROOT / "experiments" / path).pivot(
            index="seed", columns="name", values="pass@1 end"
        )[:5]
        for path in paths
    )
    assert others[["cer", "exact"]].mean().tolist() == near([0.92, 0.71])
    words = words_of(PAGE)
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
