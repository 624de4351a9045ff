"""Train with five of the rewards on the toy's questions, from the same warm starts.

    python experiments/toy/compare_rewards.py --jobs 2
    python experiments/toy/compare_rewards.py --model HuggingFaceTB/SmolLM2-135M-Instruct
    python experiments/toy/compare_rewards.py --rewards cer@6e-4 exact@1e-3 --seeds 0 1 2
    python experiments/toy/compare_rewards.py --copies .15 --out copies-toy.csv

--copies: in so many of the demonstrations the box copies the working ("3*4=12") and says nothing of
the result, so the policy begins with such answers.

The runs go to runs/compare_rewards/, --jobs at a time. A finished run adds a line to the CSV. If
the script is started again, it resumes where it stopped. At the end it prints the tables, and
draws the learning curves of the runs that are still there. If the CSV already has a line for every
run, it only does that.
"""

import itertools
import math
import os
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pandas
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's modules
import plot
from benchmarks.measure import ROOT, commit, markdown
from engine import load
from engine.export import export
from runtime import cli
from runtime.files import checkpoints, read_config, read_rows
from tasks import toy, toy_model
from tasks.toy_model import finetune

RUNS = ROOT / "runs" / "compare_rewards"
REWARDS = ["cer", "exact", "verifree", "rule", "rule+cer"]
KNOWN = {*REWARDS, "overlap+cer"}
TOY_RECIPE = "--lr {lr} --lr-end {lr_end}".format(**toy_model.LEARNING_RATE)
REAL_RECIPE = "--questions 16 --samples 4 --lr 1e-5 --max-new-tokens 40 --keep 6 --eval-limit 50"
REAL_RECIPE += " --eval-runs 2 --eval-every 10"
# A real model is evaluated on 50 questions while it is trained, and on all 200 after two thirds of
# its steps and at the end.
WHOLE = "--runs 4 --temperature 1 --top-p 1 --top-k 0 --max-new-tokens 40"


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", help="a real model, Hugging Face id or directory (default: the toy's)")
    add("--rewards", nargs="+", default=REWARDS, help="NAME, or NAME@LR")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="one run per reward and seed")
    add("--steps", type=count, help="of each run (default: 200, or 30 with a real model)")
    add("--jobs", type=count, default=1, help="runs at a time; if several, one CPU core each")
    share = cli.number(float, 0, 1)
    add("--copies", type=share, default=0, help="demonstrations that box their working (toy)")
    add("--out", type=Path, help="the CSV (default: runs/compare_rewards/MODEL.csv)")
    args = parser.parse_args()
    unknown = {name.partition("@")[0] for name in args.rewards} - KNOWN
    cli.require(not unknown, f"--rewards {unknown}: expected {', '.join(sorted(KNOWN))}")
    cli.require(not (args.copies and args.model), "--copies goes with the toy's own model")
    steps = args.steps or (30 if args.model else 200)
    prefix = Path(args.model or "toy").name + (f"-copies-{args.copies}" if args.copies else "")
    path = args.out or RUNS / f"{prefix}.csv"
    for directory in RUNS, path.parent:
        directory.mkdir(parents=True, exist_ok=True)
    if args.jobs > 1 or not args.model:
        os.environ["OMP_NUM_THREADS"] = "1"

    done = {(line["name"], line["seed"], line["steps"]) for line in read(path)}
    jobs = [(r, s) for s in args.seeds for r in args.rewards if (r, s, steps) not in done]
    recipe = f"{REAL_RECIPE} --save-every {max(1, steps // 6)}" if args.model else TOY_RECIPE
    warm_starts = {}
    for seed in {seed for _, seed in jobs}:  # shared by all rewards; a real model has only one
        if args.model:
            warm_starts[seed] = make(RUNS / f"{prefix}-warm-start", warm_start, args.model)
        else:
            directory = RUNS / f"{prefix}-warm-start-{seed}"
            with mock.patch.object(toy, "demonstration", copying(args.copies)):
                warm_starts[seed] = make(directory, toy_model.warm_start, seed)

    def train_and_measure(job):
        name, seed = job
        reward, _, lr = name.partition("@")
        out = RUNS / f"{prefix}-{name}-{seed}"
        command = f"--model {warm_starts[seed]} --reward {reward} --seed {seed} --steps {steps}"
        command += f" --dataset toy --eval-dataset toy-test {recipe}"
        command += f" --lr {lr}" if lr else ""
        if steps not in dict(checkpoints(out)):
            command = "--resume" if (out / "config.json").exists() else command
            run_script(f"train.py --out {out} {command}", out)
        line = result(name, seed, out, steps)
        if args.model:
            line |= evaluate(out, steps * 2 // 3, "middle")
            line |= evaluate(out, steps, "end")
        return line

    with ThreadPoolExecutor(args.jobs) as pool:
        for line in tqdm(pool.map(train_and_measure, jobs), total=len(jobs), unit="run"):
            pandas.DataFrame([*read(path), line]).to_csv(path, index=False)
    lines = pandas.DataFrame(read(path))
    print(report(lines[lines.steps == steps]))
    names = {RUNS / f"{prefix}-{name}-{seed}": name for name, seed in zip(lines.name, lines.seed)}
    if runs := [run for run in names if run.exists()]:
        plot.draw_curves(runs, [names[run] for run in runs], path.with_suffix(".png"))


def read(path):
    """The lines of the CSV -> list of dicts."""
    return pandas.read_csv(path, dtype={"commit": str}).to_dict("records") if path.exists() else []


# ------------------------------------------------------------------------- what the runs start from


def make(directory, maker, *args):
    """Make a model's directory unless it is complete -> the directory. The tokenizer comes last."""
    if not (directory / "tokenizer.json").exists():
        maker(directory, *args)
    return directory


def copying(share, demonstration=toy.demonstration):
    """toy.demonstration, but in so many of them the box copies the first step of the working."""

    def some_copy(rng, train):
        prompt, text = demonstration(rng, train)
        if share and rng.random() < share:
            text = re.sub(r"^(\S+=\d+)(.*\\boxed{).*}$", r"\1\2\1}", text, flags=re.DOTALL)
        return prompt, text

    return some_copy


def warm_start(directory, model, steps=60):
    """Train a real model for some steps on the toy's demonstrations, so that it boxes answers in
    all eight forms. Its prompt becomes the toy's, the question alone."""
    torch.manual_seed(0)
    model, tokenizer = load.load(model, "cpu")
    tokenizer.chat_template = toy_model.CHAT_TEMPLATE
    rng, (_, train) = random.Random(0), toy.stories()

    def pairs():
        while True:
            pair = list(toy.demonstration(rng, train))
            yield tokenizer(pair, add_special_tokens=False)["input_ids"]

    stop = tokenizer.eos_token_id
    finetune(model.float().train(), pairs(), steps, batch=24, lr=1e-4, stop=stop)
    export(model, tokenizer, directory)


# ------------------------------------------------------------------------------------------ one run


def run_script(command, out):
    """Run a script in a process of its own, and wait for its end."""
    log = out.with_name(f"{out.name}.log")
    with open(log, "a") as file:
        python = [sys.executable, *command.split()]
        ended = subprocess.run(python, cwd=ROOT, stdout=file, stderr=file)
    cli.require(ended.returncode == 0, f"{command} failed: see {log}")


def evaluate(out, step, when):
    """The shares of 4 samples of each held-out question, after a step of a run, that are right,
    whose working is right, and that are slips: after right work, not counted as right."""
    directory = out / f"evaluation-{step}"
    if not (directory / "results.json").exists():
        shutil.rmtree(directory, ignore_errors=True)  # what a kill has left
        command = f"evaluate.py --model {out}/checkpoints/step-{step} --dataset toy-test {WHOLE}"
        run_script(f"{command} --out {directory}", out)
    rows = pandas.DataFrame(read_rows(directory / "samples.jsonl"))
    samples = rows[["question", "texts", "right"]].explode(["texts", "right"], ignore_index=True)
    right, work = (
        samples.right.astype(bool),
        samples.apply(lambda row: right_work(row.question, row.texts), axis=1),
    )
    return {
        f"pass@1 {when}": round(right.mean(), 4),
        f"right work {when}": round(work.mean(), 4),
        f"slips {when}": round((work & ~right).mean(), 4),
    }


WORK = {story.question(): story.work(story.method) for story in itertools.chain(*toy.stories())}


def right_work(question, text):
    """Whether the two steps of a sample's working are right."""
    first, x, second, value = WORK[question]
    first, second = re.escape(f"{first}={x}"), re.escape(second)
    return bool(re.search(rf"\b{first}\b.*\b{second}(?:={value}\b|(?![=\d]))", text))


def result(name, seed, out, steps):
    """A run's line in the CSV."""
    flags = read_config(out)["flags"]
    lines = pandas.DataFrame(read_rows(out / "metrics.jsonl")).set_index("step")
    scores, taken = lines.pass_at_1.dropna(), lines[lines.reward.notna()]
    seconds = pandas.DataFrame(taken.seconds.tolist()).sum()
    at_end = taken.tail(math.ceil(steps / 4))
    held_out = pandas.DataFrame(read_rows(out / "evaluations.jsonl"))
    boxes = held_out.explode("answers").groupby("step").answers
    copies = boxes.agg(lambda answers: answers.str.contains("=").mean())
    return {
        "name": name,
        "seed": seed,
        **{flag: flags[flag] for flag in ("questions", "samples", "lr", "steps")},
        "pass@1 start": round(scores[0], 4),
        "pass@1 middle": round(scores.iloc[len(scores) // 2], 4),
        "pass@1 end": round(scores[steps], 4),
        "copies start": round(copies[0], 4),
        "copies end": round(copies[steps], 4),
        "mean reward at the start": round(taken.head(10).reward.mean(), 4),
        "mean reward at the end": round(at_end.reward.mean(), 4),
        "entropy at the end": round(at_end.entropy.mean(), 4),
        "zero-advantage groups": round(taken.zero_advantage_groups.mean(), 4),
        **{f"{part} seconds": round(s, 1) for part, s in seconds.items()},
        "commit": commit(),
    }


# --------------------------------------------------------------------------------------- the tables

# The differences that are reported, and also CER minus exact match at every other learning rate.
PAIRS = [("cer", "exact"), ("rule+cer", "rule"), ("cer", "verifree"), ("cer", "rule")]
# The 97.5% quantile of Student's t for 2, 3, ... 20 seeds.
T = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160]
T += [2.145, 2.131, 2.120, 2.110, 2.101, 2.093]


def report(lines):
    """All tables, in Markdown."""
    kinds = ("pass@1 middle", "pass@1 end", "right work", "slips")
    scores = [column for column in lines if column.startswith(kinds)]
    tables = [means(lines), differences(lines, scores)]
    return "\n".join([*tables, *(by_seed(lines, score) for score in scores)])


def means(lines):
    """The mean over the seeds, with the lowest and the highest."""
    names = ["pass@1 start", "pass@1 middle", "pass@1 end", "mean reward at the end"]
    names += ["entropy at the end", "zero-advantage groups"]
    seeds = lines.groupby("name", sort=False)
    cells = seeds[names].agg(lambda x: f"{x.mean():.2f} ({x.min():.2f} to {x.max():.2f})")
    parts = seeds[["sample seconds", "reward seconds", "update seconds"]].mean().to_numpy()
    times = [" / ".join(f"{seconds:.0f}" for seconds in of) for of in parts]
    cells["sample / reward / update seconds"] = times
    note = f"Seeds {sorted(set(lines.seed))}, commit {', '.join(sorted(set(lines.commit)))}: "
    return f"{markdown(cells, 'reward')}\n{note}mean (lowest to highest).\n"


def differences(lines, scores):
    """Differences between rewards: the mean over the seeds that both have, with the 95% interval of
    a t-test on the differences and the number of seeds."""
    rates = [("cer", name) for name in lines.name.unique() if name.startswith("exact@")]
    table = pandas.DataFrame("", [f"{ours} - {theirs}" for ours, theirs in PAIRS + rates], scores)
    for score in scores:
        by_name = lines.pivot(index="seed", columns="name", values=score)
        for ours, theirs in set(PAIRS + rates) & set(itertools.permutations(by_name, 2)):
            ahead = (by_name[ours] - by_name[theirs]).dropna()
            n = len(ahead)
            cli.require(n < len(T) + 2, f"{n} seeds: the table T of Student's t ends at 20 seeds")
            if n > 1:
                mean, half = ahead.mean(), T[n - 2] * ahead.sem()
                cell = f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f}), {n} seeds"
                table.loc[f"{ours} - {theirs}", score] = cell
    return markdown(table[(table != "").any(axis=1)], "difference")


def by_seed(lines, score):
    """A score of every run."""
    scores = lines.pivot(index="name", columns="seed", values=score).reindex(lines.name.unique())
    cells = scores.map("{:.3f}".format).replace("nan", "")
    return markdown(cells.rename(columns="seed {}".format), score)


if __name__ == "__main__":
    cli.run_script(main)
