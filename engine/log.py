"""What a run prints: a header, one line per step, warnings and a summary. And where it writes:
its directory, with config.json, metrics.jsonl and samples.jsonl."""

import datetime
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from engine.cli import is_rank_0, require, say
from engine.files import append_rows, keep_steps_before, read_rows, write_atomically
from engine.ranks import all_gather

GROUPS_A_STEP = 2  # kept in samples.jsonl


def new_directory(out, name):
    """--out, or runs/TIME-NAME, the same on all ranks. It must not hold files. It is not created
    here. All ranks check it before any goes on, since rank 0 will write to it."""
    out = Path(all_gather([out or time.strftime(f"runs/%Y%m%d-%H%M%S-{name}")])[0])
    used = out.is_dir() and any(path.is_file() for path in out.iterdir())
    require(not used, f"--out {out} is not empty: choose a new directory")
    above = next(path for path in [out, *out.parents] if path.exists())
    writable = above.is_dir() and os.access(above, os.W_OK)
    require(writable, f"--out {out}: cannot write to {above}")
    dist.barrier()
    return out


# --------------------------------------------------------------------------------------- in numbers


def describe(group, R, A, record):
    """The metrics of one group. R, A [N]; record: what its reward function recorded."""
    N, verdicts = len(R), record.get("verdicts", [])
    stated = [answer for answer in group.answers if answer]  # an empty box is no answer
    return {
        "reward": R.mean().item(),
        "exact_match": group.answers.count(group.problem.reference) / N,
        "answered": len(stated) / N,
        "truncated": sum(group.truncated) / N,
        "unique_answers": len(set(stated)),
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


def group_record(step, group, R, record):
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


# ------------------------------------------------------------------------------------------ the log


class RunLog:
    """Rank 0 prints, and writes config.json, metrics.jsonl (one line per step) and samples.jsonl
    (the first groups of each step). Other ranks do nothing."""

    def __init__(self, out, args, first_step, last_step):
        self.out, self.args, self.warned = out, args, set()
        self.first_step, self.last_step = first_step, last_step
        if not is_rank_0():
            return
        out.mkdir(parents=True, exist_ok=True)
        flags = {name: value for name, value in vars(args).items() if name not in ("resume", "out")}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        config = {"flags": flags, "world_size": dist.get_world_size(), "versions": versions}
        write_atomically(out / "config.json", json.dumps(config, indent=2) + "\n")
        for name in "metrics.jsonl", "samples.jsonl":  # a resumed run repeats later steps
            keep_steps_before(first_step if first_step > 1 else 0, out / name)

    def header(self, actor, problems, memory):
        """Print the first lines of a run. memory: the line of plan_memory."""
        args, parameters = self.args, sum(p.numel() for p in actor.parameters())
        verifiers = ", ".join(sorted({problem.verifier for problem in problems}))
        steps = f"{self.last_step:,} step{'s' if self.last_step > 1 else ''}"
        model, ranks = args.model or "the toy model", dist.get_world_size()
        say(
            f"{args.reward} on {args.dataset}: {len(problems):,} questions, verifier {verifiers}; "
            f"{steps} of {args.questions} questions x {args.samples} samples, "
            f"up to {args.max_new_tokens:,} tokens each; learning rate {args.lr:g}"
        )
        say(f"{model}: {parameters:,} parameters, {ranks} x {actor.device.type}")
        say(f"{memory}\nfiles: {self.out}")
        if actor.device.type == "cpu" and parameters > 1e9:
            tokens = args.questions * args.samples * args.max_new_tokens
            # 10 operations per parameter and token (sample 2, score 2, update 6) at 50 GFLOP/s
            hours = 10 * parameters * tokens / (os.cpu_count() * 5e10) / 3600
            say(
                f"On this CPU a step of {tokens:,} tokens takes about {hours:,.0f} hours. Use a "
                "GPU, a smaller model, or fewer questions, samples or tokens"
            )

    def evaluated(self, numbers):
        """Write and print the evaluation before the first step."""
        self.write({"step": 0} | numbers)
        say(f"before training  {one_line(numbers)}")

    def start(self):
        """Start the clock of a step."""
        self.seconds, self.since = {}, time.perf_counter()

    def lap(self, part):
        """Note the seconds of a part of the step, which ends here."""
        now = time.perf_counter()
        self.seconds[part], self.since = now - self.since, now

    def step(self, step, groups, R, A, records, numbers):
        """Write and print a step: the means over the groups of all ranks, and more numbers."""
        described = all_gather([describe(*each) for each in zip(groups, R, A, records)])
        line = {"step": step} | means(described) | numbers
        tokens = line["completion_tokens"] * R.shape[1] * len(described)
        line |= {"seconds": self.seconds}
        line |= {"tokens_per_second": tokens / sum(self.seconds.values())}
        self.write(line, list(zip(groups, R, records))[:GROUPS_A_STEP])

        now = time.perf_counter()
        if step == self.first_step:
            self.started = now - sum(self.seconds.values())
        seconds = (now - self.started) / (step - self.first_step + 1)
        eta = datetime.timedelta(seconds=round(seconds * (self.last_step - step)))
        position = f"step {step}/{self.last_step}"
        say(f"{position}  {one_line(line)}  {seconds:.3g} s/step  eta {eta}")
        problem = warning(line)
        if problem and problem not in self.warned:
            self.warned.add(problem)
            say(f"warning at step {step}: {problem}")

    def write(self, line, kept=()):
        if is_rank_0():
            append_rows(self.out / "metrics.jsonl", [line])
            rows = [group_record(line["step"], *each) for each in kept]
            append_rows(self.out / "samples.jsonl", rows)

    def summary(self):
        """Print the last lines of a finished run."""
        if not is_rank_0():
            return
        lines = read_rows(self.out / "metrics.jsonl")
        steps = [line for line in lines if "seconds" in line]
        print(f"{self.args.reward} on {self.args.dataset}")
        for name in "reward", "pass_at_1", "eval_exact_match", "answered":
            if values := [line[name] for line in lines if line.get(name) is not None]:
                print(f"  {name:16}  first {brief(values[0])}, last {brief(values[-1])}")
        if not any(line["grad_norm"] for line in steps):  # null: not finite, update skipped
            print("  The weights have not changed: no step had a usable gradient. ", end="")
            print("See docs/running.md")
        minutes = {p: sum(line["seconds"][p] for line in steps) / 60 for p in steps[0]["seconds"]}
        print("  minutes           " + ", ".join(f"{part} {m:.1f}" for part, m in minutes.items()))
        print(f"  model             {self.out}/checkpoints/step-{self.last_step}")
        print(f"  curves            python plot.py {self.out}")
        print(f"  samples           open {self.out}/samples.jsonl in docs/explore.html")
