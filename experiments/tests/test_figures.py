"""docs/figures: the pictures are those that their scripts draw, of the numbers that are told."""

import re
import runpy
import sys

import matplotlib
from conftest import ROOT
from pytest import approx

from docs.figures import people

FIGURES = ROOT / "docs" / "figures"


def test_the_picture_moves_one_amount_of_orange(tmp_path, monkeypatch):
    """And its words, which matplotlib writes as comments, are those of the stored one."""
    monkeypatch.setattr(sys, "argv", ["orange.py", str(tmp_path / "orange.svg")])
    with matplotlib.rc_context():
        orange = runpy.run_path(str(FIGURES / "orange.py"))
    pictures = [(folder / "orange.svg").read_text() for folder in (tmp_path, FIGURES)]
    drawn, kept = (re.findall("<!-- .* -->", picture) for picture in pictures)
    assert drawn == kept and "<!-- .443 -->" in kept
    for square in "exact", "verifree", "cer":
        bars = sum((b for b in orange[square].containers if b.get_label() == "reward"), ())
        assert sum(bar.get_width() * bar.get_height() for bar in bars) == approx(0.271)


def test_the_training_of_a_real_model_in_the_readme(tmp_path, monkeypatch):
    """Levels and standard errors from the samples of both experiments, in the table and in the
    picture."""
    page = (ROOT / "README.md").read_text()
    both = [people.levels(*table) for table in people.TABLES.values()]
    for name in "(before)", "`exact`", "`cer`", "`overlap`", "`verifree`":
        found = [levels[name.strip("`()")] for levels in both]
        cells = " | ".join(
            f"{share:.2f} ± {error:.2f}".replace("0.", ".") for share, error in found
        )
        assert re.search(rf"^\| {re.escape(name)}.* \| {re.escape(cells)} \|$", page, re.M), cells
    monkeypatch.setattr(sys, "argv", ["people.py", str(tmp_path / "people.svg")])
    people.main()
    drawn = [(folder / "people.svg").read_text() for folder in (tmp_path, FIGURES)]
    # matplotlib writes each text as a comment, and the numbers of the dots are among them
    of_drawn, of_stored = (re.findall("<!-- (.*?) -->", picture) for picture in drawn)
    assert of_drawn == of_stored and ".55" in of_drawn
