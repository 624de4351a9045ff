"""experiments/rounding: the numbers of its page are those of its CSVs."""

import re

import pandas
import torch
from conftest import ROOT

from experiments.rounding import rounding
from experiments.rounding.arrives import arrives
from experiments.tests.told import page_of, words_of

PAGE = page_of("rounding")


def test_the_trainings_with_two_roundings():
    """The table and the primary comparison, and what is said of it at the top."""
    lines = pandas.read_csv(ROOT / "experiments/rounding/rounding.csv")
    for kind, own in lines.groupby("rounding"):
        cells = [f"{x:.3f}"[1:] for x in own["pass@1 end"]]
        cells += [
            ", ".join(f"{x:.3f}"[1:] for x in own[f"{of} end"]) for of in ("right work", "slips")
        ]
        assert f"| pass@1 with `{kind}` | {' | '.join(cells)} |" in PAGE
    ahead = re.search(
        r"dither minus nearest: \+0(.+) \(\+0(.+) to \+0(.+)\)", rounding.report(lines)
    )
    numbers = "{} ({} to {}".format(*ahead.groups())
    means = [f"{x:.3f}"[1:] for x in lines.groupby("rounding")["pass@1 end"].mean()]
    assert f"`dither` minus `nearest` is {numbers})" in PAGE
    words = words_of(PAGE)
    assert (
        numbers in words and f"of {means[0]} after ten steps with `dither`, and {means[1]}" in words
    )


def test_a_step_arrives_in_the_mean_if_the_weights_are_no_bf16_numbers():
    """The weights of the page's table are not at hand. These are as large as those of the file."""
    weights = 0.012 * torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    on_the_grid = weights.bfloat16().float()
    for steps, least, most in (1, 0.05, 0.3), (10, 0.6, 0.95):
        (along, exact), (rounded, _) = arrives(weights, steps), arrives(on_the_grid, steps)
        assert 0.95 < along / exact < 1.05 and least < rounded / exact < most


def test_how_far_a_weight_is_from_the_next_bf16_number():
    x = torch.tensor(0.02).bfloat16()
    apart = torch.nextafter(x, torch.ones_like(x)).float() - x.float()
    words = words_of(PAGE)
    assert f"{apart.item():.1e} apart".replace("e-0", "e-") in words
    assert f"has {apart.item() / 2:.0e} to go".replace("e-0", "e-") in words


def test_the_table_of_rounding_is_that_of_its_csv():
    """Shares of a step that arrive, and falls of the loss, after 1, 3, 10 and 40 steps."""
    steps = pandas.read_csv(ROOT / "experiments/rounding/rounding-steps.csv", index_col="step")
    for step, line in steps.iterrows():
        left = [line[f"movement left, {name}"] for name in ("nearest", "dither")]
        falls = [line[f"loss falls by, {name}"] for name in ("exact", "nearest", "dither")]
        cells = "{:.1f}% | {:.3f} | {:.2f}".format(100 * line.changed, *left)
        cells += "".join(f" | {fall:.5f}" for fall in falls)
        cells = cells.replace(" 0.", " .")
        assert f"| {step} | {cells} |" in PAGE, cells
