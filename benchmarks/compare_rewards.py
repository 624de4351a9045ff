"""Every reward on the toy, from the same warm starts, and the paper's M sweep (Table 3) in small.

    python benchmarks/compare_rewards.py --jobs 2

One run after the other (--jobs at once) into runs/compare_rewards/. A finished run adds a line to
the CSV; started again, the script goes on where it stopped. At the end it writes the table beside
the CSV.
"""

import csv
import json
import os
import random
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import policy
import torch
from measure import ROOT, commit, markdown
from rundir import checkpoints
from tqdm import tqdm

import rewards
import toy
from data import Parser, require, run_script

RUNS = ROOT / "runs" / "compare_rewards"
CONFIGURATIONS = {name: f"--reward {name}" for name in rewards.REWARDS}
SWEEP = {
    f"cer, M = {M}": f"--reward cer --questions 8 --samples 16 --m {M}" for M in (1, 2, 4, 8, 16)
}


def main():
    parser = Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one CPU core each")
    parser.add_argument("--only", nargs="+", help="only these rewards")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/compare_rewards.csv"))
    args = parser.parse_args()
    require(args.steps >= 1 and args.jobs >= 1, "--steps and --jobs must be at least 1")
    torch.set_num_threads(1)
    policy.init_ranks()

    path = Path(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    configurations = CONFIGURATIONS | SWEEP
    require(
        not set(args.only or []) - set(configurations), f"--only takes {', '.join(configurations)}"
    )
    jobs = [(name, seed) for seed in args.seeds for name in args.only or configurations]
    done = {(line["name"], int(line["seed"])) for line in read(path)}
    jobs = [job for job in jobs if job not in done]
    for seed in {seed for _, seed in jobs}:
        prepare(RUNS / f"warm-start-{seed}", lambda to, seed=seed: toy.warm_start(to, seed))
    if any(name == "general-verifier" for name, _ in jobs):
        prepare(RUNS / "verifier", train_verifier)

    with ThreadPoolExecutor(args.jobs) as pool, tqdm(total=len(jobs), unit="run") as bar:
        for line in pool.map(lambda job: run(*job, configurations[job[0]], args.steps), jobs):
            lines = [*read(path), line]
            with open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=line)
                writer.writeheader()
                writer.writerows(lines)
            bar.update()
            bar.set_postfix_str(f"{line['name']}, seed {line['seed']}: {line['pass@1 end']}")
    text = table(read(path), configurations)
    path.with_suffix(".md").write_text(text)
    print(text)


def prepare(directory, make):
    """A directory made once, and whole."""
    if not directory.exists():
        partial = directory.with_name(directory.name + "-partial")
        make(partial)
        partial.rename(directory)


def run(name, seed, flags, steps):
    """One training run in a process of its own -> its line of the CSV."""
    out = RUNS / f"{name.replace(', M = ', '-m')}-{seed}"
    model = RUNS / f"warm-start-{seed}"
    command = (
        f"train.py --model {model} --dataset toy --seed {seed} --steps {steps} --out {out} {flags}"
    )
    if name == "general-verifier":
        command += f" --verifier-model {RUNS / 'verifier'}"
    saved = [step for step, _ in checkpoints(out)]
    if saved:
        command = f"train.py --out {out} --resume"
    if steps not in saved:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        log = out.with_suffix(".log")
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w") as file:
            code = subprocess.run(
                [sys.executable, *command.split()],
                cwd=ROOT,
                env=environment,
                stderr=file,
                stdout=file,
            ).returncode
        require(code == 0, f"{name}, seed {seed} failed: see {log}")
    config = json.loads((out / "config.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    scores = {line["step"]: line["pass_at_1"] for line in lines if "pass_at_1" in line}
    taken = [line for line in lines if "reward" in line]

    def mean(key, part=taken):
        return f"{statistics.mean(line[key] for line in part):.4f}"

    seconds = {part: sum(line["seconds"][part] for line in taken) for part in taken[0]["seconds"]}
    return {
        "name": name,
        "seed": seed,
        "questions": config["flags"]["questions"],
        "samples": config["flags"]["samples"],
        "steps": steps,
        "pass@1 start": round(scores[0], 4),
        "pass@1 middle": round(scores[steps // 2], 4) if steps // 2 in scores else "",
        "pass@1 end": round(scores[steps], 4),
        "mean reward": mean("reward"),
        "mean reward at the end": mean("reward", taken[-50:]),
        "exact match at the end": mean("exact_match", taken[-50:]),
        "zero-advantage groups": mean("zero_advantage_groups"),
        **{f"{part} seconds": f"{s:.1f}" for part, s in seconds.items()},
        "commit": commit(),
    }


def read(path):
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def table(lines, configurations):
    """Mean over the seeds, and their spread (lowest to highest)."""
    header = ["reward", "pass@1 before", "half way", "after", "mean reward"]
    header += ["zero-advantage groups", "sample / reward / update"]
    rows = []
    for name in configurations:
        of_name = [line for line in lines if line["name"] == name]
        if not of_name:
            continue

        def spread(key, of_name=of_name):
            values = [float(line[key]) for line in of_name if line[key]]
            if not values:
                return "-"
            return f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"

        def mean(key, of_name=of_name):
            return statistics.mean(float(line[key]) for line in of_name)

        seconds = " / ".join(
            f"{mean(f'{part} seconds'):.0f}" for part in ("sample", "reward", "update")
        )
        columns = [f"`{name}`", *map(spread, ("pass@1 start", "pass@1 middle", "pass@1 end"))]
        columns += [f"{mean('mean reward at the end'):.2f}", f"{mean('zero-advantage groups'):.0%}"]
        rows.append([*columns, seconds + " s"])
    commits = ", ".join(sorted({line["commit"] for line in lines}))
    seeds = sorted({int(line["seed"]) for line in lines})
    note = f"Seeds {seeds}, commit {commits}: mean (lowest to highest).\n"
    return markdown(header, rows) + "\n\n" + note


# --------------------------------------------------------------------------- a verifier for the toy


def train_verifier(directory, steps=900):
    """A General-verifier in small, for the toy's answers: the toy's model, taught to answer the
    verifier's prompt. The fixed parts of the prompt become one token each."""
    torch.manual_seed(0)
    rng, (held_out, train) = random.Random(0), toy.stories()
    tokenizer = toy.build_tokenizer()
    fixed = rewards.VERIFIER_PROMPT.format(question="@", reference="@", answer="@").split("@")
    tokenizer.add_tokens([*fixed, " Final Decision: Yes", " Final Decision: No"])
    model = toy.build_model(tokenizer)

    def pair(stories):
        """-> (question, reference, answer), and the numbers that the two say."""
        story = rng.choice(stories)
        number = story.work(story.method)[3]
        said = number if rng.random() < 0.5 else story.work(rng.randrange(3))[3]
        forms = [story.form(rng.choice(toy.FORMS), n) for n in (number, said)]
        return (story.question(), *forms), (number, said)

    def demonstrate():
        (question, reference, answer), (number, said) = pair(train)
        prompt = rewards.VERIFIER_PROMPT.format(
            question=question, reference=reference, answer=answer
        )
        decision = "Yes" if number == said else "No"
        return prompt, f" {number:02} {said:02} Final Decision: {decision}"

    toy.supervise(model, tokenizer, demonstrate, steps)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    asked = [pair(held_out) for _ in range(500)]
    verdicts = rewards.ask(policy.load(directory, "cpu", scores=False), [t for t, _ in asked])
    agree = sum((v == "right") == (n == said) for v, (_, (n, said)) in zip(verdicts, asked))
    print(f"the toy's verifier is right on {agree / 500:.1%} of 500 held-out pairs")


if __name__ == "__main__":
    run_script(main)
