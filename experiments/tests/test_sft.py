"""experiments/sft: the tables and the comparisons of its page are those of its CSVs."""

import pandas
import pytest
from conftest import ROOT

from experiments.sft import people
from experiments.tests.told import page_of, words_of
from experiments.toy.compare_rewards import T

PAGE, TOY = page_of("sft"), ROOT / "experiments/sft/toy.csv"


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
    samples = sampled()
    pages = [ROOT / "docs/rewards.md", ROOT / "experiments/README.md"]
    for one, more in ("sft", []), ("lora-5e-4", [ROOT / "experiments/lora/README.md"]):
        mean, error, _ = people.difference(samples, one, "full")
        said = f"{short(mean)} ± {short(error)}"
        assert f"minus `full` is {said}" in words_of(PAGE)
        assert all(said in words_of(page.read_text()) for page in pages + more)


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
