"""What a run prints: a header, one line per step, warnings and a summary. And where it writes:
its directory, with config.json, metrics.jsonl and samples.jsonl."""

import datetime
import json
import os
import shlex
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from engine.cli import MADE, is_rank_0, require, say
from engine.files import append_rows, lock, read_rows, to_jsonl, write_atomically
from engine.ranks import all_gather

GROUPS_A_STEP = 2  # kept in samples.jsonl
TINY = 1e-6  # rewards below this teach next to nothing


def claim(out, name, resume=False):
    """Lock --out, or runs/TIME-NAME-PID, against other processes -> its path, the same on all
    ranks. Unless a run is resumed it must be empty."""
    default = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.getpid()}"
    out = Path(all_gather([out or default])[0])
    if is_rank_0():
        used = {path.name for path in out.glob("*")} - {"lock", "warm-start"} and not resume
        require(not used, f"--out {out} is not empty: choose a new directory")
        lock(out)
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
        "boxes_opened": sum("\\boxed" in text for text in group.texts) / N,
        "truncated": sum(group.truncated) / N,
        "unique_answers": len(set(stated)),
        "solution_tokens": sum(len(group.solution(i)) for i in range(N)) / N,
        "completion_tokens": sum(len(ids) for ids in group.completions) / N,
        "zero_advantage_groups": float(not A.any()),
        "tiny_reward_groups": float(0 < R.max() < TINY),
        **({"entropy": sum(group.entropies) / N} if group.entropies else {}),
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
    shown = [(short, numbers[name]) for name, short in SHORT_NAMES.items() if name in numbers]
    return "  ".join(f"{short} {brief(number)}" for short, number in shown)


def brief(x):
    return f"{x:.3g}".replace("0.", ".", 1) if abs(x) < 1 else f"{x:.3g}"


def warning(numbers):
    """What is wrong with a step and what helps, or None. "When nothing is learned" in
    docs/running.md says more."""
    if numbers["answered"] < 0.02:
        start = "a supervised start (warm_start.py)"
        if numbers["truncated"] <= 0.5:
            return f"almost no answers: the model stops without a box and needs {start}"
        if numbers["boxes_opened"] == 0:
            return (
                f"most samples are cut off without a box: raise --max-new-tokens, or make {start}"
            )
        return "almost no answers, and most samples are cut off: raise --max-new-tokens"
    if numbers["zero_advantage_groups"] == 1 and numbers["grad_norm"] == 0:
        return "in every group all samples received the same reward, so this step had no gradient"
    if numbers["tiny_reward_groups"] > 0.5:
        cause = f"no reward exceeds {TINY:g} in most groups: the model almost never gives a*"
        return f"{cause}. Keep references short, strip remarks, or demonstrate their form"


def say_hours(actor, operations, tokens, what):
    """On a CPU, say how long `what` takes at most, if it is long. operations: per parameter and
    token, at 50 GFLOP/s and core."""
    parameters = sum(p.numel() for p in actor.parameters())
    hours = operations * parameters * tokens / (os.cpu_count() * 5e10) / 3600
    if actor.device.type == "cpu" and hours > 0.2:
        time_taken = f"{what} of up to {tokens:,} tokens takes up to about {hours:.1f} hours"
        say(f"On this CPU {time_taken}. Fewer questions, samples or tokens take less")


# ------------------------------------------------------------------------------------------ the log


class RunLog:
    """Rank 0 prints, and writes config.json, metrics.jsonl (one line per step) and samples.jsonl
    (the first groups of each step). Other ranks do nothing."""

    def __init__(self, out, args, data, first_step, last_step):
        self.out, self.args, self.warned = out, args, set()
        self.first_step, self.last_step = first_step, last_step
        kept = {}  # the steps before the first one; a resumed run repeats later steps
        for name in "metrics.jsonl", "samples.jsonl":
            rows = read_rows(out / name, log=True) if first_step > 1 else []
            kept[name] = [row for row in rows if row["step"] < first_step]
        self.before = kept["metrics.jsonl"] or [{"step": first_step - 1}]
        if is_rank_0():
            flags = {k: value for k, value in vars(args).items() if k not in ("resume", "out")}
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            config = {"flags": flags, "data": data, "world_size": dist.get_world_size()}
            config = json.dumps(config | {"versions": versions}, indent=2)
            write_atomically(out / "config.json", config + "\n")
            MADE.clear()  # from now on this is a run
            for name, rows in kept.items():
                write_atomically(out / name, to_jsonl(rows))

    def header(self, actor, problems, memory):
        """Print the first lines of a run. memory: what memory.py says."""
        args, parameters = self.args, sum(p.numel() for p in actor.parameters())
        verifiers = ", ".join(sorted({problem.verifier for problem in problems}))
        steps = f"{self.last_step:,} step{'s' if self.last_step > 1 else ''}"
        model, ranks = args.model or "the toy model", dist.get_world_size()
        batch = f"{args.questions} questions x {args.samples} samples"
        say(
            f"{args.reward} on {args.dataset}: {len(problems):,} questions, verifier {verifiers}; "
            f"{steps} of {batch}, up to {args.max_new_tokens:,} tokens; learning rate {args.lr:g}"
        )
        say(f"{model}: {parameters:,} parameters, {ranks} x {actor.device.type}")
        say(f"{memory}\nfiles: {self.out}")
        if len(problems) < args.questions:
            say(f"a step has {args.questions} questions, so some come twice in a step")
        if not args.eval_dataset:
            say("pass@1 is not measured: there is no --eval-dataset")
        # 10 operations per parameter and token: sample 2, score 2, update 6
        tokens = args.questions * args.samples * args.max_new_tokens
        say_hours(actor, 10, tokens, "a step")

    def has_evaluation(self):
        """Whether the weights that this process starts from have been evaluated."""
        return "pass_at_1" in self.before[-1]

    def evaluated(self, numbers):
        """Write and print an evaluation of the weights that this process starts from."""
        step = self.first_step - 1
        self.before[-1] |= numbers
        if is_rank_0():
            write_atomically(self.out / "metrics.jsonl", to_jsonl(self.before))
        say(f"{f'after step {step}' if step else 'before training'}  {one_line(numbers)}")

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
        line = {"step": step} | means(described) | numbers | {"seconds": self.seconds}
        tokens = line["completion_tokens"] * R.shape[1] * len(described)
        line |= {"tokens_per_second": tokens / sum(self.seconds.values())}
        if is_rank_0():
            append_rows(self.out / "metrics.jsonl", [line])
            kept = list(zip(groups, R, records))[:GROUPS_A_STEP]
            append_rows(self.out / "samples.jsonl", [group_record(step, *each) for each in kept])

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
        out = shlex.quote(str(self.out))
        print(f"  model             {out}/checkpoints/step-{self.last_step}")
        print(f"  curves            python plot.py {out}")
        print(f"  samples           open {out}/samples.jsonl in docs/explore.html")
