"""Measure the pass@1 of a model over k samples per question. train.py calls evaluate() too.

    python evaluate.py --model runs/RUN/checkpoints/step-1171 --dataset math500,amc23,aime24

The sampler is the one used in training. By default its settings are the paper's for evaluation:
temperature 0.6, top-p 0.95, top-k 20.
"""

from runtime import cli  # isort: split

import json
import os

import pandas
import torch.distributed as dist

from engine.checks import check_sampling
from engine.load import add_flags, load
from engine.tokens import positions
from reward_functions import REWARDS, R_by_name, ask_judges
from rollout import sample
from runtime.files import append_rows, write_atomically
from runtime.ranks import all_gather, init_ranks, open_run_directory, seed_everything
from runtime.samples import group_line, of_questions, sample_table, say_grade
from tasks.data import NAMES, load_problems
from tasks.prompts import show_first, usable_prompts
from tasks.verifiers import VERIFIERS

AT_ONCE = 8  # questions that a rank of judge.py samples before they are on the disk
# Samples of a rank of evaluate.py: as many as engine/slots.py decodes together. Each time it waits
# for the longest of them.
SAMPLES_AT_ONCE = 512
RUNS = {"letter": 1, "toy-rule": 4, "toy-truth": 4}  # samples per question, by verifier; else 16


def sample_and_judge(
    model, tokenizer, problems, N, tokens, names=(), verifier_model=None, write=None, **sampling
):
    """Sample every problem N times, and judge the samples -> lines of samples.jsonl in the order of
    the problems, which the ranks share. names: the rewards to compute, of which the first is
    also stored as "R". verifier_model: see ask_judges. sampling: see engine.sampling.generate.
    write: what is called with the lines of some problems before the next are sampled. Without it
    all are sampled together."""
    rank, world = dist.get_rank(), dist.get_world_size()
    judges = {"verifier"}.union(*(REWARDS[name].judges for name in names))
    at_once = (AT_ONCE if names else max(1, SAMPLES_AT_ONCE // N)) * world
    at_once = at_once if write else len(problems)
    turns, lines = range(0, len(problems), at_once), []
    for start in cli.progress("questions", turns) if write else turns:
        mine = problems[start : start + at_once][rank::world]
        groups, batch = sample(model, tokenizer, mine, N, tokens, **sampling), []
        judged = ask_judges(groups, judges, model, tokenizer, verifier_model=verifier_model)
        for k, of_group in enumerate(judged):
            line = group_line(of_group, index=start + rank + world * k)
            if names:
                line["rewards"] = {name: R_by_name(name, [of_group])[0].tolist() for name in names}
                line["R"] = line["rewards"][names[0]]
            batch.append(line)
        batch = sorted(all_gather(batch), key=lambda line: line["index"])
        lines += batch
        if write:
            write(batch)
    return lines


def evaluate(model, tokenizer, problems, runs, max_new_tokens, seed, write=None, **sampling):
    """Sample every problem `runs` times -> (summary, a line of each problem). write: see
    sample_and_judge. sampling: temperature, top_p, top_k.

    summary: pass_at_1 (mean over questions of the share of right samples), stderr (standard error
    of that mean over questions), exact_match, answered and truncated (shares of samples), tokens
    (mean length of a completion), questions, runs.
    """
    seed_everything(seed, "evaluation")
    sampling = dict(name="evaluation", write=write, **sampling)
    lines = sample_and_judge(model, tokenizer, problems, runs, max_new_tokens, **sampling)
    samples = sample_table(lines).rename(columns={"verbatim": "exact_match"})
    means = samples[["exact_match", "answered", "truncated", "tokens"]].mean().to_dict()
    pass_at_1, stderr = of_questions(samples)
    summary = {"pass_at_1": pass_at_1, "stderr": stderr} | means
    return summary | {"questions": len(problems), "runs": runs}, lines


# ------------------------------------------------------------------------- shared with judge.py


def add_model_and_data(add, most_tokens, written):
    """The flags of which model answers which questions."""
    add("--model", required=True, help="Hugging Face model id or directory")
    add("--dataset", required=True, help=f"comma-separated names ({NAMES}) or files")
    add("--verifier", choices=VERIFIERS, help="for rows that name none (default: math or text)")
    cut = f"longer completions are cut off (default: {most_tokens}, or half of its positions)"
    add("--max-new-tokens", type=cli.number(int, 1), help=cut)
    add_flags(add)
    add("--seed", type=int, default=0, help="random seed of the samples")
    add("--out", help=f"directory for {written} and samples.jsonl (default: runs/TIME-NAME-PID)")


def load_model_and_data(args, most_tokens, name, *checks):
    """-> the model, its tokenizer, {data set: problems that fit it}, a new directory."""
    device = init_ranks()
    names = [os.path.expanduser(each.strip()) for each in args.dataset.split(",")]
    datasets = {each: load_problems(each, args.limit, args.verifier) for each in names}
    out = open_run_directory(args.out, name)
    model, tokenizer = load(args.model, device, *checks, dtype=args.dtype, sampler=args.sampler)
    args.max_new_tokens = args.max_new_tokens or int(min(most_tokens, positions(model) / 2))
    for each, problems in datasets.items():
        datasets[each], _ = usable_prompts(model, tokenizer, problems, each, args.max_new_tokens)
        show_first(tokenizer, datasets[each], each)
    return model, tokenizer, datasets, out


# ------------------------------------------------------------------------------------- the script


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add_model_and_data(add, 8192, "results.json")
    add("--runs", type=count, help="samples per question (default: 16, for letters 1, the toy 4)")
    add("--limit", type=count, help="evaluate only the first K questions of each data set")
    add("--temperature", type=cli.number(float, 0), default=0.6, help="0 is greedy")
    add("--top-p", type=cli.number(float, 1e-6, 1), default=0.95, help="1 turns it off")
    add("--top-k", type=cli.number(int, 0), default=20, help="0 turns it off")
    args = parser.parse_args()
    model, tokenizer, datasets, out = load_model_and_data(args, 8192, "eval", check_sampling)
    sampling = dict(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
    results, of_all = {}, []
    for name, problems in datasets.items():
        runs = args.runs or max(RUNS.get(problem.verifier, 16) for problem in problems)
        sizes = runs, args.max_new_tokens, args.seed

        def write(lines, name=name):
            append_rows(out / "samples.jsonl", [{"dataset": name} | line for line in lines])

        results[name], lines = evaluate(model, tokenizer, problems, *sizes, write, **sampling)
        cli.say(f"{name}: pass@1 {results[name]['pass_at_1']:.3f}")
        of_all += lines
        # Save now, since the next data set may take hours.
        report = json.dumps({"flags": vars(args), "results": results}, indent=2)
        write_atomically(out / "results.json", report + "\n")
    if cli.is_rank_0():
        table = pandas.DataFrame.from_dict(results, orient="index").astype({"stderr": float})
        print(f"pass@1 at temperature {args.temperature:g}")
        print(table.to_string(float_format="{:.3f}".format, na_rep="-"))
        if len(results) > 1:
            print(f"average pass@1: {table.pass_at_1.mean():.3f}")
        print(f"all samples are in {out}/samples.jsonl")
        say_grade(of_all, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    cli.run_script(main)
