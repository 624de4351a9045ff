"""The verifiers. They decide which answers are right, for the reward `rule`, for pass@1 and for
judge.py. `verify` asks them.

A row of a data set may name its verifier. To add your own, write a function
(answer, reference) -> bool and list it in VERIFIERS. An answer on which it raises an error counts
as wrong, and the run goes on.
"""

# First, because runtime/__init__.py says what sympy computes with, before sympy is imported.
from runtime.cli import message_of, require, say  # isort: split

import collections
import itertools
import logging
import re
import unicodedata

from math_verify import LatexExtractionConfig, parse
from math_verify import verify as math_verify_equal

from tasks import toy

# math-verify with the settings of the paper's authors. Its defaults are the others of them (a test
# compares all). Its time limit is 5 seconds.
BOXED_LATEX = LatexExtractionConfig(boxed_match_priority=0)
logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # what times out is not equal


# What math-verify misreads, and what is read in its place, on both sides.
REWRITES = [
    (r"(?<!\.)(?<!\\right)\.\s*([$}]*)$", r"\1"),  # a final period, but not the one of \right.
    (r"(?<=\d)(?:\\[,;]|~)(?=\d{3}(?!\d))", ""),  # 1\,000
    (r"^(-?\d+) (\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),  # 3 1/2
    (r"(?i)(?<=\d)\s*dollars?$", ""),
]


def equal_in_mathematics(answer, reference):
    """Whether math-verify finds both equal. What it cannot parse equals only the same text. The box
    is given to it without the text around it, where it would join neighbouring boxes."""
    gold, prediction = (
        parse(rf"\boxed{{{plain_formula(text)}}}", [BOXED_LATEX], extraction_mode="first_match")
        for text in (reference, answer)
    )
    return math_verify_equal(gold, prediction)


def plain_formula(text):
    """A formula in the forms that math-verify reads."""
    plain = text.strip()
    for pattern, replacement in REWRITES:
        plain = re.sub(pattern, replacement, plain)
    return plain.strip() or text


MARKUP = re.compile(r"\\(?:text|math)\w*\s*\{([^{}]*)\}|[$*]")
LETTER = re.compile(r"\(?([A-Za-z])\)?(?:[:.)]?|[:.)]\s.*)", re.DOTALL)
SECOND_LETTER = re.compile(r"(?:\bor|\band|[,;\n])[ \t]*\(?[A-Z][:.)]\s")


def same_letter(answer, reference):
    """Whether both name the same letter."""
    return letter_in(answer) == letter_in(reference)


def letter_in(text):
    r"""The letter that a text consists of, as "A", "(A)." or "\text{A}", or that stands before the
    text of its option, as in the prompt: "A: iron". Any other text, such as "A or B", stays as it
    is."""
    plain = MARKUP.sub(r"\1", text).strip()
    letter = LETTER.fullmatch(plain)
    return letter[1] if letter and not SECOND_LETTER.search(plain) else text


def same_text(answer, reference):
    r"""Whether both are equal apart from case, white space, \text{}, $, and punctuation at the
    ends. Unicode's variants of a character count as equal (ﬁ and fi, “ and ", – and -), but not 10²
    and 102."""
    return plain_text(answer) == plain_text(reference)


def plain_text(text):
    """What is left of a text for `text` and for words(). Its time is linear in the length."""
    # Before NFKC turns a raised 2 into a plain one.
    plain = re.sub("[⁰¹²³⁴-⁹]+", lambda raised: f"^{raised[0]}", text)
    # NFKC sorts accents, and takes the square of a run's length if they are not sorted.
    runs = itertools.groupby(plain, lambda c: unicodedata.combining(c) > 0)
    plain = "".join(c for _, run in runs for c in sorted(run, key=unicodedata.combining))
    plain = unicodedata.normalize("NFKC", plain).casefold()
    plain = re.sub(r"\\text *\{([^{}]*)\}", r"\1", plain)
    plain = re.sub(r"\\?\$", "", plain)
    plain = "".join(map(plain_character, plain))
    plain = " ".join(plain.split())
    ends = "".join(c for c in {*plain} if c == "'" or unicodedata.category(c) == "Po")
    ends = re.escape(re.sub(r"[%‰#&@*/\\′″]", "", ends)) + " "  # these say something
    # So do the point of .5 and the sign of a factorial. A text of punctuation alone stays. The end
    # is looked at from behind: a search for it would begin anew at each of many dots.
    plain = re.sub(rf"^(?:(?!\.\d)[{ends}])+", "", plain) or plain
    return re.sub(rf"^(?:(?!![\d)])[{ends}])+", "", plain[::-1])[::-1] or plain or text


def plain_character(c):
    """One dash for all dashes and one quote for all quotes. Invisible characters go."""
    category = unicodedata.category(c)
    if category == "Cf":
        return ""
    is_quote = category in ("Pi", "Pf") or c in '"„‚`´'
    return "-" if category == "Pd" or c == "−" else "'" if is_quote else c


# Thai, Lao, Burmese, Khmer, Japanese and Chinese are written without spaces.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff"


def words(text):
    """The words of a text and how often each occurs, much as SQuAD compares them: plain_text
    without punctuation (except the sign of a number) and articles. In scripts without spaces each
    character is a word."""
    plain = plain_text(text)
    bare = re.sub(r"(?<!\w)-(?=\.?\d)", "−", plain)
    bare = "".join(c for c in bare if unicodedata.category(c)[0] != "P")  # not punctuation
    found = re.findall(rf"[{UNSPACED}]|[^\s{UNSPACED}]+", bare)
    # What is nothing else stays as it is: "A", or "+".
    found = [word for word in found if word not in ("a", "an", "the")] or plain.split()
    return collections.Counter(found)


# The names are what the rows of a data set use (tasks.data.Problem.verifier).
VERIFIERS = {  # (answer, reference) -> bool
    "math": equal_in_mathematics,
    "letter": same_letter,
    "text": same_text,
    "toy-rule": toy.same_digits,
    "toy-truth": toy.same_number,
}
FAILED = set()  # the verifiers whose first error has been printed


def verify(pairs: list[tuple]) -> list[bool]:
    """(problem, answer) pairs -> whether the problem's verifier accepts each answer. Of several
    references one is enough. No answer, None or an empty box, is wrong."""
    return [
        bool(answer) and any(accepts(problem.verifier, answer, each) for each in problem.references)
        for problem, answer in pairs
    ]


def accepts(name, answer, reference):
    """What a verifier returns. An error is no acceptance, and the first one is printed."""
    try:
        right = VERIFIERS[name](answer, reference)
    except Exception as error:  # one answer must not end a run
        if name not in FAILED:
            say(f"the verifier {name!r} fails on the answer {answer!r:.80}: {message_of(error)}")
        FAILED.add(name)
        return False
    require(isinstance(right, bool), f"the verifier {name!r} must return a bool, not {right!r:.80}")
    return right
