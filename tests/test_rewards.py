import logging

import pytest
import torch

import data
import rewards
from policy import Rollout
from rewards import REWARDS, Judge, verdict


def rollout(texts, reference, kind="math"):
    found = [data.split_answer(text) for text in texts]
    return Rollout(
        problem=data.Problem("q", reference, kind),
        prompt=[1],
        completions=[[2, 3]] * len(texts),
        texts=texts,
        cuts=[1] * len(texts),
        answers=[f and f[1] for f in found],
        truncated=[False] * len(texts),
    )


def reward(name, rollout, judge=None):
    return next(REWARDS[name]([rollout], judge or Judge()))


TEXTS = [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{2}", r"\boxed{1/2", "0.5"]


def test_exact_match_is_letter_for_letter():
    assert reward("exact", rollout(TEXTS, r"\frac{1}{2}"))[0].tolist() == [1, 0, 0, 0, 0]
    spaced = rollout([r"\boxed{ 14 }", r"\boxed{14}"], "14")
    assert reward("exact", spaced)[0].tolist() == [0, 1]


def test_rule_accepts_equal_values_and_nothing_without_a_box():
    R, notes = reward("rule", rollout(TEXTS, r"\frac{1}{2}"))
    assert R.tolist() == [1, 1, 0, 0, 0]
    assert notes["verdicts"] == {"right": 2, "wrong": 1}


def test_rule_on_letters_and_on_the_toy():
    letters = rollout([r"\boxed{B}", r"\boxed{A}", r"\boxed{B.}"], "B", "letter")
    assert reward("rule", letters)[0].tolist() == [1, 0, 0]
    toy = rollout([r"\boxed{14 eggs}", r"\boxed{fourteen}"], "it is 14", "toy")
    assert reward("rule", toy)[0].tolist() == [1, 0]
    for text, answer in zip(toy.texts, toy.answers):  # the ground truth is wider than the rule
        assert rewards.is_correct(toy.problem, text, answer)


def test_rule_and_cer_is_their_average(monkeypatch):
    R_cer = torch.tensor([0.5, 0.2, 0.0, 0.0, 0.0])
    monkeypatch.setattr(rewards, "cer_reward", lambda *_: (R_cer, "group"))
    R, notes = reward("rule+cer", rollout(TEXTS, r"\frac{1}{2}"))
    assert torch.allclose(R, torch.tensor([0.75, 0.6, 0.0, 0.0, 0.0]))
    assert notes["group"] == "group" and notes["verdicts"]["right"] == 2


@pytest.mark.parametrize(
    "reference, text, expected",
    [
        ("14", r"\boxed{14}", "right"),
        (r"\frac{1}{2}", r"thus \boxed{\dfrac12}.", "right"),
        ("x+1", r"\boxed{1+x}", "right"),
        ("14", r"\boxed{14 \text{ cm}}", "right"),
        ("14", r"\boxed{15}", "wrong"),
        ("14", r"\boxed{14}" + " " * 600, "unparsed"),  # only the last 512 characters are read
        ("14", r"\boxed{}", "unparsed"),
    ],
)
def test_math_verify_as_the_authors_set_it_up(reference, text, expected):
    assert verdict(data.Problem("q", reference), text, None) == expected


def test_time_outs_are_counted_apart(monkeypatch):
    def too_slow(gold, prediction):
        logging.getLogger("math_verify.grader").warning("Timeout during comparison")
        return False

    monkeypatch.setattr(rewards, "math_verify_equal", too_slow)
    assert verdict(data.Problem("q", "14"), r"\boxed{15}", "15") == "timeout"
