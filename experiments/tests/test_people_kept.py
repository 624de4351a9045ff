"""experiments/people_kept: the tables, the picture and the comparison are those of its CSVs."""

import re

import matplotlib
import pandas
from conftest import ROOT

from experiments.people_kept import people_kept
from experiments.tests.told import page_of, words_of

PAGE, SAMPLES = page_of("people_kept"), people_kept.read()
SAMPLED = SAMPLES[SAMPLES.decoding == "sampled"]


def test_every_row_of_its_tables():
    rows = [*people_kept.rows_of_arms(SAMPLES), *people_kept.rows_of_differences(SAMPLES)]
    rows += people_kept.rows_of_rewards(pandas.read_csv(people_kept.JUDGED))
    for row in rows:
        assert row in PAGE.split("\n"), row


def test_the_picture_is_that_of_the_numbers(tmp_path, monkeypatch):
    """Its points; what a version of matplotlib adds may differ."""
    kept = people_kept.PICTURE.read_text()
    monkeypatch.setattr(people_kept, "PICTURE", tmp_path / "drawn.svg")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        people_kept.draw(SAMPLES)
    drawn = (tmp_path / "drawn.svg").read_text()
    points = re.compile(r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)"')
    assert points.findall(drawn) == points.findall(kept) != []


def test_where_the_primary_comparison_is_told():
    """On the page and in the index, and what is said beside it."""
    told = {}
    for one, other in ("kept-cer", "verifree"), ("kept-cer", "start"), ("sft-2", "start"):
        mean, error, *_ = people_kept.compared(SAMPLED, one, other)
        told[one, other] = f"{people_kept.short(mean)} ± {people_kept.short(error)}"
    page = words_of(PAGE)
    primary = told["kept-cer", "verifree"]
    assert f"**The primary comparison**: `kept-cer` minus `verifree` is {primary}" in page
    index = words_of((ROOT / "experiments" / "README.md").read_text())
    assert f"kept by CER minus VeriFree: {primary}" in index
    others = {name: words_of((ROOT / name).read_text()) for name in TOLD}
    for name, text in others.items():
        for one, other in re.findall(r"`([\w-]+)` minus `([\w-]+)` is ", text):
            if (one, other) in told and "kept" in one:
                assert f"`{one}` minus `{other}` is {told[one, other]}" in text, name
    assert told["sft-2", "start"] in others["docs/rewards.md"]
    assert primary in others["docs/rewards.md"]


TOLD = "README.md", "docs/rewards.md", "docs/your-own-file.md", "docs/keeping.md"


def test_seconds_and_kept_samples_of_seed_0():
    costs = pandas.read_csv(people_kept.COSTS).set_index("run")
    kept = [f"{costs.kept[f'kept-{by}-0']:.0f}" for by in people_kept.KEPT]
    said = "257, 76 and 160"
    assert " and ".join([", ".join(kept[:2]), kept[2]]) == said and said in words_of(PAGE)
