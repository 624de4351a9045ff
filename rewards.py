"""The paper's rewards by name: each takes one question's rollout and returns R [N], in [0, 1].

A sample without an answer (no closed box, or cut off by the length limit) earns 0 from every
reward. Beside R each returns notes for the log: {"group": cer.Group} or {"verdicts": counts}.
"""

import logging
from collections import Counter
from dataclasses import dataclass

import torch
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse
from math_verify import verify as math_verify_equal

import toy
from cer import cer_reward


@dataclass(frozen=True)
class Judge:
    """What a reward may need beside the rollout: the actor (CER asks the policy itself) and M."""

    model: torch.nn.Module
    tokenizer: object
    M: int


def cer(rollout, judge):
    """Conditional Expectation Reward, R = D^-1 W P (Eq. 8)."""
    R, group = cer_reward(judge.model, judge.tokenizer, rollout, judge.M)
    return R, {"group": group}


def exact(rollout, judge=None):
    """1 where the answer is the reference letter for letter."""
    a_star = rollout.problem.reference
    return torch.tensor([float(answer == a_star) for answer in rollout.answers]), {}


def rule(rollout, judge=None):
    """1 where the data set's own verifier accepts the answer."""
    R, verdicts = torch.zeros(len(rollout.answers)), Counter()
    for i in rollout.answered:
        found = verdict(rollout.problem, rollout.texts[i], rollout.answers[i])
        R[i] = found == "right"
        verdicts[found] += 1
    return R, {"verdicts": verdicts}


def rule_and_cer(rollout, judge):
    """The plain average of rule and CER."""
    (R_rule, verdicts), (R_cer, group) = rule(rollout), cer(rollout, judge)
    return (R_rule + R_cer) / 2, verdicts | group


REWARDS = {"cer": cer, "exact": exact, "rule": rule, "rule+cer": rule_and_cer}


# ---------------------------------------------------------------------------------------- verifiers


def verdict(problem, text, answer):
    """The data set's own verifier: math-verify, equality of the letter, or the toy's rule.

    -> "right" or "wrong", and from math-verify also "unparsed" or "timeout". As the authors do,
    math-verify reads the last 512 characters of the text, with or without a box.
    """
    if problem.kind == "math":
        return math_verify(problem.reference, text)
    if problem.kind == "letter":
        return "right" if answer == problem.reference else "wrong"
    return "right" if toy.same_digits(answer, problem.reference) else "wrong"


def is_correct(problem, text, answer):
    """What pass@1 counts: the verifier's verdict, and on the toy, whose ground truth we know, the
    number itself."""
    if problem.kind == "toy":
        return answer is not None and toy.value_of(answer) == toy.value_of(problem.reference)
    return verdict(problem, text, answer) == "right"


# math-verify as the paper's authors set it up.
BOXED_LATEX = [
    LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=True,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="all"
        ),
    )
]


class Timeouts(logging.Filter):
    """math-verify reports its time-outs only to its log: count them there."""

    count = 0

    def filter(self, record):
        timeout = "Timeout during" in record.getMessage()
        self.count += timeout
        return not timeout


TIMEOUTS = Timeouts()
for module in "math_verify.parser", "math_verify.grader":
    logging.getLogger(module).addFilter(TIMEOUTS)


def math_verify(reference, text):
    before = TIMEOUTS.count
    gold = parse(rf"\boxed{{{reference}}}", BOXED_LATEX, extraction_mode="first_match")
    prediction = parse(text[-512:], BOXED_LATEX, extraction_mode="first_match")
    if math_verify_equal(gold, prediction):
        return "right"
    if TIMEOUTS.count > before:
        return "timeout"
    # What could not be read as mathematics is left as text, and text equals only the same text.
    both_read = all(any(not isinstance(e, str) for e in found) for found in (gold, prediction))
    return "wrong" if both_read else "unparsed"
