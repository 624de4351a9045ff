"""Measure the pass@1 of a model over k samples per question.

    python evaluate.py --model runs/RUN/checkpoints/step-1171 --dataset math500,amc23,aime24

The sampler is the one used in training. By default its settings are the paper's for evaluation:
temperature 0.6, top-p 0.95, top-k 20.
"""

from runtime import cli  # isort: split

import json

import pandas
import torch.distributed as dist

from engine.checks import check_sampling
from measure import add_model_and_data, evaluation, load_model_and_data, summarize
from runtime.files import append_rows, write_atomically
from runtime.sampled import say_grade

# Samples of a rank of evaluate.py: as many as engine/slots.py decodes together. Each time it waits
# for the longest of them.
SAMPLES_AT_ONCE = 512
RUNS = {"letter": 1, "toy-rule": 4, "toy-truth": 4}  # samples per question, by verifier; else 16


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
