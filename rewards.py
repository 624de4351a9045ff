"""The paper's six rewards by name.

A reward function takes the groups of a step and returns R [B, N], in [0, 1], and for each group a
record for samples.jsonl, with CER's matrices or a verifier's verdicts. It declares the keyword
arguments that it needs (actor, tokenizer, M, verifier_model) and ignores the others. A sample
without an answer (no closed box) gets reward 0 from every reward function.
"""

import re

import torch

import cer
from engine.cli import progress, require
from engine.sampling import generate
from tasks.verifiers import verdict


def conditional_expectation(groups, *, actor, tokenizer, M, **_):
    """Conditional Expectation Reward, R = D^-1 W P (Eq. 8). The actor itself is the judge."""
    R, records = [], []
    for group in progress("reward", groups, unit="question"):
        prompt, a_star = group.prompt, group.problem.reference
        R_group, matrices = cer.rewards(actor, tokenizer, prompt, group.completions, a_star, M)
        R.append(R_group)
        log_W, log_P = matrices.log_W.tolist(), matrices.log_P.tolist()
        records.append(vars(matrices) | {"log_W": log_W, "log_P": log_P})
    return torch.stack(R), records


def exact_match(groups, **_):
    """1 where the answer is the reference verbatim."""
    return as_rewards([[a == group.problem.reference for a in group.answers] for group in groups])


def rule(groups, **_):
    """1 where the data set's own verifier accepts the answer."""
    return by_verdict(groups, verdict)


def rule_and_cer(groups, **models):
    """The plain average of rule and CER."""
    R_rule, verdicts = rule(groups)
    R_cer, matrices = conditional_expectation(groups, **models)
    return (R_rule + R_cer) / 2, [a | b for a, b in zip(verdicts, matrices)]


def verifree(groups, *, actor, tokenizer, **_):
    """VeriFree: R_i = pi(a*|s_i, q), whatever answer was sampled. (An answer is needed only to know
    where the solution ends.) The update then teaches a* in its place (rloo.verifree_rows)."""
    R = torch.zeros(len(groups), len(groups[0].answers))
    for R_group, group in zip(R, progress("reward", groups, unit="question")):
        answered = [i for i, answer in enumerate(group.answers) if answer is not None]
        contexts = [group.prompt + group.solution(i) for i in answered]
        log_P = cer.answer_logprobs(actor, tokenizer, contexts, [group.problem.reference])[0]
        R_group[answered] = log_P.exp().cpu()
    return R, [{} for _ in groups]


def general_verifier(groups, *, verifier_model, **_):
    """1 where another language model judges the answer equal to the reference. It is asked once for
    each distinct (problem, answer) of the groups, all together. An empty box is wrong."""
    pairs = [(group.problem, answer) for group in groups for answer in group.answers if answer]
    distinct = list(dict.fromkeys(pairs))
    said = dict(zip(distinct, ask(verifier_model, distinct)))
    return by_verdict(groups, lambda problem, answer: said.get((problem, answer), "wrong"))


def as_rewards(right):
    """B lists that say for each of N samples whether it is right -> R [B, N], empty records."""
    return torch.tensor(right, dtype=torch.float32), [{} for _ in right]


def by_verdict(groups, judge):
    """judge(problem, answer) -> R [B, N], 1 where it says "right", and the verdicts as records. It
    is asked once for each distinct answer of a group. No answer has the verdict None."""
    verdicts = []
    for group in groups:
        said = {answer: judge(group.problem, answer) for answer in set(group.answers) - {None}}
        verdicts.append([said.get(answer) for answer in group.answers])
    R, _ = as_rewards([[one == "right" for one in of_group] for of_group in verdicts])
    return R, [{"verdicts": of_group} for of_group in verdicts]


def compute_rewards(name, groups, **models):
    """The reward of this name, checked -> R [B, N] and B records."""
    shape, returns = (len(groups), len(groups[0].answers)), f"the reward {name!r} must return"
    returned = REWARDS[name](groups, **models)
    require(type(returned) is tuple and len(returned) == 2, f"{returns} a pair, R and records")
    R, records = returned
    finite = torch.is_tensor(R) and R.shape == shape and R.isfinite().all()
    require(finite, f"{returns} finite numbers R {shape}, questions x samples, not {R}")
    dicts = [type(record) for record in records] == [dict] * len(groups)
    require(dicts, f"{returns} a record (a dict) for each of the groups, not {records}")
    return R, records


REWARDS = {
    "cer": conditional_expectation,
    "exact": exact_match,
    "rule": rule,
    "rule+cer": rule_and_cer,
    "verifree": verifree,
    "general-verifier": general_verifier,
}


# --------------------------------------------------------------------------------- General-verifier

VERIFIER_TOKENS = 1024  # longest reply
# The prompt that TIGER-Lab/general-verifier was trained on, verbatim. It uses no chat template.
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


def ask(verifier_model, pairs):
    """(problem, answer) pairs -> the verdict on each, "right", "wrong" or "undecided", by greedy
    decoding. verifier_model: (model, tokenizer)."""
    model, tokenizer = verifier_model
    texts = [
        VERIFIER_PROMPT.format(question=p.question, reference=p.reference, answer=answer)
        for p, answer in pairs
    ]
    prompts = [tokenizer.encode(text, split_special_tokens=True) for text in texts]
    outputs, _ = generate(model, prompts, VERIFIER_TOKENS, name="verifier", temperature=0)
    return [decision(tokenizer.decode(ids, skip_special_tokens=True)) for ids in outputs]


def decision(output):
    """The verdict in the verifier's reply: its last decision. One that is quoted, as in an echo of
    the prompt, is none, and neither is "Yes/No"."""
    said = re.findall(r"""Final Decision: (Yes|No)\b(?![/"'])""", output)
    return {"Yes": "right", "No": "wrong"}[said[-1]] if said else "undecided"
