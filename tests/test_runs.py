"""Runs of days: several ranks, kills, signals, full disks, gradients that are not finite."""

import itertools
import os
import random
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import (
    example_rows,
    needs_cuda,
    on_devices,
    steps_of,
    summary_of,
    tiny_model,
    written_by,
)
from processes import (
    finish,
    run_in,
    start,
    start_ranks,
    train_and_print_rows,
    two_updates,
    weights_of_a_new_policy,
)
from transformers import AutoModelForCausalLM

import train
from engine import policy
from engine.checkpoints import load_checkpoint, save_checkpoint
from reward_functions import REWARDS, Judged, Reward
from rloo import TrainingRow, update
from runtime import report
from runtime.files import LOGS, checkpoints, read_config, read_rows, to_jsonl
from runtime.ranks import seed_everything
from tasks.data import in_epochs, load_problems

# -------------------------------------------------------------------------------------------- ranks


@on_devices
@pytest.mark.parametrize("lora", [None, 1, 4])  # of rank 1 a second process has nothing of A
@pytest.mark.parametrize("family, tied", [("qwen3", True), ("llama", False)])
def test_two_ranks_take_the_step_of_one(tmp_path, device, family, tied, lora):
    """The same loss, gradient norm and weights, on ragged rows, with activation checkpointing."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = tiny_model(64, family, tied, initializer_range=0.1)
    model.save_pretrained(tmp_path / "model")
    arguments = (tmp_path / "model", example_rows(), 64, 1e-3)
    finish([start(two_updates, *arguments, tmp_path / "one", lora, device=device)])
    finish(start_ranks(2, two_updates, *arguments, tmp_path / "two", lora, device=device))
    one, two = (torch.load(tmp_path / name) for name in ("one", "two"))
    limit = 1e-5 if device == "cpu" else 1e-2  # in bf16 sums in another order round otherwise
    assert torch.tensor(two["done"]).allclose(torch.tensor(one["done"]), rtol=limit)
    for name, weight in one["weights"].items():
        assert (two["weights"][name] - weight).abs().max() < limit, name


def test_two_ranks_begin_with_the_weights_of_one(tmp_path):
    """In bf16, to the bit: where a weight begins depends on its place in the whole matrix, not in a
    rank's part of it."""
    model = tiny_model(64, initializer_range=0.1).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    finish(start_ranks(2, weights_of_a_new_policy, tmp_path / "model", tmp_path / "two"))
    two = torch.load(tmp_path / "two")
    for name, weight in model.named_parameters():
        begin = policy.spread(weight.float())
        assert torch.equal(two[f"model.{name}"], begin) and not torch.equal(begin, weight.float())


def test_a_resumed_run_in_bf16_equals_one_that_never_stopped(script, quick):
    for flags in "--out whole --steps 3", "--out run --steps 2", "--out run --steps 3 --resume":
        code, _, err = script(train, f"{quick} --dtype bf16 --save-every 2 {flags}")
        assert code == 0, err
    assert written_by(Path("run")) == written_by(Path("whole"))


def test_a_checkpoint_moves_between_one_rank_and_two(script, tmp_path, stopped_run):
    """One rank takes two steps, two ranks go on to the fourth, and one rank to the fifth, unless
    the file of one of the two is gone."""
    finish(start_ranks(2, run_in, tmp_path, train_and_print_rows, "--out run --resume"))
    for rank in 0, 1:  # each is given all rows of a step
        printed = (tmp_path / f"log-{rank}").read_text()
        assert re.findall(r"\d+ rows", printed) == ["16 rows", "16 rows"], printed
    saved = [*stopped_run.glob("checkpoints/step-4/training/*.distcp")]
    assert {path.name[:3] for path in saved} == {"__0", "__1"}
    saved[0].rename("away")
    code, _, err = script(train, "--out run --resume --steps 5")
    assert code == 2 and re.search("step-4/training: .*No such file.*; restore", err), err
    Path("away").rename(saved[0])
    finish([start(run_in, tmp_path, train.main, "--out run --resume --steps 5")])
    metrics, samples, held_out = (read_rows(stopped_run / name) for name in LOGS)
    assert [line["step"] for line in metrics if "reward" in line] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in metrics if "pass_at_1" in line] == [0, 2, 4, 5]
    own_mean = sum(samples[6]["R"] + samples[7]["R"]) / 8
    fourth, evaluated = (line for line in metrics if line["step"] == 4)
    assert fourth["reward"] != pytest.approx(own_mean)  # the other rank's questions count too
    # The data come in the same order. A rank keeps its first two questions of a step: of two ranks
    # the first has the questions 0 and 2.
    flags = read_config(stopped_run)["flags"]
    order = in_epochs(load_problems(flags["dataset"]), 20, flags["seed"])
    kept = [0, 1, 4, 5, 8, 10, 12, 14, 16, 17]
    assert [row["question"] for row in samples] == [order[k].question for k in kept]
    now = [row for row in held_out if row["step"] == 4]
    of_one_rank = [(row["index"], row["question"]) for row in held_out if row["step"] == 0]
    assert [(row["index"], row["question"]) for row in now] == of_one_rank
    numbers = summary_of(now)
    assert evaluated["pass_at_1"] == pytest.approx(numbers["pass_at_1"])
    assert evaluated["pass_at_1_stderr"] == pytest.approx(numbers["stderr"])


def test_random_numbers_differ_by_seed_step_and_rank(monkeypatch):
    numbers = set()
    for rank, *key in (0, 0, 1), (0, 0, 2), (0, 1, 1), (1, 0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        seed_everything(*key)
        numbers.add(torch.rand(()).item())
    assert len(numbers) == 4


def test_a_run_without_its_checkpoints_keeps_its_logs(script, finished_run, stopped_run):
    before = {name: (stopped_run / name).read_text() for name in LOGS}
    shutil.rmtree(stopped_run / "checkpoints")
    code, _, err = script(train, "--out run --resume")
    assert code == 0 and written_by(stopped_run) == written_by(finished_run), err
    assert before == {name: (stopped_run / f"{name}.old").read_text() for name in LOGS}


# --------------------------------------------------------------------------------- kills and stops


@on_devices
def test_a_killed_run_equals_one_that_never_was(tmp_path, quick, finished_run, device):
    """Killed at a random moment, and inside a save. On a GPU sums may round in another order."""
    run, arguments = tmp_path / "run", f"{quick} --steps 4 --save-every 1 --out run"
    partial = run / "checkpoints" / "partial"
    for kill_after, delay in (run / "config.json", 0.6), (partial, 0.02):
        shutil.rmtree(partial, ignore_errors=True)
        process = start(run_in, tmp_path, train.main, arguments, device=device)
        while process.is_alive() and not kill_after.exists():
            time.sleep(0.001)
        time.sleep(random.uniform(0, delay))
        process.kill()
        process.join()
        for _, directory in checkpoints(run):
            AutoModelForCausalLM.from_pretrained(directory)
        arguments = "--out run --resume"
    finish([start(run_in, tmp_path, train.main, arguments, device=device)])
    assert [line["step"] for line in steps_of(run)] == [1, 2, 3, 4]
    if device == "cpu":
        assert written_by(run) == written_by(finished_run)


def test_a_kill_between_any_two_writes_loses_nothing(script, tmp_path, quick, monkeypatch):
    """What a kill leaves is the directory as it then is. A run copies its own before each write,
    and with half of what it appends. Each copy is resumed, and equals the run."""
    run, left = tmp_path / "run", []

    def copy_before(name, half=None):
        if run.name in str(name) and (run / "config.json").exists():
            left.append(shutil.copytree(run, tmp_path / f"left-{len(left)}"))
            if half:
                with open(left[-1] / Path(name).name, "a") as file:
                    file.write(half)

    def watch(owner, name, half_of=lambda *_: None):
        write = getattr(owner, name)

        def copying(path, *more, **options):
            copy_before(path)
            if half := half_of(*more):
                copy_before(path, half)
            return write(path, *more, **options)

        patch.setattr(owner, name, copying)

    with monkeypatch.context() as patch:
        watch(report, "append_rows", lambda rows: to_jsonl(rows)[:-9])
        watch(Path, "rename")
        watch(Path, "replace")
        watch(shutil, "rmtree")
        flags = f"{quick} --save-every 1 --eval-every 2 --keep 1 --out run"
        assert script(train, flags)[0] == 0
    assert len(left) > 20
    for copy in left:
        code, _, err = script(train, f"--resume --out {copy.name}")
        assert code == 0 and written_by(copy) == written_by(run), (copy, err)


def test_an_evaluation_that_a_kill_has_cut_is_made(script, tmp_path, stopped_run):
    """Also if the flag that made it due changes when the run is resumed, and that run is killed."""
    for number in range(2):
        state = shutil.copytree(stopped_run, tmp_path / f"before-{number}")
        code, _, err = script(train, f"--resume --eval-every 3 --out {stopped_run}")
        assert code == 0, err
        steps = [
            row["step"] for row in read_rows(stopped_run / "metrics.jsonl") if "pass_at_1" in row
        ]
        assert steps == [0, 2, 3, 4]
        config = (stopped_run / "config.json").read_text()
        shutil.rmtree(stopped_run)
        state.rename(stopped_run)
        (stopped_run / "config.json").write_text(config)


def test_a_parameter_that_never_gets_a_gradient(tokenizer, tmp_path):
    """It has no moments, neither in a checkpoint nor when that is loaded."""
    rows, weights = [TrainingRow([5, 6, 7, 8], [0.0, 1.0, -1.0, 1.0])], []
    for resumed in False, True:
        actor, model = tiny_model(64), tiny_model(64)
        model.unused = torch.nn.Parameter(torch.ones(8))
        model = policy.Policy(model)
        optimizer = torch.optim.AdamW(model.parameters())
        if resumed:
            assert load_checkpoint(tmp_path, model, optimizer) == (1, True)
        for step in range(1 + resumed, 3):
            update(model, optimizer, rows, 1e-3, 100)
            if step == 1:
                for log in LOGS:
                    (tmp_path / log).touch()
                save_checkpoint(tmp_path, 1, 1, True, actor, tokenizer, model, optimizer)
        assert [p for p in model.parameters() if p not in optimizer.state] == [model.model.unused]
        weights.append([p.full_tensor().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


def train_with_rewards(monkeypatch, script, flags, reward_of_step):
    """Run train.py, in which all samples of a step receive reward_of_step(step)."""
    steps = itertools.count(1)

    def ask_judges(groups, *_):
        R = torch.full((4,), reward_of_step(next(steps)))
        return [Judged(group, None, R) for group in groups]

    monkeypatch.setattr(train, "ask_judges", ask_judges)
    monkeypatch.setitem(REWARDS, "exact", Reward(lambda judged: judged.right, set()))
    return script(train, f"{flags} --reward exact --save-every 9 --out run")


@pytest.mark.parametrize("name", "SIGTERM SIGINT SIGHUP SIGUSR1 SIGUSR2 SIGXCPU".split())
def test_a_signal_finishes_the_step_and_saves(monkeypatch, script, tmp_path, quick, name):
    number = signal.Signals[name]

    def interrupt(step):
        for _ in range(2 if step == 2 else 0):  # as torchrun and SLURM may pass on the same one
            os.kill(os.getpid(), number)
        return 0.0

    code, out, err = train_with_rewards(monkeypatch, script, f"{quick} --steps 9", interrupt)
    assert code == 128 + number and out == "" and "stopping after this step" in err
    assert "stopped after step 2 of 9; go on with --resume --out run" in err
    assert [line["step"] for line in steps_of(tmp_path / "run")] == [1, 2]
    assert [step for step, _ in checkpoints(tmp_path / "run")] == [2]


def test_three_skipped_updates_in_a_row_end_the_run(monkeypatch, script, tmp_path, quick):
    def broken(step):
        return 1e38 if step in (1, 2, 4, 5, 6) else 0.0

    monkeypatch.setattr(train, "leave_one_out", lambda R: 10 * R)  # infinite
    code, _, err = train_with_rewards(monkeypatch, script, f"{quick} --steps 7", broken)
    assert "warning at step 1: the gradient is not finite" in err
    assert code == 2 and "not finite in steps 4 to 6: start a new run" in err.splitlines()[-1]
    lines = steps_of(tmp_path / "run")
    assert [line["grad_norm"] is None for line in lines] == [True, True, False, True, True, True]
    assert checkpoints(tmp_path / "run")[-1][0] == 6  # nothing learned is lost


def test_a_checkpoint_before_adams_first_step(tokenizer, tmp_path, monkeypatch):
    """And an old checkpoint that cannot be deleted ends no run."""
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
    actor, model = tiny_model(64), policy.Policy(tiny_model(64))
    optimizer = torch.optim.AdamW(model.parameters())
    assert load_checkpoint(tmp_path, model, optimizer) == (0, True)
    for step in 1, 2, 3:
        save_checkpoint(tmp_path, step, 1, False, actor, tokenizer, model, optimizer)
    before = [p.full_tensor().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(2)
    assert load_checkpoint(tmp_path, model, optimizer) == (3, False)
    assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters()))


def test_a_full_disk_leaves_the_last_checkpoint_whole(script, stopped_run, toy_model_dir):
    """No file can grow over a limit: the real error of a write that fails half way. There is room
    for model.safetensors, but not for the first file of the training state, which is larger."""
    before = {path: path.read_bytes() for path in stopped_run.rglob("step-2/*") if path.is_file()}
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    of_weights = (toy_model_dir / "model.safetensors").stat().st_size * 11 // 10
    of_log = (stopped_run / "samples.jsonl").stat().st_size * 7 // 10
    for limit, file in (of_log, "write run/samples.jsonl"), (of_weights, "save run/checkpoints/"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
        try:
            code, _, err = script(train, "--out run --resume")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        last_line = err.splitlines()[-1]
        assert code == 2 and last_line.startswith(f"train.py: cannot {file}"), err
        helps = "go on with --resume --out run; the last complete checkpoint is step-2"
        assert last_line.endswith(helps)
        assert before == {path: path.read_bytes() for path in before}


# ----------------------------------------------------------------------------------------- on a GPU


@needs_cuda
@pytest.mark.parametrize("offload", ["", "--cpu-offload"])
def test_cuda_trains_the_toy_in_mixed_precision(tmp_path, quick, toy_model_dir, offload):
    flags = f"{quick} --steps 3 --out run {offload}"
    finish([start(run_in, tmp_path, train.main, flags, device="cuda")])
    losses = [line["loss"] for line in steps_of(tmp_path / "run")]
    assert len(losses) == 3 and torch.tensor(losses).isfinite().all()
    before = AutoModelForCausalLM.from_pretrained(toy_model_dir).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-3").state_dict()
    assert all((after[name].float() - before[name]).abs().max() < 0.1 for name in before)
