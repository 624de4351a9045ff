"""Save and resume the state of a run."""

import math
import os
import shutil
import time
from hashlib import sha256

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from engine.cli import InputError, first_line, require
from engine.console import is_rank_0, say
from engine.files import checkpoints, read_config

TENSORS_IN_A_FILE = 32


def fingerprint(problems, template=None):
    """What tells whether a resumed run has the same data and the same chat template."""
    digest = sha256(repr((problems, template)).encode()).hexdigest()[:16]
    return f"{len(problems)} questions, sha256 {digest}"


def check_resumed(out, data, last_step):
    """Refuse to resume a run whose data (a fingerprint) has changed, or that is complete."""
    before = read_config(out).get("data", data)
    require(
        before == data,
        f"--resume: the data has changed, or the chat template ({before} before, {data} now)",
    )
    done = max([step for step, _ in checkpoints(out)], default=0)
    if is_rank_0():  # what a kill has left
        shutil.rmtree(out / "checkpoints" / "partial", ignore_errors=True)
    require(
        done < last_step,
        f"the run in {out} has completed {done} steps: a larger --steps would extend it, unless "
        "its learning rate decays",
    )
    say(f"resuming after step {done}")


def training_state(policy, optimizer):
    """The sharded weights and Adam's state by parameter name, without copies. Before Adam's first
    step torch creates its moments here, so that a checkpoint can be loaded into them."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(policy, optimizer, options=options)
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    return dict(policy.named_parameters()) | tensors


def reason(error):
    """The first line of an error. dcp wraps the errors of the ranks in a CheckpointException."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return first_line(error)


def save_checkpoint(out, step, keep, actor, tokenizer, policy, optimizer):
    """Save out/checkpoints/step-K/, a Hugging Face directory. Its folder training/ is for --resume;
    every rank writes its own shards there, as safetensors. It is named `partial` until it is
    written, and again before it is deleted, so step-K is always complete. A file is held in host
    memory twice while it is written, so the state goes into many files."""
    directory, partial = out / "checkpoints" / f"step-{step}", out / "checkpoints" / "partial"
    if is_rank_0():
        shutil.rmtree(partial, ignore_errors=True)
        if partial.exists():  # it cannot be deleted
            partial.rename(partial.with_name(f"partial-{time.time_ns()}"))
    dist.barrier()
    try:
        state = training_state(policy, optimizer)
        file_of = {name: 1 + number // TENSORS_IN_A_FILE for number, name in enumerate(state)}
        writer = HuggingFaceStorageWriter(str(partial / "training"), file_of, save_distributed=True)
        dcp.save(state, storage_writer=writer)
        if is_rank_0():
            actor.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    # A full disk raises errors of many types; CheckpointException derives from BaseException.
    except (Exception, CheckpointException) as error:
        if is_rank_0():
            shutil.rmtree(partial, ignore_errors=True)
        last = ["none", *(path.name for _, path in checkpoints(out))][-1]
        raise InputError(
            f"cannot save {directory} ({reason(error)}); the last complete checkpoint is {last}"
        ) from error
    os.sync()
    dist.barrier()
    if is_rank_0():
        partial.rename(directory)
        for _, old in checkpoints(out)[:-keep]:
            try:
                old.rename(partial)
                shutil.rmtree(partial)
            except OSError as error:
                say(f"warning: {old} cannot be deleted ({first_line(error)})")
    dist.barrier()  # torchrun ends all ranks when one has ended


def load_checkpoint(out, policy, optimizer):
    """Load the last checkpoint, which may be of another number of ranks -> its step, or 0 if there
    is none."""
    found = checkpoints(out)
    if not found:
        return 0
    step, directory = found[-1]
    state = training_state(policy, optimizer)
    try:
        reader = HuggingFaceStorageReader(str(directory / "training"))
        saved = reader.read_metadata().state_dict_metadata
        check_complete(directory, saved, state)  # dcp.load would leave what is missing as it is
        dcp.load(state, storage_reader=reader)
    except InputError:
        raise
    except (Exception, CheckpointException) as error:  # a broken file raises errors of many types
        raise InputError(
            f"{directory}/training: not readable ({reason(error)}); remove {directory} to resume "
            "from the checkpoint before it"
        ) from error
    return step


def check_complete(directory, saved, state):
    """Check that the files of a checkpoint hold every number of the state."""
    for name, tensor in state.items():
        chunks = saved[name].chunks if name in saved else []
        held = sum(math.prod(chunk.sizes) for chunk in chunks)
        require(
            held == tensor.numel(),
            f"{directory}/training holds {held:,} of {tensor.numel():,} numbers of {name}: give "
            f"back its missing files or this run's --model, or remove {directory} to resume from "
            "the checkpoint before it",
        )
