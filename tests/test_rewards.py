"""Every reward by its definition, and the verifiers."""

import random
import time

import pytest
from conftest import group_of, tiny_model
from test_cer import naive_logprobs

import rewards
from engine.tokens import split_answer
from rewards import REWARDS
from tasks import data, toy, verifiers
from tasks.verifiers import verdict


@pytest.mark.parametrize("verifier", verifiers.VERIFIERS)
def test_a_verifier_accepts_the_reference_and_nothing_without_a_box(verifier):
    problem = data.Problem("q", "14", verifier)
    assert verdict(problem, "14") == "right" and verdict(problem, "15") == "wrong"


VERDICTS = [
    ("math", r"\frac{1}{2}", r"\dfrac12", "right"),  # as the authors set it up
    ("math", r"\frac{1}{2}", "0.5", "right"),
    ("math", "x+1", "1+x", "right"),
    ("math", "14", r"14 \text{ cm}", "right"),
    ("math", "14", "15", "wrong"),
    ("math", "14", "", "unparsed"),
    ("letter", "B", "B.", "wrong"),
    ("text", "paris", "Paris.", "right"),  # case, spaces, and punctuation at the ends
    ("text", "New York", " new  york ", "right"),
    ("text", "clod", "cold", "wrong"),
    ("text", "eF", "Fe", "wrong"),
    ("text", "1000 km", "1000 m", "wrong"),
    ("text", "-10", "1789-1799", "wrong"),
    ("text", "NH3", "NH_3", "wrong"),  # nothing clever
    ("text", "5", "-5", "wrong"),  # a sign is no punctuation
    ("toy-rule", "it is 14", "14 eggs", "right"),
    ("toy-rule", "it is 14", "fourteen", "wrong"),
    ("toy-truth", "it is 14", "fourteen", "right"),  # it knows words too
]


@pytest.mark.parametrize("verifier, reference, answer, said", VERDICTS)
def test_verdicts(verifier, reference, answer, said):
    assert verdict(data.Problem("q", reference, verifier), answer) == said


def test_the_rule_sees_the_last_box_alone(tokenizer):
    """In a longer text math-verify joins neighbouring boxes."""
    texts = [r"first \boxed{7}, no: \boxed{14}.", r"so \boxed{14}" + " and so on" * 99]
    texts += [r"\boxed{14}, no: \boxed{7}.", r"\boxed{14", "14"]
    R, [record] = REWARDS["rule"]([group_of(tokenizer, texts, "14", "math")])
    assert R.tolist() == [[1, 1, 0, 0, 0]]
    assert record["verdicts"] == ["right", "right", "wrong", None, None]
    joined = group_of(tokenizer, [r"first \boxed{7}, then \boxed{14}."], "7,14", "math")
    assert REWARDS["rule"]([joined])[0].tolist() == [[0]]


def test_time_outs_are_counted_apart(monkeypatch):
    def too_slow(gold, prediction, timeout_seconds):
        time.sleep(timeout_seconds)
        return False

    monkeypatch.setattr(verifiers, "math_verify_equal", too_slow)
    monkeypatch.setattr(verifiers, "MATH_VERIFY_SECONDS", 0.5)
    assert verdict(data.Problem("q", "14"), "15") == "timeout"


def test_math500_references_equal_themselves(shared_data):
    problems = data.load_problems(shared_data / "math500.jsonl")
    said = [verdict(problem, problem.reference) for problem in problems]
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
    model, rng, asked = tiny_model(len(tokenizer)), random.Random(a_star), []

    def ask(verifier, pairs):
        asked.extend(pairs)
        return ["right" if "14" in answer else "undecided" for _, answer in pairs]

    monkeypatch.setattr(rewards, "ask", ask)
    texts = [["no box"] * 6] + [random_texts(rng, a_star) for _ in range(4)]
    groups = [group_of(tokenizer, of_group, a_star) for of_group in texts]
    R, seen = {}, set()
    for name, function in REWARDS.items():
        R[name], _ = function(groups, actor=model, tokenizer=tokenizer, M=6, verifier=None)
        assert R[name].shape == (5, 6) and ((R[name] >= 0) & (R[name] <= 1)).all()

    for k, group in enumerate(groups):
        found = [split_answer(text) for text in group.texts]
        boxed = [i for i in range(6) if found[i] is not None]
        answers = {i: found[i][1] for i in boxed}
        seen |= set(answers.values())
        contexts = [group.prompt + tokenizer.encode(group.texts[i][: found[i][0]]) for i in boxed]
        P = naive_logprobs(model, tokenizer, contexts, a_star).exp() if boxed else None
        for i in range(6):
            expected = dict.fromkeys(REWARDS, 0.0)
            if i in boxed:
                W_i = naive_logprobs(model, tokenizer, contexts, answers[i]).exp()
                if answers[i] or not a_star:
                    expected["cer"] = ((W_i * P).sum() / W_i.sum()).item()
                expected["exact"] = float(answers[i] == a_star)
                expected["rule"] = float(toy.same_digits(answers[i], a_star))
                expected["rule+cer"] = (expected["rule"] + expected["cer"]) / 2
                expected["verifree"] = P[boxed.index(i)].item()
                expected["general-verifier"] = float("14" in answers[i])
            for name in REWARDS:
                value = R[name][k, i].item()
                assert value == pytest.approx(expected[name], rel=2e-3), (name, group.texts[i])
        assert {answer for _, answer in asked} >= set(answers.values())
    assert len(asked) == len(set(asked)) and len(seen) > 4


# --------------------------------------------------------------------------------- General-verifier


def test_the_verifier_is_asked_in_the_words_it_was_trained_on(shared_data):
    words = (shared_data.parent / "general_verifier_prompt.txt").read_text().rstrip("\n")
    assert rewards.VERIFIER_PROMPT == words


DECISIONS = {
    "\n\nBoth fractions equal one half.\n\nFinal Decision: Yes": "right",
    " The student gives 15 where the truth is 14. Final Decision: No<|im_end|>": "wrong",
    "Final Decision: Yes\n\nUser: ### Question: next": "right",
    " If correct, the decision would be Yes. To decide, we": "undecided",  # cut off
    "final decision: yes": "undecided",  # its exact words count
    "": "undecided",
}


@pytest.mark.parametrize("output, says", DECISIONS.items())
def test_the_verifiers_decision_is_read(output, says):
    assert rewards.decision(output) == says


def test_the_verifier_is_asked_greedily_and_special_names_are_text(tokenizer, monkeypatch):
    def generate(model, prompts, max_new_tokens, name, temperature):
        assert temperature == 0 and not any(tokenizer.eos_token_id in ids for ids in prompts)
        said = ["Yes" if "Answer: fourteen" in tokenizer.decode(ids) else "No" for ids in prompts]
        return [tokenizer.encode(f" Final Decision: {word}<eos>") for word in said], None

    monkeypatch.setattr(rewards, "generate", generate)
    asked = [(data.Problem("How many?", "14"), "fourteen")]
    asked.append((data.Problem("{question}", "<eos>"), "{answer}"))
    assert rewards.ask((None, tokenizer), asked) == ["right", "wrong"]
    assert rewards.ask((None, tokenizer), []) == []
