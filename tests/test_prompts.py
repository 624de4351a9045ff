"""What reaches the model: the first prompt is shown, and control tokens are kept out."""

import copy
import dataclasses
from pathlib import Path

import pytest
from conftest import tiny_model
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

import evaluate
import judge
import train
from reward_functions import asking_prompts, check_asked
from runtime.cli import InputError
from tasks import general_verifier
from tasks.data import Problem, load_examples, with_examples
from tasks.prompts import (
    INSTRUCTION,
    LETTER_ONLY,
    SYSTEM,
    chat_messages,
    encode_plain,
    encode_prompt,
    show_first,
    usable_prompts,
)


@pytest.mark.parametrize("script_of", [train, judge, evaluate])
def test_a_script_shows_first_what_the_model_is_asked(script, toy_model_dir, script_of):
    rows = '{"passage": "Ana came.", "question": "Who?", "answer": ["Ana", "she"]}\n'
    Path("mine.jsonl").write_text(rows * 4)
    flags = f"--model {toy_model_dir} --dataset mine.jsonl --max-new-tokens 4"
    if script_of is train:
        flags += " --samples 2 --questions 4 --steps 1 --eval-dataset toy-test --eval-limit 1"
    code, _, err = script(script_of, flags)
    assert code == 0, err
    asked = "  | Ana came.\n  | \n  | Who?\n  its reference: Ana or she; its verifier: text\n"
    said = f"mine.jsonl: the first prompt, as the model sees it:\n{asked}"
    assert err.count(said) == 1
    assert err.count("as the model sees it") == 1 + (script_of is train)  # and the held-out data's


def test_a_long_prompt_is_shown_without_its_middle(tokenizer, capsys):
    problem = Problem("Who? " * 1000 + "At last", "Ana " * 1000)
    show_first(tokenizer, [problem], "mine")
    said = capsys.readouterr().err
    assert "| Who? Who?" in said and " [...] " in said and "At last\n" in said
    assert "Ana Ana" in said and len(said) < 1500


def test_control_tokens_are_left_out_and_counted(own_tokenizer, capsys):
    """In questions and references, also in one of several."""
    tokenizer = own_tokenizer
    tokenizer.add_tokens(["<think>", "   "])  # the model's marks; others add runs of spaces
    good = Problem("How <b>many</b>?", "   14")  # these are no tokens
    bad = [Problem("How<eos>?", "14"), Problem("How?", "<think>14")]
    bad.append(Problem("How many?", "   14", others=("14<eos>",)))
    model = tiny_model(len(tokenizer))
    problems, longest = usable_prompts(model, tokenizer, [*bad, good], "mine", 7)
    parts = encode_prompt(tokenizer, good), [0] * 7, tokenizer.encode("{   14}")
    assert problems == [good] and longest == sum(map(len, parts))
    says = "3 of 4 questions or answers have a control token"
    assert capsys.readouterr().err == f"mine: left out: {says}\n"
    with pytest.raises(InputError, match="mine: no question is left; 3 of 3 questions or"):
        usable_prompts(model, tokenizer, bad, "mine", 7)


PIECE = "{{ messages[-1].content }}"
TEMPLATES = [
    PIECE + PIECE,
    "{{ messages[-1].content[0].text }}",
    "{{ raise_exception('no user') }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_does_not_show_the_message_is_refused(own_tokenizer, template):
    """Whether the model samples, is asked or grades."""
    tokenizer, problem = own_tokenizer, Problem("How many?", "14", "text")
    tokenizer.chat_template = template
    asked = tiny_model(len(tokenizer), max_position_embeddings=1024), tokenizer
    for ask in (
        lambda: usable_prompts(*asked, [problem], "mine", 7),
        lambda: check_asked([problem], asked, 7),
        lambda: general_verifier.encode(tokenizer, (problem, "14"), "{question}"),
    ):
        with pytest.raises(InputError, match="the chat template (does not show|fails .no user)"):
            ask()


def test_all_are_asked_in_one_way(own_tokenizer):
    """Who is asked about an answer is told not to think, where the template knows that, and who is
    asked the question is told nothing. Without a template a text stands behind the token that
    begins one, and without the token that some tokenizers append."""
    tokenizer, problem = own_tokenizer, Problem("How many?", "14", "text")

    def asked():
        yield encode_prompt(tokenizer, problem)
        yield asking_prompts(tokenizer, problem, ["14"])[0]
        yield general_verifier.encode(tokenizer, (problem, "14"), "{question}")

    tokenizer.chat_template = PIECE + "{% if enable_thinking is false %}done{% endif %}"
    told = [tokenizer.decode(ids).endswith("done") for ids in asked()]
    assert told == [False, True, True]
    tokenizer.chat_template = None
    plain = list(asked())
    special = [("<eos>", tokenizer.eos_token_id), ("<pad>", tokenizer.pad_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<pad> $A <eos>", special_tokens=special
    )
    assert list(asked()) == [[tokenizer.pad_token_id, *ids] for ids in plain]


def test_a_grader_may_have_a_tokenizer_of_any_kind():
    """One without bytes; the names of special tokens in an answer are ordinary text."""
    backend = Tokenizer(
        models.BPE({"<s>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate("ab▁")}}, [])
    )
    grader = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<s>")
    grader.chat_template = "<s>" + PIECE
    ids = general_verifier.encode(grader, (Problem("a", "b"), "</s>"), "{question}{answer}")
    assert ids[:2] == [0, 2] and 1 not in ids


def test_a_prompt_is_the_same_tomorrow(tokenizer, capsys):
    """Though its template prints today's date. A line says so, once."""
    problem = Problem("Q?", "1", "math")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') + messages[-1]['content'] }}"
    for _ in range(2):
        text = tokenizer.decode(encode_prompt(tokenizer, problem))
        assert text.startswith("26 Jul 2024Q?"), text
    assert capsys.readouterr().err.count("the prompts hold today's date") == 1


def test_worked_examples_are_turns_before_each_question(own_tokenizer, tmp_path):
    """They have what the question has: its context, the paper's instruction, its options."""
    rows = '{"context": "Ana came.", "question": "Who?", "solution": "She. \\\\boxed{Ana}"}\n'
    rows += '{"question": "Which?", "options": ["x", "y"], "solution": "y. \\\\boxed{B}"}\n'
    (tmp_path / "examples.jsonl").write_text(rows)
    examples = load_examples(tmp_path / "examples.jsonl")
    [problem] = with_examples([Problem("When?", "now", "text")], examples)
    system, *turns = chat_messages(problem)
    assert system == {"role": "system", "content": SYSTEM}
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2 + ["user"]
    asked = "Ana came.\n\nWho?", "She. \\boxed{Ana}", "Which?\nA: x\nB: y", "y. \\boxed{B}", "When?"
    contents = [text if k % 2 else f"{text}\n{INSTRUCTION}" for k, text in enumerate(asked)]
    contents[2] += LETTER_ONLY
    assert [turn["content"] for turn in turns] == contents
    model = tiny_model(len(own_tokenizer))
    with pytest.raises(InputError, match="the chat template does not show the solutions of"):
        usable_prompts(model, own_tokenizer, [problem], "mine", 7)  # the toy's shows the last turn
    own_tokenizer.chat_template = None
    plain = encode_plain(own_tokenizer, "".join(f"{text}\n\n" for text in [SYSTEM, *contents]))
    assert encode_prompt(own_tokenizer, problem) == plain
    assert chat_messages(with_examples([problem], load_examples(None))[0]) == [system, turns[-1]]
    # A control token in an example is one in every prompt.
    own_tokenizer.add_tokens("<think>")
    bad = dataclasses.replace(problem, examples=(Problem("Who?", "<think> \\boxed{Ana}"),))
    with pytest.raises(InputError, match="1 of 1 questions or answers have a control token"):
        usable_prompts(model, own_tokenizer, [bad], "mine", 7)
