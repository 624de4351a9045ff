"""What a run prints: a header, one line per step, warnings and a summary. Also its files
config.json, metrics.jsonl and samples.jsonl."""

import datetime
import json
import math
import os
import time

import torch
import torch.distributed as dist
import transformers

from engine.cli import progress, say
from engine.files import append_rows, keep_steps_before, read_rows, write_atomically

GROUPS_A_STEP = 2  # kept in samples.jsonl


# --------------------------------------------------------------------------------------- in numbers


def describe(group, R, A, record):
    """The metrics of one group. R, A [N]; record: what its reward function recorded."""
    N, verdicts = len(R), record.get("verdicts", [])
    given = [answer for answer in group.answers if answer]  # an empty box is no answer
    return {
        "reward": R.mean().item(),
        "exact_match": group.answers.count(group.problem.reference) / N,
        "answered": len(given) / N,
        "truncated": sum(group.truncated) / N,
        "unique_answers": len(set(given)),
        "solution_tokens": sum(group.solution_lengths) / N,
        "completion_tokens": sum(len(ids) for ids in group.completions) / N,
        "entropy": sum(group.entropies) / N,
        "zero_advantage_groups": float(not A.any()),
        **{f"verifier_{said}": verdicts.count(said) / N for said in set(verdicts) - {None}},
    }


def means(described):
    """The mean over the groups of a step. A metric that is missing from a group counts as 0."""
    names = sorted({name for numbers in described for name in numbers})
    return {n: sum(numbers.get(n, 0) for numbers in described) / len(described) for n in names}


def sample_record(step, group, R, record):
    """One group as a row of samples.jsonl."""
    return {
        "step": step,
        "question": group.problem.question,
        "reference": group.problem.reference,
        "texts": group.texts,
        "answers": group.answers,
        "truncated": group.truncated,
        "R": R.tolist(),
        **record,
    }


SHORT_NAMES = {
    "reward": "reward",
    "pass_at_1": "pass@1",
    "answered": "answered",
    "truncated": "cut",
    "zero_advantage_groups": "zero-adv",
    "entropy": "entropy",
}


def one_line(numbers):
    """The metrics in SHORT_NAMES as text, in three significant digits."""
    return "  ".join(
        f"{short} {brief(numbers[name])}" for name, short in SHORT_NAMES.items() if name in numbers
    )


def brief(x):
    return f"{x:.3g}".replace("0.", ".", 1) if abs(x) < 1 else f"{x:.3g}"


# ----------------------------------------------------------------------------------------- in words


def header(out, args, actor, problems, last_step, memory):
    """The lines that a run prints first."""
    parameters = sum(p.numel() for p in actor.parameters())
    verifiers = ", ".join(sorted({problem.verifier for problem in problems}))
    steps = f"{last_step:,} step{'s' if last_step > 1 else ''}"
    yield (
        f"{args.reward} on {args.dataset}: {len(problems):,} questions, verifier {verifiers}; "
        f"{steps} of {args.questions} questions x {args.samples} samples, "
        f"up to {args.max_new_tokens:,} tokens each; learning rate {args.lr:g}"
    )
    yield (
        f"{args.model or 'the toy model'}: {parameters:,} parameters, "
        f"{dist.get_world_size()} x {actor.device.type}"
    )
    yield memory
    yield f"files: {out}"
    if actor.device.type == "cpu" and parameters > 1e9:
        tokens = args.questions * args.samples * args.max_new_tokens
        # 10 operations per parameter and token (sample 2, score 2, update 6); 50 GFLOP/s per core
        hours = 10 * parameters * tokens / (os.cpu_count() * 5e10) / 3600
        yield (
            f"On this CPU a step of {tokens:,} tokens takes about {hours:,.0f} hours. Use a GPU, a "
            "smaller model, or fewer questions, samples or tokens"
        )


def warning(numbers):
    """A sentence on what is wrong with a step and what helps, or None."""
    if numbers["answered"] < 0.02 and numbers["truncated"] > 0.5:
        return "almost no sample has an answer, and most were cut off: raise --max-new-tokens"
    if numbers["answered"] < 0.02:
        return (
            "almost no sample has an answer, because the model stops without a box. It needs a "
            "supervised start (see docs/running.md, 'A supervised start')"
        )
    if numbers["zero_advantage_groups"] == 1 and numbers["grad_norm"] == 0:
        return (
            "in every group all samples received the same reward, so this step had no gradient. "
            "If this continues, see docs/running.md, 'When nothing is learned'"
        )


def summary(out, last_step):
    """The lines that a finished run prints last."""
    lines = read_rows(out / "metrics.jsonl")
    steps = [line for line in lines if "seconds" in line]
    for name in "reward", "pass_at_1", "eval_exact_match", "answered":
        if values := [line[name] for line in lines if line.get(name) is not None]:
            yield f"  {name:16}  first {brief(values[0])}, last {brief(values[-1])}"
    if not any(line["grad_norm"] for line in steps):  # null: not finite, update skipped
        yield "  The weights have not changed: no step had a usable gradient. See docs/running.md"
    minutes = {p: sum(line["seconds"][p] for line in steps) / 60 for p in steps[0]["seconds"]}
    yield "  minutes           " + ", ".join(f"{part} {m:.1f}" for part, m in minutes.items())
    yield f"  model             {out / 'checkpoints' / f'step-{last_step}'}"
    yield f"  curves            python plot.py {out}"
    yield f"  samples           open {out / 'samples.jsonl'} in docs/explore.html"


# ---------------------------------------------------------------------------------------- the files


class RunLog:
    """Rank 0 writes config.json, metrics.jsonl (one line per step) and samples.jsonl (the first
    groups of each step). It shows a progress bar on a terminal, and prints one line per step
    elsewhere. Other ranks do nothing."""

    def __init__(self, out, args, first_step, last_step):
        self.out, self.warned = out, set()
        self.active = dist.get_rank() == 0
        self.first_step, self.last_step, self.started = first_step, last_step, time.perf_counter()
        bar_format = "step {n_fmt}/{total_fmt} [{elapsed}<{remaining}]  {desc}"
        self.bar = progress(total=last_step, initial=first_step - 1, bar_format=bar_format)
        self.shown = {}
        if not self.active:
            return
        out.mkdir(parents=True, exist_ok=True)
        flags = {name: value for name, value in vars(args).items() if name not in ("resume", "out")}
        config = {
            "flags": flags,
            "world_size": dist.get_world_size(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        write_atomically(out / "config.json", json.dumps(config, indent=2) + "\n")
        for name in "metrics.jsonl", "samples.jsonl":  # a resumed run repeats later steps
            keep_steps_before(first_step if first_step > 1 else 0, out / name)

    def add(self, numbers):
        """Write and show one step, or the evaluation before the first (as step 0)."""
        if not self.active:
            return
        # JSON has no nan and no infinity, so these become null.
        odd = [n for n, x in numbers.items() if isinstance(x, float) and not math.isfinite(x)]
        append_rows(self.out / "metrics.jsonl", [numbers | dict.fromkeys(odd)])
        step = numbers["step"]
        if step == 0:
            say(f"before training  {one_line(numbers)}")
            self.started = time.perf_counter()
            return
        self.shown |= {name: numbers[name] for name in SHORT_NAMES if name in numbers}
        self.bar.set_description_str(one_line(self.shown), refresh=False)
        self.bar.update()
        if self.bar.disable:  # not on a terminal
            seconds = (time.perf_counter() - self.started) / (step - self.first_step + 1)
            eta = datetime.timedelta(seconds=round(seconds * (self.last_step - step)))
            text = f"step {step}/{self.last_step}  {one_line(numbers)}"
            say(f"{text}  {seconds:.3g} s/step  eta {eta}")
        problem = warning(numbers)
        if problem and problem not in self.warned:
            self.warned.add(problem)
            say(f"warning at step {step}: {problem}")

    def keep_samples(self, step, groups, R, records):
        if self.active:
            kept = list(zip(groups, R, records))[:GROUPS_A_STEP]
            append_rows(self.out / "samples.jsonl", [sample_record(step, *each) for each in kept])

    def close(self):
        self.bar.close()
