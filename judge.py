"""Before training: does a reward tell right from wrong on your questions, with your model?

    python judge.py --model Qwen/Qwen3-4B-Base --dataset mine.jsonl

The model samples each question as in training. The verifier that the question names says which
samples are right; `grade.py` says it by you, or by another model, afterwards. Two numbers compare
each reward with that truth:

    AUC  how often a right sample receives more than a wrong one of the same question; .5 is chance
    aim  the cosine between its advantages and those of the truth, over all samples; 1 if training
         would push every sample as the truth would

AUC asks for the order within a question. Aim asks for sizes too: a reward that is tiny for most
questions may order their samples well, and yet only the few others decide the update.
"""

from runtime import cli  # isort: split

import math

import numpy
import pandas
import torch
import torch.distributed as dist

from cer import check_scoring
from engine.load import DTYPES, check_sampling, load
from reward_functions import REWARDS, judge, rewards
from rloo import leave_one_out
from rollout import sample
from runtime.files import append_rows, read_rows, to_jsonl, write_atomically
from runtime.ranks import all_gather, init_ranks, open_run_directory, seed_everything
from runtime.report import RARE, TINY, brief, group_record, sample_table, say_grade
from tasks.data import NAMES, load_problems
from tasks.prompts import show_first, usable_prompts
from tasks.verifiers import VERIFIERS

KNOWN = [name for name in REWARDS if "model" not in REWARDS[name].asks]  # grade.py asks models
DEFAULT = "cer,verifree,exact,overlap,overlap+cer,rule+cer"
SHOWN = "AUC from to aim from to right wrong 0 equal tiny".split()  # the table's columns in print
AT_ONCE = 8  # questions that a rank samples together; what is finished is on the disk


def sample_and_judge(actor, tokenizer, problems, names, args):
    """Sample problems -> for each a line of samples.jsonl, with `right` [N], what the verifier
    accepts, and `rewards`, {name: R [N]}. Its R is that of the first name."""
    groups = sample(actor, tokenizer, problems, args.samples, args.max_new_tokens)
    asked = {"verifier"}.union(*(REWARDS[name].asks for name in names))
    judged = judge(groups, asked, actor, tokenizer)
    R = {name: rewards(name, judged).tolist() for name in names}  # {name: [B, N]}
    return [
        group_record(each, R=R[names[0]][k], rewards={name: R[name][k] for name in names})
        for k, each in enumerate(judged)
    ]


# ---------------------------------------------------------------------------------------- the table


def say_judgement(rows, graded=False):
    """Print what the lines of samples.jsonl say about their rewards -> the table, a DataFrame with
    a row for each reward. graded: whether grade.py says what is right, and not the verifier."""
    names = [*rows[0]["rewards"]]
    samples = sample_table([row | row["rewards"] for row in rows], *names)
    shares = samples[["answered", "right", "verbatim", "truncated"]].mean()
    both, table = judge_rewards(samples, names)
    sampled = ", ".join(f"{name} {brief(share)}" for name, share in shares.items())
    print(f"{len(rows)} questions x {len(rows[0]['answers'])} samples: {sampled}")
    print(f"{both} questions have both right and wrong answers; AUC is their mean")
    shown = table.map(lambda x: "-" if math.isnan(x) else brief(x)).set_axis(SHOWN, axis=1)
    print(shown.to_string())
    print("from, to: 95% over questions; right, wrong: the mean of such samples; 0: share of right")
    print("ones that receive nothing; equal, tiny: questions with equal rewards, or all < 1e-4")
    if "cer" in names and samples.right.any():
        print("least CER of right answers; the model rarely writes such references:")
        for k, reward in samples[samples.right].groupby(level=0).cer.mean().nsmallest(3).items():
            answer = samples.loc[[k]].query("right").answers.iloc[0]
            print(f"  {reward:.1e}  {answer!r:.35} for {' or '.join(rows[k]['references'])!r:.35}")
    if not graded and any(row.get("verifier") == "text" for row in rows):
        print("By the verifier `text`, exact looks nearly perfect whatever it misses: grade first")
    return table


def judge_rewards(samples, names):
    """-> how many questions have both right and wrong answers, and the table. samples: indexed by
    question. The intervals are a bootstrap over questions."""
    answered = samples[samples.answered]
    groups = samples.groupby(level=0)[names]
    right, wrong = answered[answered.right][names], answered[~answered.right][names]
    aucs = question_aucs(samples, names)
    both = len(aucs)
    if not both:
        aucs = numpy.full((1, len(names)), math.nan)
    columns = {
        **interval("AUC", aucs, lambda drawn: drawn.mean(-2)),
        **interval("aim", advantage_products(samples, names), aim),
        "mean if right": right.mean(),
        "mean if wrong": wrong.mean(),
        "right, nothing": (right < TINY).mean(),
        "groups, equal": (groups.nunique() == 1).sum(),
        "groups, tiny": (groups.max() < RARE).sum(),
    }
    return both, pandas.DataFrame(columns, index=names)


def interval(name, of_questions, statistic, draws=2000):
    """A statistic [rewards] of what each question has [questions, ...], with its 95% interval."""
    chosen = numpy.random.default_rng(0).integers(
        len(of_questions), size=(draws, len(of_questions))
    )
    # of_questions[chosen] is [draws, questions, ...], so a statistic counts axes from the end.
    low, high = numpy.nanquantile(statistic(of_questions[chosen]), [0.025, 0.975], axis=0)
    return {name: statistic(of_questions), f"{name}, low": low, f"{name}, high": high}


def question_aucs(samples, names):
    """For each question that has right and wrong answers, and each reward, how often a right answer
    receives more than a wrong one; ties count half -> [questions, rewards]."""
    aucs = []
    for _, group in samples[samples.answered].groupby(level=0):
        right, wrong = (group[group.right == x][names].to_numpy() for x in (True, False))
        if len(right) and len(wrong):
            difference = right[:, None] - wrong
            aucs.append(((difference > 0) + 0.5 * (difference == 0)).mean((0, 1)))
    return numpy.array(aucs)


def advantage_products(samples, names):
    """What aim adds up: A . A, A . T and T . T of each question and reward, with A the advantages
    of the reward and T those of the truth -> [questions, rewards, 3]."""
    products = []
    for _, group in samples.groupby(level=0):
        A = leave_one_out(torch.tensor(group[names].to_numpy(float).T))  # [rewards, N]
        T = leave_one_out(torch.tensor(group.right.to_numpy(float)))  # [N]
        products.append(torch.stack([(A * A).sum(1), A @ T, (T @ T).expand(len(A))], 1).numpy())
    return numpy.array(products)


def aim(products):
    """The cosine of all A with all T. nan where one of them is 0."""
    AA, AT, TT = numpy.moveaxis(products.sum(-3), -1, 0)
    with numpy.errstate(invalid="ignore"):
        return AT / numpy.sqrt(AA * TT)


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, cli.number(int, 1)
    add("--model", required=True, help="Hugging Face model id or directory")
    add("--dataset", required=True, help=f"{NAMES}, or a file")
    add("--verifier", choices=VERIFIERS, help="for rows that name none (default: math or text)")
    add("--limit", type=count, default=50, help="judge only the first K questions")
    add("--samples", type=cli.number(int, 2), default=16, help="N, samples per question")
    add("--max-new-tokens", type=count, default=4096, help="longer completions are cut off")
    add("--rewards", default=DEFAULT, help=f"of {', '.join(KNOWN)}")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="auto: bf16 on a GPU, else fp32")
    add("--seed", type=int, default=0, help="random seed of the samples")
    add("--out", help="directory for samples.jsonl and judge.json (default: runs/TIME-judge-PID)")
    add("--resume", action="store_true", help="go on in --out, with the same other flags")
    args = parser.parse_args()
    # CER comes first: plot.py draws the first reward's R.
    names = sorted(args.rewards.replace(" ", "").split(","), key=lambda name: name != "cer")
    cli.require({*names} <= {*KNOWN}, f"--rewards: expected some of {', '.join(KNOWN)}")
    cli.require(args.out or not args.resume, "--resume needs --out")
    device = init_ranks()
    rank, world = dist.get_rank(), dist.get_world_size()
    problems = load_problems(args.dataset, args.limit, args.verifier)
    out = open_run_directory(args.out, "judge", args.resume)
    actor, tokenizer = load(args.model, device, check_sampling, check_scoring, dtype=args.dtype)
    problems, _ = usable_prompts(tokenizer, problems, args.dataset)
    show_first(tokenizer, problems, args.dataset)

    path, turn = out / "samples.jsonl", AT_ONCE * world
    rows = read_rows(path, log=True) if path.exists() else []
    rows = rows[: len(rows) // turn * turn]  # a kill may have come in the middle of a turn
    write_atomically(path, to_jsonl(rows))
    for start in cli.progress("questions", range(len(rows), len(problems), turn)):
        seed_everything(args.seed, "judge", start)
        mine = problems[start + AT_ONCE * rank :][:AT_ONCE]
        rows += all_gather(sample_and_judge(actor, tokenizer, mine, names, args) if mine else [])
        append_rows(path, rows[start:])
    if cli.is_rank_0():
        table = say_judgement(rows)
        table.to_json(out / "judge.json", orient="index", indent=2, double_precision=15)
        say_grade([problem.verifier for problem in problems], out)
        draw = f"python plot.py {out} --question 0"
        print(f"all samples are in {out}; to draw one: {draw}")
    dist.destroy_process_group()


if __name__ == "__main__":
    cli.run_script(main)
