"""Every reward by its definition, and the verifiers."""

import copy
import dataclasses
import functools
import random
import re
import string
import time
from collections import Counter
from hashlib import sha256
from unittest import mock

import numpy
import pytest
import torch
from conftest import group_of, tiny_model
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig
from naive import log_pi, log_probs

from engine.tokens import Box, split_answer, vocabulary
from reward_functions import (
    REWARDS,
    R_by_name,
    Reward,
    ask_judges,
    asking_prompts,
    check_asked,
    decision_tokens,
    f1,
)
from runtime.cli import InputError
from runtime.sampled import group_line, sample_table
from tasks import data, general_verifier, toy, verifiers
from tasks.verifiers import BOXED_LATEX, VERIFIERS, verify, words

A = [" A ", "A.", "(A)", "(A).", r"\text{A}", r"\textbf{(A)}", "$A$", "**A**", "A: iron", "A) iron"]
A += ["(A) iron", r"\text{A}: \text{iron}", "A: P(B)", "A: both B and C", "A. John F. Kemp"]
NOT_A = ["Apple", "AB", "A or B", "A, B", "A iron", "A: iron or B: neon", "A) iron, B) neon", "B"]
NOT_A += ["a", "A.5", "A: iron\nB: neon", "B: A"]
MATHEMATICS = [  # equal
    *[("5.", "5"), ("x+1.", "x+1"), ("$5.$", "5"), (r"\text{cold.}", "cold"), ("$5$.", "5")],
    *[(r"1\,000", "1000"), ("5 dollars", "5"), (r"5 \text{ dollars}", "5")],
    *[(r"\left\{1, 2 \right.", r"\left\{1, 2 \right.")],  # this period is a delimiter
    *[("3 1/2", "7/2"), ("-3 1/2", "-7/2"), ("3 1/2", r"3\frac12")],
]
OTHERS = [("3 1/2", "2"), ("1 2 3", "123"), ("1, 200", "1200"), ("5...", "5"), ("10²", "102")]
OTHERS += [("1 000", "1"), ("3½", "3"), ("2–5", "25"), ("1e999999999", "1")]  # not equal
VERDICTS = {  # (verifier, reference): {answer: whether it is right}
    ("math", r"\frac{1}{2}"): {r"\dfrac12": True, "0.5": True},  # as the authors set it up
    ("math", "x+1"): {"1+x": True},
    ("math", "14"): {"14": True, r"14 \text{ cm}": True, "15": False, "": False, None: False},
    ("letter", "A"): dict.fromkeys(A, True) | dict.fromkeys(NOT_A, False),
    ("letter", "AB"): {"AB": True, "A": False},
    ("text", "New York"): {" new  york.": True, "York": False},  # case, spaces, ends
    ("text", r"\text{the fi\$h}"): {"The ﬁh": True},
    ("text", "3 1/2"): {"31/2": False},
    ("text", "102"): {"10²": False, "１０２": True},
    ("text", ".5"): {"5": False, "0.5": False, "(.5.": False},  # nor the point of .5
    ("text", "Zürich"): {"Zu\u0308rich": True, "“$Zürich$”": True, "Zü\u200brich": True},
    ("text", "1914-18"): {"1914–18": True, "191418": False},
    ("text", "it's"): {"it’s": True, "its": False},
    ("text", "北京"): {"北京。": True},
    ("text", "C#"): {"C": False, "C#.": True},
    ("text", "5"): {"-5": False, "5.": True, "5!": False, "5′": False, "5‰": False, '"5".': True},
    ("text", "..."): {"": False},
    ("toy-rule", "it is 14"): {"14 eggs": True, "fourteen": False, "1 4": False},
    ("toy-truth", "it is 14"): {"fourteen": True, "15": False},  # it knows words too
}


def test_verdicts():
    """Of several references one is enough."""
    for (verifier, reference), expected in VERDICTS.items():
        one = data.Problem("q", reference, verifier)
        several = data.Problem("q", "(no answer is this)", verifier, (reference,))
        for problem in one, several:
            right = verify([(problem, answer) for answer in expected])
            assert dict(zip(expected, right)) == expected


def test_math_verify_has_the_settings_of_the_papers_authors():
    """Also those that are its defaults."""
    normalization = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="all"
    )
    assert BOXED_LATEX == LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=True,
        normalization_config=normalization,
    )


def test_what_math_verify_misreads_is_rewritten_on_both_sides():
    for right, pairs in (True, MATHEMATICS), (False, OTHERS):
        for one, other in [*pairs, *(pair[::-1] for pair in pairs)]:
            assert verify([(data.Problem("q", other, "math"), one)]) == [right], (one, other)


def test_a_verifier_decides_once_about_each_last_box(tokenizer, monkeypatch):
    texts = [r"\boxed{7}, no: \boxed{14}.", r"\boxed{14}, no: \boxed{7}.", "14", r"\boxed{7}"]
    texts += [r"\boxed{}"] * 4
    program = mock.Mock(side_effect=VERIFIERS["math"])
    model = mock.Mock(side_effect=lambda pairs, _: ([answer == "7" for _, answer in pairs], []))
    monkeypatch.setitem(VERIFIERS, "math", program)
    monkeypatch.setattr(general_verifier, "ask", model)
    groups = [group_of(tokenizer, of, "14", "math") for of in (texts[:4], texts[4:])]
    judged = ask_judges(groups, {"verifier"}, None, None)
    assert R_by_name("rule", judged).tolist() == [[1, 0, 0, 0], [0] * 4] and program.call_count == 2
    judged = ask_judges(groups, {"general-verifier"}, None, None, verifier_model="model")
    assert R_by_name("general-verifier", judged).tolist() == [[0, 1, 0, 1], [0] * 4]
    problem = groups[0].problem
    model.assert_called_once_with([(problem, "14"), (problem, "7")], "model")
    assert all(of_group.accepted.dtype == torch.bool for of_group in judged)
    assert group_line(judged[0])["right"] == [False, True, False, True]
    both = ask_judges(groups[:1], {"verifier", "general-verifier"}, None, None)[0]
    assert both.right.tolist() == [True, False, False, False]
    assert both.accepted.tolist() == [False, True, False, True]


def test_a_reply_that_decides_nothing_is_0_as_a_reward(tokenizer, monkeypatch):
    monkeypatch.setattr(general_verifier, "ask", lambda pairs, _: ([None, True], ["...", "..."]))
    groups = [group_of(tokenizer, [r"\boxed{1}", r"\boxed{2}", "3"], "14")]
    judged = ask_judges(groups, {"general-verifier"}, None, None)
    assert R_by_name("general-verifier", judged).tolist() == [[0, 1, 0]]


def test_exact_match_composes_accents_on_both_sides(tokenizer):
    groups = [group_of(tokenizer, [r"\boxed{x}"] * 3, "é")]
    boxes = [Box(0, text, "}") for text in ("e\u0301", "é", "e")]
    groups = [dataclasses.replace(groups[0], boxes=boxes)]
    judged = ask_judges(groups, set(), None, None)
    assert R_by_name("exact", judged).tolist() == [[1, 1, 0]]
    assert sample_table([group_line(judged[0])]).verbatim.tolist() == [True, True, False]


LONG = ["a" + "." * 10**5 + "b", "5" + "!" * 10**5 + "x", "(" * 10**5, r"\text{" * 16_000]
LONG += ["a" + "\u0301" * 50_000 + "\u0323" * 50_000, "_ " * 5_000]
LONG += [two * 50_000 for two in ("- ", "' ", ", ", ".5", "²", "北")]


def test_a_long_line_takes_a_second():
    for line in LONG:
        started = time.process_time()
        assert not any(VERIFIERS[name](line, "14") for name in VERIFIERS.keys() - {"math"})
        assert f1(words(line), words("14")) == 0
        assert general_verifier.decision("Final Decision" + line) is None
        assert time.process_time() - started < 2, line[:9]  # for six looks at it


def test_a_time_out_is_wrong(monkeypatch):
    """math-verify's, which is 5 seconds, and 1 here."""
    soon = functools.partial(verifiers.parse, parsing_timeout=1)
    monkeypatch.setattr(verifiers, "parse", soon)
    soon = functools.partial(verifiers.math_verify_equal, timeout_seconds=1)
    monkeypatch.setattr(verifiers, "math_verify_equal", soon)
    problem = data.Problem("How many?", "7", "math")
    assert verify([(problem, "(10^{10})!"), (problem, "7")]) == [False, True]


# ------------------------------------------------------------------------ all of them by definition

FRAGMENTS = ["3*4=12; ", "so 14 eggs ", "14", "\n", "{", "}", "\\boxed{14", "\\boxed", "the end"]
BOXES = ["", " ", "1", "14", "14 eggs", "it is 14 in total", "\\boxed{14}", "14 ", "15", "}"]


def random_texts(rng, a_star):
    """Empty and blank answers, a prefix of a*, a* inside a longer text, second and nested boxes,
    boxes that never close, and a* pasted into the solution."""
    boxes = [f"\\boxed{{{box}}}" for box in [*BOXES, a_star]]
    pieces = FRAGMENTS + [a_star] + boxes * 2
    return ["".join(rng.choices(pieces, k=rng.randrange(5))) for _ in range(6)]


def token_f1(answer, reference):
    """SQuAD's, from precision and recall."""

    def tokens(text):
        plain = "".join(c for c in text.lower() if c not in string.punctuation)
        return [word for word in plain.split() if word not in ("a", "an", "the")]

    given, wanted = tokens(answer), tokens(reference)
    same = sum((Counter(given) & Counter(wanted)).values())
    if not same:
        return 0.0
    precision, recall = same / len(given), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


SAME = [("１２", "12"), *((text, text) for text in ("A", "The", "$", "+", "..."))]
PARTLY = {("The railway  bridge.", "railway bridge"): 1, ("a bridge", "railway bridge"): 2 / 3}
PARTLY |= {("bridge bridge", "railway bridge"): 0.5, ("rail", "railway bridge"): 0}
PARTLY |= {("a railway bridge over two canals", "railway bridge"): 4 / 7}
PARTLY |= {("北京市", "北京"): 4 / 5, ("-5", "5"): 0, ("C#", "C++"): 0, ("the A", "B"): 0}


@pytest.mark.parametrize("answer, reference", SAME + [*PARTLY])
def test_overlap_by_hand(answer, reference):
    """Also of typography, and of scripts without spaces."""
    share = PARTLY.get((answer, reference), 1)
    assert f1(words(answer), words(reference)) == pytest.approx(share)


def rewards_by_definition(model, tokenizer, group, references):
    """What every reward but `asked` gives to each sample, spelled out -> one dict per sample."""
    found, expected = [split_answer(text) for text in group.texts], []
    boxed = [i for i, box in enumerate(found) if box]
    contexts = [group.prompt + tokenizer.encode(group.texts[i][: found[i][0]]) for i in boxed]

    def probabilities(answer):
        scores = [log_pi(model, tokenizer, context, answer) for context in contexts]
        return torch.tensor(scores).exp()

    def mean_probability(context, a_star):
        """Of the tokens of {a*, by one plain pass."""
        tokens = tokenizer.encode("{" + a_star, add_special_tokens=False)
        logp = log_probs(model, [*context, *tokens])[len(context) - 1 : -1]
        return sum(logp[i, token].exp().item() for i, token in enumerate(tokens)) / len(tokens)

    P = sum(probabilities(a_star) for a_star in references)
    unsolved = group.prompt + tokenizer.encode(r"\boxed", add_special_tokens=False)
    before = {a_star: mean_probability(unsolved, a_star) for a_star in references}
    for i, box in enumerate(found):
        R = dict.fromkeys(REWARDS.keys() - {"asked"}, 0.0)
        if box:
            answer = box[1]
            W_i = probabilities(answer)
            if answer:
                R["cer"] = ((W_i * P).sum() / W_i.sum()).item()
            R["exact"] = float(any(answer == a_star for a_star in references))
            read = any(toy.same_digits(answer, a_star) for a_star in references)
            R["rule"] = float(read and answer != "")
            R["rule+cer"] = (R["rule"] + R["cer"]) / 2
            R["overlap"] = max(token_f1(answer, a_star) for a_star in references)
            R["overlap+cer"] = (R["overlap"] + R["cer"]) / 2
            R["verifree"] = P[boxed.index(i)].item()
            after = {each: mean_probability(contexts[boxed.index(i)], each) for each in references}
            R["rlpr"] = max(0.0, *(after[each] - before[each] for each in references))
            R["general-verifier"] = float("14" in answer)  # as ask() below says
            R["any-box"] = float(answer != "")
        expected.append(R)
    return expected


REFERENCES = ["14"], ["fourteen eggs"], [" "], ["14", "1", "fourteen"], ["the 14", "14"]


@pytest.mark.parametrize("references", REFERENCES)
def test_every_reward_is_its_definition_on_random_texts(tokenizer, monkeypatch, references):
    model, rng = tiny_model(len(tokenizer)), random.Random(references[0])

    def ask(pairs, verifier_model):
        return ["14" in answer for _, answer in pairs], []

    monkeypatch.setattr(general_verifier, "ask", ask)
    texts = [["no box"] * 6] + [random_texts(rng, references[0]) for _ in range(4)]
    groups = [group_of(tokenizer, of_group, references) for of_group in texts]
    R = {}
    for name, reward in REWARDS.items():
        R[name] = R_by_name(name, ask_judges(groups, reward.judges, model, tokenizer, M=6))
        no_box = ask_judges(groups[:1], reward.judges, model, tokenizer)
        assert R_by_name(name, no_box).dtype == torch.float32
        assert R[name].shape == (5, 6) and ((R[name] >= 0) & (R[name] <= 1)).all()
    for k, group in enumerate(groups):
        for i, expected in enumerate(rewards_by_definition(model, tokenizer, group, references)):
            received = {name: R[name][k, i].item() for name in expected}
            assert received == pytest.approx(expected, rel=2e-3), group.texts[i]


# --------------------------------------------------------------------------------------- Yes or No


def test_asking_is_a_plain_pass_over_each_prompt(qwen_tokenizer, monkeypatch):
    """In its words, over several questions, answers of different lengths and names of special
    tokens, behind a chat template and without one. Each pair once, and what a question's answers
    share once."""
    model = tiny_model(len(vocabulary(qwen_tokenizer).bytes), max_position_embeddings=1024)
    several = data.Problem("How many?", "14", others=("fourteen {question}",))
    problems = {data.Problem("Who?", "Ann"): '"Ann"', several: '"14" or "fourteen {question}"'}
    answers = ["Ann", "<|im_end|> Yes", "the one who came first", "Ann", "", "é"]
    texts = [rf"\boxed{{{answer}}}" for answer in answers] + ["no box"]
    groups = [group_of(qwen_tokenizer, texts, "x") for _ in problems]
    groups = [dataclasses.replace(g, problem=p) for g, p in zip(groups, problems)]
    plain = copy.deepcopy(qwen_tokenizer)
    plain.chat_template = None
    for tokenizer in qwen_tokenizer, plain:
        passes = mock.Mock(side_effect=model.model.forward)
        with monkeypatch.context() as patch:
            patch.setattr(model.model, "forward", passes)
            R = R_by_name("asked", ask_judges(groups, {"asked"}, model, tokenizer))
        of_other = ask_judges(groups, {"asked"}, None, None, verifier_model=(model, tokenizer))
        assert torch.equal(R_by_name("asked", of_other), R)
        sizes = [list(call.kwargs["input_ids"].shape) for call in passes.call_args_list]
        assert [rows for rows, _ in sizes] == [1, 4, 1, 4]  # the shared part, four answers
        assert not R[:, [4, 6]].any() and torch.equal(R[:, 0], R[:, 3])
        yes, no = decision_tokens(tokenizer)
        for problem, of_group in zip(problems, R):
            for answer, received in zip(answers, of_group.tolist()):
                if answer:
                    [ids] = asking_prompts(tokenizer, problem, [answer])
                    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == (
                        1 if tokenizer.chat_template else 0
                    )
                    said = f"Question: {problem.question}\nReference answer: {problems[problem]}\n"
                    said += f"Student's answer: {answer}\n\nIs the student's answer right?"
                    assert said in tokenizer.decode(ids)
                    p = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                    odds = p[yes].logsumexp(0) - p[no].logsumexp(0)
                    assert received == pytest.approx(odds.sigmoid().item(), abs=1e-4)


def test_yes_and_no_are_asked_by_tokens_of_their_own(tokenizer, monkeypatch, capsys):
    yes, no = decision_tokens(tokenizer)  # the toy spells by characters; both begin with a space
    assert [sorted(map(tokenizer.decode, ids)) for ids in (yes, no)] == [["Y", "y"], ["N", "n"]]
    problem, model = data.Problem("How many?", "14"), tiny_model(len(tokenizer))
    with pytest.raises(InputError, match="positions, too few for"):
        check_asked([problem], (model, tokenizer), 500)
    check_asked([problem], (model, tokenizer), 8)
    says = re.search("No have (.*) of the .* would begin with", capsys.readouterr().err)
    ids = torch.tensor(asking_prompts(tokenizer, problem, ["14"]))
    p = model(ids).logits[0, -1].softmax(-1)
    assert float(says[1]) == pytest.approx(p[yes + no].sum().item(), rel=0.05)
    model.lm_head.forward = lambda last: torch.eye(len(tokenizer))[yes[:1]] * 20  # it says Yes
    check_asked([problem], (model, tokenizer), 8)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("reward_functions.decision_tokens", lambda tokenizer: ([], []))
    with pytest.raises(InputError, match="with the same token"):
        check_asked([problem], (model, tokenizer), 8)


# --------------------------------------------------------------------------------- General-verifier


def test_the_verifier_is_asked_in_the_words_it_was_trained_on():
    """Those on its page on the hub, by their digest."""
    assert sha256(general_verifier.VERIFIER_PROMPT.encode()).hexdigest() == (
        "c9a087e0f1e2f1ad699d77a37ffd804a5db05e4d1db14fee265a21ec4f6b33c1"
    )


DECISIONS = {
    "\n\nBoth fractions equal one half.\n\nFinal Decision: Yes": True,
    "The student gives 15 where the truth is 14. Final Decision: No": False,
    "Final Decision: Yes|No": None,
    "I must end with Final Decision: Yes or No": None,
    "If I say Final Decision: Yes I need to be sure": None,
    "### Final Decision\nYes": True,
    "**Final Decision**: `Yes`": True,
    r"Final Decision: \boxed{No}": False,
    "Final Decision：Yes": True,
    "Final Decision: Yes/No": None,
    "**Final decision:** Yes": True,
    "Final Decision: Yes. No, wait. Final Decision: No": False,
    "If correct, the decision would be Yes. To decide, we": None,  # cut off
}


def test_the_verifier_is_asked_greedily_and_special_names_are_text(tokenizer, monkeypatch, capsys):
    def generate(model, prompts, max_new_tokens, name, temperature):
        assert temperature == 0 and not any(tokenizer.eos_token_id in ids for ids in prompts)
        asked = [re.findall("Answer: (.*)", tokenizer.decode(ids)) for ids in prompts]
        assert asked == [["<eos> or {b}", "{question}"]] * len(DECISIONS)
        return [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in DECISIONS], None

    monkeypatch.setattr(general_verifier, "generate", generate)
    model = mock.Mock(generation_config=mock.Mock(eos_token_id=[tokenizer.eos_token_id]))
    problem = data.Problem("{answer}", "<eos>", others=("{b}",))
    pairs = [(problem, "{question}")] * len(DECISIONS)
    verdicts, replies = general_verifier.ask(pairs, (model, tokenizer))
    assert verdicts == [*DECISIONS.values()] and replies == [*DECISIONS]
    undecided = [*DECISIONS.values()].count(None)
    says = f"{undecided} of {len(DECISIONS)} replies hold no decision (0 prompts are too long for"
    assert says in capsys.readouterr().err


def test_a_prompt_that_fills_the_models_positions_is_not_asked(tokenizer, monkeypatch, capsys):
    """The others are, as if it were not there."""
    monkeypatch.setattr(general_verifier, "VERIFIER_TOKENS", 4)
    model, prompt = tiny_model(len(tokenizer)), "{question} {reference} {answer}"  # 512 positions
    model.generation_config.eos_token_id = [tokenizer.eos_token_id]
    model.tokenizer_size = len(tokenizer)
    one, long = (data.Problem(question, "14") for question in ("How many?", "many " * 600))
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = "{{ messages[0]['content'] }}"
    [alone] = general_verifier.ask([(one, "3")], (model, plain), prompt)[1]
    capsys.readouterr()
    pairs = [(long, "3"), (one, "3"), (long, "4")]
    verdicts, replies = general_verifier.ask(pairs, (model, plain), prompt)
    assert verdicts == [None] * 3 and replies == ["", alone, ""] and alone
    says = "3 of 3 replies hold no decision (2 prompts are too long for it), such as"
    assert f"{says} {alone!r}" in capsys.readouterr().err


def test_a_prompt_of_ones_own_goes_through_the_chat_template(tokenizer, monkeypatch):
    """Its other braces stay."""
    chat, seen = copy.deepcopy(tokenizer), []
    chat.chat_template = "<eos>user {{ messages[0]['content'] }}<eos>"
    reply = chat.encode("Final Decision: Yes")
    model = mock.Mock(generation_config=mock.Mock(eos_token_id=[chat.eos_token_id]))

    def generate(model, prompts, max_new_tokens, **settings):
        seen.extend(prompts)
        return [[*reply, chat.eos_token_id], reply], None  # the second is cut off

    monkeypatch.setattr(general_verifier, "generate", generate)
    prompt = r"{question} {reference} {answer} \boxed{x}"
    pairs = [(data.Problem("Q", "14", others=("7",)), "{answer}<eos>")] * 2
    assert general_verifier.ask(pairs, (model, chat), prompt)[0] == [True, None]
    assert chat.decode(seen[0]) == r"<eos>user Q 14 or 7 {answer}<eos> \boxed{x}<eos>"
    assert seen[0].count(chat.eos_token_id) == 2  # those of the template


NUMBERS = [0, 1], (False, True), numpy.array([0, 1]), torch.tensor([0, 1], dtype=torch.uint8)
NUMBERS += torch.tensor([False, True]), torch.tensor([0, 1], dtype=torch.bfloat16)


@pytest.mark.parametrize("returned", NUMBERS)
def test_a_reward_may_return_numbers_of_any_type(tokenizer, monkeypatch, returned):
    monkeypatch.setitem(REWARDS, "mine", Reward(lambda judged: returned, set()))
    R = R_by_name("mine", ask_judges([group_of(tokenizer, ["a", "b"], "7")], set(), None, None))
    assert R.dtype == torch.float32 and R.tolist() == [[0, 1]]


WRONG = [torch.ones(1), torch.tensor([1.0, torch.nan]), None, 1.0, "ab", ["0", "1"], [[0], [1]]]
WRONG += [[0, None], {0: 1}, numpy.array([0, "x"], object), (x for x in [0, 1]), [0, 1e999]]


@pytest.mark.parametrize("returned", WRONG)
def test_a_reward_that_returns_something_else_is_named(tokenizer, monkeypatch, returned):
    monkeypatch.setitem(REWARDS, "mine", Reward(lambda judged: returned, set()))
    judged = ask_judges([group_of(tokenizer, ["a", "b"], "7")], set(), None, None)
    with pytest.raises(InputError, match=r"'mine' must give each sample a finite number"):
        R_by_name("mine", judged)
