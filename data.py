r"""Text: the problems, the prompt, and the cut of a completion into solution and answer.

A question q is answered by a solution s and then a boxed answer a: "... so it is \boxed{a}".
Everything here is plain text (no torch). One row format serves hub data sets and local files alike,
so a file with a hub data set's columns behaves like that data set.
"""

import argparse
import errno
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


class InputError(Exception):
    """Something the user gave is wrong. The message is one line: what, where, and what would be
    right."""


class HelpWithDefaults(argparse.HelpFormatter):
    def _get_help_string(self, action):
        none = any(action.default is value for value in (None, False, argparse.SUPPRESS))
        return action.help + " (default: %(default)s)" * (not none)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line too, and whose help names the defaults."""

    def __init__(self, **options):
        super().__init__(formatter_class=HelpWithDefaults, **options)

    def error(self, message):
        raise InputError(f"{message} (see --help)")


def first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0]


def require(condition, message):
    if not condition:
        raise InputError(message)


def require_ranges(args, counts, prefix=""):
    """The range checks of both scripts: counts (names of flags) and the sampling settings."""
    for name in counts:
        flag, value = f"--{name.replace('_', '-')}", getattr(args, name)
        require(value is None or value >= 1, f"{flag} must be at least 1, got {value}")
    flag, settings = f"--{prefix.replace('_', '-')}", vars(args)
    temperature, top_p, top_k = (settings[prefix + s] for s in ("temperature", "top_p", "top_k"))
    require(temperature >= 0, f"{flag}temperature must be 0 or more, got {temperature}")
    require(0 < top_p <= 1, f"{flag}top-p must be in (0, 1], got {top_p}")
    require(top_k >= 0, f"{flag}top-k must be 0 (all) or more, got {top_k}")


def require_writable(out):
    """The directory of a run must be one that can be made or written to; nothing is made yet."""
    existing = next(path for path in [out, *out.parents] if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        what = f"--out {out}: {existing} is not a directory that can be written to"
        raise InputError(f"{what} ({error.strerror})") from error


def write_whole(path, text):
    """Write beside and rename: a crash leaves the old file or the new one, never half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def run_script(main):
    """Run a script's main(): an InputError, or a full disk, becomes one line on stderr and exit
    code 2, without a traceback; Ctrl-C ends it without one too."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # not a line for every retry
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (InputError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOSPC:
            raise
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # Mostly all ranks meet the same error, and rank 0 says so; torchrun then ends the
            # others while they wait here. Who is still there after that is the only one to know.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(8)
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


# ----------------------------------------------------------------------------------------- problems


@dataclass(frozen=True)
class Problem:
    question: str  # q, with the options of a multiple-choice question as lines "A: ..."
    reference: str  # a*, letter for letter as the data set has it
    kind: str = "math"  # how its answers are verified: "math", "letter" or "toy" (rewards.py)


def hub_rows(path, split, keep=None):
    """The rows of a data set on the Hugging Face hub; keep(row) says which."""
    import datasets

    try:
        rows = datasets.load_dataset(path, split=split)
    except Exception as error:  # a door: the library raises a dozen kinds
        raise InputError(
            f"cannot load {path} from the Hugging Face hub ({first_line(error)}); "
            "a local .jsonl, .json or .parquet file works too: --dataset FILE"
        ) from error
    return filter(keep, rows)


def beyond_mathematics(row):
    """The paper's cut of WebInstruct-verified: university level, any subject but mathematics (about
    50K)."""
    return row["category"] != "Mathematics" and row["difficulty"] == "University"


@dataclass(frozen=True)
class Source:
    """A data set by name."""

    rows: Callable  # () -> iterable of dicts
    runs: int = 16  # samples of each question in the paper's evaluation
    kind: str = "math"


SOURCES = {
    # training
    "math7.5k": Source(lambda: hub_rows("DigitalLearningGmbH/MATH-lighteval", "train")),
    "webinstruct": Source(
        lambda: hub_rows("TIGER-Lab/WebInstruct-verified", "train", beyond_mathematics)
    ),
    # evaluation
    "math500": Source(lambda: hub_rows("math-ai/math500", "test")),
    "amc23": Source(lambda: hub_rows("math-ai/amc23", "test")),
    "aime24": Source(lambda: hub_rows("math-ai/aime24", "test")),
    "aime25": Source(lambda: hub_rows("math-ai/aime25", "test")),
    "mmlu-pro": Source(lambda: hub_rows("TIGER-Lab/MMLU-Pro", "test"), runs=1),
    "supergpqa": Source(lambda: hub_rows("m-a-p/SuperGPQA", "train"), runs=1),
}  # toy.py adds "toy" and "toy-test"


def load_problems(name_or_path, limit=None):
    """The problems of a data set by name (SOURCES) or of a local .jsonl, .json or .parquet file ->
    list[Problem].

    Columns: `question` or `problem`; `answer`, or `solution` with a box; `options` for multiple
    choice, whose answer is a letter (`answer_letter` where there is one). Rows without a usable
    question and reference are left out and counted in a log line. `limit` keeps the first that
    many. Raises InputError if the source is unknown, unreadable, lacks the columns, or has no
    usable row.
    """
    path = Path(name_or_path)
    kind = "math"
    if name_or_path in SOURCES:
        rows, kind = SOURCES[name_or_path].rows(), SOURCES[name_or_path].kind
    elif path.is_file():
        rows = read_file(path)
    elif path.suffix in READERS or len(path.parts) > 1:
        raise InputError(f"no such file: {path}")
    else:
        raise InputError(
            f"unknown data set '{name_or_path}': neither a file nor one of {', '.join(SOURCES)}"
        )

    problems, columns, total = [], set(), 0
    for row in rows:
        total += 1
        columns.update(row)
        problem = to_problem(row, kind)
        if problem is not None:
            problems.append(problem)
        if len(problems) == limit:
            break
    if total == 0:
        raise InputError(f"{name_or_path}: the data set is empty")
    for meaning, names in ("question", ("question", "problem")), ("answer", ("answer", "solution")):
        if not columns.intersection(names):
            wanted, present = " or ".join(names), ", ".join(sorted(columns))
            raise InputError(
                f"{name_or_path}: no {meaning} column ({wanted}); columns present: {present}"
            )
    if not problems:
        raise InputError(
            f"{name_or_path}: none of the {total} rows has a question and a usable reference"
        )
    if len(problems) < total:
        logger.warning(
            "%s: left out %d of %d rows without a usable question and reference",
            *(name_or_path, total - len(problems), total),
        )
    return problems


def to_problem(row, kind):
    """One row -> Problem, or None if it has no usable question or reference. References are never
    stripped or rewritten; numbers become text."""
    question, options = row.get("question") or row.get("problem"), row.get("options")
    reference = (row.get("answer_letter") if options else None) or row.get("answer")
    if reference in (None, "") and is_text(row.get("solution")):
        found = split_answer(row["solution"])
        reference = found and found[1]
    if isinstance(reference, float) and reference.is_integer():
        reference = int(reference)  # a column of integers with a gap holds floats
    is_number = isinstance(reference, int | float) and not isinstance(reference, bool)
    if is_number and reference == reference:  # not nan
        reference = str(reference)
    if not is_text(question) or not is_text(reference):
        return None
    if not options:
        return Problem(question, reference, kind)
    if not isinstance(options, list):
        return None
    by_letter = dict(zip("ABCDEFGHIJ", options))  # the paper shows at most 10 options
    if reference not in by_letter:
        return None
    lines = [f"{letter}: {option}" for letter, option in by_letter.items()]
    return Problem("\n".join([question, *lines]), reference, kind="letter")


def is_text(value):
    """Not blank, and without the half characters that JSON can spell and UTF-8 cannot."""
    return (
        isinstance(value, str) and bool(value.strip()) and not re.search("[\ud800-\udfff]", value)
    )


def read_jsonl(path):
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield parse_json(line, f"{path}, line {number}")


def read_json(path):
    rows = parse_json(path.read_text(encoding="utf-8"), path, kind=list)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(
                f"{path}, row {number}: expected an object with named columns, found {row!r:.40}"
            )
    return rows


def read_parquet(path):
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: not a readable parquet file ({error})") from error


def parse_json(text, where, kind=dict):
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, kind):
        expected = {dict: "an object with named columns", list: "a list of objects"}[kind]
        raise InputError(f"{where}: expected {expected}, found {text.strip():.40}")
    return value


READERS = {".jsonl": read_jsonl, ".json": read_json, ".parquet": read_parquet}


def read_file(path):
    if path.suffix not in READERS:
        raise InputError(f"{path}: expected a file that ends in {', '.join(READERS)}")
    try:
        yield from READERS[path.suffix](path)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error})") from error


# -------------------------------------------------------------------------------- prompt and answer

SYSTEM = "You are a helpful assistant."
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
LETTER_ONLY = " Please only provide the letter of the answer in the box."


def chat_messages(problem):
    """The paper's prompt for a problem, as chat messages."""
    user = f"{problem.question}\n{INSTRUCTION}" + (LETTER_ONLY if problem.kind == "letter" else "")
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]


def split_answer(text):
    r"""The last closed \boxed{...} of a text -> (offset of the brace that opens it, answer), or
    None.

    >>> split_answer(r"so \boxed{\frac{1}{2}}.")
    (9, '\\frac{1}{2}')

    Braces nest; an escaped brace (`\{`, `\}`) is a symbol and neither opens nor closes. A box that
    never closes is passed over for an earlier one that does. The answer is not stripped: " 14 " is
    not "14".
    """
    found = None
    opened = []  # the braces not yet closed, as (offset, whether it opens a box)
    for mark in BRACES.finditer(text):
        if mark[0] == "}":
            offset, is_box = opened.pop() if opened else (0, False)
            if is_box and (found is None or offset > found[0]):
                found = offset, text[offset + 1 : mark.start()]
        elif mark[0].endswith("{") and mark[0] != r"\{":
            opened.append((mark.end() - 1, mark[0] != "{"))
    return found


# The box, any other escape, a plain brace.
BRACES = re.compile(r"\\boxed\{|\\(?!\\boxed\{).|[{}]", re.DOTALL)
