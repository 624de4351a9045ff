"""CER in TRL (examples/trl_cer.py), if TRL is installed (requirements-dev.txt)."""

import shutil
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("trl")

import datasets
import trl
import trl_cer
from conftest import group_of, tiny_model

import cer
import sft
from engine.load import load
from reward_functions import R_by_name, ask_judges
from runtime.files import append_rows
from tasks import toy_model
from tasks.data import load_problems
from tasks.prompts import chat_messages, encode_prompt


@pytest.mark.parametrize("trainer", ["", "--grpo"])
def test_two_steps_with_the_rewards_of_train_py(script, monkeypatch, toy_model_dir, trainer):
    """The rewards of the first step are compared, in which the trainer's weights are still the
    model's. The chat template has a generation prompt, as most have."""
    shutil.copytree(toy_model_dir, "model")
    template = toy_model.CHAT_TEMPLATE + "{% if add_generation_prompt %}so {% endif %}"
    Path("model/chat_template.jinja").write_text(template)
    actor, tokenizer = load("model", "cpu")
    problems = {chat_messages(p)[-1]["content"]: p for p in load_problems("toy")}
    received, expected, trl_rewards = [], [], trl_cer.cer_rewards

    def compare(trainer, prompts, completion_ids, references):
        for i in range(0, len(prompts), 4):
            problem, group = problems[prompts[i][-1]["content"]], completion_ids[i : i + 4]
            assert references[i : i + 4] == [[*problem.references]] * 4
            prompt = encode_prompt(tokenizer, problem)
            expected.extend(cer.rewards(actor, tokenizer, prompt, group, problem.references)[0])
        received.extend(trl_rewards(trainer, prompts, completion_ids, references))
        assert trainer.model.training  # as TRL left it
        return received[-len(prompts) :]

    monkeypatch.setattr(trl_cer, "cer_rewards", compare)
    flags = "--model model --steps 2 --questions 4 --samples 4 --out out"
    code, out, err = script(trl_cer, f"{flags} {trainer}")
    assert code == 0 and "rewards/cer_reward/mean" in out, err
    assert received[:16] == expected[:16] and len(set(received[:16])) > 4


def test_the_overlap_in_trl_is_that_of_train_py(script, tokenizer, toy_model_dir):
    """On hand-made completions, and in one step of TRL."""
    texts = [r"so \boxed{14 eggs}", r"\boxed{it is 14}", "no box", r"\boxed{}"]
    group = group_of(tokenizer, texts, ["14", "14 eggs"])
    [judged] = ask_judges([group], set(), None, tokenizer)
    expected = R_by_name("overlap", [judged])[0].tolist()
    references = [["14", "14 eggs"]] * len(texts)
    found = trl_cer.overlap_rewards(tokenizer, group.completions, references)
    assert found == pytest.approx(expected)
    assert expected == [1, 0.5, 0, 0]
    flags = "--steps 1 --questions 2 --samples 4 --reward overlap --out out"
    code, out, err = script(trl_cer, f"--model {toy_model_dir} {flags}")
    assert code == 0 and "rewards/overlap_reward/mean" in out, err


def test_a_model_that_cannot_be_scored_is_refused(script, tokenizer):
    model = tiny_model(len(tokenizer), "granite", logits_scaling=1.05)
    for part in model, tokenizer:
        part.save_pretrained("granite")
    code, _, err = script(trl_cer, "--model granite --steps 1 --out out")
    assert code == 2 and "granite is not supported (its logits are not lm_head of" in err, err


def test_its_sft_trainer_reads_what_is_selected(script, monkeypatch, toy_model_dir):
    """As the rows that sft.py learns: the same tokens, of which the completion's are learned."""
    texts = [r"3*4=12\n\boxed{14}", r"\boxed{14 eggs}"]
    line = {"question": "How many eggs?", "references": ["14"], "verifier": "text"}
    line |= {"texts": texts, "answers": ["14", "14 eggs"], "truncated": [False] * 2}
    append_rows(Path("samples.jsonl"), [line | {"rewards": {"cer": [1.0, 1.0]}}])
    updated = mock.Mock(return_value=(1.0, 1.0))
    monkeypatch.setattr(sft, "update", updated)
    flags = f"--model {toy_model_dir} --data . --select cer --at-least 1 --epochs 1 --batch 2"
    code, _, err = script(sft, f"{flags} --out tuned")
    assert code == 0, err
    rows = datasets.load_dataset("json", data_files="tuned/selected.jsonl", split="train")
    config = trl.SFTConfig("trl", report_to="none", use_cpu=True, bf16=False, max_steps=1)
    trainer = trl.SFTTrainer("tuned", config, train_dataset=rows)
    read = [(row["input_ids"], [i != -100 for i in row["labels"]]) for row in trainer.train_dataset]
    ours = [(row.ids, [w > 0 for w in row.weights]) for row in updated.call_args.args[2]]
    assert sorted(read) == sorted(ours)
    trainer.train()
