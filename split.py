"""Split a table of questions by document: rows to train on, and rows that are held out.

    python split.py mine.csv --rename clause=context --separator "|"

It reads what the other programs read, and writes train.jsonl and held-out.jsonl. A fifth of the
documents are held out, with all their questions: otherwise pass@1 would not be that of new
documents. Rows are shuffled, since --limit of the other programs takes the first ones. If a row
cannot be used, nothing is written, and all such rows are named.
"""

from runtime import cli  # isort: split

import random
from decimal import Decimal
from pathlib import Path

from runtime.cli import InputError, require
from runtime.files import to_jsonl, to_row, write_atomically
from tasks.data import COLUMNS, as_text, as_written, cells_of, tidy, to_problem
from tasks.tables import read_table

FILES = "train.jsonl", "held-out.jsonl"
LONG = 5  # words: longer references have next to no probability


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("table", help="file of rows (.jsonl, .json, .parquet or .csv)")
    add("--by", default="document", choices=["document", "question"], help="what is not divided")
    add("--rename", action="append", default=[], metavar="OLD=NEW", help="such as clause=context")
    add("--separator", help="what stands between several answers in a cell, such as '|'")
    add("--seed", type=int, default=0, help="random seed of the split and of the order")
    args = parser.parse_args()
    there = " and ".join(name for name in FILES if Path(name).exists())
    require(not there, f"{there} would be overwritten: remove them, or split in another folder")
    renames = dict(rename.partition("=")[::2] for rename in args.rename)
    rows = load_rows(args.table, renames, args.separator)
    problems = check_rows(args.table, rows, args.by)

    of_document = {}
    for row in rows:
        of_document.setdefault(tidy(as_text(row[args.by])), []).append(row)
    documents, chance = sorted(of_document), random.Random(args.seed)
    require(len(documents) > 1, f"{args.table}: there is one {args.by}, so nothing can be split")
    held_out = chance.sample(documents, max(1, len(documents) // 5))
    for name, kept in zip(FILES, ({*documents} - {*held_out}, held_out)):
        part = [row for document in sorted(kept) for row in of_document[document]]
        chance.shuffle(part)
        write_atomically(Path(name), to_jsonl(part))
        print(f"{name}: {len(part)} rows, {args.by}s: {len(kept)}")
    references = [each for problem in problems for each in problem.references]
    long = sum(len(each.split()) > LONG for each in references)
    print(f"{long} of {len(references)} references have more than {LONG} words")


def load_rows(table, renames, separator):
    """The rows of a table, without empty cells, and with the columns that the other programs know.
    renames: {old: new} of columns. Numbers keep the digits with which they are written."""
    known = COLUMNS | {*renames}
    rows = read_table(table, known)
    columns = dict.fromkeys(name for row in rows for name in row)
    for old, new in renames.items():
        expected = f"OLD of {', '.join(columns)} and NEW of {', '.join(sorted(COLUMNS))}"
        require(old in columns and new in COLUMNS, f"--rename {old}={new}: expected {expected}")
    if unknown := ", ".join(as_written(name) for name in columns if name not in known):
        cli.say(f"{table}: these columns are not used: {unknown}")
    kept = []
    for row in rows:
        cells = [(renames.get(name, name), without_decimals(row[name])) for name in row]
        row = cells_of(to_row([(name, cell) for name, cell in cells if name in COLUMNS]))
        if separator and isinstance(row.get("answer"), str):
            row["answer"] = [part.strip() for part in row["answer"].split(separator)]
        kept.append(row)
    return kept


def without_decimals(cell):
    """A cell whose numbers are text if JSON does not know their type."""
    if isinstance(cell, list):
        return [without_decimals(each) for each in cell]
    return as_text(cell) if isinstance(cell, Decimal) else cell


def check_rows(table, rows, by):
    """-> the Problems of the rows. InputError names all rows that cannot be used."""
    problems, bad = [], {}
    contexts = any("context" in row for row in rows)
    for row_number, row in enumerate(rows, start=1):
        try:
            require(as_text(row.get(by)), f"no `{by}`")
            require("context" in row or not contexts, "no `context`, which other rows have")
            problems.append(to_problem(row, "text"))
        except InputError as reason:
            bad.setdefault(str(reason), []).append(row_number)
    counts = "; ".join(
        f"{why} ({len(at)} of {len(rows)}: rows {at[:9]})" for why, at in bad.items()
    )
    require(not bad, f"{table}: {counts}")
    return problems


if __name__ == "__main__":
    cli.run_script(main)
