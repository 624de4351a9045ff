"""What a run needs: ranks, random numbers, a way to stop, an output directory, checkpoints."""

import datetime
import logging
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

from engine.cli import InputError, first_line, require, say
from engine.files import checkpoints

# -------------------------------------------------------------------------------------------- ranks


def init_ranks():
    """Join torchrun's process group, or make one of a single process -> this rank's device."""
    transformers.utils.logging.disable_progress_bar()  # loading and saving models is quick
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        # On Hopper torch 2.11 and later prefer cuDNN's attention, which makes a new plan for every
        # shape. Every decode step has a new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    # Ranks wait for the one that samples longest, and for rank 0 to write files.
    patience = datetime.timedelta(hours=2)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=patience)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_rank() > 0:  # only rank 0 warns
        logging.disable(logging.WARNING)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def all_gather(part):
    """The lists of all ranks, concatenated in rank order, on every rank."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return [item for part in parts for item in part]


def seed_everything(*key):
    """Make random numbers a function of the key, such as (seed, step), and of the rank. A resumed
    run then draws the same numbers without saved state. (On a GPU samples can still differ, because
    free memory decides which rows are sampled together, and so which number goes to which row.)"""
    torch.manual_seed(random.Random(repr((*key, dist.get_rank()))).getrandbits(63))


class StopRequest:
    """In a `with` block, SIGTERM or Ctrl-C asks the run to finish its step, save and stop. A second
    signal ends it at once."""

    def __enter__(self):
        self.signal = None  # the one received
        self.before = {s: signal.signal(s, self.request) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error):
        for which, handler in self.before.items():
            signal.signal(which, handler)

    def request(self, which, frame):
        self.signal = which
        for each in self.before:
            signal.signal(each, signal.SIG_DFL)
        say(f"{signal.Signals(which).name}: stopping after this step")

    def on_any_rank(self):
        """-> the signal that some rank received, or None. All ranks call this together."""
        return max(all_gather([self.signal or 0])) or None


def output_directory(out, name):
    """--out, or runs/TIME-NAME, the same on all ranks. It must be new or empty, except for a toy's
    warm start that a refused attempt may have left. It is not created here. All ranks check it
    before any goes on, since rank 0 will write to it."""
    out = Path(all_gather([out or time.strftime(f"runs/%Y%m%d-%H%M%S-{name}")])[0])
    used = out.is_dir() and any(path.name != "warm-start" for path in out.iterdir())
    require(not used, f"--out {out} is not empty: choose a new directory")
    above = next(path for path in [out, *out.parents] if path.exists())
    writable = above.is_dir() and os.access(above, os.W_OK)
    require(writable, f"--out {out}: cannot write to {above}")
    dist.barrier()
    return out


# -------------------------------------------------------------------------------------- checkpoints


def training_state(policy, optimizer):
    """The sharded weights and Adam's state by parameter name, without copies. (Before Adam's first
    step, torch creates its moments here, so that a checkpoint can be loaded into them.)"""
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
    every rank writes its own shards there, as safetensors. A checkpoint is renamed after it is
    written and again before it is deleted, so a directory of that name is always complete."""
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
    # A full disk raises errors of many types; CheckpointException derives from BaseException.
    except (Exception, CheckpointException) as error:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        whole = [path.name for _, path in checkpoints(out)]
        raise InputError(
            f"cannot save {directory} ({reason(error)}); "
            f"the last complete checkpoint is {whole[-1] if whole else 'none'}"
        ) from error
    os.sync()
    dist.barrier()
    if rank == 0:
        os.rename(partial, directory)
        for _, old in checkpoints(out)[:-keep]:
            os.rename(old, partial)
            shutil.rmtree(partial)


def load_checkpoint(out, policy, optimizer):
    """Load the last checkpoint, which may be of another number of ranks -> its step, or 0 if there
    is none."""
    found = checkpoints(out)
    if not found:
        say(f"no checkpoint in {out} yet, so the run starts from step 1")
        return 0
    step, directory = found[-1]
    try:
        reader = HuggingFaceStorageReader(str(directory / "training"))
        reader.read_metadata()  # a broken file is found here; dcp.load would log it at length
        dcp.load(training_state(policy, optimizer), storage_reader=reader)
    except (Exception, CheckpointException) as error:  # a broken file raises errors of many types
        raise InputError(
            f"{directory / 'training'}: not readable ({reason(error)}); "
            f"remove {directory} to resume from the checkpoint before it"
        ) from error
    return step
