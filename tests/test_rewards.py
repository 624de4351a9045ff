import logging
import random

import pytest
import torch
from conftest import naive_logprobs, rollout_of, tiny_model

import data
import policy
import rewards
import toy
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
        entropies=[0.0] * len(texts),
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


def test_math500_references_equal_themselves(shared_data):
    problems = data.load_problems(shared_data / "math500.jsonl")
    said = [verdict(p, rf"So it is $\boxed{{{p.reference}}}$.", p.reference) for p in problems]
    assert said.count("right") >= 0.99 * len(problems) == 495


# ------------------------------------------------------------------------ all of them by definition

FRAGMENTS = ["3*4=12; ", "so 14 eggs ", "14", "\n", "{", "}", "\\boxed{14", "\\boxed", "the end"]
BOXES = ["", " ", "1", "14", "14 eggs", "it is 14 in total", "\\boxed{14}", "14 ", "15", "}"]


def random_texts(rng, a_star):
    """Empty and blank answers, a prefix of a*, a* inside a longer text, second and nested boxes,
    boxes that never close, and a* pasted into the solution."""
    boxes = [f"\\boxed{{{box}}}" for box in [*BOXES, a_star]]
    pieces = FRAGMENTS + [a_star] + boxes * 2
    return ["".join(rng.choices(pieces, k=rng.randrange(5))) for _ in range(6)]


@pytest.mark.parametrize("a_star", ["14", "fourteen eggs", "", " "])
def test_every_reward_is_its_definition_on_random_texts(tokenizer, monkeypatch, a_star):
    model, rng = tiny_model(len(tokenizer)), random.Random(a_star)
    asked = []

    def ask(verifier, triples):
        asked.extend(triples)
        return ["right" if "14" in answer else "undecided" for _, _, answer in triples]

    monkeypatch.setattr(rewards, "ask", ask)
    rollouts = [rollout_of(tokenizer, random_texts(rng, a_star), a_star) for _ in range(4)]
    judge, earned = Judge(model, tokenizer, M=6), {}
    for name, function in REWARDS.items():
        earned[name] = [R for R, _ in function(rollouts, judge)]
        assert all(((R >= 0) & (R <= 1)).all() for R in earned[name])

    reference = tokenizer.encode("{" + a_star + "}")
    seen = set()
    for k, rollout in enumerate(rollouts):
        found = [data.split_answer(text) for text in rollout.texts]
        boxed = [i for i in range(6) if found[i] is not None]
        answers = {i: found[i][1] for i in boxed}
        seen |= set(answers.values())
        contexts = [
            rollout.prompt + tokenizer.encode(rollout.texts[i][: found[i][0]]) for i in boxed
        ]

        def pi(answer, contexts=contexts):
            return naive_logprobs(model, tokenizer, contexts, answer).exp()

        P = pi(a_star) if boxed else torch.zeros(0)
        for i in range(6):
            expected = dict.fromkeys(REWARDS, 0.0)
            if i in boxed:
                W_i, P_i = pi(answers[i]), P[boxed.index(i)].item()
                same = toy.same_digits(answers[i], a_star)
                if answers[i] or not a_star:
                    expected["cer"] = ((W_i * P).sum() / W_i.sum()).item()
                expected["exact"] = float(answers[i] == a_star)
                expected["rule"] = float(same)
                expected["rule+cer"] = (expected["rule"] + expected["cer"]) / 2
                expected["verifree"] = P_i
                expected["nover"] = P_i ** (1 / len(reference))
                expected["general-verifier"] = float("14" in answers[i])
            for name in REWARDS:
                assert earned[name][k][i].item() == pytest.approx(expected[name], rel=2e-3), (
                    name,
                    rollout.texts[i],
                )
        assert {answer for _, _, answer in asked} >= set(answers.values())
    assert len(asked) == len(set(asked)) and len(seen) > 4


# --------------------------------------------------------------------------------- General-verifier


def test_the_verifier_is_asked_in_the_words_it_was_trained_on(shared_data):
    words = (shared_data.parent / "general_verifier_prompt.txt").read_text().rstrip("\n")
    assert rewards.VERIFIER_PROMPT == words


@pytest.mark.parametrize(
    "output, says",
    [
        ("\n\nBoth fractions equal one half.\n\nFinal Decision: Yes", "right"),
        (" The student gives 15 where the truth is 14. Final Decision: No<|im_end|>", "wrong"),
        ("Final Decision: Yes\n\nUser: ### Question: next", "right"),
        (" If correct, the decision would be Yes. To decide, we", "undecided"),  # cut off
        ("final decision: yes", "undecided"),  # its exact words count
        ("", "undecided"),
    ],
)
def test_the_verifiers_decision_is_read(output, says):
    assert rewards.decision(output) == says


def test_a_real_model_verifies(toy_model_dir):
    """A Qwen3 that was taught two verdicts, asked greedily in one batch."""
    model, tokenizer = policy.load(toy_model_dir, "cpu", scores=False)
    asked = [("How many?", "14", "fourteen"), ("{question}", "<eos>", "{answer}")]
    assert rewards.ask((model, tokenizer), []) == []
    optimizer, stop = torch.optim.Adam(model.parameters(), 3e-3), [tokenizer.eos_token_id]
    for _ in range(120):
        for (question, reference, answer), said in zip(asked, ["Yes", "No"]):
            prompt = rewards.VERIFIER_PROMPT.format(
                question=question, reference=reference, answer=answer
            )
            prompt = tokenizer.encode(prompt, split_special_tokens=True)
            ids = torch.tensor([prompt + tokenizer.encode(f" Final Decision: {said}") + stop])
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :]).backward()
            optimizer.step()
    assert rewards.ask((model, tokenizer), asked) == ["right", "wrong"]
