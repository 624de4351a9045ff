"""What reaches the model: the first prompt is shown, and control tokens are kept out."""

import re
from pathlib import Path

import pytest
from tokenizers import processors

import evaluate
import judge
import train
import warm_start
from engine.tokens import vocabulary
from runtime.cli import InputError
from tasks import toy_model
from tasks.data import Problem
from tasks.prompts import encode_plain, encode_prompt, show_first, usable_prompts


@pytest.mark.parametrize("script_of", [train, judge, evaluate])
def test_a_script_shows_first_what_the_model_is_asked(script, toy_model_dir, script_of):
    rows = '{"passage": "Ana came.", "question": "Who?", "answer": ["Ana", "she"], "level": 1}\n'
    Path("mine.jsonl").write_text(rows * 4)
    flags = f"--model {toy_model_dir} --dataset mine.jsonl --max-new-tokens 4"
    if script_of is train:
        flags += " --samples 2 --questions 4 --steps 1 --eval-dataset toy-test --eval-limit 1"
    code, _, err = script(script_of, flags)
    assert code == 0, err
    assert "mine.jsonl: these columns are not used: level\n" in err
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


def test_control_tokens_are_left_out_and_counted(capsys):
    """In questions and references, also in one of several."""
    tokenizer = toy_model.build_tokenizer()
    tokenizer.add_tokens(["<think>", "   "])  # the model's marks; others add runs of spaces
    good = Problem("How many?", "   14")
    bad = [Problem("How<eos>?", "14"), Problem("How?", "<think>14")]
    bad.append(Problem("How many?", "   14", others=("14<eos>",)))
    problems, longest = usable_prompts(tokenizer, [*bad, good], "mine")
    assert problems == [good] and longest == len(encode_prompt(tokenizer, good))
    says = "3 of 4 questions or answers have a control token"
    assert capsys.readouterr().err == f"mine: left out: {says}\n"
    with pytest.raises(InputError, match="mine: no question is left; 3 of 3 questions or"):
        usable_prompts(tokenizer, bad, "mine")


def test_qwens_control_tokens(qwen_tokenizer, capsys):
    references = "4<|im_end|>", "<think>\n\n</think>\n\n5", "<b>6</b>"
    problems, _ = usable_prompts(qwen_tokenizer, [Problem("q", r) for r in references], "mine")
    assert [problem.reference for problem in problems] == ["<b>6</b>"]


def test_demonstrations_with_control_tokens_are_left_out_and_counted(script, toy_model_dir):
    good, chat, echo = (
        '{"question": "Q?", "solution": "so \\\\boxed{7}"}\n',
        '{"question": "Q?", "solution": "so \\\\boxed{7}<eos>"}\n',
        '{"question": "<eos>Q?", "solution": "so \\\\boxed{7}"}\n',
    )
    flags = f"--model {toy_model_dir} --data demos.jsonl --batch 2 --out warm"
    Path("demos.jsonl").write_text(good + chat + good + echo)
    code, out, err = script(warm_start, flags)
    assert code == 0 and out.startswith("2 demonstrations, "), err
    assert "demos.jsonl: left out: 2 of 4 questions or answers have a control token" in err
    Path("demos.jsonl").write_text(chat + echo)
    code, out, err = script(warm_start, flags.replace("warm", "other"))
    says = "demos.jsonl: no question is left; 2 of 2 questions or answers have a control token"
    assert code == 2 and re.fullmatch(f"warm_start.py: {says}\n", err), err


def test_an_end_of_text_token_that_the_tokenizer_appends_is_taken_off():
    plain, appending = toy_model.build_tokenizer(), toy_model.build_tokenizer()
    special = [("<eos>", plain.eos_token_id), ("<pad>", plain.pad_token_id)]
    appending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<pad> $A <eos>", special_tokens=special
    )
    plain.chat_template = appending.chat_template = None
    problem = Problem("How many?", "14")
    asked = encode_prompt(plain, problem)
    assert encode_prompt(appending, problem) == [plain.pad_token_id, *asked]  # what begins it stays
    text = vocabulary(plain).join(asked).decode()
    assert encode_plain(appending, text) == [plain.pad_token_id, *asked]
