"""Load questions and reference answers as problems, from a data set by name or from a file.

Hub data sets and local files have the same row format.
"""

import dataclasses
import json
import math
import random
import re
import unicodedata
from decimal import Decimal
from pathlib import Path

from engine.tokens import split_answer
from runtime.cli import InputError, as_input_error, require, say
from runtime.files import to_row
from tasks import toy
from tasks.tables import FORMATS, read_table, table_rows, to_decimal
from tasks.verifiers import VERIFIERS, accepts, letter_in, plain_text


@dataclasses.dataclass(frozen=True)
class Problem:
    question: str  # q, with the options of a multiple-choice question as lines "A: ..."
    reference: str  # a*, as the data set has it, but tidy
    verifier: str = "math"  # how answers are verified: a name in verifiers.VERIFIERS
    others: tuple[str, ...] = ()  # what else would be right as well, in other words
    document: str = ""  # which text it is about: questions about one text are not independent
    examples: tuple["Problem", ...] = ()  # worked ones, whose solutions are their references

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
NAMES = ", ".join([*TOY, *HUB])
# OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME/CONFIG:SPLIT
HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:/(\w[\w.-]*))?(?::(.+))?")
# Other names of columns. The context is the text that a question is about.
SAME = {"problem": "question", "choices": "options", "passage": "context", "article": "context"}
COLUMNS = {"answer", "solution", "answer_letter", "verifier", "document", *SAME, *SAME.values()}
# What is no value: no text, or what pandas and spreadsheets write. ("None" or "NA" may be right.)
MISSING = re.compile(r"^\s*(-?nan|-?NaN|NaT|<NA>|#NA|#N/A( N/A)?|#[A-Z/0]+[!?]|Err:\d{3})?\s*$")
# A list, dict, tuple or array of texts as Python writes it. ("[1, 2]" and "{1, 2}" may be right.)
CONTAINER = re.compile(r"""(?s)[\[{][\[{(\s]*["'].*[\]}]|\(["'].*["'],.*\)|(\w+\.)?array\(.*\)""")

# Where \frac and \boxed were written in JSON with a single backslash, a form feed and a backspace
# are left of it, which no text has. A tab or a line end may be left of \text or \neq, and (Python
# reads these so, and data sets of the hub have them) a bell or a vertical tab of \alpha or \vec.
# These are the characters as JSON writes them, after pairs of other backslashes.
EATEN = re.compile(r"(?<!\\)(\\\\)*\\[fb]")
MAYBE_EATEN = re.compile(
    r"(?<!\\)(\\\\)*(\\u00(07|0b)[a-z]+|\\t(ext[a-z]*|imes|heta|anh?|au|op?|riangle|frac)\b(?!\\t)"
    r'|(?<=[ $"(])(\\n(eq|u|abla|eg|otin|atural|mid|leq|geq)|\\r(ight[a-z]*|ho|angle|m))\b)'
)
# An option that is a number, alone ("2", "$2.0$") or before other text ("2) iron", "2 m").
NUMBER = re.compile(r"(?s)[^\w.−-]*(-?\d+(?:\.\d+)?)(?:\W*|[:.)]?\s.*)")


def load_problems(name_or_path, limit=None, verifier=None, convert=None) -> list[Problem]:
    """Load a data set -> list[Problem], only the first `limit` if it is given. The data set is a
    name in TOY or HUB, a local .jsonl, .json, .parquet or .csv file, or the id of another one on
    the hub.

    Columns: `question` or `problem`; `context`, `passage` or `article`, which come before it;
    `answer`, one or a list of which each is right, or `solution` with a box; `options` or `choices`
    for multiple choice, whose answer names one of them (`answer_letter`, if the row has it);
    `verifier`, a name in VERIFIERS; `document`, the name of the text that the question is about.
    Rows that name no verifier get "letter" if they have options, else the one given, or "math" from
    the hub and "text" from a file.

    Rows without a usable question, reference and verifier are left out and counted. Raises
    InputError if no row is left. What may surprise about the rows is said in lines. convert: what
    makes a Problem of a row and a verifier, or raises InputError, in place of to_problem.
    """
    name = str(name_or_path)
    rows, default = load_rows(name)
    require(rows, f"{name} has no rows")
    problems, left_out, surprising = [], {}, {}  # {reason: row numbers}, {what: examples}
    for row_number, row in enumerate(rows, start=1):
        # Where tables were put together, each brings its header, maybe after a byte order mark.
        cells = {str(row[column]).strip(' \ufeff"').lower() for column in COLUMNS & row.keys()}
        is_header = len(cells) > 1 and cells <= {"", *COLUMNS} and cells & row.keys()
        require(not is_header, f"{name}, row {row_number} is a header again: expected one table")
        try:
            row = cells_of(row)
            text = json.dumps([row[column] for column in row if column in COLUMNS], default=str)
            escapes = r"a form feed or a backspace, as JSON reads \f and \b: write \\frac, \\boxed"
            require(not EATEN.search(text), escapes)
            problems.append((convert or to_problem)(row, verifier or default))
            for what, example in surprises(row, text):
                surprising.setdefault(what, []).append(f"row {row_number}: {example}")
        except InputError as reason:
            left_out.setdefault(str(reason), []).append(row_number)
    counts = [f"{why} ({len(at)} of {len(rows)}: rows {at[:3]})" for why, at in left_out.items()]
    columns = dict.fromkeys(column for row in rows for column in row)
    written = ", ".join(map(as_written, columns))
    require(problems, f"{name}: no usable row; {'; '.join(counts)}; columns: {written}")
    for count in counts:
        say(f"{name}: left out: {count}")
    for what, examples in surprising.items():
        say(f"{name}: {len(examples)} of {len(rows)} rows {what} ({examples[0]})")
    if unknown := [column for column in columns if column not in COLUMNS]:
        say(f"{name}: these columns are not used: {', '.join(map(as_written, unknown))}")
    if repeated := len(problems) - len({problem.question for problem in problems}):
        say(f"{name}: {repeated} rows repeat the question of another one, maybe with its answer")
    return problems[:limit]


def surprises(row, text):
    """Yield what may surprise about a row that can be used, and an example of it."""
    if eaten := MAYBE_EATEN.search(text):
        backslash = r"as JSON reads \t and \n: write \\text"
        yield f"may have a tab or a line end in place of a backslash, {backslash}", eaten[2]
    boxes, solution = [], as_text(row.get("solution")) or ""
    while box := split_answer(solution):
        boxes.insert(0, tidy(box[1]))
        solution = solution[: box[0] - len(r"\boxed")]
    if len({*boxes}) > 1 and not {"answer", "answer_letter"} & row.keys():
        yield "have several boxes in `solution`: the last is the reference", ", ".join(boxes)


def as_written(column):
    """The name of a column, with the one that is expected if only spaces or capitals differ."""
    meant = tidy(column).lower()
    return f"{column!r} (expected {meant!r})" if meant in COLUMNS - {column} else column or "''"


def in_epochs(rows, count, seed):
    """The first `count` rows of endless epochs, each of which has a random order of its own. The
    result depends only on the seed, so that a run can be resumed at any step."""
    epochs = range(math.ceil(count / len(rows)))
    orders = [random.Random(f"{seed} {epoch}").sample(rows, len(rows)) for epoch in epochs]
    return [row for order in orders for row in order][:count]


def load_rows(name):
    """-> the rows of a data set, and the verifier of those that name none."""
    hub_id, path = HUB_ID.fullmatch(HUB.get(name, name)), Path(name)
    is_file = path.exists() or path.suffix.lower() in FORMATS
    if name in TOY:
        return toy.rows(name), "math"
    if name in HUB or (hub_id and not is_file):
        rows = hub_rows(*hub_id.groups())
        return [row for row in rows if name != "webinstruct" or beyond_mathematics(row)], "math"
    require(is_file, f"{name}: neither a file nor one of {NAMES}, OWNER/NAME")
    return read_table(path, COLUMNS), "text"


def hub_rows(path, config, split):
    import datasets

    with as_input_error(f"cannot load {path} from the Hugging Face hub"):
        data_set = datasets.load_dataset(path, config, split=split or "train")
    return table_rows(data_set.with_format("arrow")[:], COLUMNS | {"category", "difficulty"})


def beyond_mathematics(row):
    """Whether a row is in the paper's part of WebInstruct-verified (about 50K rows): university
    level, any subject except mathematics."""
    return row["category"] != "Mathematics" and row["difficulty"] == "University"


def cells_of(row):
    """The values of a row that are not missing, with one name for each column."""
    pairs = [(SAME.get(name, name), row[name]) for name in row if row[name] not in (None, [])]
    return to_row([(name, value) for name, value in pairs if not MISSING.match(str(value))])


def to_problem(row: dict, verifier: str) -> Problem:
    """One row (see cells_of) -> Problem, with this verifier if the row names none. InputError says
    why the row cannot be used, in the same words for all rows of which that is true."""
    question = row.get("question")
    context = row.get("context") or ""
    options = row.get("options")
    require(isinstance(question, str), "no question (`question`, `problem`)")
    require(isinstance(context, str), "the column `context` is no text")
    document = as_text(row.get("document", ""))
    # A passage belongs into `context`: this column only names it, and the model does not see it.
    is_name = document is not None and len(document) <= 200
    require(is_name, "`document` is no name of at most 200 characters (the text is the `context`)")
    question = f"{context}\n\n{question}" if context else question
    if options:
        lines = [f"{letter}: {text}" for letter, text in by_letter(options).items()]
        question, verifier = "\n".join([question, *lines]), "letter"
    reference, *others = find_references(row, options)
    verifier = row.get("verifier") or verifier
    require(verifier in [*VERIFIERS], f"no verifier {verifier!r}, only {', '.join(VERIFIERS)}")
    return Problem(question, reference, verifier, tuple(others), tidy(document))


def to_demonstration(row, verifier):
    """One row -> Problem with whole completions as its references: its solution, or without one
    each reference in a box."""
    given = to_problem(row, verifier)
    if "solution" not in row:
        first, *others = [rf"\boxed{{{reference}}}" for reference in given.references]
        return dataclasses.replace(given, reference=first, others=tuple(others))
    boxed = isinstance(row["solution"], str) and split_answer(row["solution"])
    require(boxed, r"expected a `solution` with a closed \boxed{...}")
    problem = to_problem(row | {"answer": boxed[1], "answer_letter": None}, verifier)
    agree = any(say_the_same(problem.reference, each, given.verifier) for each in given.references)
    require(agree, "`answer` is not what the `solution` has in its box: mend one of them")
    return dataclasses.replace(problem, reference=row["solution"], others=())


def load_examples(path):
    """The worked examples of a file, none without one. It has rows that sft.py takes, too: a
    `question`, a `context` if other questions have one, and a `solution` that ends in a box."""
    return tuple(load_problems(path, convert=to_demonstration)) if path else ()


def with_examples(problems, examples):
    """The problems, each with these examples, which its prompt has before the question."""
    return [dataclasses.replace(problem, examples=examples) for problem in problems]


def say_the_same(one, other, verifier):
    """Whether two references agree, by their verifier or as mathematics, or because one only has
    more words than the other, such as a unit."""
    fewer, more = sorted(({*plain_text(each).split()} for each in (one, other)), key=len)
    return fewer <= more or accepts(verifier, one, other) or accepts("math", one, other)


def find_references(row, options):
    """The distinct references of a row, at least one. A list holds several people's answers, or
    several wordings, and those that cannot be used are left out."""
    if options and (letter := row.get("answer_letter")):
        require(letter in [*by_letter(options)], "`answer_letter` is not the letter of an option")
        return [letter]
    box = split_answer(as_text(row.get("solution")) or "")
    answer = row.get("answer", box and box[1])
    found = []
    for each in answer if isinstance(answer, list) else [answer]:
        try:
            found.append(find_reference(each, options))
        except InputError as reason:
            problem = reason
    if not found:
        raise problem
    return list(dict.fromkeys(found))


def find_reference(answer, options):
    """A reference verbatim, except that numbers become text, that it is tidy, that a box around all
    of it is taken off, and that of an answer of GSM8K what follows its sign is taken. With options
    it is the letter of the one that is named."""
    text = MISSING.sub("", tidy(as_text(answer) or ""))
    _, sign, last_line = text.rpartition("####")  # GSM8K writes its working before this sign
    if sign and "\n" not in last_line.strip():
        text = re.sub(r"^\$(?=[\d.,]+$)", "", last_line.strip())
    box = split_answer(text)
    if box and text == rf"\boxed{{{box[1]}}}":
        text = tidy(box[1])
    require(text, "no reference (`answer` as text or number, or `solution` with a box)")
    written = "the reference is a list, a dict or an array written as text: give a list, in .jsonl"
    require(not CONTAINER.fullmatch(text), written)
    if options:
        return letter_of(text if isinstance(answer, str) else answer, options)
    whole = split_answer(rf"\boxed{{{text}}}") == (len(r"\boxed"), text)
    require(whole, "the reference holds another box, or unmatched braces")
    return text


def tidy(text):
    """A text with composed accents (NFC), and without white space and invisible characters (such as
    a zero-width space) at its ends."""
    text = unicodedata.normalize("NFC", text)
    return text.strip("".join(c for c in text if c.isspace() or unicodedata.category(c) == "Cf"))


def letter_of(answer, options):
    """The letter of the option that an answer names: text by the letter or by the option's text, a
    number by the index from 0 or by an option that is this number (see NUMBER). If these are two
    options, nothing says which is meant."""
    named, value = [], answer if isinstance(answer, str) else Decimal(as_text(answer))
    for index, (letter, text) in enumerate(by_letter(options).items()):
        number = NUMBER.fullmatch(text)
        if value in (letter, tidy(text), index, number and Decimal(number[1])):
            named.append(letter)
    require(len(named) == 1, "`answer` is not the letter, text or index from 0 of one option")
    return named[0]


def by_letter(options):
    """{letter: text} of the options."""
    require(isinstance(options, list) and len(options) <= 26, "no list of at most 26 options")
    texts = dict(zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", map(as_text, options)))
    require(None not in texts.values(), "an option is neither text nor a finite number")
    own = [letter_in(text).upper() for text in texts.values()]
    mixed = own != [*texts] == sorted(own)
    require(not mixed, "the options have letters of their own, in another order: leave them out")
    return texts


def as_text(value):
    """Text as it is, and a finite number written out: 1e-05 as "0.00001". Decimals keep their
    zeros. None for anything else, such as nan, True or a list."""
    if type(value) in (int, float, Decimal):
        value = to_decimal(repr(value)) if type(value) is float else Decimal(value)
        return f"{value:zf}" if value.is_finite() and abs(value.adjusted()) < 400 else None
    return value if isinstance(value, str) else None
