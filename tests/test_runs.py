"""Runs of days: several ranks, kills, stops, full disks, gradients that are not finite. Each run is
a process of its own."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import needs_cuda, on_devices, tiny_model, written_by
from processes import HERE, finish, peak_of_an_update, start, start_ranks, train_in, two_updates
from test_rloo import example_rows
from transformers import AutoModelForCausalLM

import rewards
from engine.files import checkpoints, read_rows
from engine.ranks import Stop

# Short, with a checkpoint after every step.
FLAGS = "--dataset toy --lr 6e-4 --questions 2 --samples 4 --max-new-tokens 16 --eval-limit 4"
FLAGS += " --eval-runs 1 --eval-every 5 --save-every 1"
# -------------------------------------------------------------------------------------------- ranks


@on_devices
@pytest.mark.parametrize("family, tied", [("qwen3", True), ("qwen3", False), ("llama", False)])
def test_two_ranks_take_the_step_of_one(tmp_path, device, family, tied):
    """The same loss, gradient norm and weights, on ragged rows, with activation checkpointing."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = tiny_model(64, family, tied, initializer_range=0.1)
    model.save_pretrained(tmp_path / "model")
    arguments = (tmp_path / "model", example_rows(), 64, 1e-3)
    finish([start(two_updates, *arguments, tmp_path / "one", device=device)])
    finish(start_ranks(2, two_updates, *arguments, tmp_path / "two", device=device))
    one, two = (torch.load(tmp_path / name) for name in ("one", "two"))
    limit = 1e-5 if device == "cpu" else 1e-2  # in bf16 sums in another order round otherwise
    assert torch.tensor(two["done"]).allclose(torch.tensor(one["done"]), rtol=limit)
    for name, weight in one["weights"].items():
        assert (two["weights"][name] - weight).abs().max() < limit, name


def test_a_checkpoint_moves_between_one_rank_and_two(tmp_path, toy_model_dir):
    flags = f"--model {toy_model_dir} {FLAGS} --out run --steps"
    finish(start_ranks(2, train_in, tmp_path, f"{flags} 2"))
    run = tmp_path / "run"
    assert read_rows(run / "metrics.jsonl")[1]["exact_match"] * 8 % 1 == 0  # both ranks' samples
    shards = [path.name for path in (run / "checkpoints" / "step-2" / "training").iterdir()]
    assert len(shards) >= 2  # each rank wrote its own
    for world, steps in (1, 4), (2, 6):
        finish(start_ranks(world, train_in, tmp_path, f"--out run --resume --steps {steps}"))
    assert [line["step"] for line in read_rows(run / "metrics.jsonl")] == [*range(7)]
    finish([start(train_in, tmp_path, f"{flags.replace('--out run', '--out alone')} 6")])
    first = []  # rank 0's first question of each step
    for name in "run", "alone":
        lines = read_rows(tmp_path / name / "samples.jsonl")
        first.append({line["step"]: line["question"] for line in reversed(lines)})
    assert len(first[0]) == 6 and first[0] == first[1]  # the data order is that of one rank


def test_a_rank_that_fails_alone_ends_the_run_with_its_message():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*torchrun, "--standalone", str(HERE / "processes.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert ended.stderr.count("processes.py: the disk of this rank is gone") == 1


# --------------------------------------------------------------------------------- kills and stops


@on_devices
def test_a_killed_run_equals_one_that_never_was(tmp_path, toy_model_dir, device):
    """Killed at random moments, and inside a save. On a GPU sums may round in another order."""
    flags = f"--model {toy_model_dir} {FLAGS} --steps 8 --out"
    started = time.perf_counter()
    finish([start(train_in, tmp_path, f"{flags} whole", device=device)])
    whole, rng = time.perf_counter() - started, random.Random(0)
    run, partial = tmp_path / "killed", tmp_path / "killed" / "checkpoints" / "partial"
    for kill in ["anywhere", "in a save", "in a save", "anywhere", "never"]:
        if 8 in dict(checkpoints(run)):
            break  # this process was faster than the whole run before, and came to its end
        resume = (run / "config.json").exists()
        arguments = "--out killed --resume" if resume else f"{flags} killed"
        process = start(train_in, tmp_path, arguments, device=device)
        if kill == "never":
            finish([process])
        elif kill == "in a save":
            shutil.rmtree(partial, ignore_errors=True)
            while process.is_alive() and not partial.exists():
                time.sleep(0.001)
        else:
            process.join(rng.uniform(0.3, 0.6) * whole)
        process.kill()
        process.join()
        for _, directory in checkpoints(run):
            AutoModelForCausalLM.from_pretrained(directory)
    metrics = [line["step"] for line in read_rows(run / "metrics.jsonl")]
    assert metrics == [*range(9)]
    if device == "cpu":
        assert written_by(run) == written_by(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(tmp_path, toy_model_dir, number):
    flags = f"--model {toy_model_dir} {FLAGS} --save-every 500 --steps 500 --out run"
    process, run = start(train_in, tmp_path, flags), tmp_path / "run"
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.05)
        assert process.is_alive()
    os.kill(process.pid, number)
    finish([process], code=128 + number)
    steps = [line["step"] for line in read_rows(metrics)]
    assert steps == [*range(len(steps))] and steps[-1] < 500
    assert [step for step, _ in checkpoints(run)] == steps[-1:]
    log = (tmp_path / "log-0").read_text()
    assert "stopping after this step" in log
    stopped = f"stopped after step {steps[-1]} of 500; resume with: "
    assert stopped + "python train.py --resume --out run" in log and "first" not in log


def test_a_second_signal_of_either_kind_would_end_the_run():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stop = Stop()
    os.kill(os.getpid(), signal.SIGTERM)
    after = signal.signal(signal.SIGTERM, before[0]), signal.signal(signal.SIGINT, before[1])
    assert stop.signal == signal.SIGTERM and after == (signal.SIG_DFL, signal.SIG_DFL)


def train_on_a_full_disk(directory, arguments, limit):
    """No file can grow over the limit: the real error of a write that fails half way."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    train_in(directory, arguments)


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, toy_model_dir):
    flags = f"--model {toy_model_dir} {FLAGS} --steps 3 --keep 2 --out run"
    finish([start(train_in, tmp_path, flags)])
    run = tmp_path / "run"
    assert [step for step, _ in checkpoints(run)] == [2, 3]  # --keep 2
    shutil.rmtree(run / "checkpoints" / "step-3")
    before = {path: path.read_bytes() for path in run.rglob("step-*/*") if path.is_file()}
    # Room for model.safetensors, but not for the training state, which is three times larger.
    limit = (toy_model_dir / "model.safetensors").stat().st_size * 2
    finish([start(train_on_a_full_disk, tmp_path, "--out run --resume", limit)], code=2)
    last_line = (tmp_path / "log-0").read_text().splitlines()[-1]
    assert last_line.startswith("train.py: cannot save run/checkpoints/step-3")
    assert last_line.endswith("the last complete checkpoint is step-2")
    assert before == {path: path.read_bytes() for path in before}
    assert not (run / "checkpoints" / "partial").exists()
    finish([start(train_in, tmp_path, "--out run --resume")])  # now there is room


# ----------------------------------------------------------------------------- gradients not finite


def train_with_broken_rewards(directory, arguments, broken):
    steps = iter(range(1, 100))

    def reward(groups, **models):
        R, records = rewards.exact_match(groups)
        return R + (float("inf") if next(steps) in broken else 0.0), records

    rewards.REWARDS["exact"] = reward
    train_in(directory, arguments)


def test_three_skipped_updates_in_a_row_end_the_run(tmp_path, toy_model_dir):
    flags = f"--model {toy_model_dir} {FLAGS} --reward exact --steps 9 --out run"
    finish([start(train_with_broken_rewards, tmp_path, flags, [1, 2, 4, 6, 7, 8])], code=2)
    lines = read_rows(tmp_path / "run" / "metrics.jsonl")
    skipped = [line["grad_norm"] is None for line in lines[1:]]
    assert skipped == [True, True, False, True, False, True, True, True]
    last_line = (tmp_path / "log-0").read_text().splitlines()[-1]
    assert "the gradient was not finite in steps 6 to 8" in last_line
    assert checkpoints(tmp_path / "run")[-1][0] == 8  # nothing learned is lost,
    finish([start(train_in, tmp_path, "--out run --resume")])  # and the run can go on from there


# ----------------------------------------------------------------------------------------- on a GPU


@needs_cuda
@pytest.mark.parametrize("offload", ["", "--cpu-offload"])
def test_cuda_trains_the_toy_in_mixed_precision(tmp_path, toy_model_dir, offload):
    flags = f"--model {toy_model_dir} {FLAGS} --steps 3 --out run {offload}"
    finish([start(train_in, tmp_path, flags, device="cuda")])
    losses = [line["loss"] for line in read_rows(tmp_path / "run" / "metrics.jsonl")[1:]]
    assert len(losses) == 3 and torch.tensor(losses).isfinite().all()
    before = AutoModelForCausalLM.from_pretrained(toy_model_dir).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-3").state_dict()
    assert all((after[name].float() - before[name]).abs().max() < 0.1 for name in before)


@needs_cuda
def test_cuda_memory_stays_within_a_tenth_of_the_estimate(tmp_path):
    """The estimate of memory_needed against the peak of an update on the smallest Qwen3's shape."""
    shape = dict(hidden_size=1024, num_hidden_layers=28, intermediate_size=3072, head_dim=128)
    shape |= dict(num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=4096)
    tiny_model(151_936, **shape, initializer_range=0.02).save_pretrained(tmp_path / "model")
    finish([start(peak_of_an_update, tmp_path / "model", tmp_path / "peak", device="cuda")])
    estimate, peak = torch.load(tmp_path / "peak")
    assert 0.9 < peak / estimate < 1.1
