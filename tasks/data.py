"""Load questions and reference answers as problems, from a data set by name or from a file.

Hub data sets and local files have the same row format.
"""

import math
import random
import re
from dataclasses import dataclass
from pathlib import Path

from engine.cli import InputError, first_line, require, say
from engine.files import FORMATS, read_rows
from engine.tokens import split_answer
from tasks import toy
from tasks.verifiers import VERIFIERS


@dataclass(frozen=True)
class Problem:
    question: str  # q, with the options of a multiple-choice question as lines "A: ..."
    reference: str  # a*, verbatim as the data set has it
    verifier: str = "math"  # how answers are verified: a name in verifiers.VERIFIERS


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


def load_problems(name_or_path, limit=None, verifier=None):
    """Load a data set by name (TOY, HUB) or from a local .jsonl, .json or .parquet file ->
    list[Problem], only the first `limit` if it is given.

    Columns: `question` or `problem`; `answer`, or `solution` with a box; `options` for multiple
    choice, whose answer is a letter (in `answer_letter`, if the row has it); `verifier`, a name in
    VERIFIERS. Rows that name no verifier get the one given, or "math" from the hub and "text" from
    a file. Rows without a usable question and reference are left out and counted. Raises InputError
    if none is left.
    """
    name, default = str(name_or_path), verifier or "math"
    if name in TOY:
        rows = toy.rows(name)
    elif name in HUB:
        rows = hub_rows(name)
    else:
        exists = Path(name).is_file()
        require(exists, f"{name}: neither a file nor one of {', '.join([*TOY, *HUB])}")
        rows, default = read_rows(name), verifier or "text"
        if not verifier and any(not row.get("verifier") for row in rows):
            say(f"{name}: answers are verified as text; --verifier math reads formulas")
    problems, left_out = [], []
    for number, row in enumerate(rows, start=1):
        try:
            problems.append(to_problem(row, default))
        except InputError as reason:
            left_out.append(f"row {number}: {reason}")
    reasons = f"{name}: left out {len(left_out)} of {len(rows)} rows ({'; '.join(left_out[:3])})"
    require(rows, f"{name} has no rows")
    require(problems, f"{reasons}. None is left; the columns are {', '.join(rows[0])}")
    if left_out:
        say(reasons)
    if blank := sum(problem.reference != problem.reference.strip() for problem in problems):
        say(f"{name}: references with whitespace at an end, which is part of a*: {blank}")
    return problems[:limit]


def in_epochs(rows, count, seed):
    """The first `count` rows of endless epochs, each of which has a random order of its own. The
    result depends only on the seed, so that a run can be resumed at any step."""
    epochs = range(math.ceil(count / len(rows)))
    orders = [random.Random(f"{seed} {epoch}").sample(rows, len(rows)) for epoch in epochs]
    return [row for order in orders for row in order][:count]


def hub_rows(name):
    import datasets

    path, split = HUB[name]
    try:
        rows = datasets.load_dataset(path, split=split)
    except Exception as error:  # the library raises errors of many types
        problem = f"cannot load {path} from the Hugging Face hub ({first_line(error)})"
        local = f"a local file works too ({', '.join(FORMATS)}): --dataset FILE"
        raise InputError(f"{problem}; {local}") from error
    return [row for row in rows if name != "webinstruct" or beyond_mathematics(row)]


def beyond_mathematics(row):
    """Whether a row is in the paper's part of WebInstruct-verified (about 50K rows): university
    level, any subject except mathematics."""
    return row["category"] != "Mathematics" and row["difficulty"] == "University"


def to_problem(row, verifier):
    """One row -> Problem, with this verifier if the row names none. InputError says what the row
    lacks. References are never stripped or rewritten, but numbers become text, and a box around
    the whole reference is taken off."""
    question, options = row.get("question") or row.get("problem"), row.get("options")
    reference = (row.get("answer_letter") if options else None) or row.get("answer")
    if isinstance(reference, float) and reference.is_integer():
        reference = int(reference)  # integers are often stored as floats if a value is missing
    if type(reference) in (int, float) and reference == reference:  # neither a bool nor nan
        reference = str(reference)
    in_solution = reference in (None, "")
    text = row.get("solution") if in_solution else reference
    box = is_text(text) and split_answer(text)
    if box and (in_solution or text.strip() == rf"\boxed{{{box[1]}}}"):
        reference = box[1]
    require(is_text(question), "no question (`question` or `problem`)")
    require(is_text(reference), "no reference (`answer`, or `solution` with a box)")
    whole = split_answer(rf"\boxed{{{reference}}}") == (len(r"\boxed"), reference)
    require(whole, f"the reference {reference!r} cannot be boxed: check its braces")
    verifier, known = row.get("verifier") or ("letter" if options else verifier), list(VERIFIERS)
    require(verifier in known, f"the verifier {verifier!r} is not one of {', '.join(known)}")
    if not options:
        return Problem(question, reference, verifier)
    by_letter = dict(zip("ABCDEFGHIJ", options)) if isinstance(options, list) else {}  # at most 10
    require(reference in by_letter, "the answer is not the letter of an option")
    lines = [f"{letter}: {option}" for letter, option in by_letter.items()]
    return Problem("\n".join([question, *lines]), reference, verifier)


def is_text(value):
    """Whether value is non-blank text without lone surrogates (valid in JSON, but not in UTF-8)."""
    return isinstance(value, str) and value.strip() and not re.search("[\ud800-\udfff]", value)
