"""Train with every reward on the toy's questions, from the same warm starts.

    python benchmarks/compare_rewards.py --jobs 2
    python benchmarks/compare_rewards.py --model HuggingFaceTB/SmolLM2-135M-Instruct
    python benchmarks/compare_rewards.py --rewards cer@6e-4 exact@1e-3 --seeds 0 1 2

The runs go to runs/compare_rewards/, --jobs at a time. A finished run adds a line to the CSV. If
the script is started again, it resumes where it stopped. At the end it writes a table beside the
CSV and draws the learning curves.
"""

import json
import math
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas
import torch
from judge import right_work
from measure import ROOT, commit, markdown
from tqdm import tqdm

import plot
import rewards
from engine import cli, load
from engine.files import checkpoints, read_config, read_rows
from engine.supervised import supervise
from tasks import toy
from tasks.data import Problem

RUNS = ROOT / "runs" / "compare_rewards"
EVALUATION = "--eval-temperature 1 --eval-top-p 1 --eval-top-k 0"  # as on the toy
TOY_RECIPE = "--lr {lr} --lr-end {lr_end}".format(**toy.LEARNING_RATE)
REAL_RECIPE = "--questions 16 --samples 4 --lr 1e-5 --max-new-tokens 40 --eval-limit 50"
REAL_RECIPE += " --eval-runs 2 --eval-every 10 --keep 6"
# A real model is evaluated on 50 questions while it is trained, and on all 200 after two thirds of
# its steps and at the end.
WHOLE = "--runs 4 --temperature 1 --top-p 1 --top-k 0 --max-new-tokens 40"

# Eight forms without number words, for --digits.
DIGIT_FORMS = ["{n}", "{n} {unit}", "it is {n}", "exactly {n}", "{n} in total", "a total of {n}"]
DIGIT_FORMS += ["{n} altogether", "{n} {unit} in total"]


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", help="a real model, Hugging Face id or directory (default: the toy's)")
    add("--rewards", nargs="+", default=list(rewards.REWARDS), help="NAME, or NAME@LR")
    add("--digits", action="store_true", help="eight forms in digits, without number words")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="one run per reward and seed")
    add("--steps", type=count, help="of each run (default: 200, or 30 with a real model)")
    add("--jobs", type=count, default=1, help="runs at a time; if several, one CPU core each")
    add("--out", type=Path, help="the CSV (default: benchmarks/results/MODEL.csv)")
    args = parser.parse_args()
    unknown = {name.partition("@")[0] for name in args.rewards} - set(rewards.REWARDS)
    cli.require(not unknown, f"--rewards {unknown}: expected {', '.join(rewards.REWARDS)}")
    steps, prefix = args.steps or (30 if args.model else 200), Path(args.model or "toy").name
    path = args.out or ROOT / "benchmarks" / "results" / f"{prefix}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    if args.digits:
        prefix, toy.FORMS[:] = f"{prefix}-digits", DIGIT_FORMS
    dataset, held_out = [write_questions(n) if args.digits else n for n in ("toy", "toy-test")]

    done = {(line["name"], line["seed"], line["steps"]) for line in read(path)}
    jobs = [(r, s) for s in args.seeds for r in args.rewards if (r, s, steps) not in done]
    recipe, warm_starts = REAL_RECIPE if args.model else TOY_RECIPE, {}
    recipe += f" --save-every {max(1, steps // 6)}" if args.model else ""
    for seed in {seed for _, seed in jobs}:  # shared by all rewards; a real model has only one
        if args.model:
            warm_starts[seed] = make(RUNS / f"{prefix}-warm-start", warm_start, args.model)
        else:
            warm_starts[seed] = make(RUNS / f"{prefix}-warm-start-{seed}", toy.warm_start, seed)
    if any(name.startswith("general-verifier") for name, _ in jobs):
        recipe += f" --verifier-model {make(RUNS / 'verifier', train_verifier)}"

    def train_and_measure(job):
        name, seed = job
        reward, _, lr = name.partition("@")
        out, log = RUNS / f"{prefix}-{name}-{seed}", RUNS / f"{prefix}-{name}-{seed}.log"
        command = f"--model {warm_starts[seed]} --dataset {dataset} --reward {reward} --seed {seed}"
        command += f" --steps {steps} --out {out} {recipe}"
        command += f" --lr {lr}" if lr else ""
        command += f" --eval-dataset {held_out} {EVALUATION}" if args.digits else ""
        threads = 1 if args.jobs > 1 or not args.model else None
        if steps not in dict(checkpoints(out)):
            command = f"--out {out} --resume" if (out / "config.json").exists() else command
            run_script(f"train.py {command}", log, threads)
        line = result(name, seed, out, steps)
        if args.model:
            line |= evaluate(out, steps * 2 // 3, held_out, "middle", log, threads)
            line |= evaluate(out, steps, held_out, "end", log, threads)
        return line

    with ThreadPoolExecutor(args.jobs) as pool, tqdm(total=len(jobs), unit="run") as bar:
        for line in pool.map(train_and_measure, jobs):
            pandas.DataFrame([*read(path), line]).to_csv(path, index=False)
            bar.update()
            bar.set_postfix_str(f"{line['name']}, seed {line['seed']}: {line['pass@1 end']}")
    lines = pandas.DataFrame(read(path))
    scores = [f"{s} {at}" for at in ("middle", "end") for s in ("pass@1", "right work", "slips")]
    scores = [score for score in scores if score in lines]
    text = "\n".join([table(lines), *(by_seed(lines, score) for score in scores)])
    path.with_suffix(".md").write_text(text)
    print(text)
    done = [(name, RUNS / f"{prefix}-{name}-{seed}") for name, seed in zip(lines.name, lines.seed)]
    names, runs = zip(*[(name, out) for name, out in done if out.exists()])
    plot.draw_curves(runs, names, path.with_suffix(".png"))


def make(directory, maker, *args):
    """Make a directory unless it exists. It gets its name when it is complete -> the directory."""
    if not directory.exists():
        partial = directory.with_name(directory.name + "-partial")
        maker(partial, *args)
        partial.rename(directory)
    return directory


def warm_start(directory, model, steps=60):
    """Train a real model for some steps on the toy's demonstrations, so that it boxes answers in
    all eight forms. Its prompt becomes the toy's, the question alone."""
    torch.manual_seed(0)
    model, tokenizer = load.load(model, "cpu")
    tokenizer.chat_template = toy.CHAT_TEMPLATE
    rng, (_, train) = random.Random(0), toy.stories()

    def pairs():
        while True:
            pair = list(toy.demonstration(rng, train))
            yield tokenizer(pair, add_special_tokens=False)["input_ids"]

    stop = tokenizer.eos_token_id
    supervise(model.float().train(), pairs(), steps, batch=24, lr=1e-4, stop=stop)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_questions(name):
    """The toy's questions with the forms of today as a file. One rule reads all forms in digits."""
    path = RUNS / f"{name}-digits.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [row | {"verifier": "toy-rule"} for row in toy.rows(name)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_script(command, log, threads):
    """Run a script in a process of its own, and wait for its end."""
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    with open(log, "a") as file:
        ended = subprocess.run(
            [sys.executable, *command.split()], cwd=ROOT, env=environment, stdout=file, stderr=file
        )
    cli.require(ended.returncode == 0, f"{command} failed: see {log}")


def evaluate(out, step, held_out, when, log, threads):
    """The shares of 4 samples of each held-out question, after a step of a run, that are right,
    whose working is right, and that are slips, which are wrong after right work."""
    directory = out / f"evaluation-{step}"
    if not (directory / "results.json").exists():
        command = f"evaluate.py --model {out}/checkpoints/step-{step} --out {directory}"
        run_script(f"{command} --dataset {held_out} {WHOLE}", log, threads)
    samples = read_rows(directory / "samples.jsonl")
    right = pandas.Series([sample["correct"] for sample in samples])
    work = pandas.Series([right_work(s["question"], [s["text"]])[0].item() for s in samples])
    return {
        f"pass@1 {when}": round(right.mean(), 4),
        f"right work {when}": round(work.mean(), 4),
        f"slips {when}": round((work & ~right).mean(), 4),
    }


def result(reward, seed, out, steps):
    """A run's line in the CSV."""
    flags = read_config(out)["flags"]
    lines = pandas.DataFrame(read_rows(out / "metrics.jsonl")).set_index("step")
    scores, taken = lines.pass_at_1.dropna(), lines[lines.reward.notna()]
    seconds = pandas.DataFrame(taken.seconds.tolist()).sum()
    at_end = taken.tail(math.ceil(steps / 4))
    return {
        "name": reward,
        "seed": seed,
        **{flag: flags[flag] for flag in ("questions", "samples", "lr", "steps")},
        "pass@1 start": round(scores[0], 4),
        "pass@1 middle": round(scores.iloc[len(scores) // 2], 4),
        "pass@1 end": round(scores[steps], 4),
        "mean reward at the end": round(at_end.reward.mean(), 4),
        "entropy at the end": round(at_end.entropy.mean(), 4),
        "zero-advantage groups": round(taken.zero_advantage_groups.mean(), 4),
        **{f"{part} seconds": round(s, 1) for part, s in seconds.items()},
        "commit": commit(),
    }


def read(path):
    return pandas.read_csv(path).to_dict("records") if path.exists() else []


def table(lines):
    """The mean over the seeds, with the lowest and the highest, as a Markdown table."""
    names = ["pass@1 start", "pass@1 middle", "pass@1 end", "mean reward at the end"]
    names += ["entropy at the end", "zero-advantage groups"]
    seeds = lines.groupby("name", sort=False)
    cells = seeds[names].agg(lambda x: f"{x.mean():.2f} ({x.min():.2f} to {x.max():.2f})")
    parts = seeds[["sample seconds", "reward seconds", "update seconds"]].mean().to_numpy()
    cells["seconds"] = [" / ".join(f"{seconds:.0f}" for seconds in of) for of in parts]
    rows = [[f"`{name}`", *row] for name, row in zip(cells.index, cells.to_numpy())]
    head = ["reward", *names, "sample / reward / update seconds"]
    note = f"Seeds {sorted(set(lines.seed))}, commit {', '.join(sorted(set(lines.commit)))}: "
    return f"{markdown(head, rows)}\n\n{note}mean (lowest to highest).\n"


# The 97.5% quantile of Student's t for 2, 3, ... 20 seeds.
T = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160]
T += [2.145, 2.131, 2.120, 2.110, 2.101, 2.093]


def by_seed(lines, score):
    """A score of every run, and CER's minus that of each other reward: the mean over the seeds that
    both have, with a 95% interval of a t-test on the differences."""
    scores, rows = lines.pivot(index="seed", columns="name", values=score), []
    for name in lines.name.unique():
        cells = ["" if math.isnan(x) else f"{x:.3f}" for x in scores[name]]
        ahead, interval = (scores.get("cer", math.nan) - scores[name]).dropna(), ""
        if name != "cer" and len(ahead) > 1:
            mean, half = ahead.mean(), T[len(ahead) - 2] * ahead.sem()
            interval = f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"
        rows.append([f"`{name}`", *cells, interval])
    head = [score, *(f"seed {seed}" for seed in scores.index), "CER minus this"]
    return f"{markdown(head, rows)}\n"


# --------------------------------------------------------------------------- a verifier for the toy


def train_verifier(directory, steps=900):
    """Train a small general-verifier for the toy's answers. It is the toy's model, and learns to
    answer the verifier's prompt. Each fixed part of the prompt becomes one token."""
    torch.manual_seed(0)
    rng, (held_out, train) = random.Random(0), toy.stories()
    tokenizer = toy.build_tokenizer()
    fixed = rewards.VERIFIER_PROMPT.format(question="@", reference="@", answer="@").split("@")
    tokenizer.add_tokens([*fixed, " Final Decision: Yes", " Final Decision: No"])
    model = toy.build_model(tokenizer)

    def pair(stories):
        """-> (problem, answer), and the numbers that the reference and the answer state."""
        story = rng.choice(stories)
        number = story.work(story.method)[3]
        said = number if rng.random() < 0.5 else story.work(rng.randrange(3))[3]
        forms = [story.answer(rng.choice(toy.FORMS), n) for n in (number, said)]
        return (Problem(story.question(), forms[0]), forms[1]), (number, said)

    def demonstrations():
        while True:
            (problem, answer), (number, said) = pair(train)
            prompt = rewards.VERIFIER_PROMPT.format(
                question=problem.question, reference=problem.reference, answer=answer
            )
            decision = f" {number:02} {said:02} Final Decision: {'Yes' if number == said else 'No'}"
            yield tokenizer([prompt, decision])["input_ids"]

    supervise(model, demonstrations(), steps, batch=64, lr=8e-3, stop=tokenizer.eos_token_id)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    asked = [pair(held_out) for _ in range(500)]
    verdicts = rewards.ask(load.load(directory, "cpu", check=False), [t for t, _ in asked])
    agree = sum((v == "right") == (n == said) for v, (_, (n, said)) in zip(verdicts, asked))
    print(f"the toy's verifier is right on {agree / 500:.1%} of 500 held-out pairs")


if __name__ == "__main__":
    cli.run_script(main)
