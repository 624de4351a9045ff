"""A run: its ranks, its directory with the logs, its checkpoints.

config.json, metrics.jsonl, samples.jsonl and checkpoints/step-K/. A crash at any moment leaves the
last checkpoint whole, and logs that a resumed run cuts back to it.
"""

import datetime
import json
import logging
import math
import os
import random
import shutil
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from data import InputError, first_line, read_rows, require

logger = logging.getLogger("train")  # train.py lets its messages through


# -------------------------------------------------------------------------------------------- ranks


def init_ranks():
    """Join the process group of torchrun, or open one of a single process -> device."""
    transformers.utils.logging.disable_progress_bar()  # "loading", "writing": not what we wait for
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        # cuDNN's attention comes first on Hopper since torch 2.11, and plans anew for every shape:
        # every decode step is a new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    # Ranks wait for the one that samples longest, and for the one that writes.
    patience = datetime.timedelta(hours=2)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=patience)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_rank() > 0:  # one rank speaks for all
        logging.disable(logging.WARNING)
    return compute_device()


def compute_device():
    """Where this rank computes."""
    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def gather(part):
    """Every rank's list, end to end, on every rank."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return [item for part in parts for item in part]


def seed_everything(*key):
    """Random numbers that are a function of the key, such as (seed, step), and of the rank: nothing
    has to be saved for a resumed run to draw the same. (On a GPU the free memory decides which rows
    are sampled together, and with it which number falls to which row.)"""
    torch.manual_seed(random.Random(repr((*key, dist.get_rank()))).getrandbits(63))


class StopRequest:
    """SIGTERM or Ctrl-C: finish the step, save, and end well. A second one ends the run at once."""

    def __init__(self):
        self.requested = False
        for which in signal.SIGTERM, signal.SIGINT:
            signal.signal(which, self.request)

    def request(self, which, frame):
        self.requested = True
        signal.signal(which, signal.SIG_DFL)
        logger.info("%s: stops after this step", signal.Signals(which).name)


# ---------------------------------------------------------------------------------------------- log


def new_directory(out, name):
    """The directory for a run's files, runs/TIME-NAME by default, the same on all ranks. It must be
    new or empty; nothing is made yet. No rank goes on before all have looked, since rank 0 will
    write."""
    out = Path(gather([out or time.strftime(f"runs/%Y%m%d-%H%M%S-{name}")])[0])
    used = out.is_dir() and any(out.iterdir())
    require(not used, f"--out {out} is not empty: choose a new directory")
    dist.barrier()
    return out


def read_flags(out):
    """The flags of a run, from its config.json."""
    path = Path(out) / "config.json"
    try:
        return dict(json.loads(path.read_text())["flags"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"{path} is not the configuration of a run ({first_line(error)})"
        raise InputError(message) from error


def describe(rollout, R, A, record):
    """One question's group in numbers, for the log."""
    N, verdicts = len(R), record.get("verdicts", [])
    return {
        "reward": R.mean().item(),
        "exact_match": rollout.answers.count(rollout.problem.reference) / N,
        "answered": len(rollout.answered) / N,
        "truncated": sum(rollout.truncated) / N,
        "unique_answers": len({rollout.answers[i] for i in rollout.answered}),
        "solution_tokens": sum(rollout.cuts) / N,
        "completion_tokens": sum(len(ids) for ids in rollout.completions) / N,
        "entropy": sum(rollout.entropies) / N,
        "zero_advantage_groups": float(not A.any()),  # all earn the same: nothing to learn here
        **{f"verifier_{said}": verdicts.count(said) / N for said in set(verdicts) - {None}},
    }


def means(groups):
    names = sorted({name for group in groups for name in group})
    return {name: sum(group.get(name, 0) for group in groups) / len(groups) for name in names}


# What the progress bar shows: how well it goes, and whether the policy collapses.
SHOWN = "pass_at_1 reward entropy answered truncated unique_answers zero_advantage_groups".split()


class RunFiles:
    """What rank 0 writes: config.json, metrics.jsonl (a line a step), samples.jsonl (the first
    groups of each step, with the matrices that Fig. 2 draws)."""

    GROUPS_A_STEP = 2

    def __init__(self, out, args, first_step):
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.shown = out, {}
        flags = {name: value for name, value in vars(args).items() if name not in ("resume", "out")}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        config = {"flags": flags, "world_size": dist.get_world_size(), "versions": versions}
        write_whole(out / "config.json", json.dumps(config, indent=2) + "\n")
        for name in "metrics.jsonl", "samples.jsonl":  # a resumed run rewrites its later steps
            keep_steps_before(first_step if first_step > 1 else 0, out / name)
        logger.info("run: %s", out)

    def log(self, line, bar):
        """One step into metrics.jsonl and the progress bar."""
        # JSON has no nan and no inf: null.
        odd = [name for name, x in line.items() if isinstance(x, float) and not math.isfinite(x)]
        with open(self.out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line | dict.fromkeys(odd)) + "\n")
        self.shown |= {name: f"{line[name]:.3g}" for name in SHOWN if name in line}
        bar.set_postfix(self.shown, refresh=False)

    def keep_samples(self, step, rollouts, rewards, records):
        with open(self.out / "samples.jsonl", "a") as file:
            for group in list(zip(rollouts, rewards, records))[: self.GROUPS_A_STEP]:
                file.write(json.dumps({"step": step} | sample_record(*group)) + "\n")

    def summary(self, last_step):
        """The last lines of a run, for its user."""
        lines = read_rows(self.out / "metrics.jsonl")
        for name in "reward", "pass_at_1":
            if values := [line[name] for line in lines if line.get(name) is not None]:
                yield f"  {name:9}  {values[0]:.3f} at first, {values[-1]:.3f} at last"
        seconds = [line["seconds"] for line in lines if "seconds" in line]
        minutes = {part: sum(of[part] for of in seconds) / 60 for part in seconds[0]}
        yield "  minutes    " + ", ".join(f"{part} {m:.1f}" for part, m in minutes.items())
        yield f"  model      {self.out / 'checkpoints' / f'step-{last_step}'}"
        yield f"  curves     python plot.py {self.out}"
        yield f"  samples    open {self.out / 'samples.jsonl'} in docs/explore.html"


def sample_record(rollout, R, record):
    """One group for samples.jsonl; `record` is what its reward has to show (rewards.py)."""
    problem = {"question": rollout.problem.question, "reference": rollout.problem.reference}
    samples = {name: getattr(rollout, name) for name in ("texts", "answers", "truncated")}
    return {**problem, **samples, "R": R.tolist(), **record}


def keep_steps_before(first_step, path):
    """Cut a log back to the steps before first_step; a crash may have left half a line."""
    whole = path.read_text() if path.exists() else ""
    write_whole(path, whole[: whole.rfind("\n") + 1])
    kept = [line for line in read_rows(path) if line["step"] < first_step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))


def write_whole(path, text):
    """Write beside and rename: a crash leaves the old file or the new one, never half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


# -------------------------------------------------------------------------------------- checkpoints


def checkpoints(out):
    """-> all checkpoints of a run, (step, directory), oldest first."""
    found = {path.name.removeprefix("step-"): path for path in out.glob("checkpoints/step-*")}
    return sorted((int(step), path) for step, path in found.items() if step.isdigit())


def training_state(policy, optimizer):
    """Weights and Adam's state by parameter name: the tensors themselves, sharded. (Before Adam's
    first step torch makes its moments here, so that there is something to load into.)"""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(policy, optimizer, options=options)
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    return dict(policy.named_parameters()) | tensors


def reason(error):
    """The first line of what went wrong; dcp wraps the errors of the ranks in one of its own."""
    failures = getattr(error, "failures", {None: (error, None)})
    return first_line(next(iter(failures.values()))[0])


def save_checkpoint(out, step, keep, actor, tokenizer, policy, optimizer):
    """out/checkpoints/step-K/: a Hugging Face directory, and in it training/, from which --resume
    goes on; every rank writes its own shards, as safetensors. Written beside and renamed, and
    renamed before it is deleted: a directory of that name is whole, whenever the run is killed."""
    directory, partial = out / "checkpoints" / f"step-{step}", out / "checkpoints" / "partial"
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    try:
        writer = HuggingFaceStorageWriter(str(partial / "training"), save_distributed=True)
        dcp.save(training_state(policy, optimizer), storage_writer=writer)
        if rank == 0:
            actor.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    except (Exception, CheckpointException) as error:  # a full disk raises a dozen kinds
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        whole = [path.name for _, path in checkpoints(out)]
        raise InputError(
            f"cannot save {directory} ({reason(error)}); "
            f"the last whole checkpoint is {whole[-1] if whole else 'none'}"
        ) from error
    os.sync()
    dist.barrier()
    if rank == 0:
        os.rename(partial, directory)
        for _, old in checkpoints(out)[:-keep]:
            os.rename(old, partial)
            shutil.rmtree(partial)


def load_checkpoint(out, policy, optimizer):
    """Restore the last checkpoint, whatever its number of ranks was -> its step; 0 if the run ended
    before its first."""
    found = checkpoints(out)
    if not found:
        logger.info("no checkpoint in %s yet: the run begins again", out)
        return 0
    step, directory = found[-1]
    try:
        reader = HuggingFaceStorageReader(str(directory / "training"))
        reader.read_metadata()  # a broken file is found here; dcp.load would log it at length
        dcp.load(training_state(policy, optimizer), storage_reader=reader)
    except (Exception, CheckpointException) as error:  # a broken file raises a dozen kinds
        raise InputError(
            f"{directory / 'training'}: not readable ({reason(error)}); "
            f"remove {directory} to go on from the checkpoint before"
        ) from error
    return step
