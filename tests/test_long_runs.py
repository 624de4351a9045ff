"""Runs of days: several ranks, kills, stops, full disks, gradients that are not finite."""

import json
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
from conftest import tiny_model
from processes import HERE, start, start_ranks, train_in, two_updates
from test_policy import example_rows
from test_scripts import read_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

import policy
import rundir
import train

# Short, with a checkpoint after every step.
FLAGS = "--dataset toy --questions 2 --samples 4 --max-new-tokens 16 --eval-limit 4 --eval-runs 1"
FLAGS += " --eval-every 5 --save-every 1"


def finish(processes, code=0, seconds=120):
    for process in processes:
        process.join(seconds)
    assert [process.exitcode for process in processes] == [code] * len(processes)


def without_times(path):
    lines = read_lines(path)
    for line in lines:
        line.pop("seconds", None), line.pop("tokens_per_second", None)
    return lines


def weights(run, step):
    return (run / "checkpoints" / f"step-{step}" / "model.safetensors").read_bytes()


# -------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("family, tied", [("qwen3", True), ("qwen3", False), ("llama", False)])
def test_two_ranks_take_the_step_of_one(tmp_path, family, tied):
    """The same loss, gradient norm and weights, on ragged rows, with activation checkpointing."""
    model = tiny_model(64, family, tied, initializer_range=0.1)
    model.save_pretrained(tmp_path / "model")
    arguments = (tmp_path / "model", example_rows(), 64, 1e-3)
    ranks = start_ranks(2, two_updates, *arguments, tmp_path / "two")
    finish([start(two_updates, *arguments, tmp_path / "one"), *ranks])
    one, two = (torch.load(tmp_path / name) for name in ("one", "two"))
    assert torch.tensor(two["done"]).allclose(torch.tensor(one["done"]), rtol=1e-5)
    for name, weight in one["weights"].items():
        assert (two["weights"][name] - weight).abs().max() < 1e-5, name


def test_a_checkpoint_moves_between_one_rank_and_two(tmp_path, toy_model_dir):
    flags = f"--model {toy_model_dir} {FLAGS} --out run --steps"
    finish(start_ranks(2, train_in, tmp_path, f"{flags} 2"))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[1]["exact_match"] * 8 % 1 == 0  # 2 questions x 4 samples, gathered
    for world, steps in (1, 4), (2, 6):
        config = json.loads((tmp_path / "run" / "config.json").read_text())
        config["flags"]["steps"] = steps
        (tmp_path / "run" / "config.json").write_text(json.dumps(config))
        finish(start_ranks(world, train_in, tmp_path, "--out run --resume"))
        assert f"the checkpoint is of {3 - world} ranks" in (tmp_path / "log-0").read_text()
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [*range(7)]
    finish([start(train_in, tmp_path, f"{flags.replace('--out run', '--out alone')} 6")])
    first_question = [
        {line["step"]: line["question"] for line in read_lines(path)[::-1]}
        for path in (tmp_path / "run" / "samples.jsonl", tmp_path / "alone" / "samples.jsonl")
    ]
    assert len(first_question[0]) == 6 and first_question[0] == first_question[1]  # the data order


def test_a_rank_that_fails_alone_ends_the_run_with_its_message():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*torchrun, "--standalone", str(HERE / "processes.py")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert ended.stderr.count("processes.py: the disk of this rank is gone") == 1


# --------------------------------------------------------------------------------- kills and stops


def test_a_run_killed_twenty_times_equals_one_that_never_was(tmp_path, toy_model_dir):
    flags = f"--model {toy_model_dir} {FLAGS} --steps 12 --out"
    started = time.perf_counter()
    finish([start(train_in, tmp_path, f"{flags} whole")])
    whole = time.perf_counter() - started
    rng, kills = random.Random(0), 0
    run = tmp_path / "killed"
    while True:
        resume = (run / "config.json").exists()
        arguments = "--out killed --resume" if resume else f"{flags} killed"
        process = start(train_in, tmp_path, arguments)
        if kills >= 20:
            process.join(120)
        elif kills % 4 == 3:  # in the middle of a save
            shutil.rmtree(run / "checkpoints" / "partial", ignore_errors=True)
            while process.is_alive() and not (run / "checkpoints" / "partial").exists():
                time.sleep(0.001)
        else:  # at any moment
            process.join(rng.uniform(0, whole * 0.5))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
        for step, directory in rundir.checkpoints(run):
            (
                AutoModelForCausalLM.from_pretrained(directory),
                AutoTokenizer.from_pretrained(directory),
            )
            assert torch.load(directory / "training.pt", weights_only=True)["step"] == step
        if kills < 20 and process.exitcode == 0:  # done too early: lose some of it again
            for _, directory in rundir.checkpoints(run):
                shutil.rmtree(directory)
        elif kills == 20 and process.exitcode == 0:
            break
        assert process.exitcode in (0, -signal.SIGKILL), (tmp_path / "log-0").read_text()[-2000:]
    assert weights(run, 12) == weights(tmp_path / "whole", 12)
    for name in "metrics.jsonl", "samples.jsonl":
        assert without_times(run / name) == without_times(tmp_path / "whole" / name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(tmp_path, toy_model_dir, number):
    flags = f"--model {toy_model_dir} {FLAGS} --save-every 500 --steps 500 --out run"
    process = start(train_in, tmp_path, flags)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and len(read_lines(metrics)) > 2):
        time.sleep(0.05)
        assert process.is_alive()
    os.kill(process.pid, number)
    finish([process], code=0)
    steps = [line["step"] for line in read_lines(metrics)]
    assert steps == [*range(len(steps))] and steps[-1] < 500
    assert [step for step, _ in rundir.checkpoints(tmp_path / "run")] == steps[-1:]
    assert "stops after this step" in (tmp_path / "log-0").read_text()


def test_only_the_newest_checkpoints_are_kept(tmp_path, toy_model_dir):
    flags = f"--model {toy_model_dir} {FLAGS} --steps 5 --keep 2 --out run"
    finish([start(train_in, tmp_path, flags)])
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-4", "step-5"]


def train_on_a_full_disk(directory, arguments, limit):
    """No file can grow over the limit: the real error of a write that fails half way."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    train_in(directory, arguments)


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, toy_model_dir):
    finish([start(train_in, tmp_path, f"--model {toy_model_dir} {FLAGS} --steps 2 --out run")])
    directory = tmp_path / "run" / "checkpoints" / "step-2"
    shutil.rmtree(directory)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("step-*/*")}
    # Room for model.safetensors, but not for training.pt, which is three times larger.
    limit = (toy_model_dir / "model.safetensors").stat().st_size * 2
    finish([start(train_on_a_full_disk, tmp_path, "--out run --resume", limit)], code=2)
    last_line = (tmp_path / "log-0").read_text().splitlines()[-1]
    assert last_line.startswith("train.py: cannot save run/checkpoints/step-2")
    assert last_line.endswith("the last whole checkpoint is step-1")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("step-*/*")}
    assert not (tmp_path / "run" / "checkpoints" / "partial").exists()
    finish([start(train_in, tmp_path, "--out run --resume")])  # now there is room


# ------------------------------------------------------------------------- gradients not finite


def train_state(run):
    _, directory = rundir.checkpoints(run)[-1]
    return torch.load(directory / "training.pt", weights_only=True)


def update_with(model, rows, weight):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = [policy.Row(row.ids, [weight * w for w in row.weights]) for row in rows]
    before = [p.full_tensor().clone() for p in model.parameters()]
    _, grad_norm = train.update(model, optimizer, rows, 1e-2, 64)
    return grad_norm, any(
        not torch.equal(a, b.full_tensor()) for a, b in zip(before, model.parameters())
    )


def test_an_update_that_is_not_finite_is_skipped():
    model = policy.shard(tiny_model(64))
    for weight in float("inf"), float("nan"):
        grad_norm, changed = update_with(model, example_rows(), weight)
        assert not torch.tensor(grad_norm).isfinite() and not changed
    grad_norm, changed = update_with(model, example_rows(), 1.0)
    assert torch.tensor(grad_norm).isfinite() and changed


def train_with_broken_rewards(directory, arguments, broken):
    exact, steps = train.REWARDS["exact"], iter(range(1, 100))

    def reward(rollouts, judge):
        step = next(steps)
        for R, notes in exact(rollouts, judge):
            yield R + (float("inf") if step in broken else 0.0), notes

    train.REWARDS["exact"] = reward
    train_in(directory, arguments)


def test_three_skipped_updates_in_a_row_end_the_run(tmp_path, toy_model_dir):
    flags = f"--model {toy_model_dir} {FLAGS} --reward exact --steps 9 --out run"
    broken = [1, 2, 4, 6, 7, 8]
    finish([start(train_with_broken_rewards, tmp_path, flags, broken)], code=2)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["updates_skipped"] for line in lines[1:]] == [1, 1, 0, 1, 0, 1, 1, 1]
    assert lines[1]["grad_norm"] is None and lines[3]["grad_norm"] is not None
    last_line = (tmp_path / "log-0").read_text().splitlines()[-1]
    assert "the gradient was not finite in steps 6 to 8" in last_line
    assert train_state(tmp_path / "run")["step"] == 8  # nothing learned is lost
    rows = read_lines(tmp_path / "run" / "not-finite-step-8.jsonl")
    assert len(rows) == 8 and len(rows[0]["ids"]) == len(rows[0]["weights"])
