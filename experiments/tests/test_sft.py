"""experiments/sft: the tables and the comparisons of its page are those of its CSVs."""

import re

import numpy
import pandas
import pytest
from conftest import ROOT

from experiments.sft import people
from experiments.tests.told import page_of, words_of
from experiments.toy.compare_rewards import T

PAGE, TOY = page_of("sft"), ROOT / "experiments/sft/toy.csv"
FRONT = (ROOT / "README.md").read_text()


def short(number):
    return f"{number:.3f}".replace("0.", ".")


@pytest.mark.parametrize("decoding", ["sampled", "greedy"])
def test_the_shares_of_each_arm(decoding):
    table = people.table(decoding)
    for arm, cells in table[people.SHOWN[decoding]].iterrows():
        assert f"| {arm} | {' | '.join(cells)} |" in PAGE


def test_the_comparisons():
    """Both primary ones, and what is told beside them."""
    samples = people.read()
    for decoding, own in samples.groupby("decoding"):
        for one, other in people.PAIRS:
            cells = []
            for what in people.WHAT:
                mean, error, seeds = people.difference(own, one, other, what)
                cells.append(f"{short(mean)} ± {short(error)}")
            row = f"| {decoding}: `{one}` minus `{other}` | {' | '.join(cells)} | {seeds} |"
            assert row in PAGE


def sampled():
    samples = people.read()
    return samples[samples.decoding == "sampled"]


def test_where_both_primary_comparisons_are_told():
    """Here, in the index, and wherever else."""
    samples = sampled()
    others = [*ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*.md")]
    others.append(ROOT / "experiments/lora/README.md")
    others = " ".join(words_of(page.read_text()) for page in others)
    named = {"sft": "(?:fine-tuning|`sft`) minus (?:VeriFree|`verifree`)"}
    named["lora-5e-4"] = r"(?:`--lora` minus full|SmolLM2:)"
    for one, name in named.items():
        mean, error, _ = people.difference(samples, one, "full")
        said = f"{short(mean)} ± {short(error)}"
        assert f"minus `full` is {said}" in words_of(PAGE)
        assert set(re.findall(rf"{name}(?: is|:)? (-?\.\d+ ± \.\d+)", others)) == {said}
    gains = []
    for one, told in ("sft", "1.96 standard errors"), ("full", "over four"):
        mean, error, _ = people.difference(samples, one, "start")
        assert f"{short(mean)} ± {short(error)}" in words_of(PAGE) and told in words_of(PAGE)
        assert (one, f"{mean / error:.2f}") in (("sft", "1.96"), ("full", "4.14"))
        gains.append(f"{short(mean)} ± {short(error)}")
    said = "[Elsewhere](experiments/sft/README.md) it gained {}, `verifree` {}."
    assert said.format(*gains) in words_of(FRONT)
    _, error, _ = people.difference(samples, "sft", "full")
    power = f"{(1.96 + 0.84) * error:.3f}".replace("0.", ".")
    assert f"only a true difference of {power} or more" in words_of(PAGE)


def test_paired_by_seed_the_first_comparison_would_be_decided():
    """The house rule, which counts no questions, and what the page says of it."""
    right = sampled().pivot_table("text", "arm", "seed")
    ahead = (right.loc["sft"] - right.loc["full"]).dropna()
    half = T[len(ahead) - 2] * ahead.sem()
    said = f"an interval from {short(ahead.mean() - half)} to {short(ahead.mean() + half)}"
    one, two, three = map(short, ahead)
    assert said in words_of(PAGE) and f"({one}, {two} and {three})" in words_of(PAGE)


def test_the_chance_of_the_samples_is_counted_once():
    """The squared standard error is in the mean the variance of the mean of questions + seeds +
    rest. A rest that is counted in both spreads makes it a third larger here."""
    rng = numpy.random.default_rng(0)
    of_questions, of_seeds, of_rest = 0.3, 0.1, 0.5
    found = []
    for _ in range(1000):
        table = of_questions * rng.normal(size=(20, 1)) + of_seeds * rng.normal(size=(1, 3))
        table = table + of_rest * rng.normal(size=(20, 3))
        found.append(people.with_seeds(pandas.DataFrame(table)))
    true = of_questions**2 / 20 + of_seeds**2 / 3 + of_rest**2 / 60
    means, errors = numpy.array(found).T
    assert means.var() == pytest.approx(true, rel=0.1)
    assert (errors**2).mean() == pytest.approx(true, rel=0.1)
    # It never falls below the rest's own part, even where chance lets both spreads be smaller.
    mean, error = people.with_seeds(pandas.DataFrame([[0.0, 1.0], [1.0, 0.0]]))
    assert (mean, error) == (0.5, 0.5)
    mean, error = people.with_seeds(pandas.DataFrame([[0.0], [1.0]]))
    assert (mean, error) == (0.5, 0.5)


def test_the_rates():
    """What each seed has."""
    right = sampled().pivot_table("text", "arm", "seed")
    for arm, row in ("full", "full, 1e-5"), *((a, f"`--lora 32`, {a[5:]}") for a in people.LORA):
        seeds = ", ".join(map(short, right.loc[arm].dropna()))
        assert f"| {row} | {seeds} |" in PAGE


def test_the_rows_are_those_of_the_verifier():
    samples = people.read()
    assert set(samples.arm) == set(people.ARMS) and set(samples.line) == set(range(300, 400))
    assert (samples.verbatim <= samples.text).all() and (samples.text <= samples.f1.round()).all()
    counts = samples.groupby(["arm", "seed", "decoding"]).size().unstack()
    assert (counts.sampled == 400).all() and (counts.greedy == 100).all()


def test_the_toy():
    """`sft` minus `cer`, whose pass@1 is that of the first five of twenty seeds."""
    of = pandas.read_csv(TOY)
    stored = pandas.read_csv(ROOT / "experiments/toy/toy-seeds-0-19.csv").set_index("name")
    sft = of[of.what == "runs"].set_index("seed")
    rows = {"before": sft.before, "`sft`": sft["pass@1"]}
    for reward in "cer", "exact", "verifree":
        rows[f"`{reward}`"] = stored.loc[reward].set_index("seed")["pass@1 end"][sft.index]
    for name, values in rows.items():
        cells = " | ".join(map(short, [*values, values.mean()]))
        assert f"| {name} | {cells} |" in PAGE
    difference = rows["`sft`"] - rows["`cer`"]
    half = T[len(sft) - 2] * difference.sem()
    low, high = difference.mean() - half, difference.mean() + half
    assert f"`sft` minus `cer` is {short(difference.mean())} ({short(low)} to {short(high)})" in (
        words_of(PAGE)
    )
    unseen = of[of.what == "unseen"]
    for name, column in ("before", "before"), ("`sft`", "pass@1"), ("`cer`", "cer"):
        cells = " | ".join(map(short, [*unseen[column], unseen[column].mean()]))
        assert f"| {name} | {cells} |" in PAGE
