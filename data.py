r"""Text: the problems, the prompt, and the cut of a completion into solution and answer.

A question q is answered by a solution s and then a boxed answer a: "... so it is \boxed{a}".
One row format serves hub data sets and local files alike, so a file with a hub data set's columns
behaves like that data set. This file needs no torch.
"""

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet

logger = logging.getLogger(__name__)


class InputError(Exception):
    """Something the user gave is wrong. The message is one line: what, where, and what would be
    right."""


def require(condition, message):
    if not condition:
        raise InputError(message)


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ----------------------------------------------------------------------------------------- problems


@dataclass(frozen=True)
class Problem:
    question: str  # q, with the options of a multiple-choice question as lines "A: ..."
    reference: str  # a*, letter for letter as the data set has it
    kind: str = "math"  # how its answers are verified: "math", "letter" or "toy" (rewards.py)


TOY = ("toy", "toy-test")  # made by toy.py
HUB = {  # name: (data set on the Hugging Face hub, split)
    # training
    "math7.5k": ("DigitalLearningGmbH/MATH-lighteval", "train"),
    "webinstruct": ("TIGER-Lab/WebInstruct-verified", "train"),  # see beyond_mathematics
    # evaluation
    "math500": ("math-ai/math500", "test"),
    "amc23": ("math-ai/amc23", "test"),
    "aime24": ("math-ai/aime24", "test"),
    "aime25": ("math-ai/aime25", "test"),
    "mmlu-pro": ("TIGER-Lab/MMLU-Pro", "test"),
    "supergpqa": ("m-a-p/SuperGPQA", "train"),
}


def beyond_mathematics(row):
    """The paper's cut of WebInstruct-verified: university level, any subject but mathematics (about
    50K)."""
    return row["category"] != "Mathematics" and row["difficulty"] == "University"


def load_problems(name_or_path, limit=None):
    """The problems of a data set by name (TOY, HUB) or of a local .jsonl, .json or .parquet file ->
    list[Problem]; with a limit the first so many.

    Columns: `question` or `problem`; `answer`, or `solution` with a box; `options` for multiple
    choice, whose answer is a letter (`answer_letter` where there is one). Rows without a usable
    question and reference are left out and counted. InputError if nothing is left.
    """
    name = str(name_or_path)
    if name in TOY:
        import toy  # here and not above: it needs torch

        rows = toy.rows(name)
    else:
        known = name in HUB or Path(name).is_file()
        require(known, f"{name}: neither a file nor one of {', '.join([*TOY, *HUB])}")
        rows = hub_rows(name) if name in HUB else read_rows(Path(name))
    kind = "toy" if name in TOY else "math"
    problems = [problem for row in rows if (problem := to_problem(row, kind)) is not None]
    if not problems:
        raise InputError(
            f"{name}: no row has a question (`question` or `problem`) and a reference (`answer`, "
            f"or `solution` with a box); columns of the first row: {', '.join([*rows, {}][0])}"
        )
    if len(problems) < len(rows):
        left_out = len(rows) - len(problems)
        logger.warning("%s: left out %d of %d unusable rows", name, left_out, len(rows))
    return problems[:limit]


def hub_rows(name):
    import datasets

    path, split = HUB[name]
    try:
        rows = datasets.load_dataset(path, split=split)
    except Exception as error:  # the library raises a dozen kinds
        raise InputError(
            f"cannot load {path} from the Hugging Face hub ({first_line(error)}); "
            "a local .jsonl, .json or .parquet file works too: --dataset FILE"
        ) from error
    return [row for row in rows if name != "webinstruct" or beyond_mathematics(row)]


READERS = {
    ".jsonl": lambda path: map(json.loads, filter(str.strip, open(path, encoding="utf-8"))),
    ".json": lambda path: json.loads(path.read_text(encoding="utf-8")),
    ".parquet": lambda path: pyarrow.parquet.read_table(path).to_pylist(),
}


def read_rows(path):
    """The rows of a local file -> list of dicts; a run's own logs are such files too. Values stay
    as they are: readers that guess types turn "014" into 14."""
    rows = []
    try:
        for row in READERS.get(path.suffix, READERS[".jsonl"])(path):
            rows.append(dict(row))
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise InputError(
            f"{path}, row {len(rows) + 1}: expected a .jsonl, .json or .parquet file of objects "
            f"with named columns ({first_line(error)})"
        ) from error
    return rows


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
    if type(reference) in (int, float) and reference == reference:  # neither a bool nor nan
        reference = str(reference)
    if not is_text(question) or not is_text(reference):
        return None
    if not options:
        return Problem(question, reference, kind)
    if not isinstance(options, list):
        return None
    by_letter = dict(zip("ABCDEFGHIJ", options))  # the authors show at most 10 options
    if reference not in by_letter:
        return None
    lines = [f"{letter}: {option}" for letter, option in by_letter.items()]
    return Problem("\n".join([question, *lines]), reference, kind="letter")


def is_text(value):
    """Not blank, and without the half characters that JSON can spell and UTF-8 cannot."""
    return isinstance(value, str) and value.strip() and not re.search("[\ud800-\udfff]", value)


# -------------------------------------------------------------------------------- prompt and answer

# The prompt of the paper's authors (it is in their code, not in the paper).
SYSTEM = "You are a helpful assistant."
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
LETTER_ONLY = " Please only provide the letter of the answer in the box."


def chat_messages(problem):
    """The prompt for a problem, as chat messages."""
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
