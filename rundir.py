"""A run's directory: its log and its checkpoints.

config.json, metrics.jsonl, samples.jsonl and checkpoints/step-K/. Rank 0 writes; a crash at any
moment leaves the last checkpoint whole, and logs that a resumed run cuts back to it.
"""

import json
import logging
import math
import os
import shutil
import time

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import distribute_tensor

from data import InputError, first_line, parse_json, write_whole
from policy import compute_device, gather
from rloo import NEGLIGIBLE

logger = logging.getLogger("train")


# ---------------------------------------------------------------------------------------------- log


def describe(rollout, R, A, notes):
    """One question's group in numbers, for the log."""
    N, verdicts = len(R), notes.get("verdicts", {})
    all_earn_the_same = float(A.abs().max() <= NEGLIGIBLE)  # nothing to learn here
    return {
        "reward": R.mean().item(),
        "exact_match": sum(a == rollout.problem.reference for a in rollout.answers) / N,
        "answered": len(rollout.answered) / N,
        "truncated": sum(rollout.truncated) / N,
        "unique_answers": len({rollout.answers[i] for i in rollout.answered}),
        "solution_tokens": sum(rollout.cuts) / N,
        "entropy": sum(rollout.entropies) / N,
        "zero_advantage_groups": all_earn_the_same,
        **{f"verifier_{verdict}": count / N for verdict, count in verdicts.items()},
        "tokens": sum(len(ids) for ids in rollout.completions),
    }


def means(groups):
    names = dict.fromkeys(name for group in groups for name in group if name != "tokens")
    return {name: sum(group.get(name, 0) for group in groups) / len(groups) for name in names}


def timing(clock, groups):
    sample, reward, update = (after - before for before, after in zip(clock, clock[1:]))
    tokens = sum(group["tokens"] for group in groups)
    seconds = {"sample": sample, "reward": reward, "update": update}
    return {"seconds": seconds, "tokens_per_second": tokens / (clock[-1] - clock[0])}


def report(run, bar, line):
    """One step into metrics.jsonl and the progress bar (rank 0)."""
    if run is None:
        return
    run.log(line)
    run.shown |= {name: line[key] for name, key in SHOWN.items() if key in line}
    bar.set_postfix({name: f"{value:.3g}" for name, value in run.shown.items()}, refresh=False)
    bar.update(line["step"] > 0)


# What the progress bar shows: how well it goes, and whether the policy collapses.
SHOWN = {
    "reward": "reward",
    "pass@1": "pass_at_1",
    "entropy": "entropy",
    "tokens": "solution_tokens",
    "answered": "answered",
    "cut": "truncated",
    "answers": "unique_answers",
    "equal": "zero_advantage_groups",
}


class RunFiles:
    """What rank 0 writes: config.json, metrics.jsonl (a line a step), samples.jsonl (the first
    groups of each step, with the matrices that Fig. 2 draws)."""

    GROUPS_A_STEP = 2

    def __init__(self, out, args, first_step):
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.args, self.start, self.shown = out, args, time.perf_counter(), {}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        flags = {name: value for name, value in vars(args).items() if name not in ("resume", "out")}
        config = {"flags": flags, "world_size": dist.get_world_size(), "versions": versions}
        write_whole(out / "config.json", json.dumps(config, indent=2) + "\n")
        for name in "metrics.jsonl", "samples.jsonl":  # a resumed run rewrites its later steps
            keep_steps_before(first_step if first_step > 1 else 0, out / name)
        logger.info("run: %s", out)

    def log(self, line):
        with open(self.out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(finite(line)) + "\n")

    def keep_samples(self, step, rollouts, rewards, notes):
        with open(self.out / "samples.jsonl", "a") as file:
            for group in list(zip(rollouts, rewards, notes))[: self.GROUPS_A_STEP]:
                file.write(json.dumps(sample_record(step, *group)) + "\n")

    def summarise(self, last_step):
        lines = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "reward" in line]
        spent = {part: sum(s["seconds"][part] for s in steps) for part in steps[0]["seconds"]}
        shares = ", ".join(f"{part} {s / sum(spent.values()):.0%}" for part, s in spent.items())
        minutes, seconds = divmod(round(time.perf_counter() - self.start), 60)
        print(
            f"{self.args.reward} on {self.args.dataset}: {last_step} steps, {minutes}:{seconds:02}"
        )
        print(f"  time    {shares}")
        print(f"  log     {self.out / 'metrics.jsonl'}")
        print(f"  model   {self.out / 'checkpoints' / f'step-{last_step}'}")
        print(f"  reward  {steps[0]['reward']:.3f} at first, {steps[-1]['reward']:.3f} at last")
        scores = [line for line in lines if "pass_at_1" in line]
        if scores:
            before, after = scores[0]["pass_at_1"], scores[-1]["pass_at_1"]
            print(f"  pass@1  {before:.3f} before, {after:.3f} after, on {self.args.eval_dataset}")


def sample_record(step, rollout, R, notes):
    """One group for samples.jsonl: what plot.py draws."""
    record = {
        "step": step,
        "question": rollout.problem.question,
        "reference": rollout.problem.reference,
        "texts": rollout.texts,
        "answers": rollout.answers,
        "R": R.tolist(),
    }
    if "group" in notes:
        group = notes["group"]
        record |= {"distinct_answers": group.answers, "columns": group.columns}
        record |= {"W": rounded(group.log_W.exp()), "P": rounded(group.log_P.exp())}
    return record


def keep_steps_before(first_step, path):
    """Cut a log back to the steps before first_step; a crash may have left half a line."""
    kept = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if not line.endswith("\n") or parse_json(line, path)["step"] >= first_step:
            break
        kept.append(line)
    write_whole(path, "".join(kept))


def finite(line):
    """JSON has no nan and no inf: null."""
    odd = {name for name, x in line.items() if isinstance(x, float) and not math.isfinite(x)}
    return line | dict.fromkeys(odd)


def rounded(tensor):
    """Four significant digits are enough to draw."""
    if tensor.dim() > 1:
        return [rounded(row) for row in tensor]
    return [float(f"{value:.4g}") for value in tensor.tolist()]


# -------------------------------------------------------------------------------------- checkpoints


def checkpoints(out):
    """-> all whole checkpoints of a run, (step, directory), oldest first."""
    found = [path.parent for path in out.glob("checkpoints/step-*/training.pt")]
    return sorted((int(path.name.removeprefix("step-")), path) for path in found)


def save_checkpoint(out, step, keep, actor, tokenizer, policy, optimizer):
    """out/checkpoints/step-K/: a Hugging Face directory, and training.pt, from which --resume goes
    on. Written beside and renamed, and renamed before it is deleted, so that a directory of that
    name is whole, whenever the run is killed."""
    state = {"step": step, "policy": full_state(policy, optimizer)}
    state["rng"] = gather([{"cpu": torch.get_rng_state(), "cuda": cuda_rng()}])
    if dist.get_rank() == 0:
        directory, partial = out / "checkpoints" / f"step-{step}", out / "checkpoints" / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            actor.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            torch.save(state, partial / "training.pt")
        except Exception as error:  # a door: a full disk raises another kind from every writer
            shutil.rmtree(partial, ignore_errors=True)
            whole = [path.name for _, path in checkpoints(out)]
            raise InputError(
                f"cannot save {directory} ({first_line(error)}); "
                f"the last whole checkpoint is {whole[-1] if whole else 'none'}"
            ) from error
        os.sync()
        shutil.rmtree(directory, ignore_errors=True)  # one whose training.pt was removed by hand
        os.rename(partial, directory)
        for _, old in checkpoints(out)[:-keep]:
            os.rename(old, partial)
            shutil.rmtree(partial)
    dist.barrier()


def load_checkpoint(out, policy, optimizer):
    """Restore the last checkpoint -> its step; 0 if the run ended before its first."""
    found = checkpoints(out)
    if not found:
        logger.info("no checkpoint in %s yet: the run begins again", out)
        return 0
    step, directory = found[-1]
    path = directory / "training.pt"
    try:
        state = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:  # a door: a broken file raises a dozen kinds
        raise InputError(
            f"{path}: not readable ({first_line(error)}); "
            f"remove {directory} to go on from the checkpoint before"
        ) from error
    restore(policy, optimizer, state["policy"])
    if len(state["rng"]) == dist.get_world_size():
        rng = state["rng"][dist.get_rank()]
        torch.set_rng_state(rng["cpu"])
        if rng["cuda"] is not None:
            torch.cuda.set_rng_state(rng["cuda"])
    else:
        logger.info(
            "the checkpoint is of %d ranks: the data order is kept, samples will differ",
            len(state["rng"]),
        )
    return step


@torch.no_grad()
def full_state(policy, optimizer):
    """Weights and Adam's state by parameter name, whole and in the CPU's memory of rank 0; one
    parameter after the other, so that no GPU holds more than its shards and one of them."""
    state = {}
    for name, p in policy.named_parameters():
        tensors = {"weight": p, **optimizer.state[p]}  # exp_avg, exp_avg_sq, and the scalar step
        whole = {k: t.full_tensor() if t.dim() else t for k, t in tensors.items()}
        if dist.get_rank() == 0:
            state[name] = {k: t.cpu() for k, t in whole.items()}
    return state


@torch.no_grad()
def restore(policy, optimizer, state):
    """The reverse: every rank takes its shards, whatever the number of ranks was."""
    for name, p in policy.named_parameters():
        for key, whole in state[name].items():
            if whole.dim():
                target = p if key == "weight" else torch.zeros_like(p)
                whole = whole.to(compute_device())
                shard = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
                target.to_local().copy_(shard.to_local())
            else:
                target = whole.to(p.device) if optimizer.defaults["fused"] else whole.clone()
            if key != "weight":
                optimizer.state[p][key] = target


def cuda_rng():
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else None
