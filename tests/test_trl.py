"""VeriFree, CER and overlap in TRL (examples/trl_cer.py), if TRL and peft are installed
(requirements-dev.txt)."""

import contextlib
import dataclasses
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

import peft
import torch
import trl_cer
from conftest import ROOT, group_of, tiny_model
from datasets import Dataset
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_cer import VeriFreeTrainer

import cer
import rloo
from engine.load import load
from engine.lora import LoraPolicy
from engine.policy import Policy
from engine.tokens import vocabulary
from reward_functions import R_by_name, ask_judges
from rollout import to_group
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


# ----------------------------------------------------------------- VeriFree: the gradient of a step

SETTINGS = trl_cer.RULES | trl_cer.GRPO_RULES
SETTINGS |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
SETTINGS |= {"num_generations": 4, "max_completion_length": 32, "max_steps": 1, "use_cpu": True}
SETTINGS |= {"bf16": False, "output_dir": "out", "report_to": "none", "save_strategy": "no"}


class Spy(VeriFreeTrainer):
    """Keeps the samples, and the gradients of the step."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.samples, self.gradients = [], {}
        self.add_callback(type("", (TrainerCallback,), {"on_pre_optimizer_step": self.keep})())

    def verifree_reward(self, prompts, completion_ids, reference, **others):
        self.samples.extend(zip(prompts, completion_ids))
        return super().verifree_reward(prompts, completion_ids, reference, **others)

    def keep(self, *_, model, **__):
        named = model.named_parameters()
        self.gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}


def last_reference(scores):
    return dict.fromkeys(scores.columns, scores.references[-1])


LONG = "fourteen eggs and no more"


@pytest.fixture
def questions(monkeypatch):
    """Four, of which two have several references, and the rows that TRL takes. Of the references
    the last one is taught, by TRL and by train.py, which would choose at random. It makes its rows
    longer than the samples."""
    monkeypatch.setattr(cer.Scores, "sample_references", last_reference)
    problems = load_problems("toy")[:4]
    problems[::2] = [dataclasses.replace(each, others=("14", LONG)) for each in problems[::2]]
    return problems, [{"prompt": chat_messages(p), "reference": [*p.references]} for p in problems]


def spy_on_a_step(model_dir, rows, edit=lambda model: None, **more):
    """A step of VeriFreeTrainer, whose options and settings are in `more`."""
    options = {name: more.pop(name) for name in {"peft_config"} & more.keys()}
    model, tokenizer = load(model_dir, "cpu")
    config = GRPOConfig(**SETTINGS | more)
    rows = Dataset.from_list(rows)
    trainer = Spy(model, config, processing_class=tokenizer, train_dataset=rows, **options)
    edit(trainer.model)
    trainer.train()
    return trainer


def own_step(policy, actor, tokenizer, problems, samples):
    """What train.py does with TRL's samples. The gradient stays in p.grad."""
    by_message = {chat_messages(p)[-1]["content"]: p for p in problems}
    stops, rows = actor.generation_config.eos_token_id, []
    for k in range(0, len(samples), 4):
        problem = by_message[samples[k][0][-1]["content"]]
        prompt, completions = encode_prompt(tokenizer, problem), [x for _, x in samples[k : k + 4]]
        group = to_group(tokenizer, stops, problem, prompt, completions, [])
        [judged] = ask_judges([group], {"actor"}, actor, tokenizer)
        R = R_by_name("verifree", [judged])[0]
        rows += rloo.verifree_rows(judged, R, rloo.leave_one_out(R), tokenizer)
    optimizer = types.SimpleNamespace(param_groups=[], step=int, zero_grad=int)
    _, norm = rloo.update(policy, optimizer, rows, 0.0, 1024)
    assert norm < 1  # it was not clipped, which would hide another scale


def gradients_of_own_step(model_dir, problems, samples):
    """-> {name: gradient} of all weights."""
    actor, tokenizer = load(model_dir, "cpu")
    policy = Policy(load(model_dir, "cpu")[0])
    own_step(policy, actor, tokenizer, problems, samples)
    return {name: p.grad.full_tensor() for name, p in policy.model.named_parameters()}


def relative_error(found, expected):
    """Of one gradient in the other, over all tensors together."""
    assert found.keys() == expected.keys()
    wrong = sum((found[name] - expected[name]).square().sum() for name in expected)
    size = sum(each.square().sum() for each in expected.values())
    assert size.sqrt() > 0.01
    return (wrong / size).sqrt().item()


@pytest.mark.parametrize("limit", [32, 17])  # with 17 tokens many samples have no box
def test_a_step_of_verifree_in_trl_is_that_of_train_py(script, toy_model_dir, questions, limit):
    problems, rows = questions
    trainer = spy_on_a_step(toy_model_dir, rows, max_completion_length=limit)
    vocab = vocabulary(trainer.processing_class)
    boxes = [vocab.locate_answer(ids) for _, ids in trainer.samples]
    assert any(boxes) and (limit == 32 or None in boxes)
    expected = gradients_of_own_step(toy_model_dir, problems, trainer.samples)
    assert relative_error(trainer.gradients, expected) < 1e-5


def test_a_group_without_a_box_moves_nothing(script, toy_model_dir, questions):
    trainer = spy_on_a_step(toy_model_dir, questions[1], max_completion_length=2)
    assert len(trainer.gradients) > 20 and not any(map(torch.any, trainer.gradients.values()))


def test_prompts_that_are_texts(script, toy_model_dir, questions):
    """TRL reads them without a template, so they are given as the template would write them."""
    problems, rows = questions
    tokenizer = load(toy_model_dir, "cpu")[1]
    messages = {tokenizer.decode(encode_prompt(tokenizer, p)): chat_messages(p) for p in problems}
    rows = [row | {"prompt": text} for text, row in zip(messages, rows)]
    trainer = spy_on_a_step(toy_model_dir, rows)
    samples = [(messages[text], ids) for text, ids in trainer.samples]
    expected = gradients_of_own_step(toy_model_dir, problems, samples)
    assert relative_error(trainer.gradients, expected) < 1e-5


def test_a_step_of_verifree_with_an_adapter_of_peft(script, toy_model_dir, questions):
    """Beside engine/lora.py with the same A and B. B is not 0, or A would have no gradient. The
    dropout that recipes of peft have is switched off."""
    problems, rows = questions
    start = {}

    def make_B_matter(model):
        for name, p in model.named_parameters():
            if p.requires_grad:
                if "lora_B" in name:
                    p.data.normal_(std=0.05)
                start[name] = p.detach().clone()

    config = trl_cer.lora_config(load(toy_model_dir, "cpu")[0], 8)
    config.lora_dropout = 0.5
    trainer = spy_on_a_step(toy_model_dir, rows, make_B_matter, peft_config=config)
    actor, tokenizer = load(toy_model_dir, "cpu")
    policy, own = LoraPolicy(actor, 8, "nearest", 0), {}
    for k, name in enumerate(policy.layers):
        for part in "AB":
            parameter = getattr(policy, part)[k]
            own[f"base_model.model.model.layers.{name}.lora_{part}.default.weight"] = parameter
    for name, parameter in own.items():
        parameter.data.to_local().copy_(start[name])
    policy.copy_weights(actor)
    own_step(policy, actor, tokenizer, problems, trainer.samples)
    expected = {name: parameter.grad.full_tensor() for name, parameter in own.items()}
    assert relative_error(trainer.gradients, expected) < 1e-5


IMPORTS = """
import json, sys
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOConfig, GRPOTrainer
import cer
from engine.tokens import pad, vocabulary
"""
STEP = """
model_dir, settings, rows = map(json.loads, sys.argv[1:])
torch.set_num_threads(1)
cer.Scores.sample_references = last_reference
config = GRPOConfig(**settings)
model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa")
options = dict(processing_class=AutoTokenizer.from_pretrained(model_dir))
trainer = Spy(model, config, train_dataset=Dataset.from_list(rows), **options)
trainer.train()
gradients = {name.removeprefix("module."): grad for name, grad in trainer.gradients.items()}
torch.save((trainer.samples, gradients), f"rank-{trainer.accelerator.process_index}.pt")
"""


def test_the_class_copied_into_a_folder_of_its_own_on_two_ranks(tmp_path, toy_model_dir, questions):
    """With what the docstring of trl_cer.py names, and nothing else of the repository. Each rank
    samples two questions, a micro-batch each, and has the gradient of all four."""
    problems, rows = questions
    (tmp_path / "engine").mkdir()
    for name in "cer.py", "engine/tokens.py":
        shutil.copy(ROOT / name, tmp_path / name)
    parts = Path(trl_cer.__file__).read_text().split("# ----------")
    [marked] = [part for part in parts if "class VeriFreeTrainer" in part]
    copied = marked.partition("\n")[2], *map(inspect.getsource, [rloo.leave_one_out])
    spy = map(inspect.getsource, [Spy, last_reference])
    (tmp_path / "own.py").write_text("\n\n".join([IMPORTS, *copied, *spy, STEP]))
    settings = SETTINGS | {"per_device_train_batch_size": 4, "ddp_backend": "gloo"}
    arguments = [json.dumps(each) for each in (str(toy_model_dir), settings, rows)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "own.py", *arguments]
    processes = []
    for rank in "01":
        of_rank = environ | {"RANK": rank, "LOCAL_RANK": rank, "CUDA_VISIBLE_DEVICES": ""}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=of_rank, **pipes))
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    ranks = [torch.load(tmp_path / f"rank-{r}.pt", weights_only=False) for r in range(2)]
    samples = [sample for of_rank, _ in ranks for sample in of_rank]
    assert [len(of_rank) for of_rank, _ in ranks] == [8, 8]
    expected = gradients_of_own_step(toy_model_dir, problems, samples)
    for _, found in ranks:
        assert relative_error(found, expected) < 1e-5


# ------------------------------------------------------------- VeriFree: its rows, and its refusals


def test_each_row_of_verifree_is_that_of_train_py(qwen_tokenizer, questions):
    """On hand-made completions, whose boxes are closed by different tokens, or not at all."""
    boxed = r"\boxed{14 eggs}$.", "\\boxed{15}\n", r"so {\boxed{1}}"
    texts = [*boxed, "no box", r"\boxed{1"]
    group = group_of(qwen_tokenizer, texts, ["14", "fourteen"])
    assert len({box.closing for box in group.boxes if box}) == 3
    messages, N = chat_messages(group.problem), len(texts)
    group = dataclasses.replace(group, prompt=encode_prompt(qwen_tokenizer, group.problem))
    model = tiny_model(1 + max(qwen_tokenizer.get_vocab().values()))
    [judged] = ask_judges([group], {"actor"}, model, qwen_tokenizer)
    R = R_by_name("verifree", [judged])[0]
    expected = rloo.verifree_rows(judged, R, rloo.leave_one_out(R), qwen_tokenizer)

    trainer = types.SimpleNamespace(
        model=model.train(),
        processing_class=qwen_tokenizer,
        num_generations=N,
        num_generations_eval=1,
        _tokenize_prompts=lambda prompts: ([group.prompt for _ in prompts], None, {}),
        is_fsdp_enabled=False,
        accelerator=types.SimpleNamespace(autocast=contextlib.nullcontext),
    )
    of_samples = [messages] * N, group.completions, [[*group.problem.references]] * N
    reward = VeriFreeTrainer.verifree_reward
    assert reward(trainer, *of_samples) == R.tolist() and R.count_nonzero() == 3
    prompt = len(group.prompt)
    assert trainer.rows == [(row.ids[prompt:], row.weights[prompt:]) for row in expected]
    model.eval()  # in an evaluation nothing is taught
    assert reward(trainer, *of_samples) == pytest.approx(R.tolist()) and not trainer.rows

    model.train()
    with pytest.raises(ValueError, match="a rank has only some of a question's samples: [^\n]*$"):
        reward(trainer, *(each[:-1] for each in of_samples))
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="the weights are sharded, but [^\n]*$"):
        reward(trainer, *of_samples)


OTHER_METHODS = {
    "beta": 0.1,
    "num_iterations": 2,
    "mask_truncated_completions": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "disable_dropout": False,
    "router_aux_loss_coef": None,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "importance_sampling_level": "sequence",
    "delta": 1.5,
    "vllm_importance_sampling_correction": True,
    "steps_per_generation": 4,
    "generation_kwargs": {"temperature": 0.6},
}


@pytest.mark.parametrize("name", OTHER_METHODS)
def test_verifree_refuses_what_would_be_another_method(script, name):
    config = GRPOConfig(**SETTINGS | {name: OTHER_METHODS[name]})
    with pytest.raises(ValueError, match=f"VeriFree [^\n]*{name}[^\n]*$"):
        VeriFreeTrainer(None, config)


def test_every_rule_is_a_setting_of_trl():
    """TRL's defaults break some of them."""
    default = GRPOConfig(use_cpu=True, bf16=False)
    rules = trl_cer.RULES | trl_cer.GRPO_RULES
    broken = {name for name, value in rules.items() if getattr(default, name) != value}
    assert broken == {
        "disable_dropout",
        "loss_type",
        "router_aux_loss_coef",
        "scale_rewards",
        "vllm_importance_sampling_correction",
    }


def test_what_belongs_to_the_sampled_tokens_is_refused(
    script, monkeypatch, toy_model_dir, questions
):
    """Such as the mask of what a tool wrote: the loss would use it on other tokens."""
    generate = GRPOTrainer._generate_and_score_completions

    def with_tools(trainer, inputs):
        batch = generate(trainer, inputs)
        return batch | {"tool_mask": batch["completion_mask"]}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", with_tools)
    with pytest.raises(ValueError, match=r"VeriFree [^\n]* cannot take \['tool_mask'\]$"):
        spy_on_a_step(toy_model_dir, questions[1])


# ------------------------------------------------------------------------------ what a script saves


def test_a_script_trains_an_adapter_with_verifree(script, toy_model_dir):
    """With micro-batches of one question. The model that is saved is the merged one."""
    flags = f"--model {toy_model_dir} --steps 2 --questions 2 --samples 4 --out out --lora 4"
    code, out, err = script(trl_cer, f"{flags} --reward verifree --lr 1e-2")
    assert code == 0 and "rewards/verifree_reward/mean" in out, err
    before, after = load(toy_model_dir, "cpu")[0], load("out/model", "cpu")[0]
    changed = [x for x, y in zip(before.parameters(), after.parameters()) if not x.equal(y)]
    assert len(changed) == 14
    adapted = peft.PeftModel.from_pretrained(before, "out/adapter").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    assert (adapted(ids).logits - after(ids).logits).abs().max() < 1e-4


def test_a_model_whose_experts_would_stay_as_they_are_gets_no_adapter(script, tokenizer):
    model = tiny_model(len(tokenizer), "mixtral", num_experts_per_tok=2, num_local_experts=4)
    for part in model, tokenizer:
        part.save_pretrained("experts")
    flags = "--model experts --reward overlap --steps 1 --questions 1 --samples 2 --lora 4"
    code, _, err = script(trl_cer, f"{flags} --out out")
    assert code == 2 and "--lora trains linear layers, which mixtral's" in err, err


def test_a_small_change_survives_merging(tokenizer):
    """A change of each weight by less than bf16 can tell is all there after merging."""
    model = tiny_model(len(tokenizer)).to(torch.bfloat16)
    W0 = model.model.layers[0].mlp.up_proj.weight.float()
    adapted = peft.get_peft_model(model, trl_cer.lora_config(model, 4))
    layer = adapted.base_model.model.model.layers[0].mlp.up_proj
    layer.lora_B["default"].weight.data.fill_(1e-5)
    change = 8 * 1e-5 * layer.lora_A["default"].weight.sum(0).float()  # s = 32 / 4
    W = trl_cer.merged(adapted).model.layers[0].mlp.up_proj.weight
    assert W.dtype == torch.float32 and (W.to(torch.bfloat16) == W0).float().mean() > 0.9
    torch.testing.assert_close(W - W0, change.expand_as(W), atol=1e-7, rtol=0.01)


@pytest.mark.parametrize("flags", ["--reward overlap", "--reward overlap --lora 4"])
def test_what_is_saved_is_the_same_model_in_transformers_4(script, toy_model_dir, flags):
    """The toy's config says that head and embeddings are tied, but here the files have two
    matrices. transformers 4 would believe the config, and it looks for the base of RoPE at its top
    and for the class of the tokenizer by another name."""
    model, tokenizer = load(toy_model_dir, "cpu")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 0.01)
    model.config.rope_parameters["rope_theta"] = 1e6
    for part in model, tokenizer:
        part.save_pretrained("two")
    assert json.loads(Path("two/config.json").read_text())["tie_word_embeddings"]
    model = load("two", "cpu")[0]
    code, _, err = script(
        trl_cer, f"--model two --steps 1 --questions 1 --samples 2 --lr 1e-9 --out out {flags}"
    )
    assert code == 0, err
    config, of_tokenizer = (
        json.loads(Path("out/model", name).read_text())
        for name in ("config.json", "tokenizer_config.json")
    )
    assert (config["tie_word_embeddings"], config["rope_theta"]) == (False, 1e6)
    assert of_tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    ids = torch.tensor([[5, 6, 7, 8]])
    saved = AutoModelForCausalLM.from_pretrained("out/model")
    found, expected = (log_softmax(each(ids).logits, -1) for each in (saved, model))
    assert (found - expected).abs().max() < 1e-4


# ------------------------------------------------------------------------------------------- others


def test_the_rate_falls_for_the_toy_alone():
    for model, lora, lr, expected in (
        (None, None, None, (6e-4, "polynomial", 6e-5)),
        (None, 8, None, (2e-3, "polynomial", 2e-4)),
        (None, None, 1e-3, (1e-3, "polynomial", 1e-4)),
        ("a/model", None, None, (1e-6, "constant", None)),
        ("a/model", 8, None, (1e-4, "constant", None)),
        ("a/model", 8, 3e-5, (3e-5, "constant", None)),
    ):
        found = trl_cer.learning_rate(types.SimpleNamespace(model=model, lora=lora, lr=lr))
        lr_end = found.get("lr_scheduler_kwargs", {}).get("lr_end")
        rates = found["learning_rate"], found["lr_scheduler_type"], lr_end
        assert rates == (expected if lr_end is None else pytest.approx(expected))


def test_the_overlap_in_trl_is_that_of_train_py(script, tokenizer, toy_model_dir):
    """On hand-made completions, and in one step of TRL."""
    texts = [r"so \boxed{14 eggs}", r"\boxed{it is 14}", "no box", r"\boxed{}"]
    group = group_of(tokenizer, texts, ["14", "14 eggs"])
    [judged] = ask_judges([group], set(), None, tokenizer)
    expected = R_by_name("overlap", [judged])[0].tolist()
    references = [["14", "14 eggs"]] * len(texts)
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    for completions in texts, messages:
        assert trl_cer.overlap_rewards(completions, references) == pytest.approx(expected)
    assert expected == [1, 0.5, 0, 0]
    flags = "--steps 1 --questions 2 --samples 4 --reward overlap --out out"
    code, out, err = script(trl_cer, f"--model {toy_model_dir} {flags}")
    assert code == 0 and "rewards/overlap_reward/mean" in out, err


@pytest.mark.parametrize("reward", ["cer", "verifree", "overlap"])
def test_a_model_that_cannot_be_scored_is_refused(script, tokenizer, reward):
    """But not by overlap, which asks it nothing."""
    model = tiny_model(len(tokenizer), "granite", logits_scaling=1.05)
    for part in model, tokenizer:
        part.save_pretrained("granite")
    flags = "--model granite --steps 1 --questions 1 --samples 2 --out out"
    code, _, err = script(trl_cer, f"{flags} --reward {reward}")
    if reward == "overlap":
        assert code == 0, err
    else:
        assert code == 2 and "granite is not supported (its logits are not lm_head of" in err, err
