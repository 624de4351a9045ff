"""Read and write the files of runs and data sets. Does not import torch."""

import json
import os
from pathlib import Path

from engine.cli import InputError, first_line, require

FORMATS = (".jsonl", ".json", ".parquet")


def read_rows(path):
    """The rows of a .jsonl, .json or .parquet file -> list of dicts. Values are not converted,
    because readers that guess types turn "014" into 14. InputError names the first bad row."""
    path = Path(path)
    rows = []
    formats = ", ".join(FORMATS)
    require(path.suffix in FORMATS, f"{path}: expected a file that ends in {formats}")
    require(path.is_file(), f"{path}: no such file")
    try:
        for row in raw_rows(path):
            rows.append(dict(row))
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise InputError(
            f"{path}, row {len(rows) + 1}: expected objects with named columns, in a .jsonl, .json "
            f"or .parquet file ({first_line(error)})"
        ) from error
    return rows


def raw_rows(path):
    if path.suffix == ".parquet":
        import pyarrow.parquet  # imported here, because the other formats do not need it

        yield from pyarrow.parquet.read_table(path).to_pylist()
    elif path.suffix == ".json":
        yield from json.loads(path.read_text(encoding="utf-8"))
    else:
        with open(path, encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.strip())


def write_atomically(path, text):
    """Write beside path, then rename. A crash leaves the old file or the new one, never half."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def append_rows(path, rows):
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def keep_steps_before(first_step, path):
    """Keep only the steps before first_step in a log. A crash may have left half a line."""
    text = path.read_text() if path.exists() else ""
    write_atomically(path, text[: text.rfind("\n") + 1])
    kept = [row for row in read_rows(path) if row["step"] < first_step]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))


def read_flags(run):
    """The flags of a run, from its config.json."""
    run = Path(run)
    require(run.is_dir(), f"{run}: no such directory")
    path = run / "config.json"
    require(path.is_file(), f"{run} is not a run: it has no config.json")
    try:
        return dict(json.loads(path.read_text())["flags"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path} is not the configuration of a run ({first_line(error)})"
        ) from error


def checkpoints(run):
    """All complete checkpoints of a run -> list of (step, directory), oldest first."""
    found = {path.name.removeprefix("step-"): path for path in Path(run).glob("checkpoints/step-*")}
    return sorted((int(step), path) for step, path in found.items() if step.isdigit())
