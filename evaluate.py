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
from engine.sampling import positions
from reward_functions import ask_judges
from rollout import sample
from runtime.files import append_rows, write_atomically
from runtime.ranks import all_gather, init_ranks, open_run_directory, seed_everything
from runtime.samples import group_line, of_questions, sample_table, say_grade
from tasks.data import NAMES, load_examples, load_problems, with_examples
from tasks.prompts import show_first, usable_prompts
from tasks.verifiers import VERIFIERS

# Samples of a rank of evaluate.py: as many as engine/slots.py decodes together. Each time it waits
# for the longest of them.
SAMPLES_AT_ONCE = 512
RUNS = {"letter": 1, "toy-rule": 4, "toy-truth": 4}  # samples per question, by verifier; else 16


def in_batches(problems, at_once, to_lines):
    """Yield the lines of samples.jsonl of some problems at a time, in the order of the problems.
    The ranks share a batch, at_once problems each, and all get its lines, so that these are written
    before the next batch is sampled. to_lines: a list of problems -> a line for each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    turns = range(0, len(problems), at_once * world)
    for start in cli.progress("questions", turns) if len(turns) > 1 else turns:
        mine = range(len(problems))[start : start + at_once * world][rank::world]
        lines = zip(mine, to_lines([problems[i] for i in mine]))
        lines = all_gather([line | {"index": i} for i, line in lines])
        yield sorted(lines, key=lambda line: line["index"])


def evaluation(model, tokenizer, problems, at_once, runs, tokens, seed, **sampling):
    """Sample every problem `runs` times, and yield what in_batches does. sampling: temperature,
    top_p, top_k."""
    seed_everything(seed, "evaluation")

    def to_lines(mine):
        groups = sample(model, tokenizer, mine, runs, tokens, name="evaluation", **sampling)
        return map(group_line, ask_judges(groups, {"verifier"}, model, tokenizer))

    return in_batches(problems, at_once, to_lines)


def summarize(lines):
    """The numbers of an evaluation: pass_at_1 (mean over questions of the share of right samples),
    stderr (its standard error: see of_questions), exact_match, answered and truncated (shares of
    samples, too), tokens (mean length of a completion), questions, runs."""
    samples = sample_table(lines).rename(columns={"verbatim": "exact_match"})
    by_case = samples.groupby("case")[["exact_match", "answered", "truncated", "tokens"]]
    means = by_case.mean().mean().to_dict()
    pass_at_1, stderr = of_questions(samples)
    summary = {"pass_at_1": pass_at_1, "stderr": stderr} | means
    return summary | {"questions": samples.case.nunique(), "runs": len(lines[0]["texts"])}


def evaluate(model, tokenizer, problems, *sizes):
    """An evaluation of all problems together, sampled as in training -> (summary, a line for each
    problem). sizes: runs, tokens and seed of evaluation()."""
    [lines] = evaluation(model, tokenizer, problems, len(problems), *sizes)
    return summarize(lines), lines


# ------------------------------------------------------------------------- shared with judge.py


def add_model_and_data(add, most_tokens, written):
    """The flags of which model answers which questions."""
    add("--model", required=True, help="Hugging Face model id or directory")
    add("--dataset", required=True, help=f"comma-separated names ({NAMES}) or files")
    add("--verifier", choices=VERIFIERS, help="for rows that name none (default: math or text)")
    add("--examples", help="file of worked examples, which stand before each question")
    cut = f"longer completions are cut off (default: {most_tokens}, or half of its positions)"
    add("--max-new-tokens", type=cli.number(int, 1), help=cut)
    add_flags(add)
    add("--seed", type=int, default=0, help="random seed of the samples")
    add("--out", help=f"directory for {written} and samples.jsonl (default: runs/TIME-NAME-PID)")


def load_model_and_data(args, most_tokens, name, *checks):
    """-> the model, its tokenizer, {data set: problems that fit it}, a new directory."""
    device = init_ranks()
    names = [os.path.expanduser(each.strip()) for each in args.dataset.split(",")]
    examples = load_examples(args.examples)
    datasets = {
        each: with_examples(load_problems(each, args.limit, args.verifier), examples)
        for each in names
    }
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
        sizes = max(1, SAMPLES_AT_ONCE // runs), runs, args.max_new_tokens, args.seed
        lines = []
        for batch in evaluation(model, tokenizer, problems, *sizes, **sampling):
            append_rows(out / "samples.jsonl", [{"dataset": name} | line for line in batch])
            lines += batch
        results[name] = summarize(lines)
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
