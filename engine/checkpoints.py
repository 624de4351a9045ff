"""Save and resume the state of a run."""

import json
import math
import os
import shutil
from hashlib import sha256

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from engine.load import export
from runtime.cli import InputError, is_rank_0, require, say
from runtime.files import checkpoints, how_to_resume, read_config


def fingerprint(problems, held_out, template, judge=None):
    """What tells whether a resumed run has the same data, chat template, and other model that
    judges, if it has one: (model, tokenizer)."""
    digest = sha256(repr((problems, held_out, template)).encode()).hexdigest()[:16]
    data = f"{len(problems)} questions and {len(held_out)} held out, sha256 {digest}"
    return f"{data}, judge {mark_of(judge[0])}" if judge else data


def mark_of(model, *more):
    """A mark that changes with the weights of a model, and with what else is given."""
    sums = [f"{p.double().sum().item():.6g}" for p in model.parameters()]
    return sha256(repr([sums, *more]).encode()).hexdigest()[:6]


def check_resumed(out, flags, may_change, last_step):
    """Refuse to resume a run with other flags, except those in may_change, or with other data (a
    fingerprint among the flags)."""
    config = read_config(out)
    before = config["flags"] | {"data": config.get("data")}
    changed = [
        f"{name} was {before.get(name)} and is {flags.get(name)}"
        for name in before | flags
        if name not in may_change and before.get(name) != flags.get(name)
    ]
    keep = "keep it, or choose a new directory"
    require(not changed, f"{out} cannot go on, since {', '.join(changed)}: {keep}")
    done = max([step for step, _ in checkpoints(out)], default=0)
    require(done <= last_step, f"the run in {out} has {done} steps, more than {last_step}")
    shutil.rmtree(out / "checkpoints" / "partial", ignore_errors=True)  # what a kill has left
    say(f"resuming after step {done}")


def training_state(policy, optimizer):
    """The sharded weights and Adam's state by parameter name, without copies. Before Adam's first
    step torch creates its moments here, so that a checkpoint can be loaded into them."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(policy, optimizer, options=options)
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    return dict(policy.named_parameters()) | tensors


def reason(error):
    """The last line of an error. dcp's CheckpointException holds a traceback, which ends in it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


class Writer(hf_storage.HuggingFaceStorageWriter):
    """Every rank writes its own shards as safetensors, 32 tensors a file, of which the host holds
    one at a time. dcp's writer builds each file in memory first, which takes longer, and on a GPU
    it keeps pinned memory for all."""

    def write_data(self, plan, planner):
        for first in range(0, len(plan.items), 32):
            tensors, places = {}, {}
            for item in plan.items[first : first + 32]:
                name, offsets = item.index.fqn, item.tensor_data.chunk.offsets
                tensors[name] = planner.resolve_data(item).detach()
                places[name] = {hf_storage.SAVED_OFFSETS_KEY: offsets}
            path = f"{self.path}/rank-{dist.get_rank()}-{first}.safetensors"
            save_file(tensors, path, {hf_storage.CUSTOM_METADATA_KEY: json.dumps(places)})
        written = torch.futures.Future()
        written.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return written


def save_checkpoint(out, step, keep, actor, tokenizer, policy, optimizer):
    """Save out/checkpoints/step-K/, a Hugging Face directory. Its folder training/ is for --resume.
    It is written as `partial` and renamed when it is complete, and it gets that name back before it
    is deleted, so step-K is always complete."""
    directory, partial = out / "checkpoints" / f"step-{step}", out / "checkpoints" / "partial"
    if is_rank_0():
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    try:
        writer = Writer(str(partial / "training"), save_distributed=True)
        dcp.save(training_state(policy, optimizer), storage_writer=writer)
        if is_rank_0():
            export(actor, tokenizer, partial)
    # A full disk raises errors of many types; CheckpointException derives from BaseException.
    except (Exception, CheckpointException) as error:
        problem = f"cannot save {directory} ({reason(error)})"
        raise InputError(f"{problem}; {how_to_resume(out)}") from error
    os.sync()
    dist.barrier()
    if is_rank_0():
        partial.rename(directory)
        for _, old in checkpoints(out)[:-keep]:
            old.rename(partial)
            shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()  # torchrun ends all ranks when one has ended


def load_checkpoint(out, policy, optimizer):
    """Load the last checkpoint, which may be of another number of ranks -> its step, or 0 if there
    is none."""
    if not checkpoints(out):
        return 0
    step, directory = checkpoints(out)[-1]
    state = training_state(policy, optimizer)
    try:
        reader = hf_storage.HuggingFaceStorageReader(str(directory / "training"))
        saved = reader.read_metadata().state_dict_metadata
        for name, tensor in state.items():  # dcp.load would leave what is missing as it is
            chunks = saved[name].chunks if name in saved else []
            there, all_ = sum(math.prod(chunk.sizes) for chunk in chunks), tensor.numel()
            require(there == all_, f"it holds {there:,} of the {all_:,} numbers of {name}")
        dcp.load(state, storage_reader=reader)
    except (Exception, CheckpointException) as error:  # a broken file raises errors of many types
        helps = f"restore its files and the run's --model, or remove {directory}"
        raise InputError(f"{directory}/training: {reason(error)}; {helps}") from error
    return step
