"""--lora: the actor is the policy, and a change of low rank is trained in each of its layers."""

import json
import math
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    QWEN3_4B,
    as_a_crash_leaves,
    example_rows,
    four_steps,
    steps_of,
    tiny_model,
    written_by,
)
from naive import completion_logprobs
from processes import finish, run_in, start_ranks
from torch.distributed.checkpoint import FileSystemReader
from torch.func import functional_call
from transformers import AutoModelForCausalLM, Qwen3Config

import evaluate
import train
from engine import checkpoints as checkpoints_of
from engine import checks, load, lora, memory, policy
from rloo import microbatches, update
from runtime.cli import InputError
from runtime.files import checkpoints, read_config, read_rows

TINY = dict(initializer_range=0.1)


def make(rank=4, family="qwen3", dtype=torch.float32, rounding="dither", **settings):
    """A model, its weights before it was trained, and the policy."""
    model = tiny_model(64, family, **TINY | settings).to(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    return model, before, lora.LoraPolicy(model, rank, rounding, seed=0)


def matrices(trained):
    """{name of the weight: (A, B)}, whole and in fp64."""
    pairs = zip(trained.layers, trained.A, trained.B, strict=True)
    whole = lambda p: p.detach().full_tensor().double()  # noqa: E731
    return {f"model.layers.{name}.weight": (whole(A), whole(B)) for name, A, B in pairs}


def move(trained, size):
    """Set all B, which begin as 0, to random numbers."""
    for B in trained.B:
        B.data.to_local().normal_(0, size)


# ------------------------------------------------------------------------------- the mathematics


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "olmo2"])  # qwen2 has biases
def test_the_gradients_are_those_of_an_unmerged_model(family, recompute):
    """Autograd's own, through W0 + s B A, of every A and B, over padded rows."""
    model, before, trained = make(family=family)
    move(trained, 0.05)
    trained.copy_weights(model)
    pairs = matrices(trained).items()
    pairs = {name: [x.float().requires_grad_() for x in AB] for name, AB in pairs}
    weights = {name: before[name] + 32 / 4 * B @ A for name, (A, B) in pairs.items()}
    plain = tiny_model(64, family, **TINY)
    rows = example_rows(5)
    loss = 0
    for row in rows:
        logits = functional_call(plain, before | weights, torch.tensor([row.ids])).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(row.ids[1:])[:, None])[:, 0]
        loss = loss - torch.tensor(row.weights[1:]) @ logprobs / len(rows)
    theirs = torch.autograd.grad(loss, [x for AB in pairs.values() for x in AB])
    if recompute:
        model.activation_checkpointing_enable()
    passes = []
    model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    optimizer = mock.Mock(param_groups=[], zero_grad=lambda: None)  # the gradients stay
    ours_loss, norm = update(trained, optimizer, rows, 0.0, 64)
    assert ours_loss == pytest.approx(loss.item(), rel=1e-5)
    assert len(passes) == (2 if recompute else 1) * len([*microbatches(rows, 64)])
    scale = 1 / max(1.0, norm + 1e-6)  # they were clipped
    ours = [x.grad.full_tensor() for AB in zip(trained.A, trained.B) for x in AB]
    for mine, its in zip(ours, theirs, strict=True):
        assert its.abs().max() > 0 and (mine - its * scale).norm() < 1e-4 * its.norm() * scale


def test_many_steps_do_not_drift_and_freeze_the_rest():
    """W is W0 + s B A after every step, W0 never changes, and B = 0 gives it back to the bit. What
    is frozen has no gradient, and no moments of Adam."""
    model, before, trained = make(rank=2)
    adam = policy.make_adam(trained)
    for _ in range(5):
        update(trained, adam, example_rows(), 1e-2, 64)
        trained.copy_weights(model)
        now = dict(model.named_parameters())
        for name, (A, B) in matrices(trained).items():
            assert (now[name] - (before[name] + 32 / 2 * B @ A)).abs().max() < 1e-5
            assert (now[name] - before[name]).abs().max() > 1e-4
    for name in now.keys() - matrices(trained).keys():
        assert torch.equal(now[name], before[name]), name
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    size = sum(A.numel() + B.numel() for A, B in matrices(trained).values())
    assert size == sum(p.numel() for p in trained.parameters())
    assert size == memory.trained_parameters(model, 2)
    moments = [state[name] for state in adam.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert sum(m.numel() for m in moments) == 2 * size
    for B in trained.B:
        B.data.to_local().zero_()
    trained.copy_weights(model)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_bf16_is_right_in_the_mean():
    """A change far below the steps of bf16 moves some weights by a whole step, always the same
    ones, and their sum is the change. Rounding to the nearest would leave nearly all as they are.
    Zeros stay numbers."""
    model, before, trained = make(dtype=torch.bfloat16, hidden_size=256, intermediate_size=512)
    trained.copy_weights(model)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    move(trained, 1e-5)
    trained.copy_weights(model)
    now = {name: p.detach().clone() for name, p in model.named_parameters()}
    nearest = change = 0
    for name, (A, B) in matrices(trained).items():
        exact = before[name].double() + 32 / 4 * B @ A
        step = 2.0 ** (exact.abs().maximum(before[name].double().abs()).log2().floor() - 7)
        assert ((now[name] - exact).abs() <= step).all()
        sign = (exact - before[name]).sign()
        change += torch.stack([((x - before[name]) * sign).sum() for x in (now[name], exact)])
        nearest += ((exact.bfloat16() - before[name]) * sign).sum()
    assert change[0] == pytest.approx(change[1].item(), rel=0.05) and nearest < 0.3 * change[1]
    trained.copy_weights(model)
    assert all(torch.equal(p, now[name]) for name, p in model.named_parameters())


def test_the_actor_samples_as_it_is_trained(tokenizer, tmp_path):
    """check_training holds, before a step and after. Noise in training mode is found."""
    tiny_model(len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    actor, _ = load.load(tmp_path, "cpu", checks.check_sampling)
    trained = lora.LoraPolicy(actor, 4, "dither", 0)
    checks.check_training(trained, actor)
    move(trained, 0.1)
    trained.copy_weights(actor)
    checks.check_training(trained, actor)
    assert not actor.training
    ids = [5, 6, 7, 8]
    plain = completion_logprobs(actor, ids[:1], ids[1:])
    ours = trained(torch.tensor([ids]), torch.tensor([[False, True, True, True]]))
    assert (ours - plain).abs().max() < 1e-5
    actor.lm_head.register_forward_hook(lambda m, x, logits: (1 + 0.01 * m.training) * logits)
    with pytest.raises(InputError, match="qwen3 is not supported: its log-probabilities in tra"):
        checks.check_training(trained, actor)


EXPERTS = dict(num_experts_per_tok=2, num_local_experts=4)
REFUSED = [  # rank, family, settings, what is said
    (4, "mixtral", EXPERTS, r"linear layers, which mixtral's \['0.mlp.*\] is not"),
    (17, "qwen3", {}, "--lora 17 is more than 16, the smallest size of a layer"),
]


@pytest.mark.parametrize("rank, family, settings, says", REFUSED)
def test_what_it_cannot_train_is_refused(rank, family, settings, says):
    with pytest.raises(InputError, match=says):
        make(rank, family, **settings)


# -------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def flags(quick):
    return f"{quick} --lora 4 --lr 2e-3"


@pytest.fixture(scope="module")
def low_run(tmp_path_factory, flags):
    """The directory of a run of four steps, which tests read or copy."""
    return four_steps(tmp_path_factory.mktemp("low"), flags)


def test_it_begins_where_full_training_does(low_run, finished_run):
    """With the same samples and rewards in the first step, and others in the second."""
    low, full = (read_rows(run / "samples.jsonl") for run in (low_run, finished_run))
    assert low[:2] == full[:2] and low[2:] != full[2:]
    assert steps_of(low_run)[0]["reward"] == steps_of(finished_run)[0]["reward"] > 0


def test_it_learns(script, flags):
    assert script(train, f"{flags} --reward verifree --steps 12 --eval-every 12 --out run")[0] == 0
    rewards = [line["reward"] for line in steps_of(Path("run"))]
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3]), rewards


def test_a_resumed_run_equals_one_that_never_stopped(
    script, low_run, tmp_path, toy_model_dir, monkeypatch
):
    """To the byte. Its checkpoints are plain models, with little beside them. Another rank and
    another model are refused."""
    run = as_a_crash_leaves(low_run, tmp_path / "run")
    code, _, err = script(train, "--resume --out run --lora 2")
    assert code == 2 and "lora was 4 and is 2" in err, err
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints_of, "mark_of", lambda name: "another")
        code, _, err = script(train, "--resume --out run")
        assert code == 2 and "and is another" in err, err
    code, _, err = script(train, "--resume --out run")
    assert code == 0, err
    assert written_by(run) == written_by(low_run)
    _, last = checkpoints("run")[-1]
    trained = AutoModelForCausalLM.from_pretrained(last)
    before = AutoModelForCausalLM.from_pretrained(toy_model_dir)
    assert trained.state_dict().keys() == before.state_dict().keys()
    changed = {n for n, p in trained.named_parameters() if (p != before.get_parameter(n)).any()}
    assert changed == {n for n, p in before.named_parameters() if "_proj" in n}
    saved = FileSystemReader(last / "training").read_metadata().state_dict_metadata.values()
    numbers = sum(math.prod(of.size) for of in saved if len(of.size))  # steps have no size
    assert numbers == 3 * memory.trained_parameters(before, 4)
    dataset = read_config("run")["flags"]["dataset"]
    code, _, err = script(evaluate, f"--model {last} --dataset {dataset} --limit 2 --runs 1")
    assert code == 0, err


def test_a_full_run_does_not_go_on_with_it(script, stopped_run):
    code, _, err = script(train, "--out run --resume --lora 4")
    assert code == 2 and "lora was None and is 4" in err, err


def test_peft_reads_the_adapter(low_run, toy_model_dir):
    """On the model that the run began with, it gives the logits of the checkpoint."""
    peft = pytest.importorskip("peft")
    _, last = checkpoints(low_run)[-1]
    ids = torch.tensor([[5, 6, 7, 8]])
    merged, base = (AutoModelForCausalLM.from_pretrained(d) for d in (last, toy_model_dir))
    without = base(ids).logits
    adapted = peft.PeftModel.from_pretrained(base, last / "adapter")(ids).logits
    expected = merged(ids).logits
    assert (adapted - expected).abs().max() < 1e-4 < (without - expected).abs().max()
    said = json.loads((last / "adapter" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(toy_model_dir)


def test_the_adapter_names_its_base_from_anywhere(tmp_path, monkeypatch):
    """An id of the hub stays what it is. A seed of any size, and what a kill or a file system has
    left in the folder, do not matter."""
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    model = tiny_model(64)
    for seed, path, expected in (2**70, "base", f"{tmp_path}/base"), (-1, "an/id", "an/id"):
        model.name_or_path = path
        trained = lora.LoraPolicy(model, 4, "dither", seed)
        trained.save_adapter(tmp_path / "adapter")
        config, weights = sorted((tmp_path / "adapter").iterdir())
        assert json.loads(config.read_text())["base_model_name_or_path"] == expected
        assert weights.stat().st_mode == config.stat().st_mode  # others may read it, too


def test_it_goes_on_with_two_ranks(tmp_path, low_run):
    run = as_a_crash_leaves(low_run, tmp_path / "run")
    finish(start_ranks(2, run_in, tmp_path, train.main, "--out run --resume --steps 3"))
    assert [line["step"] for line in steps_of(run)] == [1, 2, 3]
    weights = [AutoModelForCausalLM.from_pretrained(d).state_dict() for _, d in checkpoints(run)]
    for name, before in weights[0].items():
        assert ("_proj" in name) == bool((weights[1][name] != before).any()), name


SAYS = [  # more flags, what the last line says
    ("--lora 0", "--lora: expected 1 to inf, got 0"),
    ("--lora 4 --cpu-offload", "--lora has nothing that --cpu-offload could move"),
    ("--lora 65", "--lora 65 is more than 64"),
]


@pytest.mark.parametrize("more, says", SAYS)
def test_flags_that_are_refused(script, quick, more, says):
    code, _, err = script(train, f"{quick} {more} --out run")
    assert code == 2 and says in err.splitlines()[-1], err


# ------------------------------------------------------------------------------------------ memory


PLANS = [  # GB of the card -> the line of the log, or what is refused
    (24, "memory: 16,384 tokens in a micro-batch, about 10.1 of 15.5 GB"),
    (16, "memory: 10,733 tokens in a micro-batch, about 7.72 of 7.72 GB"),
    (12, "6144 tokens .* and 3.8.* are free: use shorter rows or a smaller model"),
]


@pytest.mark.parametrize("card, says", PLANS)
def test_a_4b_model_fits_into_24_gb(monkeypatch, tmp_path, card, says):
    """Rows of 6,144 tokens, the paper's lengths. Nothing moves to CPU memory."""
    config = Qwen3Config(**QWEN3_4B, tie_word_embeddings=True, max_position_embeddings=40_960)
    with torch.device("meta"):
        actor = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    free = card * 1e9 - 2 * sum(p.numel() for p in actor.parameters())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, None))
    monkeypatch.setattr(memory, "all_gather", lambda part: part)
    monkeypatch.setattr(memory, "free_on_host", lambda: 8e9)
    try:
        _, offload, said = memory.plan_memory(actor, 6144, lora=32)
        assert not offload
        with mock.patch.object(memory, "free_on_host", lambda: 7e9):
            with pytest.raises(InputError, match="the loaded weights need about 7.27 of 7 GB"):
                memory.plan_memory(actor, 6144, lora=32)
    except InputError as error:
        said = str(error)
    assert re.search(says, said), said
    # 8.05 GB of bf16, .79 of fp32 matrices with their moments, .26 of the adapter
    assert "1 more checkpoints would take 9.1 of" in memory.check_disk(actor, tmp_path, 1, 32)
