"""Runs of days: several ranks, kills, signals, full disks, gradients that are not finite."""

import itertools
import json
import math
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
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import train
from engine import policy
from engine.checkpoints import load_checkpoint, save_checkpoint
from engine.checks import mark_of
from engine.lora import LoraPolicy
from reward_functions import REWARDS, Judged, Reward
from rloo import TrainingRow, update
from runtime import report
from runtime.cli import InputError
from runtime.files import (
    LOGS,
    append_rows,
    beginning,
    checkpoints,
    read_config,
    read_rows,
    remove_partial,
    to_jsonl,
)
from runtime.ranks import all_gather, init_ranks, open_run_directory, seed_everything
from tasks.data import in_epochs, load_problems

# -------------------------------------------------------------------------------------------- ranks


@on_devices
def test_two_ranks_take_the_step_of_one(tmp_path, device):
    """The same loss, gradient norm and weights, on ragged rows, with activation checkpointing."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    cases = []
    for family, tied in ("qwen3", True), ("llama", False):
        tiny_model(64, family, tied, initializer_range=0.1).save_pretrained(tmp_path / family)
        # All weights, and --lora: of rank 1 a second process has nothing of A.
        cases += [(tmp_path / family, lora_rank) for lora_rank in (None, 1, 4)]
    arguments = (cases, example_rows(), 64, 1e-3)
    finish([start(two_updates, *arguments, tmp_path / "one", device=device)])
    finish(start_ranks(2, two_updates, *arguments, tmp_path / "two", device=device))
    one, two = (torch.load(tmp_path / name) for name in ("one", "two"))
    limit = 1e-5 if device == "cpu" else 1e-2  # in bf16 sums in another order round otherwise
    for case, (done, weights), (of_two, theirs) in zip(cases, one, two, strict=True):
        assert torch.tensor(of_two).allclose(torch.tensor(done), rtol=limit), case
        for name, weight in weights.items():
            assert (theirs[name] - weight).abs().max() < limit, (case, name)


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


def test_one_process_needs_no_interface(monkeypatch):
    """A cluster's profile may name interfaces for all of its jobs."""
    dist.destroy_process_group()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    init_ranks()
    assert all_gather([1, 2]) == [1, 2]


# ----------------------------------------------------------------------------- a run's directory


def fail(*args):
    raise InputError("it fails here")


def test_a_start_that_fails_can_be_made_again(script, quick, monkeypatch):
    """Before config.json is there, as a new run, and afterwards with --resume."""
    for owner, name in (train, "check_training"), (report.RunLog, "open_logs"):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            code, _, err = script(train, f"{quick} --steps 1 --out run")
        assert code == 2 and "it fails here" in err, err
    code, _, err = script(train, "--out run --resume")
    assert code == 0 and [line["step"] for line in steps_of(Path("run"))] == [1], err


def test_the_model_that_began_a_run(script, quick, toy_model_dir, monkeypatch):
    """A checkpoint has the weights. Before the first one another --model is refused."""
    other = shutil.copytree(toy_model_dir, "other")
    model = AutoModelForCausalLM.from_pretrained(other)
    model.model.norm.weight.data += 1
    model.save_pretrained(other)
    with monkeypatch.context() as patch:
        patch.setattr(train, "Stop", fail)
        assert script(train, f"{quick} --steps 1 --out run")[0] == 2
    code, _, err = script(train, "--out run --resume --model other")
    assert code == 2 and re.search("since base was ([0-9a-f]+) and is (?!\\1)[0-9a-f]+: keep", err)
    for flags in "", "--model other --steps 2":
        code, _, err = script(train, f"--out run --resume {flags}")
        assert code == 0 and f"{toy_model_dir}: " in err, err
        config = read_config("run")
        assert config["flags"]["model"] == str(toy_model_dir)
        assert config["base"] == mark_of(toy_model_dir)


def exchange_rows(path):
    weights = load_file(path)
    weights["model.embed_tokens.weight"][[40, 41]] = weights["model.embed_tokens.weight"][[41, 40]]
    save_file(weights, path, {"format": "pt"})


def exchange_ids(path):
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["7"], vocab["8"] = vocab["8"], vocab["7"]
    path.write_text(json.dumps(content))


def set_theta(path):
    config = json.loads(path.read_text())
    config["rope_theta"] = 50.0
    path.write_text(json.dumps(config))


EDITS = {
    "model.safetensors": exchange_rows,
    "tokenizer.json": exchange_ids,
    "config.json": set_theta,
    "generation_config.json": lambda path: path.write_text('{"eos_token_id": 0}'),
    "chat_template.jinja": lambda path: path.write_text(path.read_text() + "{# #}"),
}


def test_a_mark_changes_with_every_file_of_a_model(toy_model_dir, tmp_path):
    """Not with where they are, nor with other files."""
    copy = shutil.copytree(toy_model_dir, tmp_path / "copy")
    (copy / "README.md").write_text("My model")
    before = mark_of(copy)
    assert before == mark_of(str(toy_model_dir)) != mark_of(copy, "a prompt")
    others = set()
    for file, edit in EDITS.items():
        edited = shutil.copytree(toy_model_dir, tmp_path / f"other-{file}")
        edit(edited / file)
        others.add(mark_of(edited))
    assert len(others - {before}) == len(EDITS)


@pytest.mark.parametrize("file", EDITS)
def test_a_run_does_not_go_on_from_an_edited_checkpoint(script, finished_run, file):
    last = shutil.copytree(finished_run, Path("run")) / "checkpoints" / "step-4"
    EDITS[file](last / file)
    code, _, err = script(train, "--out run --resume --steps 5")
    says = "training: it belongs to other files than those of the model in .*step-4; restore"
    assert code == 2 and re.search(says, err.splitlines()[-1]), err


def test_the_state_of_a_training_belongs_to_its_step(script, finished_run):
    """Also if the step's own logged.json is kept."""
    steps = sorted(shutil.copytree(finished_run, Path("run")).glob("checkpoints/step-*"))
    logs = (steps[-1] / "training" / "logged.json").read_text()
    shutil.rmtree(steps[-1] / "training")
    shutil.copytree(steps[-2] / "training", steps[-1] / "training")
    (steps[-1] / "training" / "logged.json").write_text(logs)
    code, _, err = script(train, "--out run --resume --steps 5")
    assert code == 2 and "it belongs to other files" in err.splitlines()[-1], err


def test_the_wrong_directory_gets_the_right_one(script, finished_run, toy_model_dir):
    last = finished_run / "checkpoints" / "step-4"
    for wrong in last, last / "training", finished_run / "checkpoints":
        code, _, err = script(train, f"--resume --out {wrong}")
        assert code == 2 and f"; the run is {finished_run}" in err.splitlines()[-1], err
    code, _, err = script(train, f"--resume --out {toy_model_dir}")
    assert code == 2 and "expected an object with flags (" in err.splitlines()[-1], err


def test_a_directory_with_what_is_the_file_systems_is_new(tmp_path):
    for name in ".nfs0001", ".snapshot", "lost+found", "lock", "warm-start":
        (tmp_path / name).mkdir() if name != "lock" else (tmp_path / name).touch()
    assert open_run_directory(tmp_path, "name") == tmp_path
    (tmp_path / "mine").touch()
    with pytest.raises(InputError, match="is not empty"):
        open_run_directory(tmp_path, "name")


@pytest.mark.parametrize("end", ["", "\n"])
def test_rows_are_appended_on_lines_of_their_own(tmp_path, end):
    """An editor may leave no end of line behind."""
    path = tmp_path / "grades.jsonl"
    append_rows(path, [{"row": 1}])
    path.write_text(path.read_text().rstrip() + end)
    append_rows(path, [{"row": 2}, {"row": 3}])
    assert path.read_text() == '{"row": 1}\n{"row": 2}\n{"row": 3}\n'


# --------------------------------------------------------------------------------- kills and stops


@on_devices
def test_a_killed_run_equals_one_that_never_was(tmp_path, quick, finished_run, device):
    """Killed at a random moment, and inside a save. On a GPU sums may round in another order."""
    run, arguments = tmp_path / "run", f"{quick} --steps 4 --save-every 1 --out run"
    for kill_after, delay in ("config.json", 0.6), ("checkpoints/partial-*", 0.02):
        remove_partial(run)
        process = start(run_in, tmp_path, train.main, arguments, device=device)
        while process.is_alive() and not any(run.glob(kill_after)):
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
        small = "--questions 2 --samples 2 --max-new-tokens 12 --eval-limit 1 --eval-runs 1"
        flags = f"{quick} {small} --save-every 1 --eval-every 2 --keep 1 --out run"
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


def logs_in(run):
    """Empty logs -> what a checkpoint notes of them."""
    for name in LOGS:
        (run / name).touch()
    return dict.fromkeys(LOGS, beginning(run / LOGS[0], -1)) | {"due": True}


def test_a_parameter_that_never_gets_a_gradient(tokenizer, tmp_path):
    """It has no moments, neither in a checkpoint nor when that is loaded."""
    rows, weights = [TrainingRow([5, 6, 7, 8], [0.0, 1.0, -1.0, 1.0])], []
    logged = logs_in(tmp_path)
    for resumed in False, True:
        actor, model = tiny_model(64), tiny_model(64)
        model.unused = torch.nn.Parameter(torch.ones(8))
        model = policy.Policy(model)
        optimizer = torch.optim.AdamW(model.parameters())
        if resumed:
            assert load_checkpoint(tmp_path, model, optimizer) == (1, logged)
        for step in range(1 + resumed, 3):
            update(model, optimizer, rows, 1e-3, 100)
            if step == 1:
                save_checkpoint(tmp_path, 1, 1, logged, actor, tokenizer, model, optimizer)
        assert [p for p in model.parameters() if p not in optimizer.state] == [model.model.unused]
        weights.append([p.full_tensor().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


def train_with_rewards(monkeypatch, script, flags, reward_of_step):
    """Run train.py, in which all samples of a step receive reward_of_step(step)."""
    steps = itertools.count(1)

    def ask_judges(groups, *_):
        R = torch.full((4,), reward_of_step(next(steps)))
        return [Judged(group, None, right=R) for group in groups]

    monkeypatch.setattr(train, "ask_judges", ask_judges)
    monkeypatch.setitem(REWARDS, "exact", Reward(lambda judged: judged.right, set()))
    flags += " --reward exact --save-every 9 --eval-dataset= --out run"
    return script(train, flags)


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


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_a_save_before_adams_first_step_changes_nothing(tokenizer, tmp_path, lora_rank):
    """The gradient of step 1 is not finite. The run that saves, the one that goes on from there and
    the one that does neither are equal, to the bit."""
    rows = [TrainingRow([5, 6, 7, 8], [0.0, 1.0, -1.0, 1.0])]
    broken, weights = [TrainingRow([5, 6, 7, 8], [0.0, math.inf, 0.0, 0.0])], []
    logged = logs_in(tmp_path)
    for doing in "neither", "save", "load":
        actor = tiny_model(64)
        trained = LoraPolicy(actor, lora_rank, "dither", 0) if lora_rank else None
        trained = trained or policy.Policy(tiny_model(64))
        optimizer = policy.make_adam(trained)
        for step in range(3):
            if (doing, step) == ("load", 1):
                assert load_checkpoint(tmp_path, trained, optimizer) == (1, logged)
            update(trained, optimizer, rows if step else broken, 1e-3, 100)
            if (doing, step) == ("save", 0):
                save_checkpoint(tmp_path, 1, 1, logged, actor, tokenizer, trained, optimizer)
        weights.append([p.full_tensor().clone() for p in trained.parameters()])
        assert {state["step"].item() for state in optimizer.state.values()} == {2}
    assert all(map(torch.equal, weights[0], weights[1]))
    assert all(map(torch.equal, weights[0], weights[2]))


@pytest.mark.parametrize("keeps", [".nfs0001", "adapter/.nfs0001", "training/.nfs0001"])
def test_what_a_file_system_keeps_ends_no_run(tokenizer, tmp_path, monkeypatch, keeps):
    """NFS keeps a file that is open somewhere, and so its directory; also after a kill."""
    remove = shutil.rmtree

    def rmtree(path, **options):
        remove(path, **options)
        (path / keeps).parent.mkdir(parents=True)
        (path / keeps).touch()

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    actor, model = tiny_model(64), policy.Policy(tiny_model(64))
    optimizer, logged = policy.make_adam(model), logs_in(tmp_path)
    (tmp_path / "checkpoints" / "partial-step-3").mkdir(parents=True)
    for step, keep in enumerate([3, 3, 3, 1, 1], start=1):
        remove_partial(tmp_path)
        save_checkpoint(tmp_path, step, keep, logged, actor, tokenizer, model, optimizer)
        assert checkpoints(tmp_path)[-1][0] == step
    assert [step for step, _ in checkpoints(tmp_path)] == [5]
    assert load_checkpoint(tmp_path, model, optimizer) == (5, logged)


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
