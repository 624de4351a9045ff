"""The paper's rewards by name: each takes a step's rollouts and yields, for one question after the
other, R [N] in [0, 1] and notes for the log ({"group": cer.Group} or {"verdicts": counts}).

A sample without an answer (no closed box, or cut off by the length limit) earns 0 from every
reward.
"""

import logging
from collections import Counter
from dataclasses import dataclass

import torch
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse
from math_verify import verify as math_verify_equal
from torch.distributed import get_rank
from tqdm import tqdm

import toy
from cer import answer_logprobs, cer_reward
from policy import generate
from vocabulary import vocabulary


@dataclass(frozen=True)
class Judge:
    """What a reward may need beside the rollouts: the actor (CER asks the policy itself), M, and
    the verifier's model and tokenizer."""

    model: torch.nn.Module = None
    tokenizer: object = None
    M: int = 1
    verifier: tuple | None = None


def cer(rollouts, judge):
    """Conditional Expectation Reward, R = D^-1 W P (Eq. 8)."""
    for rollout in rollouts:
        R, group = cer_reward(judge.model, judge.tokenizer, rollout, judge.M)
        yield R, {"group": group}


def exact(rollouts, judge):
    """1 where the answer is the reference letter for letter."""
    for rollout in rollouts:
        a_star = rollout.problem.reference
        yield torch.tensor([float(answer == a_star) for answer in rollout.answers]), {}


def rule(rollouts, judge):
    """1 where the data set's own verifier accepts the answer."""
    for rollout in rollouts:
        texts, answers = rollout.texts, rollout.answers
        found = {i: verdict(rollout.problem, texts[i], answers[i]) for i in rollout.answered}
        yield from_verdicts(rollout, found)


def rule_and_cer(rollouts, judge):
    """The plain average of rule and CER."""
    for (R_rule, verdicts), (R_cer, group) in zip(rule(rollouts, judge), cer(rollouts, judge)):
        yield (R_rule + R_cer) / 2, verdicts | group


def verifree(rollouts, judge):
    """VeriFree: R_i = pi(a*|s_i, q), whatever was answered (that there is an answer shows where the
    solution ends). The update then teaches a* in the answer's place: rloo.verifree_rows."""
    for rollout in rollouts:
        yield likelihood(rollout, judge), {}


def nover(rollouts, judge):
    """NOVER's likelihood per token, pi(a*|s_i, q)^(1 / tokens of a*). Plain: its paper takes it
    from a slowly following proxy of the policy, pays by rank, and rewards format and brevity."""
    for rollout in rollouts:
        yield likelihood(rollout, judge) ** (1 / len(reference_ids(rollout, judge.tokenizer))), {}


def likelihood(rollout, judge):
    """P [N]: pi(a*|s_i, q), the finished reference; 0 without an answer."""
    contexts, a_star = [rollout.context(i) for i in rollout.answered], rollout.problem.reference
    log_P = answer_logprobs(judge.model, judge.tokenizer, contexts, [a_star])[0]
    P = torch.zeros(len(rollout.answers))
    P[rollout.answered] = log_P.exp().cpu()
    return P


def reference_ids(rollout, tokenizer):
    """The tokens of "{a*}", as the tokenizer spells it."""
    return vocabulary(tokenizer).encode("{" + rollout.problem.reference + "}")


def general_verifier(rollouts, judge):
    """1 where another language model finds the answer equal to the reference. It is asked once for
    each distinct (question, reference, answer) of the step, in one batch."""
    asked = [
        {i: (r.problem.question, r.problem.reference, r.answers[i]) for i in r.answered}
        for r in rollouts
    ]
    distinct = list(dict.fromkeys(triple for triples in asked for triple in triples.values()))
    verdict_on = dict(zip(distinct, ask(judge.verifier, distinct)))
    for rollout, triples in zip(rollouts, asked):
        yield from_verdicts(rollout, {i: verdict_on[triple] for i, triple in triples.items()})


def from_verdicts(rollout, verdicts):
    """verdicts: of each sample that answered -> R [N], 1 where "right"; and their counts."""
    R = torch.tensor([float(verdicts.get(i) == "right") for i in range(len(rollout.answers))])
    return R, {"verdicts": Counter(verdicts.values())}


REWARDS = {
    "cer": cer,
    "exact": exact,
    "rule": rule,
    "rule+cer": rule_and_cer,
    "verifree": verifree,
    "general-verifier": general_verifier,
    "nover": nover,
}


# --------------------------------------------------------------------------------- General-verifier

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
    bar = tqdm(total=len(prompts), desc="verifier", leave=False, delay=10, disable=get_rank() > 0)
    with bar:
        outputs, _ = generate(model, prompts, 1024, temperature=0, progress=bar.update)
    return [decision(tokenizer.decode(ids, skip_special_tokens=True)) for ids in outputs]


def decision(output):
    """What the verifier says, in its own words only: its prompt holds both decisions."""
    if "Final Decision: Yes" in output:
        return "right"
    return "wrong" if "Final Decision: No" in output else "undecided"


# ------------------------------------------------------------------------------------------- rules


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
