"""What the tests of the pages share: a page, a part of it, its tables and its blocks of code."""

import contextlib
import re

import pytest
from conftest import ROOT


def page_of(folder):
    return (ROOT / "experiments" / folder / "README.md").read_text()


def words_of(page):
    return " ".join(page.split())


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


def in_words(mean, error):
    return f"{mean:.3f} ± {error:.3f}".replace("0.", ".")
