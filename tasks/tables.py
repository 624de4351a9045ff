"""Read tables of questions: .jsonl, .json, .parquet and .csv. Does not import torch."""

import csv
import io
from decimal import Decimal
from pathlib import Path

import numpy
import pyarrow.parquet

from runtime.cli import require
from runtime.files import json_rows, read_rows, read_text, to_row

FORMATS = (".jsonl", ".json", ".parquet", ".csv")


def read_table(path: str | Path, columns=None) -> list[dict]:
    """The rows of a table -> list of dicts. Values are not converted, because readers that guess
    types turn "014" into 14, and numbers of JSON keep their digits. InputError names the first bad
    row. columns: see table_rows."""
    ending = Path(path).suffix.lower()
    require(ending in FORMATS, f"{path}: expected a file that ends in {', '.join(FORMATS)}")

    def parse(path):
        if ending == ".parquet":
            return table_rows(pyarrow.parquet.read_table(path), columns)
        return csv_rows(read_text(path)) if ending == ".csv" else json_rows(path, to_decimal)

    return read_rows(path, parse)


def to_decimal(text):
    """The number that a text names, with all its digits. But 27.0 is 27, since a column of integers
    with a gap is often stored as floats."""
    return Decimal(text.removesuffix(".0"))


def csv_rows(text):
    """The rows of a table as dicts of texts. Cells are separated by commas, semicolons or tabs:
    spreadsheets write what is usual in their country. Spaces before a cell are left out. Before a
    quote they would make the quotes a part of it, and split it at separators between them."""

    def read(separator, **options):
        table = io.StringIO(text.removeprefix(f"sep={separator}"), newline="")  # a line for Excel
        cells = csv.reader(table, delimiter=separator, skipinitialspace=True, **options)
        return filter(None, cells)

    csv.field_size_limit(2**31 - 1)
    separator = max(",;\t", key=lambda each: len(next(read(each), [])))
    rows = read(separator, strict=True)
    header = next(rows, [])
    for cells in rows:
        wide = f"more cells than columns {header}: put quotes around a cell with {separator!r}"
        require(len(cells) <= len(header), wide)
        yield to_row([*zip(header, cells)])


def table_rows(table, columns=None):
    """The rows of a pyarrow table as dicts, with floats as they are printed. If columns are named,
    the values of others are None, since some cannot be converted (the year 294247)."""
    for i, name in enumerate(table.column_names):
        if columns and name not in columns:
            table = table.set_column(i, name, pyarrow.nulls(len(table)))
    of = pyarrow.struct(table.schema)
    return [as_printed(row, of) for row in table.to_pylist()]


def as_printed(value, of):
    """A value of this type of pyarrow. A float of 16 or 32 bits becomes the one that is printed:
    .1 would be 0.0999755859375 or 0.10000000149011612."""
    if value is None or "float" not in str(of) or pyarrow.types.is_map(of):
        return value
    if isinstance(value, dict):
        return {field.name: as_printed(value[field.name], field.type) for field in of}
    if isinstance(value, list):
        return [as_printed(each, of.value_type) for each in value]
    return float(str(numpy.float16(value) if "halffloat" in str(of) else numpy.float32(value)))
