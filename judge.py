"""Before training: does a reward tell right from wrong on your questions, with your model?

    python judge.py --model Qwen/Qwen3-4B-Base --dataset mine.jsonl

The model samples each question as in training. The verifier that the question names says which
samples are right. A reward is a good judge if a right sample receives more than a wrong one of the
same question. AUC is how often that is so: 1 is always, and .5 is chance.
"""

import torch.distributed as dist

from cer import check_scoring
from engine.load import check_sampling, load
from report import group_record, say_judgement
from reward_functions import REWARDS, compute_rewards
from rollout import sample
from runtime import cli
from runtime.files import append_rows
from runtime.ranks import all_gather, init_ranks, make_directory, seed_everything
from tasks.data import HUB, TOY, load_problems
from tasks.prompts import usable_prompts
from tasks.verifiers import VERIFIERS, is_right

AT_ONCE = 8  # questions that a rank samples together; what is finished is on the disk


def judge(actor, tokenizer, problems, names, args):
    """Sample problems -> for each a row of samples.jsonl. Beside what a run writes it has `right`
    [N], whether the verifier accepts a sample, and `rewards`, {name: R [N]}. Its R is the first."""
    groups = sample(actor, tokenizer, problems, args.samples, args.max_new_tokens)
    models = {"actor": actor, "tokenizer": tokenizer, "M": None}
    R, records = zip(*(compute_rewards(name, groups, **models) for name in names))
    rows = []
    for group, R_group, of_group in zip(groups, zip(*R), zip(*records)):  # by question now
        record = {key: value for one in of_group for key, value in one.items()}
        record["right"] = [is_right(group.problem, answer) for answer in group.answers]
        record["rewards"] = {name: R_name.tolist() for name, R_name in zip(names, R_group)}
        rows.append(group_record(0, group, R_group[0], record))
    return rows


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    known = [name for name in REWARDS if name != "general-verifier"]  # it needs a second model
    add("--model", required=True, help="Hugging Face model id or directory")
    add("--dataset", required=True, help=f"{', '.join([*TOY, *HUB])}, or a file")
    add("--verifier", choices=VERIFIERS, help="for rows that name none (default: math or text)")
    add("--limit", type=count, default=50, help="judge only the first K questions")
    add("--samples", type=cli.number(int, 2), default=16, help="N, samples per question")
    add("--max-new-tokens", type=count, default=4096, help="longer completions are cut off")
    add("--rewards", default="cer,verifree,exact,rule+cer", help=f"of {', '.join(known)}")
    add("--seed", type=int, default=0, help="random seed of the samples")
    add("--out", help="directory for samples.jsonl and judge.json (default: runs/TIME-judge-PID)")
    args = parser.parse_args()
    # CER comes first: plot.py draws the first reward's R.
    names = sorted(args.rewards.replace(" ", "").split(","), key=lambda name: name != "cer")
    cli.require({*names} <= {*known}, f"--rewards: expected some of {', '.join(known)}")
    device, rows = init_ranks(), []
    rank, world = dist.get_rank(), dist.get_world_size()
    problems = load_problems(args.dataset, args.limit, args.verifier)
    out = make_directory(args.out, "judge")
    actor, tokenizer = load(args.model, device, check_sampling, check_scoring)
    problems, _ = usable_prompts(tokenizer, problems, args.dataset)
    for start in cli.progress("questions", range(0, len(problems), AT_ONCE * world)):
        seed_everything(args.seed, "judge", start)
        mine = problems[start + AT_ONCE * rank :][:AT_ONCE]
        rows += all_gather(judge(actor, tokenizer, mine, names, args) if mine else [])
        append_rows(out / "samples.jsonl", rows[start:])
    if cli.is_rank_0():
        table = say_judgement(rows)
        table.to_json(out / "judge.json", orient="index", indent=2, double_precision=15)
        print(f"all samples are in {out}; to draw one: python plot.py {out} --question 0")
    dist.destroy_process_group()


if __name__ == "__main__":
    cli.run_script(main)
