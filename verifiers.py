"""The verifiers: which answers count as right, for the reward `rule` and for pass@1.

Each row of a data set names its verifier. A verifier of your own is a function
(answer, reference) -> bool, and a line in VERIFIERS.
"""

import logging
import re
import time

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse
from math_verify import verify as math_verify_equal

import toy

# math-verify as the paper's authors set it up; the seconds are its own default.
MATH_VERIFY_SECONDS = 5
BOXED_LATEX = [
    LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=True,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="all"
        ),
    )
]
logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # time-outs are counted, not logged


def math_verify(answer, reference):
    """Equal as mathematics. It is given the last box alone: in a longer text math-verify would join
    neighbouring boxes. -> "right", "wrong", "unparsed" or "timeout"."""
    start = time.perf_counter()
    gold, prediction = (
        parse(rf"\boxed{{{text}}}", BOXED_LATEX, extraction_mode="first_match")
        for text in (reference, answer)
    )
    if math_verify_equal(gold, prediction, timeout_seconds=MATH_VERIFY_SECONDS):
        return "right"
    if time.perf_counter() - start >= MATH_VERIFY_SECONDS:  # of all three calls: an upper bound
        return "timeout"
    # What could not be read as mathematics is left as text, and text equals only the same text.
    both_read = all(any(not isinstance(e, str) for e in found) for found in (gold, prediction))
    return "wrong" if both_read else "unparsed"


def same_letter(answer, reference):
    """The letter of a multiple choice, verbatim."""
    return answer == reference


def same_text(answer, reference):
    """Equal as text, apart from case, spaces, and punctuation at the ends. "Paris." is "paris"."""
    return plain_text(answer) == plain_text(reference)


def plain_text(text):
    words = " ".join(text.casefold().split())
    return re.sub(r"^[\s.,;:!?\"'`]+|[\s.,;:!?\"'`]+$", "", words)


# By the name that a data set's rows give (data.Problem.verifier).
VERIFIERS = {
    "math": math_verify,
    "letter": same_letter,
    "text": same_text,
    "toy-rule": toy.same_digits,
    "toy-truth": toy.same_number,
}


def verdict(problem, answer):
    """What the problem's verifier says of an answer -> "right" (which pass@1 counts) or "wrong",
    from math-verify also "unparsed" or "timeout"; None without an answer."""
    if answer is None:
        return None
    said = VERIFIERS[problem.verifier](answer, problem.reference)
    return said if isinstance(said, str) else "right" if said else "wrong"
