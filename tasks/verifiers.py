"""The verifiers. They decide which answers are right, for the reward `rule` and for pass@1.

Each row of a data set names its verifier. To add your own, write a function
(answer, reference) -> bool and list it in VERIFIERS. If it raises an error on an answer, the
verdict is "failed", and the run goes on.
"""

import logging
import re
import time
import unicodedata

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse
from math_verify import verify as math_verify_equal

from engine.cli import InputError, first_line
from engine.console import say
from tasks import toy

# math-verify with the settings of the paper's authors. The time limit is math-verify's default.
MATH_VERIFY_SECONDS = 5
NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="all"
)
BOXED_LATEX = LatexExtractionConfig(
    boxed_match_priority=0, try_extract_without_anchor=True, normalization_config=NORMALIZATION
)
logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # time-outs are counted, not logged


PUNCTUATION = " .,;:!?\"'`“”„‘’«»"
LEADING_PUNCTUATION = re.compile(rf"((?!\.\d)[{PUNCTUATION}])*")  # the point of ".5" is none


class Undecided(Exception):
    """A verifier cannot decide. The message, one word, is counted apart from "wrong"."""


def equal_in_mathematics(answer, reference):
    """Whether both are equal as mathematics. Undecided: "unparsed" or "timeout". The box is given
    to math-verify without the text around it, where it would join neighbouring boxes."""
    start = time.perf_counter()
    gold, prediction = (
        parse(rf"\boxed{{{text}}}", [BOXED_LATEX], extraction_mode="first_match")
        for text in (reference, answer)
    )
    if math_verify_equal(gold, prediction, timeout_seconds=MATH_VERIFY_SECONDS):
        return True
    if time.perf_counter() - start >= MATH_VERIFY_SECONDS:  # of three calls, so it may overcount
        raise Undecided("timeout")
    # What cannot be parsed as mathematics stays text, and text equals only the same text.
    if any(all(isinstance(e, str) for e in found) for found in (gold, prediction)):
        raise Undecided("unparsed")
    return False


def same_letter(answer, reference):
    """Whether the letter of a multiple-choice answer is the reference verbatim."""
    return answer == reference


def same_text(answer, reference):
    r"""Whether both are equal apart from case, punctuation and quotes at the ends, \text{}, $,
    commas between thousands, the marks of a subscript that is a number (CH$_{4}$ is CH4), and
    spaces that stand neither between two letters nor between two digits (0 °C is 0°C)."""
    return plain_text(answer) == plain_text(reference)


def plain_text(text):
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = re.sub(r"\\text *\{([^{}]*)\}", r"\1", plain)
    plain = re.sub(r"\\?\$|(?<=\d),(?=\d{3}(?!\d))", "", plain)
    # Other braces count. Without them, \frac{1}{23} would be \frac{12}{3}, and x^{2}3 be x^{23}.
    plain = re.sub(r"(?<=[_^])\{(\d+)\}(?!\d)", r"\1", plain)
    plain = " ".join(plain.split()).rstrip(PUNCTUATION)
    # An underscore after a digit counts, since 12_5 is in base 5, and so does the space in 3 1/2.
    plain = re.sub(r"(?<!\d)_(?=\d)|(?<![^\W\d]) (?!\d)|(?<!\d) (?![^\W\d])", "", plain)
    # A text of punctuation alone stays as it is.
    return plain[LEADING_PUNCTUATION.match(plain).end() :] or text


# The keys are the names that the rows of a data set use (tasks.data.Problem.verifier).
VERIFIERS = {
    "math": equal_in_mathematics,
    "letter": same_letter,
    "text": same_text,
    "toy-rule": toy.same_digits,
    "toy-truth": toy.same_number,
}


FAILED = set()  # the verifiers whose first failure has been said


def verdict(problem, answer):
    """The verdict of the problem's verifier on an answer: "right" (which pass@1 counts), "wrong",
    with math-verify "unparsed" or "timeout", or "failed" if the verifier raises an error."""
    name = problem.verifier
    try:
        right = VERIFIERS[name](answer, problem.reference)
    except Undecided as reason:
        return str(reason)
    except Exception as error:  # one answer must not end a run
        if name not in FAILED:
            asked = f"the answer {answer!r:.80} to the question {problem.question!r:.80}"
            say(f"the verifier {name!r} fails on {asked}: {first_line(error)}")
        FAILED.add(name)
        return "failed"
    if not isinstance(right, bool):
        raise InputError(f"the verifier {name!r} must return a bool and returned {right!r:.80}")
    return "right" if right else "wrong"
