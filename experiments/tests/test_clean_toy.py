"""experiments/clean_toy: what is withheld is shown nowhere; the numbers are those of the CSV."""

import itertools
import json
from unittest import mock

import pytest

from experiments.clean_toy import clean_toy
from tasks import toy, toy_model

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
