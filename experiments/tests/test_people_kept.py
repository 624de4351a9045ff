"""experiments/people_kept: the tables, the picture and the comparison are those of its CSVs."""

import re

import matplotlib
import pandas
import pytest
from conftest import ROOT

from experiments.people_kept import people_kept
from experiments.tests.told import page_of, words_of

PAGE, FOLDER = page_of("people_kept"), people_kept.folder_of(150)
FOLDERS = [FOLDER, people_kept.folder_of(300)]


def sampled(folder):
    samples = people_kept.read(folder)
    return samples[samples.decoding == "sampled"]


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


def difference(one, other, samples):
    mean, error, *_ = people_kept.compared(samples, one, other)
    return f"{people_kept.short(mean)} ± {people_kept.short(error)}"


def test_where_the_primary_comparisons_are_told():
    """On the page, in the index, and wherever else; and what is said beside them."""
    page = words_of(PAGE)
    index, rewards, day, front = (words_of((ROOT / name).read_text()) for name in TOLD)
    both = [sampled(folder) for folder in FOLDERS]
    primary, again = (difference("kept-cer", "verifree", samples) for samples in both)
    assert f"**The primary comparison**: `kept-cer` minus `verifree` is {primary}" in page
    assert f"**The primary comparison**: `kept-cer` minus `verifree` is {again}" in page
    assert f"kept by CER minus VeriFree: {primary}; from 300 questions {again}" in index
    said = f"`kept-cer` minus `verifree` is {primary} (from twice as many questions {again})"
    assert said in rewards
    of_arm = {}
    for arm in "kept-cer", "kept-right", "kept-overlap", "verifree", "sft-2":
        of_arm[arm] = [difference(arm, "start", samples) for samples in both]
        assert f"| `{arm}` | {' | '.join(of_arm[arm])} |" in PAGE
    four = f"one seed, gained {difference('sft-4', 'start', both[0])}.)"
    gains, later = ({arm: each[k] for arm, each in of_arm.items()} for k in (0, 1))
    assert gains["kept-right"] in index and four in page
    rivals = [difference("sft-2", "verifree", samples) for samples in both]
    assert all(f"`sft-2` minus `verifree` is {rival}" in page for rival in rivals)
    assert f"from 300 questions it is {rivals[1]}" in rewards
    greedy = people_kept.read(FOLDERS[1]).query("decoding == 'greedy'")
    said = f"the two are further apart: {difference('sft-2', 'verifree', greedy)}"
    assert said in page
    ended = f"ended {gains['kept-cer']} above the start, and what a program kept"
    assert f"{ended} {gains['kept-right']}" in rewards
    assert f"({gains['kept-right']} by `right`, {gains['kept-cer']} by CER)" in day
    behind = difference("kept-right", "kept-cer", both[0])
    assert f"{behind} behind it; by overlap {gains['kept-overlap']} was gained" in day
    for samples, gain in zip(both, (gains, later)):
        shares = {arm: people_kept.short(own.text.mean()) for arm, own in samples.groupby("arm")}
        cells = shares["start"], shares["sft-2"], shares["verifree"], gain["sft-2"]
        assert f"| {' | '.join(cells)} |" in rewards
    passes = people_kept.short(both[0][both[0].arm == "sft-4"].text.mean())
    assert f"over 150 questions, one seed, ended at {passes}" in rewards
    start = both[1][both[1].arm == "start"].text.mean()
    assert f"a 135M, {start:.2f} after 142".replace("0.", ".") in front
    said = "fine-tuning gained {sft-2}, `verifree` {verifree}, a round kept by CER {kept-cer}."
    assert said.format_map(later) in front


TOLD = "experiments/README.md", "docs/rewards.md", "docs/your-own-file.md", "README.md"


def test_seconds_and_kept_samples_of_seed_0():
    costs = people_kept.read_costs(FOLDER).set_index("run")
    kept = [costs.kept[f"kept-{by}-0"] for by in people_kept.KEPT]
    said = "257, 76 and 160"
    assert " and ".join([", ".join(kept[:2]), kept[2]]) == said and said in words_of(PAGE)
