"""Save and resume the state of a run."""

import json
import os
import shutil
from hashlib import sha256

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from engine.export import export
from runtime.cli import InputError, is_rank_0, require, say
from runtime.files import LOGS, checkpoints, how_to_resume, read_config

# The lengths of the logs when the checkpoint was saved, in bytes, and whether an evaluation is due.
LOGGED = "training/logs.json"


def fingerprint(problems, held_out, prompts, judge=None, base=None):
    """What tells whether a resumed run has the same data and prompts (token ids), and if it has
    them, the same other model that judges, (model, tokenizer), and the same model to which --lora
    adds."""
    digest = sha256(repr((problems, held_out, prompts)).encode()).hexdigest()[:16]
    data = f"{len(problems)} questions and {len(held_out)} held out, sha256 {digest}"
    data += f", judge {mark_of(judge[0])}" if judge else ""
    return data + (f", base {mark_of(base)}" if base else "")


def mark_of(model, *more):
    """A mark that changes with the weights of a model, and with what else is given."""
    sums = [f"{p.double().sum().item():.6g}" for p in model.parameters()]
    return sha256(repr([sums, *more]).encode()).hexdigest()[:6]


def check_resumed(out, flags, may_change, last_step):
    """Refuse to resume a run with other flags, except those in may_change, or with other data (a
    fingerprint among the flags)."""
    config = read_config(out)
    done, last = max(checkpoints(out), default=(0, out))
    older = f"{last} was saved by an older version, which can go on with it"
    require(not done or (last / LOGGED).is_file(), older)
    before = config["flags"] | {"data": config.get("data")}
    changed = [
        f"{name} was {before.get(name)} and is {flags.get(name)}"
        for name in before | flags
        if name not in may_change and before.get(name) != flags.get(name)
    ]
    keep = "keep it, or choose a new directory"
    require(not changed, f"{out} cannot go on, since {', '.join(changed)}: {keep}")
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


def save_checkpoint(out, step, keep, due, actor, tokenizer, policy, optimizer):
    """Save out/checkpoints/step-K/, a Hugging Face directory. Its folder training/ is for --resume:
    the state of the training, the lengths of the logs, and whether an evaluation is due. It is
    written as `partial` and renamed when it is complete, and it gets that name back before it is
    deleted, so step-K is always complete."""
    directory, partial = out / "checkpoints" / f"step-{step}", out / "checkpoints" / "partial"
    try:
        dcp.save(training_state(policy, optimizer), checkpoint_id=partial / "training")
        if hasattr(policy, "save_adapter"):  # with --lora
            policy.save_adapter(partial / "adapter")
        if is_rank_0():
            export(actor, tokenizer, partial)
            logged = {name: (out / name).stat().st_size for name in LOGS} | {"due": due}
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
            old.rename(partial)
            shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()  # torchrun ends all ranks when one has ended


def load_checkpoint(out, policy, optimizer):
    """Load the last checkpoint, which may be of another number of ranks, and cut the logs to the
    lengths that they had -> its step, and whether an evaluation of it is due. So a resumed run may
    repeat what came later, and a kill may leave half a line. Without a checkpoint a run begins anew
    -> 0, True; if it has logged something, that goes to NAME.old."""
    logs = [out / name for name in LOGS]
    if not checkpoints(out):
        for log in logs if is_rank_0() else []:
            if log.exists() and log.stat().st_size:
                log.replace(f"{log}.old")
            log.touch()
        return 0, True
    step, directory = checkpoints(out)[-1]
    training = directory / "training"
    try:
        logged = json.loads((directory / LOGGED).read_text())
        for log in logs:
            is_whole = log.is_file() and log.stat().st_size >= logged[log.name]
            require(is_whole, f"{log} is shorter than it was then")
        training_state(policy, optimizer)
        saved = dcp.FileSystemReader(training).read_metadata().state_dict_metadata
        for name, parameter in policy.named_parameters():
            if f"state.{name}.step" not in saved:  # as it never had a gradient
                optimizer.state.pop(parameter, None)
        dcp.load(training_state(policy, optimizer), checkpoint_id=training)
    except (Exception, CheckpointException) as error:  # a broken file raises errors of many types
        helps = f"restore its files, or remove {directory}"
        raise InputError(f"{training}: {reason(error)}; {helps}") from error
    for log in logs if is_rank_0() else []:
        os.truncate(log, logged[log.name])
    return step, logged.get("due", True)
