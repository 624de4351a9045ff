"""Before training: does a reward tell right from wrong on your questions, with your model?

    python judge.py --model Qwen/Qwen3-4B-Base --dataset mine.jsonl

The model samples each question as in training. The verifier that the question names says which
samples are right; `grade.py` says it by you, or by another model, afterwards. Then the AUC of a
reward is how often a right sample receives more than a wrong one of the same question; .5 is
chance. Only samples with an answer count, since a reward of 1 for any answer would tell these from
the others.
"""

from runtime import cli  # isort: split

import numpy
import pandas
import torch.distributed as dist

from cer import check_scoring
from engine.checks import check_sampling
from engine.load import load
from evaluate import add_model_and_data, in_batches, load_model_and_data
from reward_functions import REWARDS, R_by_name, ask_judges, check_asked
from rollout import sample
from runtime.files import append_rows, write_atomically
from runtime.ranks import seed_everything
from runtime.report import warning
from runtime.samples import brief, group_line, sample_table, say_grade, tiny_reward_groups

KNOWN = [name for name in REWARDS if name != "general-verifier"]  # grade.py asks models to reply
DEFAULT = "cer,verifree,exact,overlap,overlap+cer,rule+cer,asked"
AT_ONCE = 8  # questions that a rank samples before they are on the disk
FEW = 10  # fewer questions with right and wrong answers give no interval


# ---------------------------------------------------------------------------------------- the table


def say_ratings(samples, path=None):
    """Print what samples say about the rewards that all of them have -> the table, a DataFrame with
    a row for each reward. path: where it is written before anything is printed."""
    given = [name for name in samples if name in REWARDS]
    names = [name for name in given if samples[name].notna().all()]
    if lacking := ", ".join(name for name in given if name not in names):
        print(f"left out, since some questions lack them: {lacking}")
    if not names:
        return None
    samples = samples.set_index(samples.case.factorize()[0])  # a question of several calls is one
    both, table = rate_rewards(samples, names)
    if path:
        write_atomically(path, table.to_json(orient="index", indent=2, double_precision=15))
    by_question = samples[["answered", "right", "verbatim", "truncated"]].groupby(level=0)
    shares = by_question.mean().mean()
    sampled = ", ".join(f"{name} {brief(share)}" for name, share in shares.items())
    print(f"{samples.index.nunique()} questions, {len(samples)} samples: {sampled}")
    print(f"{both} questions have both right and wrong answers; AUC is their mean")
    print(table.map(lambda x: "-" if pandas.isna(x) else brief(x)).to_string())
    print("low, high: 95% over questions; right, wrong: the mean rewards of such answers")
    if "asked" in names:
        print("asked can be gamed: read samples (experiments/asking/README.md)")
    warned = {}
    for name in names:  # what train.py would warn of with this reward
        tiny = tiny_reward_groups(samples, samples[name], "actor" in REWARDS[name].judges)
        problem = warning(dict(shares, tiny_reward_groups=tiny))
        warned.setdefault(problem, []).append(name)
    for problem in filter(None, warned):
        cli.say(f"warning ({', '.join(warned[problem])}): {problem}")
    return table


def rate_rewards(samples, names):
    """-> how many questions have both right and wrong answers, and the table. samples: indexed by
    question."""
    answered = samples[samples.answered]
    aucs = question_aucs(answered, names)
    table = pandas.DataFrame(index=names, columns=["AUC", "low", "high"], dtype=float)
    if len(aucs):
        table["AUC"] = aucs.mean(0)
    if len(aucs) >= FEW:
        _, table["low"], table["high"] = interval(aucs)
    table["right"] = answered[answered.right][names].mean()
    table["wrong"] = answered[~answered.right][names].mean()
    return len(aucs), table


def interval(of_questions, statistic=lambda resampled: resampled.mean(0)):
    """A statistic of what each question has, and the ends of its 95% interval, by resampling the
    questions -> three arrays. of_questions: [questions, ...]. statistic: of such an array."""
    count = len(of_questions)
    chosen = numpy.random.default_rng(0).integers(count, size=(2000, count))
    resampled = numpy.array([statistic(of_questions[questions]) for questions in chosen])
    return statistic(of_questions), *numpy.nanquantile(resampled, [0.025, 0.975], axis=0)


def question_aucs(answered, names):
    """For each question that has right and wrong answers, and each reward, how often a right answer
    receives more than a wrong one; ties count half -> [questions, rewards]."""
    aucs = []
    for _, group in answered.groupby(level=0):
        right, wrong = (group[group.right == x][names].to_numpy() for x in (True, False))
        if len(right) and len(wrong):
            difference = right[:, None] - wrong
            aucs.append(((difference > 0) + 0.5 * (difference == 0)).mean((0, 1)))
    return numpy.array(aucs).reshape(-1, len(names))


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
