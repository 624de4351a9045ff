"""Who is asked about a group, and the rewards by name.

`judge` is the only stage of the loop that asks a model or a program about answers, and it asks each
once: the actor for W and P, a verifier for what is right. A reward is then a small function of what
they said, Judged -> R [N], in [0, 1], and 0 for a sample without an answer. It calls no model. For
a reward of your own add a function and a line to REWARDS.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import cer
from rloo import rloo_rows, verifree_rows
from rollout import Group
from runtime.cli import progress, require
from runtime.report import verbatim
from tasks import general_verifier
from tasks.verifiers import verify, words


@dataclass(frozen=True)
class Judged:
    """One question with its N samples, and what was said about them."""

    group: Group
    scores: cer.Scores | None  # W and P, if the actor was asked
    right: torch.Tensor | None  # [N], bool, if a verifier was asked


def judge(
    groups: list[Group], asked: set[str], actor, tokenizer, M=None, verifier_model=None
) -> list[Judged]:
    """asked: "actor", for W and P, and for what is right "verifier", the program that the question
    names, or "model", the language model verifier_model, a pair (model, tokenizer)."""
    scores, right = [None] * len(groups), [None] * len(groups)
    if "actor" in asked:
        inputs = [(g.prompt, g.completions, g.problem.references, M) for g in groups]
        scores = [cer.score(actor, tokenizer, *each) for each in progress("judge", inputs)]
    if asked & {"verifier", "model"}:
        pairs = [(group.problem, answer) for group in groups for answer in group.answers]
        if "model" in asked:
            verdicts = verify(pairs, lambda some: general_verifier.ask(some, verifier_model)[0])
        else:
            verdicts = verify(pairs)
        of_group = iter(verdicts)
        right = [torch.tensor([next(of_group) for _ in group.answers]) for group in groups]
    return [Judged(*each) for each in zip(groups, scores, right)]


# -------------------------------------------------------------------------------------- the rewards


def conditional_expectation(judged):
    """Conditional Expectation Reward, R = D^-1 W P (Eq. 8). The actor itself is the judge."""
    return judged.scores.cer()


def exact_match(judged):
    """1 where the answer is a reference verbatim."""
    references = judged.group.problem.references
    return torch.tensor([float(verbatim(answer, references)) for answer in judged.group.answers])


def verdict(judged):
    """1 where the verifier accepts the answer: a program, or General-verifier's model."""
    return judged.right.float()


def verifree(judged):
    """VeriFree: R_i = P_i = pi(a*|s_i, q), whatever answer was sampled. (An answer is needed only
    to know where the solution ends.) The update teaches a* in its place (rloo.verifree_rows)."""
    return judged.scores.verifree()


def overlap(judged):
    """The token F1 of SQuAD between the answer and the reference that fits best: the harmonic mean
    of the shares of their words that they have in common. It needs no model. It cannot see that
    "no" and "they are the same" may say one thing, gives "not guilty" .67 for "guilty", and since
    punctuation does not count it takes 15 for 1.5."""
    references = [words(reference) for reference in judged.group.problem.references]
    answers = [words(answer or "") for answer in judged.group.answers]
    return torch.tensor([max(f1(answer, each) for each in references) for answer in answers])


def f1(one, other):
    """For two Counters of words twice what they share over what they hold, in [0, 1]."""
    return 2 * (one & other).total() / max(1, one.total() + other.total())


def mean_of(*rewards):
    """The plain average of rewards."""
    return lambda judged: torch.stack([reward(judged) for reward in rewards]).mean(0)


@dataclass(frozen=True)
class Reward:
    of: Callable[[Judged], torch.Tensor]  # -> R [N]
    asks: set[str]  # see judge
    rows: Callable = rloo_rows  # (Judged, R, A, tokenizer) -> the training rows of the question


REWARDS = {
    "cer": Reward(conditional_expectation, {"actor"}),
    "exact": Reward(exact_match, set()),
    "rule": Reward(verdict, {"verifier"}),
    "rule+cer": Reward(mean_of(verdict, conditional_expectation), {"verifier", "actor"}),
    "verifree": Reward(verifree, {"actor"}, verifree_rows),
    "general-verifier": Reward(verdict, {"model"}),
    "overlap": Reward(overlap, set()),
    "overlap+cer": Reward(mean_of(overlap, conditional_expectation), {"actor"}),
}


def rewards(name: str, judged: list[Judged]) -> torch.Tensor:
    """R [B, N] of a step, checked."""
    R = [REWARDS[name].of(each) for each in judged]
    for R_group, each in zip(R, judged):
        fits = R_group.shape == (len(each.group.answers),) and R_group.isfinite().all()
        require(fits, f"the reward {name!r} must give each sample a finite number, not {R_group}")
    return torch.stack(R)
