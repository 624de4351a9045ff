"""The truth need not be a program: you say which answers are right, or another model says it.

    python grade.py runs/MY-JUDGE                                  # by you
    python grade.py runs/MY-JUDGE --by TIGER-Lab/general-verifier  # by a model
    python grade.py runs/BEFORE runs/AFTER                         # of two runs, paired by question

A directory is what judge.py, evaluate.py or train.py wrote. You see a question, its references, and
the answers of all directories, shuffled and without their rewards. You type the numbers of the
right ones. You are not asked about answers that equal a reference by the verifier `text`, which
count as right, nor about samples without an answer, which count as wrong. A model is asked about
the same answers, so you can see how often you agree with it before you let it grade the rest.

Each grader has a file: grades.jsonl is yours, and a model's is named by it and its weights. Each
grade is saved there at once, as a line, and a second start goes on. It belongs to a question with
its references and an answer; the last one counts. The numbers are given by all files grades*.jsonl
that lie together, and how far the others agree with the first.
"""

from runtime import cli  # isort: split

import json
import os
import textwrap
from pathlib import Path

from engine.checks import mark_of
from engine.load import add_flags, load
from measure import say_ratings
from reward_functions import REWARDS
from runtime.files import append_rows
from runtime.ranks import init_ranks
from runtime.sampled import read_lines, say_pass_at_1
from tasks.data import Problem
from tasks.general_verifier import ask, read_prompt
from tasks.grades import by_grades, choose_questions, in_doubt, read_grades

AT_ONCE = 64  # answers about which a model is asked together
KEYS = "the numbers of the right ones, Enter for none, ? to leave the question out, q to stop"


def save(path, sample, right, **more):
    row = {"question": sample.question, "references": sample.references}
    append_rows(path, [row | {"answer": sample.answers, "right": right} | more])


# --------------------------------------------------------------------------------------- who grades


def by_person(todo, path):
    """Ask about the answers to each question."""
    print(f"{todo.case.nunique()} questions have answers in doubt. Type {KEYS}.")
    for turn, (_, of_case) in enumerate(todo.groupby("place"), start=1):
        asked = [*of_case.itertuples()]
        print(f"\n{turn} of {todo.case.nunique()}:\n{wrapped(asked[0].question)}")
        print(f"reference:\n  {wrapped(' or '.join(asked[0].references), 2)}")
        for k, sample in enumerate(asked, start=1):
            print(f"{k:>4}  {wrapped(cli.shorten(' '.join(sample.answers.split()), 300), 6)}")
        reply = ask_numbers(len(asked))
        if reply is None:
            print("\nstopped; the same command goes on")
            return
        for sample, right in zip(asked, reply):
            save(path, sample, right)


def ask_numbers(count):
    """-> for each of so many numbers whether it is typed, or None for all to leave the question
    out. None alone means to stop, also by Ctrl-C or at the end of a pipe."""
    choices = [str(k) for k in range(1, count + 1)]
    while True:
        try:
            reply = input("right: ").replace(",", " ").split()
        except (EOFError, KeyboardInterrupt, RuntimeError):  # the last one without any stdin
            return None
        if reply == ["q"]:
            return None
        if reply == ["?"]:
            return [None] * count
        if {*reply} <= {*choices}:
            return [choice in reply for choice in choices]
        print(f"expected {KEYS}")


def wrapped(text, indent=0):
    """A text for a terminal of 80 columns."""
    lines = [textwrap.fill(line, 74) for line in cli.printable(text).split("\n")]
    return "\n".join(lines).replace("\n", "\n" + " " * indent)


def by_model(todo, path, verifier_model, prompt):
    """Ask a model in batches, in the order of the questions. An answer about which it does not
    decide is kept as null, as a question is that you leave out."""
    for start in cli.progress("grade", range(0, len(todo), AT_ONCE), unit="batch"):
        batch, pairs = [*todo[start : start + AT_ONCE].itertuples()], []
        for sample in batch:
            reference, *others = sample.references
            problem = Problem(sample.question, reference, others=tuple(others))
            pairs.append((problem, sample.answers))
        for sample, right, reply in zip(batch, *ask(pairs, verifier_model, prompt)):
            save(path, sample, right, reply=reply)


# -------------------------------------------------------------------------------------- the numbers


def say_numbers(samples, path):
    """pass@1 and the table of judge.py by the grades in a file -> these grades."""
    grades = read_grades(path)
    graded = by_grades(samples, grades, path)
    if len(graded):
        say_pass_at_1(graded, path)
        say_pass_at_1(samples.loc[graded.index], "the run's own verifier")
        for run, of_run in graded.groupby("run", sort=False):
            if any(of_run[name].notna().any() for name in of_run if name in REWARDS):
                print(f"\n{run}, what is right by {path}:")
                say_ratings(of_run.dropna(axis="columns", how="all"))
    else:
        print(f"{path} has no grades of these questions")
    return grades


def say_agreement(one, other, of_one, of_other):
    """How far another grader accepts what one accepts, and three answers on which they differ."""
    both = [at for at in of_one if None not in (of_one[at], of_other.get(at))]
    differ = [at for at in both if of_one[at] != of_other[at]]
    print(f"\n{one} and {other} agree on {len(both) - len(differ)} of {len(both)} answers")
    for right, word in (True, "right"), (False, "wrong"):
        yes = [of_other[at] for at in both if of_one[at] == right]
        print(f"  {other} accepts {sum(yes)} of the {len(yes)} that {one} calls {word}")
    for case, key in differ[:3]:
        word, reference = "right" if of_one[case, key] else "wrong", json.loads(case)[1][0]
        print(f"  {key!r:.30} for {reference!r:.30}: {one} says {word}")


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("directories", nargs="+", metavar="DIR", help="of judge, evaluate or train")
    add("--by", default="you", metavar="you|MODEL", help="who grades: you, or a model's id or path")
    add("--prompt", help="file with another prompt for the model")
    add_flags(add)
    add("--grades", help="the grader's file (default: grades*.jsonl in the first DIR)")
    add("--questions", type=cli.number(int, 1), default=50, help="grade at most K questions")
    args = parser.parse_args()
    cli.require(os.environ.get("WORLD_SIZE", "1") == "1", "grade.py runs without torchrun")
    directories = [Path(each) for each in args.directories]
    prompt = args.prompt and read_prompt(args.prompt)
    lines = [line for directory in directories for line in read_lines(directory)]
    samples = choose_questions(lines, args.questions)
    name, verifier_model = "grades.jsonl", None
    if args.by != "you":
        verifier_model = load(args.by, init_ranks(), dtype=args.dtype, sampler=args.sampler)
        mark = mark_of(args.by, prompt)  # other weights, another grader
        name = f"grades-{Path(args.by).name}-{mark}.jsonl"
    path = Path(args.grades or directories[0] / name)
    usable = path.suffix == ".jsonl" and path.parent.is_dir()
    cli.require(usable, f"--grades {path}: expected a file .jsonl in a directory that is there")
    todo = in_doubt(samples, read_grades(path))
    if todo.empty:
        print("nothing is asked: no sample has an answer that is neither a reference nor graded")
    elif verifier_model:
        by_model(todo, path, verifier_model, prompt)
    else:
        by_person(todo, path)
    files = {path, *path.parent.glob("grades*.jsonl")}
    first, *others = sorted(files, key=lambda file: (file.name != "grades.jsonl", file))
    of_first = say_numbers(samples, first)
    for other in others:
        say_agreement(first, other, of_first, say_numbers(samples, other))


if __name__ == "__main__":
    cli.run_script(main)
