"""experiments/people_kept: the tables, the picture and the comparison are those of its CSVs."""

import re

import matplotlib
import pandas
import pytest
from conftest import ROOT

from experiments.people_kept import people_kept
from experiments.tests.told import page_of, words_of

PAGE, FOLDER = page_of("people_kept"), people_kept.folder_of(150)
SAMPLES = people_kept.read(FOLDER)
SAMPLED = SAMPLES[SAMPLES.decoding == "sampled"]
FOLDERS = [FOLDER, people_kept.folder_of(300)]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_row_of_its_tables(folder):
    rows = [*people_kept.rows_of_arms(folder)]
    rows += people_kept.rows_of_differences(people_kept.read(folder))
    rows += people_kept.rows_of_rewards(pandas.read_csv(folder / people_kept.JUDGED))
    for row in rows:
        assert row in PAGE.split("\n"), row


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_picture_is_that_of_the_numbers(folder, tmp_path):
    """Its points; what a version of matplotlib adds may differ."""
    kept = (folder / people_kept.PICTURE).read_text()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        people_kept.draw(folder, tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    points = re.compile(r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)"')
    assert points.findall(drawn) == points.findall(kept) != []


def test_where_the_primary_comparison_is_told():
    """On the page and in the index, and what is said beside it."""
    told = {}
    for arm in "kept-cer", "kept-right", "kept-overlap", "sft-2":
        told[arm] = difference(arm, "start")
    primary = difference("kept-cer", "verifree")
    page = words_of(PAGE)
    assert f"**The primary comparison**: `kept-cer` minus `verifree` is {primary}" in page
    assert f"`sft-2` minus `verifree` is {difference('sft-2', 'verifree')}" in page
    index, rewards, day, front = (words_of((ROOT / name).read_text()) for name in TOLD)
    assert f"kept by CER minus VeriFree: {primary}" in index and told["kept-right"] in index
    assert f"`kept-cer` minus `verifree` is {primary}" in rewards
    ended = (
        f"ended {told['kept-cer']} above the start, and what a program kept {told['kept-right']}"
    )
    assert ended in rewards
    assert f"({told['kept-right']} by `right`, {told['kept-cer']} by CER)" in day
    behind = difference("kept-right", "kept-cer")
    assert f"{behind} behind it; by overlap {told['kept-overlap']} was gained" in day
    shares = {arm: people_kept.short(own.text.mean()) for arm, own in SAMPLED.groupby("arm")}
    cells = shares["start"], shares["sft-2"], shares["verifree"], told["sft-2"]
    assert f"| {' | '.join(cells)} |" in rewards
    assert f"four passes, one seed, ended at {shares['sft-4']}" in rewards
    gains = [difference(arm, "start") for arm in ("sft-2", "verifree", "kept-cer")]
    said = "it gained {}, `verifree` {}, a round kept by CER {}."
    assert said.format(*gains) in front and f"a 135M, {shares['start'][:3]} after" in front


def difference(one, other):
    mean, error, *_ = people_kept.compared(SAMPLED, one, other)
    return f"{people_kept.short(mean)} ± {people_kept.short(error)}"


TOLD = "experiments/README.md", "docs/rewards.md", "docs/your-own-file.md", "README.md"


def test_seconds_and_kept_samples_of_seed_0():
    costs = people_kept.read_costs(FOLDER).set_index("run")
    kept = [costs.kept[f"kept-{by}-0"] for by in people_kept.KEPT]
    said = "257, 76 and 160"
    assert " and ".join([", ".join(kept[:2]), kept[2]]) == said and said in words_of(PAGE)
