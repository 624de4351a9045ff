"""CER in TRL (examples/trl_cer.py), if TRL is installed (requirements-dev.txt)."""

import shutil
from types import SimpleNamespace

import pytest

pytest.importorskip("trl")

import torch
import trl_cer
from transformers import AutoModelForCausalLM

from engine.load import load
from rewards import conditional_expectation
from rollout import chat_messages, encode_prompt, to_group
from tasks import toy
from tasks.data import load_problems

STEPS = "--steps {} --questions 4 --samples 4 --out out"


@pytest.mark.parametrize("trainer", ["", "--grpo"])
def test_two_steps(script, toy_model_dir, trainer):
    flags = f"--model {toy_model_dir} {STEPS.format(2)} {trainer}"
    code, out, err = script(trl_cer, flags)
    assert code == 0 and "rewards/cer_reward/mean" in out, err
    started, trained = map(AutoModelForCausalLM.from_pretrained, (toy_model_dir, "out/model"))
    assert all((a != b).any() for a, b in zip(started.parameters(), trained.parameters()))


def test_the_rewards_are_those_of_train_py(script, monkeypatch, toy_model_dir, tmp_path):
    """On the rollouts of a first step, in which the trainer's weights are still the model's. The
    chat template has a generation prompt, as most have."""
    model = shutil.copytree(toy_model_dir, tmp_path / "model")
    template = toy.CHAT_TEMPLATE + "{% if add_generation_prompt %}so {% endif %}"
    (model / "chat_template.jinja").write_text(template)
    actor, tokenizer = load(model, "cpu")
    problems = {chat_messages(p)[-1]["content"]: p for p in load_problems("toy")}
    stops, compared, trl_rewards = actor.generation_config.eos_token_id, [], trl_cer.cer_rewards

    def compare(trainer, prompts, completion_ids, references):
        groups = []
        for i in range(0, len(prompts), 4):
            problem, ids = problems[prompts[i][-1]["content"]], completion_ids[i : i + 4]
            assert references[i : i + 4] == [problem.reference] * 4
            prompt = encode_prompt(tokenizer, problem)
            groups.append(to_group(tokenizer, stops, problem, prompt, ids, [0.0] * 4))
        expected, _ = conditional_expectation(groups, actor=actor, tokenizer=tokenizer, M=4)
        R = trl_rewards(trainer, prompts, completion_ids, references)
        compared.append((R, expected.flatten().tolist()))
        assert trainer.model.training  # as TRL left it
        return R

    monkeypatch.setattr(trl_cer, "cer_rewards", compare)
    code, _, err = script(trl_cer, f"--model {model} {STEPS.format(1)}")
    assert code == 0, err
    [(R, expected)] = compared
    assert R == expected and len(set(R)) > 4


def test_what_would_be_silently_wrong_is_refused(monkeypatch):
    trainer = SimpleNamespace(is_fsdp_enabled=False, num_generations=4, chat_template_kwargs={})
    trainer.model, trainer.processing_class = torch.nn.Linear(1, 1).train(), None
    with pytest.raises(ValueError, match="must be a multiple of num_generations, 4"):
        trl_cer.cer_rewards(trainer, ["q"] * 3 + ["r"] * 3, [[1]] * 6, ["14"] * 6)
    whole_groups = trainer, ["q"] * 4, [[1]] * 4, ["14"] * 4
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="the policy is sharded"):
        trl_cer.cer_rewards(*whole_groups)
    trainer.is_fsdp_enabled = False
    monkeypatch.setattr(trl_cer, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="the policy is sharded"):
        trl_cer.cer_rewards(*whole_groups)
