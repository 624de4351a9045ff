"""What the programs that measure a model share: which model answers which questions, pass@1, and
the table of judge.py, which says how well each reward tells right from wrong.
"""

import os

import numpy
import pandas
import torch.distributed as dist

from engine.load import add_flags, load
from engine.tokens import positions
from reward_functions import REWARDS, ask_judges
from rollout import sample
from runtime import cli
from runtime.files import write_atomically
from runtime.ranks import all_gather, init_ranks, open_run_directory, seed_everything
from runtime.report import warning
from runtime.sampled import brief, group_line, of_questions, sample_table, tiny_reward_groups
from tasks.data import NAMES, load_examples, load_problems, with_examples
from tasks.prompts import show_first, usable_prompts
from tasks.verifiers import VERIFIERS

FEW = 10  # fewer questions with right and wrong answers give no interval

# -------------------------------------------------------------------------- models and questions


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


# ------------------------------------------------------------------------------------------ pass@1


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


# --------------------------------------------------------------------------- the table of judge.py


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
