"""Read and write the files of runs and data sets. Does not import torch."""

import json
import os
from pathlib import Path

import pyarrow.parquet

from engine.cli import InputError, first_line, require

FORMATS = (".jsonl", ".json", ".parquet")


def read_rows(path):
    """The rows of a .jsonl, .json or .parquet file -> list of dicts. Values are not converted,
    because readers that guess types turn "014" into 14. InputError names the first bad row."""
    path, rows = Path(path), []
    require(path.suffix in FORMATS, f"{path}: expected a file that ends in {', '.join(FORMATS)}")
    require(path.is_file(), f"{path}: no such file")
    try:
        if path.suffix == ".parquet":
            source = pyarrow.parquet.read_table(path).to_pylist()
        elif path.suffix == ".json":
            source = json.loads(path.read_text(encoding="utf-8"))
        else:
            lines = path.read_text(encoding="utf-8").split("\n")
            source = (json.loads(line) for line in lines if line.strip())
        for row in source:
            rows.append(dict(row))
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise InputError(
            f"{path}, row {len(rows) + 1}: expected objects with named columns, in a .jsonl, .json "
            f"or .parquet file ({first_line(error)})"
        ) from error
    return rows


def write_atomically(path, text):
    """Write beside path, then rename. A crash leaves the old file or the new one, never half."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def append_rows(path, rows):
    """Append rows as JSON. JSON has no nan and no infinity, so these become null."""
    with open(path, "a") as file:
        for row in rows:
            finite = json.loads(json.dumps(row), parse_constant=lambda name: None)
            file.write(json.dumps(finite) + "\n")


def keep_steps_before(first_step, path):
    """Keep only the steps before first_step in a log. A crash may have left half a line."""
    text = path.read_text() if path.exists() else ""
    write_atomically(path, text[: text.rfind("\n") + 1])
    kept = [row for row in read_rows(path) if row["step"] < first_step]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))


def read_flags(run):
    """The flags of a run, from its config.json."""
    path = Path(run) / "config.json"
    require(Path(run).is_dir(), f"{run}: no such directory")
    require(path.is_file(), f"{run} is not a run: it has no config.json")
    try:
        return dict(json.loads(path.read_text())["flags"])
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path} is not the configuration of a run ({first_line(error)})"
        ) from error


def checkpoints(run):
    """All complete checkpoints of a run -> list of (step, directory), oldest first."""
    found = {path.name.removeprefix("step-"): path for path in Path(run).glob("checkpoints/step-*")}
    return sorted((int(step), path) for step, path in found.items() if step.isdigit())
