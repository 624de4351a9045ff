"""Every reward by its definition, and the verifiers."""

import random
import re
from unittest import mock

import pytest
import torch
from conftest import group_of, tiny_model
from one_file import log_pi

import reward_functions
from engine.tokens import split_answer
from reward_functions import REWARDS
from runtime.cli import InputError
from tasks import data, general_verifier, toy
from tasks.verifiers import is_right

VERDICTS = {  # (verifier, reference): {answer: whether it is right}
    ("math", r"\frac{1}{2}"): {r"\dfrac12": True, "0.5": True},  # as the authors set it up
    ("math", "x+1"): {"1+x": True},
    ("math", "14"): {"14": True, r"14 \text{ cm}": True, "15": False, "": False, None: False},
    ("letter", "B"): {"B": True, "A": False, "B.": False},
    ("text", "New York"): {" new  york.": True, "York": False},  # case, spaces, ends
    ("text", r"\text{the fi\$h}"): {"The ﬁh": True},
    ("text", "3 1/2"): {"31/2": False},
    ("text", "102"): {"10²": False, "１０２": True},
    ("text", "5"): {"-5": False, "5.": True},  # a sign is no punctuation
    ("text", ".5"): {"5": False, "0.5": False, "(.5.": False},  # nor the point of .5
    ("text", "Zürich"): {"Zu\u0308rich": True, "“$Zürich$”": True},
    ("text", "..."): {"": False},
    ("toy-rule", "it is 14"): {"14 eggs": True, "fourteen": False, "1 4": False},
    ("toy-truth", "it is 14"): {"fourteen": True, "15": False},  # it knows words too
}


def test_verdicts():
    for (verifier, reference), expected in VERDICTS.items():
        problem = data.Problem("q", reference, verifier)
        assert {answer: is_right(problem, answer) for answer in expected} == expected


def test_the_rule_asks_once_for_each_last_box(tokenizer, monkeypatch):
    texts = [r"\boxed{7}, no: \boxed{14}.", r"\boxed{14}, no: \boxed{7}.", "14", r"\boxed{7}"]
    monkeypatch.setattr(reward_functions, "is_right", asked := mock.Mock(side_effect=is_right))
    R, [record] = reward_functions.rule([group_of(tokenizer, texts, "14", "math")])
    assert R.tolist() == [[1, 0, 0, 0]]
    assert record["verdicts"] == ["right", "wrong", None, "wrong"] and asked.call_count == 2


# ------------------------------------------------------------------------ all of them by definition

FRAGMENTS = ["3*4=12; ", "so 14 eggs ", "14", "\n", "{", "}", "\\boxed{14", "\\boxed", "the end"]
BOXES = ["", " ", "1", "14", "14 eggs", "it is 14 in total", "\\boxed{14}", "14 ", "15", "}"]


def random_texts(rng, a_star):
    """Empty and blank answers, a prefix of a*, a* inside a longer text, second and nested boxes,
    boxes that never close, and a* pasted into the solution."""
    boxes = [f"\\boxed{{{box}}}" for box in [*BOXES, a_star]]
    pieces = FRAGMENTS + [a_star] + boxes * 2
    return ["".join(rng.choices(pieces, k=rng.randrange(5))) for _ in range(6)]


def rewards_by_definition(model, tokenizer, group, a_star):
    """What every reward gives to each sample, spelled out -> one dict per sample."""
    found, expected = [split_answer(text) for text in group.texts], []
    boxed = [i for i, box in enumerate(found) if box]
    contexts = [group.prompt + tokenizer.encode(group.texts[i][: found[i][0]]) for i in boxed]

    def probabilities(answer):
        scores = [log_pi(model, tokenizer, context, answer) for context in contexts]
        return torch.tensor(scores).exp()

    P = probabilities(a_star)
    for i, box in enumerate(found):
        R = dict.fromkeys(REWARDS, 0.0)
        if box:
            answer = box[1]
            W_i = probabilities(answer)
            if answer or not a_star:
                R["cer"] = ((W_i * P).sum() / W_i.sum()).item()
            R["exact"] = float(answer == a_star)
            R["rule"] = float(toy.same_digits(answer, a_star))
            R["rule+cer"] = (R["rule"] + R["cer"]) / 2
            R["verifree"] = P[boxed.index(i)].item()
            R["general-verifier"] = float("14" in answer)  # as the ask() below says
        expected.append(R)
    return expected


@pytest.mark.parametrize("a_star", ["14", "fourteen eggs", "", " "])
def test_every_reward_is_its_definition_on_random_texts(tokenizer, monkeypatch, a_star):
    model, rng, asked = tiny_model(len(tokenizer)), random.Random(a_star), []

    def ask(verifier_model, pairs):
        asked.extend(pairs)
        return ["14" in answer for _, answer in pairs]

    monkeypatch.setattr(reward_functions, "ask", ask)
    texts = [["no box"] * 6] + [random_texts(rng, a_star) for _ in range(4)]
    groups = [group_of(tokenizer, of_group, a_star) for of_group in texts]
    R = {}
    for name, (function, _) in REWARDS.items():
        R[name], _ = function(groups, actor=model, tokenizer=tokenizer, M=6, verifier_model=None)
        assert R[name].shape == (5, 6) and ((R[name] >= 0) & (R[name] <= 1)).all()
    for k, group in enumerate(groups):
        for i, expected in enumerate(rewards_by_definition(model, tokenizer, group, a_star)):
            received = {name: R[name][k, i].item() for name in REWARDS}
            assert received == pytest.approx(expected, rel=2e-3), group.texts[i]
    given = {answer for group in groups for answer in group.answers} - {None, ""}
    assert sorted(answer for _, answer in asked) == sorted(given) and len(given) > 4  # once each


# --------------------------------------------------------------------------------- General-verifier


def test_the_verifier_is_asked_in_the_words_it_was_trained_on(shared_data):
    words = (shared_data.parent / "general_verifier_prompt.txt").read_text().rstrip("\n")
    assert general_verifier.VERIFIER_PROMPT == words


DECISIONS = {
    "\n\nBoth fractions equal one half.\n\nFinal Decision: Yes": True,
    "The student gives 15 where the truth is 14. Final Decision: No<|im_end|>": False,
    "The student wrote 'Final Decision: Yes'. Final Decision: No": False,
    "Final Decision: Yes/No": False,
    "Final Decision: Yes. No, wait. Final Decision: No": False,
    "If correct, the decision would be Yes. To decide, we": False,  # cut off
}


def test_the_verifier_is_asked_greedily_and_special_names_are_text(tokenizer, monkeypatch):
    def generate(model, prompts, max_new_tokens, name, temperature):
        assert temperature == 0 and not any(tokenizer.eos_token_id in ids for ids in prompts)
        asked = [re.findall("Answer: (.*)", tokenizer.decode(ids)) for ids in prompts]
        assert asked == [["<eos>", "{answer}"]] * len(DECISIONS)
        return [tokenizer.encode(text) for text in DECISIONS], None

    monkeypatch.setattr(general_verifier, "generate", generate)
    pairs = [(data.Problem("{question}", "<eos>"), "{answer}")] * len(DECISIONS)
    assert general_verifier.ask((None, tokenizer), pairs) == [*DECISIONS.values()]


NAN = torch.tensor([[1.0, torch.nan]])
RETURNED = [(torch.ones(2, 1), [{}]), (NAN, [{}]), (torch.ones(1, 2), [])]


@pytest.mark.parametrize("returned", RETURNED)
def test_a_reward_that_returns_something_else_is_named(tokenizer, monkeypatch, returned):
    monkeypatch.setitem(reward_functions.REWARDS, "mine", (lambda groups, **_: returned, None))
    with pytest.raises(InputError, match=r"'mine' must return finite numbers R \(1, 2\)"):
        reward_functions.compute_rewards("mine", [group_of(tokenizer, ["a", "b"], "7")])
