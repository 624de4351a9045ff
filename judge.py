"""Before training: does a reward tell right from wrong on your questions, with your model?

    python judge.py --model Qwen/Qwen3-4B-Base --dataset mine.jsonl

The model samples each question as in training. The verifier that the question names says which
samples are right; `grade.py` says it by you, or by another model, afterwards. Then the AUC of a
reward is how often a right sample receives more than a wrong one of the same question; .5 is
chance. Only samples with an answer count, since a reward of 1 for any answer would tell these from
the others.
"""

from runtime import cli  # isort: split

import torch.distributed as dist

from cer import check_scoring
from engine.checks import check_sampling
from engine.load import load
from measure import add_model_and_data, in_batches, load_model_and_data, say_ratings
from reward_functions import REWARDS, R_by_name, ask_judges, check_asked
from rollout import sample
from runtime.files import append_rows
from runtime.ranks import seed_everything
from runtime.sampled import group_line, sample_table, say_grade

KNOWN = [name for name in REWARDS if name != "general-verifier"]  # grade.py asks models to reply
DEFAULT = "cer,verifree,exact,overlap,overlap+cer,rule+cer,asked"
AT_ONCE = 8  # questions that a rank samples before they are on the disk


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add_model_and_data(add, 4096, "judge.json")
    add("--limit", type=cli.number(int, 1), default=50, help="judge only the first K questions")
    add("--samples", type=cli.number(int, 2), default=16, help="N, samples per question")
    add("--rewards", default=DEFAULT, help=f"of {', '.join(KNOWN)}")
    add("--verifier-model", help="who is asked for the reward asked (default: the model itself)")
    args = parser.parse_args()
    # CER comes first: plot.py draws the first reward's R.
    names = dict.fromkeys(args.rewards.replace(" ", "").split(","))
    names = sorted(names, key=lambda name: name != "cer")
    cli.require({*names} <= {*KNOWN}, f"--rewards: expected some of {', '.join(KNOWN)}")
    idle = args.verifier_model and "asked" not in names
    cli.require(not idle, "--verifier-model does nothing without the reward asked: leave it out")
    checks = check_sampling, check_scoring
    actor, tokenizer, datasets, out = load_model_and_data(args, 4096, "judge", *checks)
    problems = sum(datasets.values(), [])
    verifier_model, options = args.verifier_model, dict(dtype=args.dtype, sampler=args.sampler)
    verifier_model = verifier_model and load(verifier_model, actor.device, check_scoring, **options)
    if "asked" in names:
        try:
            check_asked(problems, verifier_model or (actor, tokenizer), args.max_new_tokens)
        except cli.InputError as reason:
            cli.say(f"asked is left out, since {reason}")
            names.remove("asked")
    cli.require(names, "no reward is left to judge")
    seed_everything(args.seed, "judge")
    judges = {"verifier"}.union(*(REWARDS[name].judges for name in names))

    def to_lines(mine):
        groups = sample(actor, tokenizer, mine, args.samples, args.max_new_tokens)
        for judged in ask_judges(groups, judges, actor, tokenizer, None, verifier_model):
            rewards = {name: R_by_name(name, [judged])[0].tolist() for name in names}
            yield group_line(judged, rewards=rewards, R=rewards[names[0]])

    lines = []
    for batch in in_batches(problems, AT_ONCE, to_lines):
        append_rows(out / "samples.jsonl", batch)
        lines += batch
    if cli.is_rank_0():
        say_ratings(sample_table(lines), path=out / "judge.json")
        say_grade(lines, out)
        print(f"all samples are in {out}")
        if with_columns := [k for k, line in enumerate(lines) if line.get("columns")]:
            draw = cli.for_shell(out, "--question", with_columns[0])
            print(f"to draw one: python plot.py {draw}")
    dist.destroy_process_group()


if __name__ == "__main__":
    cli.run_script(main)
