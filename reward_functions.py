"""The paper's six rewards by name.

`judge` asks about each group whoever has to be asked, once: the actor for W and P, or a verifier
for its verdicts. A reward is then a function of what they said -> R [N], in [0, 1]. It calls no
model. For a reward of your own add a function and a line to REWARDS.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import cer
from rloo import rloo_rows, verifree_rows
from runtime.cli import progress, require
from tasks.verifiers import verify


@dataclass(frozen=True)
class Judged:
    """A group, and what the judges said about it, as far as they were asked."""

    group: object  # rollout.Group
    scores: cer.Scores | None  # W and P, by the actor
    verdicts: dict[str, torch.Tensor]  # by judge: [N], 1.0 where it accepts the answer

    @property
    def right(self):
        """What the first of them accepts [N], or None."""
        return next(iter(self.verdicts.values()), None)


def judge(groups, judges, actor, tokenizer, M=None, verifier_model=None):
    """-> list of Judged. judges: some of "actor", "rule" (each problem's own verifier) and names of
    verifiers."""
    scores, verdicts = [None] * len(groups), [{} for _ in groups]
    if "actor" in judges:
        inputs = [(g.prompt, g.completions, g.problem.references, M) for g in groups]
        scores = [cer.score(actor, tokenizer, *each) for each in progress("reward", inputs)]
    pairs = [(g.problem, answer) for g in groups for answer in g.answers]
    for name in sorted(judges - {"actor"}, reverse=True):  # "rule" comes first
        right = torch.tensor(verify(pairs, verifier_model, None if name == "rule" else name))
        for of_group, R in zip(verdicts, right.float().view(len(groups), -1)):
            of_group[name] = R
    return [Judged(*each) for each in zip(groups, scores, verdicts)]


# -------------------------------------------------------------------------------------- the rewards


def conditional_expectation(judged):
    """Conditional Expectation Reward, R = D^-1 W P (Eq. 8). The actor itself is the judge."""
    return judged.scores.cer()


def exact_match(judged):
    """1 where the answer is a reference verbatim."""
    references = judged.group.problem.references
    return torch.tensor([float(answer in references) for answer in judged.group.answers])


def rule(judged):
    """1 where the question's verifier accepts the answer."""
    return judged.verdicts["rule"]


def general_verifier(judged):
    """1 where another language model accepts the answer, whatever the question's verifier is."""
    return judged.verdicts["general-verifier"]


def rule_and_cer(judged):
    """The plain average of rule and CER."""
    return (rule(judged) + conditional_expectation(judged)) / 2


def verifree(judged):
    """VeriFree: R_i = pi(a*|s_i, q), whatever answer was sampled. The update then teaches a* in its
    place (rloo.verifree_rows)."""
    return judged.scores.P()


@dataclass(frozen=True)
class Reward:
    of: Callable  # Judged -> R [N]
    judges: set  # whom it needs
    rows: Callable = rloo_rows  # (Judged, R, A, tokenizer) -> its training rows


REWARDS = {
    "cer": Reward(conditional_expectation, {"actor"}),
    "exact": Reward(exact_match, set()),
    "rule": Reward(rule, {"rule"}),
    "rule+cer": Reward(rule_and_cer, {"actor", "rule"}),
    "verifree": Reward(verifree, {"actor"}, verifree_rows),
    "general-verifier": Reward(general_verifier, {"general-verifier"}),
}


def rewards(name, judged):
    """R [B, N] of a step, checked."""
    R = [REWARDS[name].of(each) for each in judged]
    for R_group, each in zip(R, judged):
        fits = R_group.shape == (len(each.group.answers),) and R_group.isfinite().all()
        require(fits, f"the reward {name!r} must give each sample a finite number, not {R_group}")
    return torch.stack(R)
