"""Before training: does a reward tell right from wrong on your questions, with your model?

    python judge.py --model Qwen/Qwen3-4B-Base --dataset mine.jsonl

The model samples each question as in training. The verifier that the question names says which
samples are right. A reward is a good judge if a right sample receives more than a wrong one of the
same question. AUC is how often that is so: 1 is always, and .5 is chance.
"""

import numpy
import pandas
import torch
import torch.distributed as dist

from cer import check_scoring
from engine.load import check_sampling, load
from report import RARE, TINY, brief, group_record
from reward_functions import REWARDS, compute_rewards
from rloo import leave_one_out
from rollout import sample
from runtime import cli
from runtime.console import is_rank_0, progress
from runtime.files import append_rows, lock, write_atomically
from runtime.ranks import all_gather, choose_directory, init_ranks, seed_everything
from tasks.data import HUB, TOY, load_problems
from tasks.prompts import usable_prompts
from tasks.verifiers import VERIFIERS, is_right

AT_ONCE = 8  # questions that a rank samples together


def judge(problems, names, samples, max_new_tokens, **models):
    """Sample problems -> for each a row of samples.jsonl. Beside what a run writes it has `right`
    [N], whether the verifier accepts a sample, and `rewards`, {name: R [N]}. Its R is the first."""
    groups = sample(models["actor"], models["tokenizer"], problems, samples, max_new_tokens)
    R, records = zip(*(compute_rewards(name, groups, **models) for name in names))
    rows = []
    for k, group in enumerate(groups):
        record = {"right": [is_right(group.problem, answer) for answer in group.answers]}
        record["rewards"] = {name: R_name[k].tolist() for name, R_name in zip(names, R)}
        for of_groups in records:
            record |= of_groups[k]
        rows.append(group_record(0, group, R[0][k], record))
    return rows


# -------------------------------------------------------------------------------------- the numbers


def auc(samples, name):
    """How often a right sample receives more than a wrong one, both answered. Ties count half. It
    is nan without such a pair. samples: those of one question."""
    right, wrong = (samples[name][samples.right == is_].to_numpy() for is_ in (True, False))
    difference = right[:, None] - wrong
    return ((difference > 0) + 0.5 * (difference == 0)).mean() if difference.size else numpy.nan


def table_of(samples, names):
    """samples: a table with a line for each sample, indexed by question -> a table with a line for
    each reward. The interval of the mean AUC is a bootstrap over questions."""
    lines, answered = {}, samples[samples.answered]
    for name in names:
        groups = [group for _, group in samples.groupby(level=0)[name]]
        aucs = [auc(group, name) for _, group in answered.groupby(level=0)]
        aucs = numpy.array([x for x in aucs if x == x] or [numpy.nan])
        means = numpy.random.default_rng(0).choice(aucs, (2000, len(aucs))).mean(1)
        lines[name] = {
            "AUC": aucs.mean(),
            "from": numpy.quantile(means, 0.025),
            "to": numpy.quantile(means, 0.975),
            "mean if right": answered[name][answered.right].mean(),
            "if wrong": answered[name][~answered.right].mean(),
            "right, none": (answered[name][answered.right] < TINY).mean(),
            "no advantage": sum(not leave_one_out(torch.tensor([*R])).any() for R in groups),
            "tiny": sum(R.max() < RARE for R in groups),
        }
    return pandas.DataFrame.from_dict(lines, orient="index")


def report(rows):
    """Print what rows of samples.jsonl say about their rewards -> the table."""
    names, lists = [*rows[0]["rewards"]], ["answers", "right", "truncated"]
    samples = pandas.DataFrame([row | row["rewards"] for row in rows])[["reference", *lists, *names]]
    samples = samples.explode([*lists, *names]).infer_objects()
    samples["answered"] = samples.answers.map(bool)
    samples["verbatim"] = samples.answers == samples.reference
    both = samples[samples.answered].groupby(level=0).right.nunique() == 2
    shares = samples[["answered", "right", "verbatim", "truncated"]].mean()
    said = ", ".join(f"{name} {brief(share)}" for name, share in shares.items())
    print(f"{len(rows)} questions, {len(samples)} samples: {said}")
    print(f"{both.sum()} questions have both right and wrong answers; the AUC is over these")
    table = table_of(samples, names)
    print(table.to_string(float_format="{:.3g}".format, na_rep="-"))
    if "cer" in names and samples.right.any():
        least = samples[samples.right].groupby(level=0).cer.mean().nsmallest(3)
        print("least CER of right answers; the model rarely writes these references in their form:")
        for k, reward in least.items():
            answer = samples.loc[[k]].query("right").answers.iloc[0]
            print(f"  {reward:.1e}  a* {rows[k]['reference']!r:.60}, answered {answer!r:.60}")
    print(advice(shares, table))
    return table


def advice(shares, table):
    """What the numbers mean for training, in a sentence."""
    if shares.right < 0.02:
        return "Few samples are right: take easier questions, or a supervised start (warm_start.py)."
    if "cer" in table.index and table.tiny["cer"] > table.tiny.size / 2:
        return "Most rewards are tiny: shorten the references."
    if shares.verbatim < 0.7 * shares.right:
        return "Many right answers are not verbatim: train with cer, or with rule if it reads them."
    return "Most right answers are verbatim: exact may do, and it costs the least."


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", required=True, help="Hugging Face model id or directory")
    add("--dataset", required=True, help=f"{', '.join([*TOY, *HUB])}, or a file")
    add("--verifier", choices=VERIFIERS, help="for rows that name none (default: math or text)")
    add("--limit", type=count, default=50, help="judge only the first K questions")
    add("--samples", type=cli.number(int, 2), default=16, help="N, samples per question")
    add("--max-new-tokens", type=count, default=4096, help="longer completions are cut off")
    add("--rewards", default="cer,verifree,exact,rule+cer", help=f"of {', '.join(REWARDS)}")
    add("--seed", type=int, default=0, help="random seed of the samples")
    add("--out", help="directory for samples.jsonl and judge.json (default: runs/TIME-judge)")
    args = parser.parse_args()
    names = args.rewards.split(",")
    cli.require({*names} <= {*REWARDS}, f"--rewards: expected names of {', '.join(REWARDS)}")
    device = init_ranks()
    rank, world = dist.get_rank(), dist.get_world_size()
    out = choose_directory(args.out, "judge")
    problems = load_problems(args.dataset, args.limit, args.verifier)
    model, tokenizer = load(args.model, device, check_sampling, check_scoring)
    problems, _ = usable_prompts(tokenizer, problems, args.dataset)
    models, rows = {"actor": model, "tokenizer": tokenizer, "M": None}, []
    if is_rank_0():
        claim = lock(out)  # noqa: F841  until this process ends
    for start in progress("questions", range(0, len(problems), AT_ONCE * world)):
        seed_everything(args.seed, "judge", start)
        mine = problems[start:][rank : AT_ONCE * world : world]
        new = judge(mine, names, args.samples, args.max_new_tokens, **models) if mine else []
        new = all_gather([(rank + world * k, row) for k, row in enumerate(new)])
        rows += [row for _, row in sorted(new, key=lambda pair: pair[0])]
        if is_rank_0():  # what a kill leaves
            append_rows(out / "samples.jsonl", rows[start:])
    if is_rank_0():
        table = report(rows)
        write_atomically(out / "judge.json", table.to_json(orient="index", indent=2) + "\n")
        print(f"all samples are in {out}/samples.jsonl; draw one: python plot.py {out} --question 0")
    dist.destroy_process_group()


if __name__ == "__main__":
    cli.run_script(main)
