"""The paper's six rewards by name.

A reward function takes the groups of a step and returns R [B, N], in [0, 1], and for each group a
record for samples.jsonl, with CER's matrices or a verifier's verdicts. It declares the keyword
arguments that it needs (actor, tokenizer, M, verifier_model) and ignores the others. A sample
without an answer (no closed box) gets reward 0 from every reward function.

REWARDS names each reward with the function that computes it and the one that makes the training
rows from it (rloo.py). For a reward of your own add a function and a line there.
"""

import torch

import cer
from rloo import rloo_rows, verifree_rows
from runtime.cli import progress, require
from tasks.general_verifier import ask
from tasks.verifiers import is_right


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
    right = [[answer == group.problem.reference for answer in group.answers] for group in groups]
    return torch.tensor(right, dtype=torch.float32), [{} for _ in groups]


def rule(groups, **_):
    """1 where the data set's own verifier accepts the answer."""
    return by_verdict(groups, is_right)


def rule_and_cer(groups, **models):
    """The plain average of rule and CER."""
    R_rule, verdicts = rule(groups)
    R_cer, matrices = conditional_expectation(groups, **models)
    return (R_rule + R_cer) / 2, [a | b for a, b in zip(verdicts, matrices)]


def verifree(groups, *, actor, tokenizer, **_):
    """VeriFree: R_i = pi(a*|s_i, q), whatever answer was sampled. (An answer is needed only to know
    where the solution ends.) The update then teaches a* in its place (rloo.verifree_rows)."""
    R, records = torch.zeros(len(groups), len(groups[0].answers)), []
    for R_group, group in zip(R, progress("reward", groups, unit="question")):
        answered = [i for i, answer in enumerate(group.answers) if answer is not None]
        contexts = [group.prompt + group.solution(i) for i in answered]
        log_P = cer.answer_logprobs(actor, tokenizer, contexts, [group.problem.reference])[0]
        R_group[answered] = log_P.exp().cpu()
        records.append({"log_P": log_P.tolist()})
    return R, records


def general_verifier(groups, *, verifier_model, **_):
    """1 where another language model judges the answer equal to the reference. It is asked once for
    each distinct (problem, answer) of the groups, all together. An empty box is wrong."""
    pairs = [(group.problem, answer) for group in groups for answer in group.answers if answer]
    distinct = list(dict.fromkeys(pairs))
    accepted = dict(zip(distinct, ask(verifier_model, distinct)))
    return by_verdict(groups, lambda problem, answer: accepted.get((problem, answer), False))


def by_verdict(groups, judge):
    """judge(problem, answer) -> R [B, N], 1 where it returns True, and records with the verdicts,
    "right", "wrong", or None without an answer. It is asked once for each distinct answer of a
    group."""
    records = []
    for group in groups:
        verdicts = {None: None}
        for answer in set(group.answers) - {None}:
            verdicts[answer] = "right" if judge(group.problem, answer) else "wrong"
        records.append({"verdicts": [verdicts[answer] for answer in group.answers]})
    R = [[float(verdict == "right") for verdict in record["verdicts"]] for record in records]
    return torch.tensor(R), records


REWARDS = {  # name: (reward function, its training rows)
    "cer": (conditional_expectation, rloo_rows),
    "exact": (exact_match, rloo_rows),
    "rule": (rule, rloo_rows),
    "rule+cer": (rule_and_cer, rloo_rows),
    "verifree": (verifree, verifree_rows),
    "general-verifier": (general_verifier, rloo_rows),
}


def compute_rewards(name, groups, **models):
    """The reward of this name, checked -> R [B, N] and B records."""
    function, _ = REWARDS[name]
    R, records = function(groups, **models)
    shape = len(groups), len(groups[0].answers)
    fits = R.shape == shape and R.isfinite().all() and len(records) == len(groups)
    form = f"finite numbers R {shape}, questions x samples, and a record (a dict) for each group"
    require(fits, f"the reward {name!r} must return {form}, not {R!r:.200}")
    return R.float(), records
