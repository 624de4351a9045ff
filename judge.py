"""Before training: does a reward tell right from wrong on your questions, with your model?

    python judge.py --model Qwen/Qwen3-4B-Base --dataset mine.jsonl

The model samples each question as in training. The verifier that the question names says which
samples are right: a program, or (--verifier general-verifier) another model. Or you say it, with
grade.py. A reward is a good judge if a right sample receives more than a wrong one of the same
question. AUC is how often that is so: 1 is always, and .5 is chance.
"""

import torch.distributed as dist

from cer import check_scoring
from engine.load import check_sampling, load
from report import group_record, say_judgement
from reward_functions import REWARDS, judge, rewards
from rollout import sample
from runtime import cli
from runtime.files import append_rows
from runtime.ranks import all_gather, init_ranks, make_directory, seed_everything
from tasks.data import HUB, TOY, load_problems
from tasks.general_verifier import GENERAL_VERIFIER
from tasks.prompts import usable_prompts
from tasks.verifiers import VERIFIERS

AT_ONCE = 8  # questions that a rank samples together; what is finished is on the disk


def sample_and_judge(actor, tokenizer, problems, names, args, verifier):
    """Sample problems -> for each a row of samples.jsonl. Beside what a run writes it has `right`
    [N], whether the verifier accepts a sample, and `rewards`, {name: R [N]}. Its R is the first."""
    groups = sample(actor, tokenizer, problems, args.samples, args.max_new_tokens)
    judges = {"rule"}.union(*(REWARDS[name].judges for name in names))
    judged, rows = judge(groups, judges, actor, tokenizer, None, verifier), []
    R = {name: rewards(name, judged) for name in names}
    for k, each in enumerate(judged):
        of_group = {name: R[name][k].tolist() for name in names}
        right = {"right": each.right.bool().tolist(), "rewards": of_group}
        rows.append(group_record(0, each, R[names[0]][k]) | right)
    return rows


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", required=True, help="Hugging Face model id or directory")
    add("--dataset", required=True, help=f"{', '.join([*TOY, *HUB])}, or a file")
    add("--verifier", choices=VERIFIERS, help="for rows that name none (default: math or text)")
    add("--verifier-model", default=GENERAL_VERIFIER, help="for general-verifier")
    add("--limit", type=count, default=50, help="judge only the first K questions")
    add("--samples", type=cli.number(int, 2), default=16, help="N, samples per question")
    add("--max-new-tokens", type=count, default=4096, help="longer completions are cut off")
    add("--rewards", default="cer,verifree,exact,rule+cer", help=f"of {', '.join(REWARDS)}")
    add("--seed", type=int, default=0, help="random seed of the samples")
    add("--out", help="directory for samples.jsonl and judge.json (default: runs/TIME-judge-PID)")
    args = parser.parse_args()
    # CER comes first: plot.py draws the first reward's R.
    names = sorted(args.rewards.replace(" ", "").split(","), key=lambda name: name != "cer")
    cli.require({*names} <= {*REWARDS}, f"--rewards: expected some of {', '.join(REWARDS)}")
    device, rows = init_ranks(), []
    rank, world = dist.get_rank(), dist.get_world_size()
    problems = load_problems(args.dataset, args.limit, args.verifier)
    out = make_directory(args.out, "judge")
    actor, tokenizer = load(args.model, device, check_sampling, check_scoring)
    by_model = "general-verifier" in {*names, *(problem.verifier for problem in problems)}
    verifier = load(args.verifier_model, device) if by_model else None
    problems, _ = usable_prompts(tokenizer, problems, args.dataset)
    for start in cli.progress("questions", range(0, len(problems), AT_ONCE * world)):
        seed_everything(args.seed, "judge", start)
        mine = problems[start + AT_ONCE * rank :][:AT_ONCE]
        judging = actor, tokenizer, mine, names, args, verifier
        rows += all_gather(sample_and_judge(*judging) if mine else [])
        append_rows(out / "samples.jsonl", rows[start:])
    if cli.is_rank_0():
        table = say_judgement(rows)
        table.to_json(out / "judge.json", orient="index", indent=2, double_precision=15)
        print(f"all samples are in {out}; to draw one: python plot.py {out} --question 0")
    dist.destroy_process_group()


if __name__ == "__main__":
    cli.run_script(main)
