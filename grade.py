"""The truth need not be a program: you say which answers are right, or another model says it.

    python grade.py runs/MY-JUDGE                                  # by you
    python grade.py runs/MY-JUDGE --by TIGER-Lab/general-verifier  # by a model
    python grade.py runs/BEFORE runs/AFTER --table                 # what the grades say

A directory is what judge.py, evaluate.py or train.py wrote. You see a question, its references, and
the answers of all directories, shuffled and without their rewards. You type the numbers of the
right ones. An answer that equals a reference (by the verifier `text`) is right and no answer is
wrong, so neither is asked. Each reply is saved at once, in grades.jsonl of the first directory, and
a second start goes on. A model is asked about the same answers, so you can see how often you agree
with it before you let it grade the rest.
"""

from runtime import cli  # isort: split

import contextlib
from pathlib import Path

import pandas
import torch.distributed as dist

from engine.load import load
from judge import FEW, say_judgement
from runtime.files import lock
from runtime.ranks import all_gather, init_ranks
from runtime.report import brief
from tasks.data import Problem
from tasks.general_verifier import decide, read_prompt
from tasks.grades import Grades, draw, in_doubt, read_lines, read_samples
from tasks.verifiers import plain_text

AT_ONCE = 64  # answers about which a model is asked together, on each rank
WORD = {True: "right", False: "wrong"}

# --------------------------------------------------------------------------------------- who grades


def by_you(samples, questions, grades):
    """Ask about each answer in doubt that has no grade yet."""
    doubts = {question: in_doubt(samples, question) for question in questions}
    questions = [question for question in questions if doubts[question]]
    print(f"{len(questions)} questions have answers in doubt. Type {cli.KEYS}.")
    at, back = 0, False
    while at < len(questions):
        question = questions[at]
        graded = {} if back else grades.of.get("you", {})  # who comes back sees all answers again
        asked = [a for key, a in doubts[question].items() if (question, key) not in graded]
        references = samples.references[samples.question == question].iloc[0]
        reply = {}
        if asked:
            place = f"{at + 1} of {len(questions)}:"
            reply = cli.ask_numbers(place, question, " or ".join(references), asked)
        if reply == "q":
            print("\nstopped; the same command goes on")
            return
        back = reply == "b"
        if not back:
            for answer, right in reply.items():
                grades.save(question, answer, right, "you")
        at = max(0, at - 1) if back else at + 1


def by_model(samples, questions, grades, by, model, prompt):
    """Ask a model in batches, in the order of the questions. model: a pair (model, tokenizer)."""
    graded = grades.of.get(by, {})
    undecided = 0
    rank, world = dist.get_rank(), dist.get_world_size()
    todo = []
    for question in questions:
        first, *others = samples.references[samples.question == question].iloc[0]
        problem = Problem(question, first, others=tuple(others))
        doubts = in_doubt(samples, question).items()
        todo += [(problem, answer) for key, answer in doubts if (question, key) not in graded]
    for start in cli.progress("grade", range(0, len(todo), AT_ONCE * world), unit="batch"):
        mine = todo[start : start + AT_ONCE * world][rank::world]
        decisions = decide(mine, model, prompt)
        for (problem, answer), decision in all_gather([*zip(mine, decisions)]):
            undecided += decision is None  # not accepted, as in training
            grades.save(problem.question, answer, decision is True, by)
    if undecided:
        cli.say(f"{undecided} of {len(todo)} replies hold no decision; they count as wrong")


# -------------------------------------------------------------------------------------- the numbers


def verdicts(samples, questions, graded):
    """For each sample whether it is right, None where that is not known. Only questions before the
    first ungraded answer count. Later ones that happen to need no grade are the easy ones, and
    would raise the share. graded: {(question, key): right}; a question with None is left out."""
    counts = set()
    for question in questions:
        own = [graded.get((question, key), "missing") for key in in_doubt(samples, question)]
        if "missing" in own:
            break
        if None not in own:
            counts.add(question)
    keys = zip(samples.question, samples.key)
    right = samples.clear.combine_first(pandas.Series(map(graded.get, keys), samples.index))
    return right.where(samples.question.isin(counts))


def say_pass_at_1(samples, truths):
    """Print pass@1 of each run by each truth, a column of samples, and the change from the first
    run, paired by question."""
    runs = list(samples.run.unique())
    for by in truths:
        known = samples.dropna(subset=[by]).astype({by: float})
        shares = known.pivot_table(by, "question", "run")[runs]  # means
        print(f"\n{len(shares)} questions, what is right by {by}:")
        for run in runs:
            line = f"  {run}: pass@1 {brief(shares[run].mean())} (SE {brief(shares[run].sem())})"
            change = shares[run] - shares[runs[0]]
            low, high = (brief(change.mean() + sign * 1.96 * change.sem()) for sign in (-1, 1))
            interval = f"95%: {low} to {high}" if len(shares) >= FEW else f"no interval under {FEW}"
            line += f", change {brief(change.mean())} ({interval})" if run != runs[0] else ""
            print(line)


def say_agreement(samples, by):
    """How far a model accepts what you accept, and three answers on which you differ."""
    doubtful = samples[samples.clear.isna()].drop_duplicates(["question", "key"])
    both = doubtful.dropna(subset=["you", by])
    differ = both[both.you != both[by]]
    print(f"\nyou and {by} agree on {len(both) - len(differ)} of {len(both)} answers: it accepts")
    for yours, group in both.groupby("you"):
        print(f"  {group[by].astype(bool).sum()} of your {len(group)} {WORD[yours]} ones")
    for row in differ.head(3).itertuples():
        print(f"  {row.answer!r:.30} for {row.references[0]!r:.30}: you say {WORD[row.you]}")


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("directories", nargs="+", metavar="DIR", help="of judge, evaluate or train")
    add("--by", default="you", metavar="you|MODEL", help="who grades: you, or a model's id or path")
    add("--prompt", help="file with another prompt for the model")
    add("--questions", type=cli.number(int, 1), default=50, help="grade at most K questions")
    add("--seed", type=int, default=0, help="random seed of the choice of questions")
    add("--table", action="store_true", help="ask nothing, show what the grades say")
    args = parser.parse_args()
    directories = [Path(each) for each in args.directories]
    prompt = args.prompt and read_prompt(args.prompt)
    samples = read_samples(directories)
    questions = draw(samples, args.questions, args.seed)
    samples = samples[samples.question.isin(questions)]
    by = args.by if prompt is None else f"{args.by} with {args.prompt}"
    ask = not args.table
    with lock(directories[0]) if ask and cli.is_rank_0() else contextlib.nullcontext():
        grades = Grades(directories)
        if ask:
            grades.mend()
            if args.by == "you":
                by_you(samples, questions, grades)
            else:
                by_model(samples, questions, grades, by, load(args.by, init_ranks()), prompt)
                dist.destroy_process_group()
    if not cli.is_rank_0():
        return
    grades.of.setdefault(by, {})  # where nothing is in doubt, all is known
    for name, graded in grades.of.items():
        samples = samples.assign(**{name: verdicts(samples, questions, graded)})
    truths = [name for name in grades.of if samples[name].notna().any()]
    cli.require(by in truths, f"no question is graded by {by}")
    say_pass_at_1(samples[samples[truths].notna().any(axis=1)], [*truths, "verifier"])
    for name in truths:
        if "you" in truths and name != "you":
            say_agreement(samples, name)
    known = samples.dropna(subset=[by])
    truth = dict(zip(zip(known.question, known.key), known[by]))
    graded = {*known.question}
    for directory in directories:
        by_judge = [x for x in read_lines(directory) if "rewards" in x and x["question"] in graded]
        for line in by_judge:
            keys = [(line["question"], plain_text(answer or "")) for answer in line["answers"]]
            line["right"] = [bool(truth[key]) for key in keys]
        if by_judge:
            print(f"\n{directory}, what is right by {by}:")
            say_judgement(by_judge, graded=True)


if __name__ == "__main__":
    cli.run_script(main)
