"""Measure the pass@1 of a model over k samples per question. train.py calls evaluate() too.

    python evaluate.py --model runs/RUN/checkpoints/step-1171 --dataset math500,amc23,aime24

The sampler is the one used in training. By default its settings are the paper's for evaluation:
temperature 0.6, top-p 0.95, top-k 20.
"""

import json
from pathlib import Path

import pandas
import torch.distributed as dist

from data import HUB, TOY, load_problems
from engine import cli, run
from engine.files import append_rows, write_atomically
from engine.policy import load
from rollout import encode_prompt, sample
from verifiers import verdict

RUNS = {"letter": 1, "toy-rule": 4, "toy-truth": 4}  # samples per question, by verifier; else 16


def evaluate(model, tokenizer, problems, runs, seed=0, **settings):
    """Sample every problem `runs` times -> (summary, one record per sample, in order). The ranks
    share the problems.

    summary: pass_at_1 (mean over questions of the share of right samples), stderr (standard error
    of that mean over questions), exact_match, answered and truncated (shares of samples), tokens
    (mean length of a completion), questions, runs. settings: max_new_tokens (reduced if the model
    has too few positions), temperature, top_p, top_k.
    """
    run.seed_everything(seed, "evaluation")
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = problems[rank::world]
    longest = max(len(encode_prompt(tokenizer, problem)) for problem in problems)
    room = getattr(model.config, "max_position_embeddings", 0) - longest
    if 0 < room < settings["max_new_tokens"]:
        settings["max_new_tokens"] = room
    groups = sample(model, tokenizer, mine, runs, name="evaluation", **settings)
    records = [
        {
            "index": rank + world * k,
            "question": group.problem.question,
            "reference": group.problem.reference,
            "answer": answer,
            "correct": verdict(group.problem, answer) == "right",
            "truncated": group.truncated[i],
            "tokens": len(group.completions[i]),
            "text": group.texts[i],
        }
        for k, group in enumerate(groups)
        for i, answer in enumerate(group.answers)
    ]
    records = sorted(run.all_gather(records), key=lambda record: record["index"])
    samples = pandas.DataFrame(records)
    by_question = samples.groupby("index").correct.mean()
    summary = {
        "pass_at_1": by_question.mean(),
        "stderr": by_question.sem() if len(problems) > 1 else None,
        "exact_match": (samples.answer == samples.reference).mean(),
        "answered": (samples.answer.fillna("") != "").mean(),  # an empty box is no answer
        "truncated": samples.truncated.mean(),
        "tokens": samples.tokens.mean(),
        "questions": len(problems),
        "runs": runs,
    }
    return summary, records


def table(results, temperature):
    """{data set: summary} -> the paper's table as text, one line per data set and their average."""
    lines = pandas.DataFrame(results).T
    if len(results) > 1:
        lines.loc["average"] = lines[["pass_at_1"]].mean()
    lines.index = [Path(name).name for name in lines.index]
    for name in "questions", "runs":
        lines[name] = lines[name].astype("Int64")
    title = f"pass@1 at temperature {temperature:g}\n"
    return title + lines.to_string(na_rep="", float_format="{:.3f}".format)


def add_sampling(parser, prefix=""):
    """Add flags for the sampling settings, with the paper's values as defaults."""
    add = parser.add_argument
    add(f"--{prefix}temperature", type=cli.number(float, 0), default=0.6, help="0 is greedy")
    add(f"--{prefix}top-p", type=cli.number(float, 1e-6, 1), default=0.95, help="1 turns it off")
    add(f"--{prefix}top-k", type=cli.number(int, 0), default=20, help="0 turns it off")


def sampling_settings(args, prefix=""):
    settings = {name: getattr(args, prefix + name) for name in ("temperature", "top_p", "top_k")}
    return settings | {"max_new_tokens": args.max_new_tokens}


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", required=True, help="Hugging Face model id or directory")
    names = f"comma-separated names ({', '.join([*TOY, *HUB])}) or files"
    add("--dataset", required=True, help=names)
    add("--runs", type=count, help="samples per question (default: 16, for letters 1, the toy 4)")
    add("--limit", type=count, help="evaluate only the first K questions of each data set")
    add("--max-new-tokens", type=count, default=8192, help="longer completions are cut off")
    add_sampling(parser)
    add("--seed", type=int, default=0, help="random seed of the samples")
    add("--out", help="directory for results.json and samples.jsonl (default: runs/TIME-eval)")
    args = parser.parse_args()
    device = run.init_ranks()
    out = run.output_directory(args.out, "eval")
    datasets = {name: load_problems(name, args.limit) for name in args.dataset.split(",")}
    model, tokenizer = load(args.model, device)
    if dist.get_rank() == 0:  # an unwritable file fails now, not after hours
        out.mkdir(parents=True, exist_ok=True)
        (out / "samples.jsonl").touch()

    results = {}
    for name, problems in datasets.items():
        settings = sampling_settings(args) | {"seed": args.seed}
        runs = args.runs or max(RUNS.get(problem.verifier, 16) for problem in problems)
        results[name], records = evaluate(model, tokenizer, problems, runs, **settings)
        if dist.get_rank() == 0:  # save now, since the next data set may take hours
            append_rows(out / "samples.jsonl", [{"dataset": name} | record for record in records])
            cli.say(f"{name}: pass@1 {results[name]['pass_at_1']:.3f}")
            report = {"args": vars(args), "results": results}
            write_atomically(out / "results.json", json.dumps(report, indent=2) + "\n")
    if dist.get_rank() == 0:
        print(table(results, args.temperature))
        print(f"all samples are in {out / 'samples.jsonl'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    cli.run_script(main)
