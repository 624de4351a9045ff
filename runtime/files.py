"""Read and write the files of runs and data sets. Does not import torch."""

import csv
import fcntl
import io
import json
import shutil
from collections import Counter
from hashlib import sha256
from pathlib import Path

import numpy
import pyarrow.parquet

from runtime.cli import InputError, as_input_error, for_shell, is_rank_0, message_of, require, say

FORMATS = (".jsonl", ".json", ".parquet", ".csv")
LOGS = "metrics.jsonl", "samples.jsonl", "evaluations.jsonl"  # of a run, only appended to


def read_rows(path: str | Path, columns=None, parse_float=float) -> list[dict]:
    """The rows of a .jsonl, .json, .parquet or .csv file -> list of dicts. Values are not
    converted, because readers that guess types turn "014" into 14. InputError names the first bad
    row. columns: see table_rows. parse_float: what reads a number of JSON that is no integer."""
    path = Path(path)
    ending = path.suffix.lower()
    require(ending in FORMATS, f"{path}: expected a file that ends in {', '.join(FORMATS)}")
    require(path.is_file(), f"{path}: {'a directory' if path.is_dir() else 'no such file'}")
    rows = []
    try:
        for row in parse_rows(path, ending, columns, parse_float):
            require(isinstance(row, dict), f"expected objects with named columns, got {row!r:.40}")
            # A byte of another encoding is a lone surrogate by now. No tokenizer takes it.
            with as_input_error("a character is not UTF-8: save the file as UTF-8"):
                json.dumps(row, ensure_ascii=False, default=str).encode()
            rows.append(row)
    except Exception as error:  # libraries raise errors of many types
        ours = isinstance(error, InputError)
        problem = error if ours else f"expected objects with named columns ({message_of(error)})"
        raise InputError(f"{path}, row {len(rows) + 1}: {problem}") from error
    return rows


def parse_rows(path, ending, columns, parse_float):
    if ending == ".parquet":
        return table_rows(pyarrow.parquet.read_table(path), columns)
    content = path.read_bytes()  # of UTF-16, too, as Windows writes; a bad byte stays in its row
    text = content.decode(json.detect_encoding(content), "surrogateescape")
    require("\0" not in text, "the file is not text: save a workbook as .csv, in UTF-8")
    if ending == ".csv":
        return csv_rows(text)
    parse = json.JSONDecoder(parse_float=parse_float, object_pairs_hook=to_row).decode
    if text.lstrip().startswith("["):  # the file is one list
        return parse(text)
    return map(parse, filter(str.strip, text.split("\n")))


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


def to_row(pairs):
    """A dict of these (name, value) pairs. If a name stood twice, a value would be lost. Columns
    without a name are not used."""
    for name, count in Counter(name for name, _ in pairs).items():
        require(count == 1 or not name, f"two columns for {name!r}: rename or remove one")
    return dict(pairs)


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


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside path, then rename. A killed process leaves the old file or the new one. Only
    rank 0 writes."""
    if is_rank_0():
        partial = path.with_name(path.name + ".partial")
        with as_input_error(f"cannot write {path}"):
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            partial.replace(path)


def append_rows(path: Path, rows: list[dict]) -> None:
    """Append rows as lines of JSON, the first on a line of its own: an editor, or a disk that was
    full, may have left a last line without an end. Only rank 0 writes."""
    if is_rank_0():
        with as_input_error(f"cannot write {path}"), open(path, "a+b") as file:
            file.seek(max(0, file.seek(0, io.SEEK_END) - 1))
            begin = b"" if file.read() in (b"", b"\n") else b"\n"
            file.write(begin + to_jsonl(rows).encode())


def to_jsonl(rows: list[dict]) -> str:
    """Rows as lines of JSON. JSON has no nan and no infinity. Python writes them all the same, and
    reading them back is the simplest way to find them and make them null."""
    finite = [json.loads(json.dumps(row), parse_constant=lambda name: None) for row in rows]
    return "".join(json.dumps(row) + "\n" for row in finite)


def beginning(path, length):
    """What tells whether so many first bytes of a log are as they were -> their number, a hash."""
    with open(path, "rb") as file:
        content = file.read(length)
    return [len(content), sha256(content).hexdigest()[:16]]


def lock(directory):
    """Make a directory, and lock it against other processes -> the open lock file. The lock ends
    when this is closed, at the latest with the process. Where the file system has no locks, as some
    NFS and Lustre, a line says so."""
    directory.mkdir(parents=True, exist_ok=True)
    file = open(directory / "lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{directory}: another process is writing to it") from error
    except OSError as error:
        problem = f"{directory} cannot be locked ({error.strerror})"
        say(f"{problem}: start no other process that writes to it")
    return file


def read_config(run):
    """config.json of a run, with its flags by name in "flags"."""
    config = Path(run) / "config.json"
    above = [each for each in Path(run).absolute().parents if (each / LOGS[0]).is_file()]
    right = f"; the run is {above[0]}" if above else ""  # a checkpoint has a config.json, too
    require(config.is_file(), f"{run} is not a run: it has no config.json{right}")
    with as_input_error(f"{config}: expected an object with flags{right}"):
        content = json.loads(config.read_text(encoding="utf-8"))
        return content | {"flags": dict(content["flags"])}


def checkpoints(run):
    """All complete checkpoints of a run -> list of (step, directory), oldest first."""
    paths = {path.name.removeprefix("step-"): path for path in Path(run).glob("checkpoints/step-*")}
    return sorted((int(step), path) for step, path in paths.items() if step.isdigit())


def remove_partial(out):
    """Remove checkpoints that are not complete. A file system may keep some of their files, as NFS
    keeps those that are open somewhere. They do no harm, and are removed another time."""
    for left in (out / "checkpoints").glob("partial-step-*") if is_rank_0() else []:
        shutil.rmtree(left, ignore_errors=True)


def how_to_resume(run):
    """In words, for a run that is stopped or cannot write."""
    last = ["none", *(path.name for _, path in checkpoints(run))][-1]
    again = for_shell("--resume", "--out", run)
    return f"go on with {again}; the last complete checkpoint is {last}"
