"""experiments/clean_toy: what is withheld is shown nowhere; the numbers are those of the CSV."""

import argparse
import itertools
import json
from unittest import mock

import pandas
import pytest
from conftest import ROOT

from experiments.clean_toy import clean_toy, tables
from experiments.tests.told import page_of, words_of
from tasks import toy, toy_model

FRONT = (ROOT / "README.md").read_text()
STORIES = {story.question(): story for story in itertools.chain(*toy.stories())}


def demonstrated(tmp_path, withheld):
    """The combinations that a supervised start of 8,000 demonstrations shows."""
    shown = set()

    def look(model, pairs, *args, **options):
        for prompt, _ in itertools.islice(pairs, 8000):
            question = tokenizer.decode(prompt).removesuffix("\n")
            shown.add(STORIES[question].combination)

    tokenizer = toy_model.build_tokenizer()
    with mock.patch.object(toy_model, "finetune", look):
        toy_model.warm_start(tmp_path, 0, withheld=withheld)
    return shown


def test_the_start_demonstrates_nothing_that_is_withheld(tmp_path):
    own, whole = map(set, clean_toy.withheld_of(3))
    shown = demonstrated(tmp_path, own | whole)
    assert not shown & (own | whole) and len(shown) == 180 - 45
    assert own | whole < demonstrated(tmp_path, ())


@pytest.mark.parametrize("fold", [None, *clean_toy.FOLDS])
def test_the_questions_of_a_fold(tmp_path, fold):
    own, whole = map(set, clean_toy.withheld_of(fold))
    clean_toy.write_rows(tmp_path, fold)
    of = {}
    for name in "train", "new", "whole", "known":
        rows = [json.loads(line) for line in open(tmp_path / f"{name}.jsonl")]
        of[name] = [STORIES[row["question"]].combination for row in rows]
        assert len({row["question"] for row in rows}) == len(rows)
    sizes = {name: len(combinations) for name, combinations in of.items()}
    assert sizes["train"] == 2000 and sizes["new"] == 400 and sizes["whole"] == 200
    assert not {*of["train"], *of["known"]} & (own | whole)
    assert {*of["new"]} <= own and {*of["whole"]} <= whole
    # The numbers of a whole triple are in no training question, under no kind.
    assert not {c[1:] for c in of["train"]} & {c[1:] for c in whole}
    assert {c[1:] for c in of["new"]} <= {c[1:] for c in of["train"]}


def test_the_parts_are_disjoint():
    tuning, whole, folds = clean_toy.parts()
    parts = [*tuning, *whole, *itertools.chain(*folds)]
    assert len(parts) == len({*parts}) == 180 and not {*tuning} & {*whole}


def test_the_tables_and_both_primary_comparisons():
    lines = tables.read(1)
    page = page_of("clean_toy")
    for row in tables.markdown(lines):
        assert row in page
    for one, other in tables.PRIMARY:
        said = tables.in_words(*tables.difference(lines, one, other))
        assert said in words_of(page)
    start, kept = (
        f"{lines[(lines.arm == arm) & (lines['round'] == round_)].new.mean():.2f}"[1:]
        for arm, round_ in (("start", 0), ("kept-cer", 1))
    )
    gain = tables.in_words(*tables.difference(lines, *tables.PRIMARY[0]))
    assert f"goes from {start} to {kept}, {gain} above one kept by exact match" in words_of(FRONT)
    _, low, high, _ = tables.difference(lines, *tables.PRIMARY[1])
    assert low < 0 < high and "two rounds against 200 steps of RLOO: undecided" in words_of(FRONT)
    # By hand: the mean of the differences of the same fold and seed.
    of = {arm: lines[lines.arm == arm] for arm in ("kept-cer", "kept-exact")}
    first = {arm: own[own["round"] == 1].set_index(["fold", "seed"]).new for arm, own in of.items()}
    both = sorted({*first["kept-cer"].index} & {*first["kept-exact"].index})
    differences = [first["kept-cer"][pair] - first["kept-exact"][pair] for pair in both]
    mean, _, _, count = tables.difference(lines, *tables.PRIMARY[0])
    assert count == len(both) and mean == pytest.approx(sum(differences) / count)


def test_all_arms_on_the_second_machine():
    lines = tables.read(2)
    page = page_of("clean_toy")
    described = tables.differences(lines, tables.PRIMARY + tables.DESCRIBED)
    for row in [*tables.markdown(lines), *described]:
        assert row in page
    assert {*tables.NAMES} < {*lines.arm}
    # RLOO that begins where one round ends has drawn the samples of both.
    drawn = lines[lines.arm == "rloo-cer-after-kept"].samples
    assert {*drawn} == {8 * 2000 + 200 * 16 * 8}


def test_what_the_page_tells_of_other_judges_and_more_rounds():
    page = words_of(page_of("clean_toy"))
    first = tables.read(1)
    by_P = tables.in_words(*tables.difference(first, ("kept-cer", 1), ("kept-verifree", 1)))
    assert f"CER's minus $P$'s is {by_P}." in page
    rewards = words_of((ROOT / "docs" / "rewards.md").read_text())
    assert f"not declared, is {by_P}.)" in rewards
    second = tables.in_words(*tables.difference(first, ("kept-cer", 2), ("kept-cer", 1)))
    assert f"on the first machine the second minus the first is {second}." in page
    new = tables.table(tables.read(2)).new
    rounds = [new[f"kept by CER, {each}"] for each in ("1 round", "2 rounds", "3 rounds")]
    assert f"ends lower here, {', '.join(rounds)}," in page and rounds == sorted(rounds)[::-1]
    assert f"three rounds to {new['kept by shared words, 3 rounds']}," in page
    after = new["one round kept by CER, then RLOO: cer"]
    assert f"where its round ends, goes on to {after}, which is undecided" in page
    bare = f"lower the new ones, from {new['start']} to {new['fine-tuned on bare references']}."
    assert bare in page


def test_what_rounding_changes():
    """Of one fold and seed on both machines: how far apart their shares end."""
    both = [tables.read(machine).set_index(["arm", "round", "fold", "seed"]) for machine in (1, 2)]
    apart = (both[1].new - both[0].new).dropna().drop("start").groupby(["arm", "round"])
    page = words_of(page_of("clean_toy"))
    spread = apart.std()
    told = f"{tables.short(spread.min())} to {tables.short(spread.max())}"
    assert f"a standard deviation of {told} over the six pairs" in page and {*apart.size()} == {6}
    assert f"a mean of at most {tables.short(apart.mean().abs().max())}." in page


def test_gather_keeps_the_lines_of_other_machines(tmp_path):
    (tmp_path / "3-2").mkdir()
    line = {"fold": 3, "seed": 2, "arm": "start", "round": 0, "new": 0.5}
    pandas.DataFrame([line]).to_csv(tmp_path / "3-2" / "lines.csv", index=False)
    before = pandas.read_csv(clean_toy.CSV)
    copy = tmp_path / "copy.csv"
    before.to_csv(copy, index=False)
    with mock.patch.object(clean_toy, "CSV", copy):
        for _ in range(2):  # twice is once
            clean_toy.gather(argparse.Namespace(out=tmp_path, machine=7))
    after = pandas.read_csv(copy)
    assert len(after) == len(before) + 1 and after[after.machine == 7].new.tolist() == [0.5]
    pandas.testing.assert_frame_equal(after[after.machine != 7], before)


def test_gather_asks_which_machine_it_was(tmp_path, capsys):
    before = clean_toy.CSV.read_bytes()
    with mock.patch("sys.argv", ["clean_toy.py", "gather", str(tmp_path)]):
        with pytest.raises(SystemExit, match="2"):
            clean_toy.main()
    assert "gather needs --machine" in capsys.readouterr().err
    assert clean_toy.CSV.read_bytes() == before


def test_a_seed_is_measured_by_todays_programs(tmp_path, toy_model_dir):
    """On the first questions of each part, sampled and greedily."""
    clean_toy.write_rows(tmp_path, 0)
    for name in "new", "whole", "known":
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(path.open().readlines()[:3]))
    found = clean_toy.pass_at_1(tmp_path, toy_model_dir)
    assert {*found} == {"new", "whole", "known", "greedy", "verbatim"}
    assert all(0 <= share <= 1 for share in found.values())
    assert found["greedy"] * 3 == round(found["greedy"] * 3)  # one answer to each
