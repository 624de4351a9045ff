"""The paper's six rewards by name, and the verifiers: what counts as right.

A reward takes a step's rollouts and yields, for one question after the other, R [N] in [0, 1] and a
record for samples.jsonl: CER's matrices, or a verifier's verdicts. A sample without an answer (no
closed box) earns 0 from every reward.
"""

import logging
import time
from dataclasses import dataclass

import torch
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse
from math_verify import verify as math_verify_equal

import toy
from cer import answer_logprobs, reward_group, score_rollout
from engine.sampling import generate


@dataclass(frozen=True)
class Judge:
    """What a reward may need beside the rollouts: the actor (CER asks the policy itself), M, and
    the verifier's model and tokenizer."""

    model: torch.nn.Module = None
    tokenizer: object = None
    M: int = 1
    verifier: tuple | None = None


def conditional_expectation(rollouts, judge):
    """Conditional Expectation Reward, R = D^-1 W P (Eq. 8)."""
    for rollout in rollouts:
        R, group = reward_group(score_rollout(judge.model, judge.tokenizer, rollout), judge.M)
        matrices = {"W": group.log_W.exp().tolist(), "P": group.log_P.exp().tolist()}
        names = {"distinct_answers": group.distinct_answers, "solutions": group.solutions}
        yield R, names | matrices


def exact_match(rollouts, judge):
    """1 where the answer is the reference letter for letter."""
    for rollout in rollouts:
        a_star = rollout.problem.reference
        yield torch.tensor([float(answer == a_star) for answer in rollout.answers]), {}


def rule(rollouts, judge):
    """1 where the data set's own verifier accepts the answer."""
    for rollout in rollouts:
        samples = zip(rollout.texts, rollout.answers)
        yield from_verdicts([verdict(rollout.problem, text, answer) for text, answer in samples])


def rule_and_cer(rollouts, judge):
    """The plain average of rule and CER."""
    both = zip(rule(rollouts, judge), conditional_expectation(rollouts, judge))
    for (R_rule, verdicts), (R_cer, matrices) in both:
        yield (R_rule + R_cer) / 2, verdicts | matrices


def verifree(rollouts, judge):
    """VeriFree: R_i = pi(a*|s_i, q), whatever was answered (that there is an answer shows where the
    solution ends). The update then teaches a* in the answer's place: rloo.verifree_rows."""
    for rollout in rollouts:
        contexts, a_star = [rollout.context(i) for i in rollout.answered], rollout.problem.reference
        log_P = answer_logprobs(judge.model, judge.tokenizer, contexts, [a_star])[0]
        R = torch.zeros(len(rollout.answers))
        R[rollout.answered] = log_P.exp().cpu()
        yield R, {}


def general_verifier(rollouts, judge):
    """1 where another language model finds the answer equal to the reference. It is asked once for
    each distinct (question, reference, answer) of the step, in one batch."""
    asked = [
        [None if a is None else (r.problem.question, r.problem.reference, a) for a in r.answers]
        for r in rollouts
    ]
    distinct = list(dict.fromkeys(triple for triples in asked for triple in triples if triple))
    verdict_on = dict(zip(distinct, ask(judge.verifier, distinct)))
    for triples in asked:
        yield from_verdicts([verdict_on.get(triple) for triple in triples])


def from_verdicts(verdicts):
    """Verdicts on the samples, None without an answer -> R [N], 1 where "right", and the record."""
    return torch.tensor([float(said == "right") for said in verdicts]), {"verdicts": verdicts}


REWARDS = {
    "cer": conditional_expectation,
    "exact": exact_match,
    "rule": rule,
    "rule+cer": rule_and_cer,
    "verifree": verifree,
    "general-verifier": general_verifier,
}


# --------------------------------------------------------------------------------- General-verifier

VERIFIER_TOKENS = 1024  # that it may think
# Word for word what TIGER-Lab/general-verifier was trained on; it is not a chat.
VERIFIER_PROMPT = """\
User: ### Question: {question}

### Ground Truth Answer: {reference}

### Student Answer: {answer}

For the above question, please verify if the student's answer is equivalent to the ground truth \
answer.
Do not solve the question by yourself; just check if the student's answer is equivalent to the \
ground truth answer.
If the student's answer is correct, output "Final Decision: Yes". If the student's answer is \
incorrect, output "Final Decision: No". Assistant:"""


def ask(verifier, triples):
    """(question, reference, answer) triples -> a verdict on each: "right", "wrong" or
    "undecided". Greedy."""
    model, tokenizer = verifier
    texts = [VERIFIER_PROMPT.format(question=q, reference=r, answer=a) for q, r, a in triples]
    prompts = [tokenizer.encode(text, split_special_tokens=True) for text in texts]
    outputs, _ = generate(model, prompts, VERIFIER_TOKENS, name="verifier", temperature=0)
    return [decision(tokenizer.decode(ids, skip_special_tokens=True)) for ids in outputs]


def decision(output):
    """What the verifier says, in its own words only: its prompt holds both decisions."""
    if "Final Decision: Yes" in output:
        return "right"
    return "wrong" if "Final Decision: No" in output else "undecided"


# ------------------------------------------------------------------------------------------- rules


def verdict(problem, text, answer):
    """The data set's own verifier: math-verify, equality of the letter, or the toy's rule.

    -> "right" or "wrong", and from math-verify also "unparsed" or "timeout"; None without an
    answer. As the authors do, math-verify reads the last 512 characters of the text.
    """
    if answer is None:
        return None
    if problem.kind == "math":
        return math_verify(problem.reference, text)
    same = toy.same_digits if problem.kind == "toy" else str.__eq__
    return "right" if same(answer, problem.reference) else "wrong"


def is_correct(problem, text, answer):
    """What pass@1 counts: the verifier's verdict, and on the toy, whose ground truth we know, the
    number itself."""
    if problem.kind == "toy":
        return answer is not None and toy.value_of(answer) == toy.value_of(problem.reference)
    return verdict(problem, text, answer) == "right"


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


logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # a time-out is no news: it is counted


def math_verify(reference, text):
    start = time.perf_counter()
    gold = parse(rf"\boxed{{{reference}}}", BOXED_LATEX, extraction_mode="first_match")
    prediction = parse(text[-512:], BOXED_LATEX, extraction_mode="first_match")
    if math_verify_equal(gold, prediction, timeout_seconds=MATH_VERIFY_SECONDS):
        return "right"
    if time.perf_counter() - start >= MATH_VERIFY_SECONDS:  # of all three calls: an upper bound
        return "timeout"
    # What could not be read as mathematics is left as text, and text equals only the same text.
    both_read = all(any(not isinstance(e, str) for e in found) for found in (gold, prediction))
    return "wrong" if both_read else "unparsed"
