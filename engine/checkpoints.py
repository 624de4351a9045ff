"""Save and resume the state of a run."""

import json
import os
from hashlib import sha256

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from engine.checks import mark_of
from engine.export import export
from runtime.cli import InputError, is_rank_0, require, say
from runtime.files import LOGS, beginning, checkpoints, how_to_resume, read_config, remove_partial
from runtime.ranks import all_gather

LOGGED = "training/logged.json"  # what RunLog.state says when the checkpoint is saved


def fingerprint(problems, held_out, prompts, judge=None, base=None):
    """What tells whether a resumed run has the same data and prompts (token ids), and if it has
    them, the same other model that judges, and the same base, the model from which its training
    starts (both by name) -> entries of config.json."""
    digest = sha256(repr((problems, held_out, prompts)).encode()).hexdigest()[:16]
    data = f"{len(problems)} questions and {len(held_out)} held out, sha256 {digest}"
    data += f", judge {mark_of(judge)}" if judge else ""
    return {"data": data} | ({"base": mark_of(base)} if base else {})


def check_resumed(out, flags, may_change, last_step):
    """Refuse to resume a run with other flags, except those in may_change, or with other data or
    another base (a fingerprint among the flags)."""
    config = read_config(out)
    done = max((step for step, _ in checkpoints(out)), default=0)
    before = config | config["flags"]
    changed = [
        f"{name} was {before.get(name)} and is {value}"
        for name, value in flags.items()
        if name not in may_change and before.get(name) != value
    ]
    require(not changed, f"{out} cannot go on, since {', '.join(changed)}: keep it, or start anew")
    require(done <= last_step, f"the run in {out} has {done} steps, more than {last_step}")
    say(f"resuming after step {done}")


def training_state(policy, optimizer, mark):
    """The sharded weights and Adam's state by parameter name, without copies, and the mark of the
    model that is saved beside them. Before Adam's first step there is no state. (torch would make
    it, by a step that Adam then counts.)"""
    weights = dict(policy.named_parameters()) | {"mark": torch.tensor(int(mark, 16))}
    if not optimizer.state:
        return weights
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(policy, optimizer, options=options)
    return weights | {name: value for name, value in state.items() if torch.is_tensor(value)}


def reason(error):
    """The last line of an error. dcp's CheckpointException holds a traceback, which ends in it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def save_checkpoint(out, step, keep, logged, actor, tokenizer, policy, optimizer):
    """Save out/checkpoints/step-K/, a Hugging Face directory. Its folder training/ is for --resume:
    the state of the training, and what RunLog.state says. While it is written and while it is
    deleted, its name is partial-step-K, so step-K is always complete."""
    directory = out / "checkpoints" / f"step-{step}"
    partial = directory.with_name(f"partial-{directory.name}")
    try:
        policy.save_adapter(partial / "adapter")  # with --lora
        if is_rank_0():
            export(actor, tokenizer, partial)
        [mark] = all_gather([mark_of(partial)] if is_rank_0() else [])
        dcp.save(training_state(policy, optimizer, mark), checkpoint_id=partial / "training")
        if is_rank_0():
            (partial / LOGGED).write_text(json.dumps(logged))
    # A full disk raises errors of many types; CheckpointException derives from BaseException.
    except (Exception, CheckpointException) as error:
        problem = f"cannot save {directory} ({reason(error)})"
        raise InputError(f"{problem}; {how_to_resume(out)}") from error
    os.sync()
    dist.barrier()
    if is_rank_0():
        partial.rename(directory)
        for _, old in checkpoints(out)[:-keep]:
            old.rename(old.with_name(f"partial-{old.name}"))
        remove_partial(out)
    dist.barrier()  # torchrun ends all ranks when one has ended


def load_checkpoint(out, policy, optimizer):
    """Load the last checkpoint, which may be of another number of ranks -> its step, and what
    RunLog.state said when it was saved. Without a checkpoint a run begins anew -> 0, {}."""
    if not checkpoints(out):
        return 0, {}
    step, directory = checkpoints(out)[-1]
    training = directory / "training"
    try:
        logged = json.loads((directory / LOGGED).read_text())
        for log in [out / name for name in LOGS]:
            as_then = log.is_file() and beginning(log, logged[log.name][0]) == logged[log.name]
            require(as_then, f"{log} is shorter than it was then, or was changed")
        get_optimizer_state_dict(policy, optimizer)  # makes Adam's state, to be loaded into
        saved = dcp.FileSystemReader(training).read_metadata().state_dict_metadata
        for name, parameter in policy.named_parameters():
            if f"state.{name}.step" not in saved:  # as it never had a finite gradient
                optimizer.state.pop(parameter, None)
        state, mark = training_state(policy, optimizer, "0"), mark_of(directory)
        dcp.load(state, checkpoint_id=training)
        changed = f"it belongs to other files than those of the model in {directory}"
        require(state["mark"].item() == int(mark, 16), changed)
    except (Exception, CheckpointException) as error:  # a broken file raises errors of many types
        helps = f"restore its files, or remove {directory}"
        raise InputError(f"{training}: {reason(error)}; {helps}") from error
    return step, logged
