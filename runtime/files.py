"""Read and write the files of runs. Does not import torch."""

import fcntl
import io
import json
import shutil
from collections import Counter
from hashlib import sha256
from pathlib import Path

from runtime.cli import InputError, as_input_error, for_shell, is_rank_0, message_of, require, say

LOGS = "metrics.jsonl", "samples.jsonl", "evaluations.jsonl"  # of a run, only appended to


def read_rows(path: str | Path, parse=None, needed=()) -> list[dict]:
    """The rows of a file -> list of dicts. parse: what makes them of the path; without it they are
    lines of JSON, as in the logs of a run. needed: the columns that each must have. InputError
    names the first bad row."""
    path, rows = Path(path), []
    require(path.is_file(), f"{path}: {'a directory' if path.is_dir() else 'no such file'}")
    try:
        for row in (parse or json_rows)(path):
            require(isinstance(row, dict), f"expected objects with named columns, got {row!r:.40}")
            require({*needed} <= row.keys(), f"expected the columns {', '.join(needed)}")
            # A byte of another encoding is a lone surrogate by now. No tokenizer takes it.
            with as_input_error("a character is not UTF-8: save the file as UTF-8"):
                json.dumps(row, ensure_ascii=False, default=str).encode()
            rows.append(row)
    except Exception as error:  # libraries raise errors of many types
        ours = isinstance(error, InputError)
        problem = error if ours else f"expected objects with named columns ({message_of(error)})"
        raise InputError(f"{path}, row {len(rows) + 1}: {problem}") from error
    return rows


def read_text(path):
    """What a file says, also in UTF-16, as Windows writes. A bad byte stays in its row."""
    content = path.read_bytes()
    text = content.decode(json.detect_encoding(content), "surrogateescape")
    require("\0" not in text, "the file is not text: save a workbook as .csv, in UTF-8")
    return text


def json_rows(path, parse_float=float):
    """The rows of a file of JSON, of one list or of a row a line. parse_float: what reads a number
    that is no integer."""
    text = read_text(path)
    parse = json.JSONDecoder(parse_float=parse_float, object_pairs_hook=to_row).decode
    if text.lstrip().startswith("["):  # the file is one list
        return parse(text)
    return map(parse, filter(str.strip, text.split("\n")))


def to_row(pairs):
    """A dict of these (name, value) pairs. If a name stood twice, a value would be lost. Columns
    without a name are not used."""
    for name, count in Counter(name for name, _ in pairs).items():
        require(count == 1 or not name, f"two columns for {name!r}: rename or remove one")
    return dict(pairs)


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
