"""Read and write the files of runs and data sets. Does not import torch."""

import fcntl
import json
import os
from pathlib import Path

import pyarrow.parquet

from engine.cli import MADE, InputError, first_line, require

FORMATS = (".jsonl", ".json", ".parquet")


def read_rows(path, log=False):
    """The rows of a .jsonl, .json or .parquet file -> list of dicts. Values are not converted,
    because readers that guess types turn "014" into 14. InputError names the first bad row. The
    last line of a log may be half written, and is left out if it has no end."""
    path, rows = Path(path), []
    ending = path.suffix.lower()
    require(ending in FORMATS, f"{path}: expected a file that ends in {', '.join(FORMATS)}")
    require(path.is_file(), f"{path}: no such file")
    try:
        if ending == ".parquet":
            source = pyarrow.parquet.read_table(path).to_pylist()
        elif ending == ".json":
            source = json.loads(path.read_bytes())
            if isinstance(source, dict):  # an object with one list, such as {"data": [...]}
                [source] = [value for value in source.values() if isinstance(value, list)]
        else:
            lines = path.read_bytes().split(b"\n")[: -1 if log else None]
            source = (json.loads(line) for line in lines if line.strip())
        for row in source:
            rows.append(dict(row))
    except (ValueError, TypeError, OSError, RecursionError) as error:
        where = f"{path}, row {len(rows) + 1}"
        problem = f"{where}: expected objects with named columns ({first_line(error)})"
        raise InputError(problem) from error
    return rows


def write_atomically(path, text):
    """Write beside path, then rename. A killed process leaves the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def append_rows(path, rows):
    with open(path, "a") as file:
        file.write(to_jsonl(rows))


def to_jsonl(rows):
    """Rows as lines of JSON, which has no nan and no infinity, so these become null."""
    finite = [json.loads(json.dumps(row), parse_constant=lambda name: None) for row in rows]
    return "".join(json.dumps(row) + "\n" for row in finite)


LOCKS = []  # the lock files that this process holds open until it ends


def lock(directory):
    """Make a directory, and lock it against other processes until this one ends."""
    MADE[:] = [path for path in [directory, *directory.parents] if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT)
    LOCKS.append(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        MADE.clear()  # the directory is another process's
        owner = os.read(file, 20).decode()
        raise InputError(f"{directory}: process {owner} is writing to it") from error
    os.ftruncate(file, 0)
    os.pwrite(file, str(os.getpid()).encode(), 0)


def read_config(run):
    """config.json of a run, with its flags by name in "flags"."""
    require(Path(run).is_dir(), f"{run}: no such directory")
    config = Path(run) / "config.json"
    require(config.is_file(), f"{run} is not a run: it has no config.json")
    return read_flags(config)


def read_flags(path):
    """The JSON object in config.json or results.json, which has the flags of a script."""
    try:
        content = json.loads(path.read_text())
        return content | {"flags": dict(content["flags"])}
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path}: expected an object with flags ({first_line(error)})") from error


def checkpoints(run):
    """All complete checkpoints of a run -> list of (step, directory), oldest first."""
    found = {path.name.removeprefix("step-"): path for path in Path(run).glob("checkpoints/step-*")}
    return sorted((int(step), path) for step, path in found.items() if step.isdigit())
