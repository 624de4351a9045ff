"""Before training: does a reward tell right from wrong on your questions, with your model?

    python judge.py --model Qwen/Qwen3-4B-Base --dataset mine.jsonl

The model samples each question as in training. The verifier that the question names says which
samples are right; `grade.py` says it by you, or by another model, afterwards. Then the AUC of a
reward is how often a right sample receives more than a wrong one of the same question; .5 is
chance. Only samples with an answer count, since a reward of 1 for any answer would tell these from
the others.
"""

from runtime import cli  # isort: split

import math

import numpy
import pandas
import torch.distributed as dist

from cer import check_scoring
from engine.load import add_flags, check_sampling, load
from engine.sampling import positions
from evaluate import sample_and_judge
from reward_functions import REWARDS, check_asked
from runtime.files import append_rows, write_atomically
from runtime.ranks import init_ranks, open_run_directory, seed_everything
from runtime.report import brief, case_of, sample_table, say_grade
from tasks.data import NAMES, load_problems
from tasks.prompts import show_first, usable_prompts
from tasks.verifiers import VERIFIERS

KNOWN = [name for name in REWARDS if name != "general-verifier"]  # grade.py asks models to reply
DEFAULT = "cer,verifree,exact,overlap,overlap+cer,rule+cer,asked"
FEW = 10  # fewer questions with right and wrong answers give no interval
AT_ONCE = 8  # questions that a rank samples together; what is finished is on the disk


# ---------------------------------------------------------------------------------------- the table


def say_judgement(lines, path=None):
    """Print what lines of samples.jsonl say about the rewards that all of them have -> the table, a
    DataFrame with a row for each reward. path: where it is written before anything is printed."""
    rewards = pandas.DataFrame([line.get("rewards", {}) for line in lines])
    names = [*rewards.dropna(axis="columns")]
    if lacking := [name for name in rewards if name not in names]:
        print(f"left out, since some questions lack them: {', '.join(lacking)}")
    if not names:
        return None
    samples = sample_table([line | line["rewards"] for line in lines], *names)
    # Lines of the same question, from several calls, are one question.
    cases = pandas.Series(map(case_of, lines))
    samples.index = cases.factorize()[0][samples.index]
    shares = samples[["answered", "right", "verbatim", "truncated"]].mean()
    both, table = judge_rewards(samples, names)
    if path:
        write_atomically(path, table.to_json(orient="index", indent=2, double_precision=15))
    sampled = ", ".join(f"{name} {brief(share)}" for name, share in shares.items())
    print(f"{cases.nunique()} questions, {len(samples)} samples: {sampled}")
    print(f"{both} questions have both right and wrong answers; AUC is their mean")
    print(table.map(lambda x: "-" if math.isnan(x) else brief(x)).to_string())
    print("low, high: 95% over questions; right, wrong: the mean rewards of such answers")
    if "asked" in names:
        print("asked can be gamed: read samples (docs/measurements.md#why-not-ask-the-model)")
    return table


def judge_rewards(samples, names):
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


def interval(of_questions, statistic=lambda drawn: drawn.mean(0)):
    """A statistic of what each question has, and the ends of its 95% interval, by drawing questions
    again -> three arrays. of_questions: [questions, ...]. statistic: of such an array."""
    count = len(of_questions)
    chosen = numpy.random.default_rng(0).integers(count, size=(2000, count))
    drawn = numpy.array([statistic(of_questions[questions]) for questions in chosen])
    return statistic(of_questions), *numpy.nanquantile(drawn, [0.025, 0.975], axis=0)


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
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", required=True, help="Hugging Face model id or directory")
    add("--dataset", required=True, help=f"{NAMES}, or a file")
    add("--verifier", choices=VERIFIERS, help="for rows that name none (default: math or text)")
    add("--limit", type=count, default=50, help="judge only the first K questions")
    add("--samples", type=cli.number(int, 2), default=16, help="N, samples per question")
    cut = "longer completions are cut off (default: 4096, or half of the model's positions)"
    add("--max-new-tokens", type=count, help=cut)
    add("--rewards", default=DEFAULT, help=f"of {', '.join(KNOWN)}")
    add("--verifier-model", help="who is asked for the reward asked (default: the model itself)")
    add_flags(add)
    add("--seed", type=int, default=0, help="random seed of the samples")
    add("--out", help="directory for samples.jsonl and judge.json (default: runs/TIME-judge-PID)")
    args = parser.parse_args()
    # CER comes first: plot.py draws the first reward's R.
    names = dict.fromkeys(args.rewards.replace(" ", "").split(","))
    names = sorted(names, key=lambda name: name != "cer")
    cli.require({*names} <= {*KNOWN}, f"--rewards: expected some of {', '.join(KNOWN)}")
    device = init_ranks()
    problems = load_problems(args.dataset, args.limit, args.verifier)
    out = open_run_directory(args.out, "judge")
    kind = dict(dtype=args.dtype, sampler=args.sampler)
    actor, tokenizer = load(args.model, device, check_sampling, check_scoring, **kind)
    tokens = args.max_new_tokens or int(min(4096, positions(actor) / 2))
    problems, _ = usable_prompts(actor, tokenizer, problems, args.dataset, tokens)
    show_first(tokenizer, problems, args.dataset)
    other = args.verifier_model and load(args.verifier_model, device, check_scoring, **kind)
    if "asked" in names:
        try:
            check_asked(problems, other or (actor, tokenizer), tokens)
        except cli.InputError as reason:
            cli.say(f"asked is left out, since {reason}")
            names.remove("asked")
    cli.require(names, "no reward is left to judge")
    seed_everything(args.seed, "judge")
    how = args.samples, tokens, AT_ONCE, names, other
    lines = []
    turns = math.ceil(len(problems) / AT_ONCE / dist.get_world_size())
    judged = sample_and_judge(actor, tokenizer, problems, *how)
    for some in cli.progress("questions", judged, total=turns):
        append_rows(out / "samples.jsonl", some)
        lines += some
    if cli.is_rank_0():
        say_judgement(lines, path=out / "judge.json")
        say_grade([problem.verifier for problem in problems], out)
        print(f"all samples are in {out}")
        if drawn := [k for k, line in enumerate(lines) if line.get("columns")]:
            print(f"to draw one: python plot.py {out} --question {drawn[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    cli.run_script(main)
