"""pass@1 of a model over k runs: a function that train.py calls, and a script.

    python evaluate.py --model runs/RUN/checkpoints/step-1171 --dataset math500,amc23,aime24

The sampler is the one that trains, at the paper's evaluation settings: temperature 0.6, top-p 0.95,
top-k 20.
"""

import json
import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import toy  # noqa: F401  adds the data sets "toy" and "toy-test"
from data import (
    SOURCES,
    InputError,
    Parser,
    load_problems,
    require_ranges,
    require_writable,
    run_script,
    write_whole,
)
from policy import encode_prompt, gather, init_ranks, load, sample
from rewards import is_correct


def evaluate(model, tokenizer, problems, runs, seed=0, name="evaluation", **settings):
    """Sample every problem `runs` times -> (summary, records: every sample, in order). Ranks share
    the problems.

    summary: pass_at_1 (mean over questions of the share of right samples), stderr (of that mean,
    over questions: how much another draw of questions would move it), exact_match, answered and
    truncated (shares of samples), tokens (mean length of a completion), questions, runs. settings:
    max_new_tokens, temperature, top_p, top_k.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = problems[rank::world]
    prompts = [encode_prompt(tokenizer, problem) for problem in mine]
    with tqdm(
        total=len(mine) * runs, desc=name, unit="sample", leave=False, disable=rank > 0
    ) as bar:
        # Evaluating leaves a training run's random numbers alone.
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed * 1000 + rank)
            settings["progress"] = bar.update
            rollouts = sample(model, tokenizer, mine, prompts, runs, **settings)
    records = [
        {
            "index": rank + world * k,
            "question": rollout.problem.question,
            "reference": rollout.problem.reference,
            "answer": rollout.answers[i],
            "correct": is_correct(rollout.problem, rollout.texts[i], rollout.answers[i]),
            "truncated": rollout.truncated[i],
            "tokens": len(rollout.completions[i]),
            "text": rollout.texts[i],
        }
        for k, rollout in enumerate(rollouts)
        for i in range(runs)
    ]
    # By question; sorted() keeps the order of the runs.
    records = sorted(gather(records), key=lambda record: record["index"])

    def mean(values):
        return sum(values) / len(records)

    by_question = torch.tensor([float(r["correct"]) for r in records]).view(-1, runs).mean(1)
    summary = {
        "pass_at_1": by_question.mean().item(),
        "stderr": (by_question.std() / len(by_question) ** 0.5).item()
        if len(by_question) > 1
        else None,
        "exact_match": mean(r["answer"] == r["reference"] for r in records),
        "answered": mean(r["answer"] is not None for r in records),
        "truncated": mean(r["truncated"] for r in records),
        "tokens": mean(r["tokens"] for r in records),
        "questions": len(problems),
        "runs": runs,
    }
    return summary, records


def table(results):
    """results: data set -> summary. The paper's table: a line a data set, and the average."""
    lines = [
        "data set               pass@1    +/-   answered  truncated  tokens   questions x runs"
    ]
    for path, s in results.items():
        spread = "-" if s["stderr"] is None else f"{100 * s['stderr']:.1f}"
        name, score, answered = Path(path).name[-20:], 100 * s["pass_at_1"], 100 * s["answered"]
        rates = f"{answered:9.1f}% {100 * s['truncated']:9.1f}% {s['tokens']:7.0f}"
        lines.append(f"{name:20} {score:8.1f} {spread:>6} {rates}   {s['questions']} x {s['runs']}")
    if len(results) > 1:
        average = sum(s["pass_at_1"] for s in results.values()) / len(results)
        lines.append(f"{'average':20} {100 * average:8.1f}")
    return "\n".join(lines)


def parse_args():
    parser = Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face model id or directory")
    parser.add_argument(
        "--dataset", required=True, help=f"comma-separated names ({', '.join(SOURCES)}) or files"
    )
    parser.add_argument(
        "--runs", type=int, help="samples of each question (16; 1 for multiple choice)"
    )
    parser.add_argument(
        "--limit", type=int, help="only the first so many questions of each data set"
    )
    parser.add_argument("--max-new-tokens", type=int, default=8192, help="longer ones are cut off")
    parser.add_argument("--temperature", type=float, default=0.6, help="0: greedy")
    parser.add_argument("--top-p", type=float, default=0.95, help="1: all")
    parser.add_argument("--top-k", type=int, default=20, help="0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument(
        "--out", help="directory for results.json and samples.jsonl (default: runs/TIME-eval)"
    )
    args = parser.parse_args()
    require_ranges(args, ["runs", "limit", "max_new_tokens"])
    return args


def main():
    logging.basicConfig(format="%(message)s")
    args = parse_args()
    out = Path(args.out or time.strftime("runs/%Y%m%d-%H%M%S-eval"))
    if (out / "results.json").exists():
        raise InputError(f"{out} holds the results of another evaluation: choose another --out")
    require_writable(out)
    device = init_ranks()
    datasets = {name: load_problems(name, args.limit) for name in args.dataset.split(",")}
    model, tokenizer = load(args.model, device)

    results = {}
    for name, problems in datasets.items():
        letters = all(problem.kind == "letter" for problem in problems)
        runs = args.runs or (SOURCES[name].runs if name in SOURCES else 1 if letters else 16)
        settings = dict(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
        settings |= dict(max_new_tokens=args.max_new_tokens, seed=args.seed, name=name)
        results[name], records = evaluate(model, tokenizer, problems, runs, **settings)
        if dist.get_rank() == 0:  # after each data set: the next may take hours
            out.mkdir(parents=True, exist_ok=True)
            with open(out / "samples.jsonl", "w" if len(results) == 1 else "a") as file:
                file.writelines(json.dumps({"dataset": name} | r) + "\n" for r in records)
            report = {"args": vars(args), "results": results}
            write_whole(out / "results.json", json.dumps(report, indent=2) + "\n")

    if dist.get_rank() == 0:
        print(table(results))
        print(f"every sample: {out / 'samples.jsonl'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_script(main)
