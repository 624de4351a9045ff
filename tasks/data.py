"""Load questions and reference answers as problems, from a data set by name or from a file.

Hub data sets and local files have the same row format.
"""

import collections
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path

from engine.tokens import split_answer
from runtime.cli import InputError, as_input_error, require, say
from runtime.files import FORMATS, read_rows, table_rows
from tasks import toy
from tasks.verifiers import VERIFIERS


@dataclass(frozen=True)
class Problem:
    question: str  # q, with the options of a multiple-choice question as lines "A: ..."
    reference: str  # a*, as the data set has it, without white space at its ends
    verifier: str = "math"  # how answers are verified: a name in verifiers.VERIFIERS
    others: tuple[str, ...] = ()  # what else would be right as well, in other words

    @property
    def references(self):
        """All that the data set has, each once. An answer is right if it is one of them."""
        return (self.reference, *self.others)


TOY = ("toy", "toy-test")  # made by toy.py
HUB = {  # name: data set on the Hugging Face hub
    # training
    "math7.5k": "DigitalLearningGmbH/MATH-lighteval:train",
    "webinstruct": "TIGER-Lab/WebInstruct-verified:train",  # see beyond_mathematics
    # evaluation
    "math500": "math-ai/math500:test",
    "amc23": "math-ai/amc23:test",
    "aime24": "math-ai/aime24:test",
    "aime25": "math-ai/aime25:test",
    "mmlu-pro": "TIGER-Lab/MMLU-Pro:test",
    "supergpqa": "m-a-p/SuperGPQA:train",
}
# OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME/CONFIG:SPLIT
HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:/(\w[\w.-]*))?(?::(.+))?")


def load_problems(name_or_path, limit=None, verifier=None):
    """Load a data set -> list[Problem], only the first `limit` if it is given. The data set is a
    name in TOY or HUB, a local .jsonl, .json or .parquet file, or the id of another one on the hub.

    Columns: `question` or `problem`; `answer`, one or a list of which each is right, or `solution`
    with a box; `options` for multiple choice, whose answer is a letter (in `answer_letter`, if the
    row has it); `verifier`, a name in VERIFIERS. Rows that name no verifier get "letter" if they
    have options, else the one given, or "math" from the hub and "text" from a file. Rows without a
    usable question, reference and verifier are left out and counted. Raises InputError if no row is
    left.
    """
    name = str(name_or_path)
    rows, default = load_rows(name, verifier)
    require(rows, f"{name} has no rows")
    problems, left_out = [], collections.defaultdict(list)  # {reason: row numbers}
    for number, row in enumerate(rows, start=1):
        try:
            problems.append(to_problem(row, default))
        except InputError as reason:
            left_out[str(reason)].append(number)
    counts = [f"{why} ({len(at)} of {len(rows)}: rows {at[:3]})" for why, at in left_out.items()]
    columns = f"the columns are {', '.join(rows[0])}"
    require(problems, f"{name}: no row can be used; {'; '.join(counts)}; {columns}")
    for count in counts:
        say(f"{name}: left out: {count}")
    if several := sum(len(problem.references) > 1 for problem in problems):
        say(f"{name}: {several} of {len(rows)} answers are lists: one of the list is enough")
    return problems[:limit]


def in_epochs(rows, count, seed):
    """The first `count` rows of endless epochs, each of which has a random order of its own. The
    result depends only on the seed, so that a run can be resumed at any step."""
    epochs = range(math.ceil(count / len(rows)))
    orders = [random.Random(f"{seed} {epoch}").sample(rows, len(rows)) for epoch in epochs]
    return [row for order in orders for row in order][:count]


def load_rows(name, verifier):
    """-> the rows of a data set, and the verifier of those that name none."""
    hub_id, path = HUB_ID.fullmatch(HUB.get(name, name)), Path(name)
    is_file = path.exists() or path.suffix.lower() in FORMATS
    if name in TOY:
        return toy.rows(name), verifier or "math"
    if name in HUB or (hub_id and not is_file):
        rows = hub_rows(*hub_id.groups())
        rows = [row for row in rows if name != "webinstruct" or beyond_mathematics(row)]
        return rows, verifier or "math"
    require(is_file, f"{name}: neither a file nor one of {', '.join([*TOY, *HUB])}, OWNER/NAME")
    rows = read_rows(path)
    if not verifier and any(not (row.get("verifier") or row.get("options")) for row in rows):
        say(f"{name}: answers are verified as text; --verifier math reads formulas")
    return rows, verifier or "text"


def hub_rows(path, config, split):
    import datasets

    with as_input_error(f"cannot load {path} from the Hugging Face hub"):
        rows = datasets.load_dataset(path, config, split=split or "train")
    return table_rows(rows.with_format("arrow")[:])


def beyond_mathematics(row):
    """Whether a row is in the paper's part of WebInstruct-verified (about 50K rows): university
    level, any subject except mathematics."""
    return row["category"] != "Mathematics" and row["difficulty"] == "University"


def to_problem(row, verifier):
    """One row -> Problem, with this verifier if the row names none. InputError says why the row
    cannot be used, in the same words for all rows of which that is true."""
    question, options = row.get("question") or row.get("problem"), row.get("options")
    require(isinstance(question, str) and question.strip(), "no question (`question`, `problem`)")
    references = find_references(row)
    if options:
        question, verifier = with_options(question, options, references), "letter"
    # These are valid in JSON, but not in UTF-8, and no tokenizer takes them.
    texts = "".join([question, *references])
    require(not re.search("[\ud800-\udfff]", texts), "a lone surrogate in the text")
    verifier = row.get("verifier") or verifier
    require(verifier in VERIFIERS, f"no verifier {verifier!r}, only {', '.join(VERIFIERS)}")
    return Problem(question, references[0], verifier, tuple(references[1:]))


def find_references(row):
    """The distinct references of a row, at least one. A list holds several people's answers, or
    several wordings."""
    answer = (row.get("options") and row.get("answer_letter")) or row.get("answer")
    answers = answer if isinstance(answer, list) and answer else [answer]
    return list(dict.fromkeys(find_reference(row, each) for each in answers))


def find_reference(row, answer):
    """A reference verbatim, except that numbers become text, and that white space at its ends and a
    box around all of it are taken off. It is in the row's solution if there is no answer."""
    in_solution = answer in (None, "")
    text = as_text(row.get("solution") if in_solution else answer) or ""
    text = text.rsplit("\n#### ")[-1].strip()  # GSM8K writes its working before this mark
    box = split_answer(text)
    if in_solution or (box and text == rf"\boxed{{{box[1]}}}"):
        text = box[1].strip() if box else ""
    require(text, "no reference (`answer` as text or number, or `solution` with a box)")
    whole = split_answer(rf"\boxed{{{text}}}") == (len(r"\boxed"), text)
    require(whole, "the reference holds another box, or unmatched braces")
    return text


def with_options(question, options, references):
    """The question with its options as lines "A: ...". A reference is the letter of one."""
    require(isinstance(options, list) and len(options) <= 26, "no list of at most 26 options")
    by_letter = dict(zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", map(as_text, options)))
    require(None not in by_letter.values(), "an option is neither text nor a finite number")
    require({*references} <= {*by_letter}, "the answer is not the letter of an option")
    return "\n".join([question, *(f"{letter}: {text}" for letter, text in by_letter.items())])


def as_text(value):
    """Text as it is, and a finite number as text: 27.0 as "27", since a column of integers with a
    gap is often stored as floats. None for anything else, such as nan, True or a list."""
    if type(value) in (int, float) and abs(value) < math.inf:
        return str(value).removesuffix(".0")
    return value if isinstance(value, str) else None
