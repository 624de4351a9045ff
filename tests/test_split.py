"""split.py: what is on each side, and what it refuses."""

import json
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import split
from runtime.files import append_rows, read_rows
from tasks.data import load_problems

TABLE = """Document;clause;question;answer;page
lease 1;Notice of three months;How long?;three months | 3 months;4
lease 1;By letter;How?;by letter;4
"lease 2 ";Rent is 4.50;How much?;4.50;5
lease 3;It ends on the last day;When?;on the last day of the next month;7
lease 2;Paid monthly;How often?;monthly |;7
"""
RENAMED = "--rename Document=document --rename clause=context"


def both_sides():
    return read_rows("train.jsonl"), read_rows("held-out.jsonl")


def test_a_spreadsheet_becomes_rows(script):
    """Semicolons, UTF-16, several answers in a cell, a document with a space after its name."""
    Path("mine.csv").write_text(TABLE, encoding="utf-16")
    code, out, err = script(split, f"mine.csv {RENAMED} --separator |")
    assert code == 0 and err == "mine.csv: these columns are not used: page\n", err
    train, held_out = both_sides()
    said = [f"{len(train)} rows, documents: 2", f"{len(held_out)} rows, documents: 1"]
    lines = f"train.jsonl: {said[0]}\nheld-out.jsonl: {said[1]}\n"
    assert out == f"{lines}1 of 6 references have more than 5 words\n"
    by_question = {row["question"]: row for row in [*train, *held_out]}
    assert by_question["How long?"] == {
        "document": "lease 1",
        "context": "Notice of three months",
        "question": "How long?",
        "answer": ["three months", "3 months"],
    }
    problems = load_problems("train.jsonl") + load_problems("held-out.jsonl")
    references = {problem.references for problem in problems}
    assert ("4.50",) in references and ("monthly",) in references
    assert {problem.document for problem in problems} == {"lease 1", "lease 2", "lease 3"}


@pytest.mark.parametrize("by", ["document", "question"])
def test_no_document_is_on_both_sides(script, by):
    """Every row is on one, in another order, and the seed decides."""
    rows = [
        {"document": f"lease {k % 10}", "question": f"Q{k % 25}?", "answer": f"{k}.50"}
        for k in range(50)
    ]
    append_rows(Path("mine.jsonl"), rows)
    code, _, err = script(split, f"mine.jsonl --by {by}")
    assert code == 0, err
    train, held_out = both_sides()
    assert not {row[by] for row in train} & {row[by] for row in held_out}
    assert len(held_out) == 10
    for side in train, held_out:
        in_order = [row for row in rows if row in side]
        assert len(in_order) == len(side) and in_order != side
    assert len(train) + len(held_out) == 50
    for seed, same in (0, True), (1, False):
        for name in split.FILES:
            Path(name).unlink()
        script(split, f"mine.jsonl --by {by} --seed {seed}")
        assert (both_sides() == (train, held_out)) == same


def test_a_number_keeps_its_digits(script):
    """In JSON it may be one; a parquet file has its own types."""
    Path("mine.jsonl").write_text(
        '{"document": 1, "question": "A?", "answer": 4.50}\n'
        '{"document": 2, "question": "B?", "answer": [27.0, 014e0]}\n'.replace("014e0", "14")
    )
    script(split, "mine.jsonl")
    answers = {row["question"]: row["answer"] for row in sum(both_sides(), [])}
    assert answers == {"A?": "4.50", "B?": ["27", 14]}
    for name in split.FILES:
        Path(name).unlink()
    columns = {"document": ["a", "b"], "question": ["A?", "B?"], "answer": [Decimal("4.50")] * 2}
    pyarrow.parquet.write_table(pyarrow.table(columns), "mine.parquet")
    code, _, err = script(split, "mine.parquet")
    assert code == 0, err
    assert {row["answer"] for row in sum(both_sides(), [])} == {"4.50"}


NO_QUESTION = "lease 4;Clause;;yes;1\n"
REFUSED = [
    ("", "", "mine.csv: no `document` (5 of 5: rows [1, 2, 3, 4, 5])"),
    ("", "--by Document", "argument --by: invalid choice"),
    ("", "--rename clause", "--rename clause=: expected OLD of Document, clause"),
    ("", "--rename claus=context", "--rename claus=context: expected OLD of Document, clause"),
    ("", f"{RENAMED} --rename page=context", "two columns for 'context': rename or remove one"),
    (NO_QUESTION, RENAMED, "mine.csv: no question (`question`, `problem`) (1 of 6: rows [6])"),
    ("lease 4;;Who?;Ann;1\n", RENAMED, "no `context`, which other rows have (1 of 6: rows [6])"),
    ("lease 4;Clause;Who?;;1\n", RENAMED, "no reference (`answer` as text or number"),
    (";Clause;Who?;Ann;1\n", RENAMED, "no `document` (1 of 6: rows [6])"),
]


@pytest.mark.parametrize("more, flags, says", REFUSED)
def test_a_table_that_needs_work_is_refused(script, more, flags, says):
    """All rows are named in one line, and nothing is written."""
    Path("mine.csv").write_text(TABLE + more)
    code, out, err = script(split, f"mine.csv {flags}")
    last = err.splitlines()[-1]
    assert code == 2 and last.startswith("split.py: ") and says in last, err
    assert not out and [path.name for path in Path().iterdir()] == ["mine.csv"]
    if not flags:
        assert "not used: 'Document' (expected 'document'), clause, page" in err


def test_it_never_overwrites_nor_splits_one_document(script):
    append_rows(Path("train.jsonl"), [{"document": "a", "question": "Q?", "answer": "7"}])
    code, _, err = script(split, "train.jsonl")
    assert code == 2 and "train.jsonl would be overwritten" in err
    Path("train.jsonl").rename("mine.jsonl")
    code, _, err = script(split, "mine.jsonl")
    assert code == 2 and "there is one document, so nothing can be split" in err
    assert json.loads(Path("mine.jsonl").read_text())["answer"] == "7"
