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

import random
import textwrap
from pathlib import Path

import pandas
import torch.distributed as dist

from engine.load import load
from judge import say_judgement
from runtime.files import append_rows, read_rows, to_jsonl, write_atomically
from runtime.ranks import all_gather, init_ranks
from runtime.report import over_questions
from tasks.data import Problem
from tasks.general_verifier import ask, read_prompt
from tasks.verifiers import plain_text

AT_ONCE = 64  # answers about which a model is asked together, on each rank
KEYS = "the numbers of the right ones, Enter for none, ? to leave the question out, q to stop"
WORD = {True: "right", False: "wrong"}

# ----------------------------------------------------------------------------- samples and grades


def read_lines(directory):
    """The lines of judge.py or of an evaluation. Of a run's evaluations, whose lines have a step,
    these are the first and the last."""
    is_run = (directory / "config.json").exists()
    lines = read_rows(directory / ("evaluations.jsonl" if is_run else "samples.jsonl"), log=True)
    cli.require(lines, f"{directory} has no evaluation: train.py makes them with --eval-dataset")
    ends = lines[0].get("step"), lines[-1].get("step")
    return [line for line in lines if line.get("step") in ends]


def read_samples(directories):
    """-> a DataFrame with a row for each sample: run (a directory, or an evaluation of a training
    run), question, references, answer; verifier, what the run's own verifier says; key, equal for
    answers that are equal by the verifier `text`; and clear, True for what equals a reference,
    False for no answer, and else None."""
    rows = []
    for directory in directories:
        for line in read_lines(directory):
            run = f"{directory} step {line['step']}" if "step" in line else str(directory)
            of_line = {"run": run, "question": line["question"], "references": line["references"]}
            for answer, right in zip(line["answers"], line["right"]):
                key = plain_text(answer or "")
                clear = True if key in map(plain_text, line["references"]) else None
                of_sample = {"answer": answer, "verifier": right, "key": key}
                rows.append(of_line | of_sample | {"clear": clear if answer else False})
    return pandas.DataFrame(rows)


def draw(samples, count, seed):
    """At most so many of the questions that all runs have. Their order depends only on their text
    and the seed, so that grades are of use with other runs, and with more questions."""
    in_runs = samples.groupby("question").run.nunique()
    questions = list(in_runs.index[in_runs == samples.run.nunique()])
    cli.require(questions, "no question is in all of these directories")
    return sorted(questions, key=lambda text: random.Random(f"{seed} {text}").random())[:count]


def in_doubt(samples, question):
    """The answers to a question that are not clear, shuffled -> {key: answer}."""
    rows = samples[(samples.question == question) & samples.clear.isna()]
    answers = sorted(dict(zip(rows.key, rows.answer)).items())
    return dict(random.Random(question).sample(answers, len(answers)))


class Grades:
    """What is in the files grades.jsonl of the directories. New grades go into the first."""

    def __init__(self, directories):
        self.of = {}  # of[by][question, key]
        self.path, *others = (directory / "grades.jsonl" for directory in directories)
        for path in (self.path, *others):
            for row in read_rows(path, log=True) if path.exists() else []:
                self.note(**row)

    def mend(self):
        """Take off half a line that a kill has left, before others are appended."""
        if self.path.exists():
            write_atomically(self.path, to_jsonl(read_rows(self.path, log=True)))

    def note(self, question, answer, right, by):
        self.of.setdefault(by, {})[question, plain_text(answer)] = right

    def save(self, question, answer, right, by):
        """right: None if you leave the question out."""
        row = {"question": question, "answer": answer, "right": right, "by": by}
        append_rows(self.path, [row])
        self.note(**row)

    def todo(self, samples, questions, by):
        """The answers in doubt that this grader has not graded -> {question: (references,
        answers)}, without questions that have none."""
        todo, graded = {}, self.of.get(by, {})
        for question in questions:
            doubts = in_doubt(samples, question).items()
            if answers := [answer for key, answer in doubts if (question, key) not in graded]:
                todo[question] = samples[samples.question == question].references.iloc[0], answers
        return todo


# --------------------------------------------------------------------------------------- who grades


def by_you(todo, grades):
    """Ask about the answers to each question."""
    print(f"{len(todo)} questions have answers in doubt. Type {KEYS}.")
    for place, (question, (references, answers)) in enumerate(todo.items(), start=1):
        print(f"\n{place} of {len(todo)}:\n{wrapped(question)}")
        print(f"reference:\n  {wrapped(' or '.join(references), 2)}")
        for number, answer in enumerate(answers, start=1):
            print(f"{number:>4}  {wrapped(cli.shorten(' '.join(answer.split()), 300), 6)}")
        reply = ask_numbers(answers)
        if reply is None:
            print("\nstopped; the same command goes on")
            return
        for answer, right in reply.items():
            grades.save(question, answer, right, "you")


def ask_numbers(answers):
    """-> {answer: whether its number is typed}, with None for all to leave the question out; or
    None to stop, also by Ctrl-C or at the end of a pipe."""
    numbers = [str(number) for number in range(1, len(answers) + 1)]
    while True:
        try:
            reply = input("right: ").replace(",", " ").split()
        except (EOFError, KeyboardInterrupt):
            return None
        if reply == ["q"]:
            return None
        if reply == ["?"]:
            return dict.fromkeys(answers)
        if {*reply} <= {*numbers}:
            return {answer: number in reply for number, answer in zip(numbers, answers)}
        print(f"expected {KEYS}")


def wrapped(text, indent=0):
    """A text for a terminal of 80 columns."""
    lines = cli.printable(text).split("\n")
    parts = [part for line in lines for part in textwrap.wrap(line, 74) or [""]]
    return ("\n" + " " * indent).join(parts)


def by_model(todo, grades, by, model, prompt):
    """Ask a model in batches, in the order of the questions. model: a pair (model, tokenizer)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [
        (Problem(question, references[0], others=tuple(references[1:])), answer)
        for question, (references, answers) in todo.items()
        for answer in answers
    ]
    for start in cli.progress("grade", range(0, len(pairs), AT_ONCE * world), unit="batch"):
        mine = pairs[start : start + AT_ONCE * world][rank::world]
        verdicts = ask(mine, model, prompt)
        for (problem, answer), right in all_gather([*zip(mine, verdicts)]):
            grades.save(problem.question, answer, right, by)


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
    run, paired by question. ±: standard errors over questions."""
    for by in truths:
        known = samples.dropna(subset=[by]).astype({by: float})
        shares = known.pivot_table(by, "question", "run")[[*samples.run.unique()]]  # means
        print(f"\n{len(shares)} questions, what is right by {by}:")
        for run in shares:
            line = f"  {run}: pass@1 {over_questions(shares[run])}"
            if run != shares.columns[0]:
                line += f", change {over_questions(shares[run] - shares.iloc[:, 0])}"
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
    by = args.by if prompt is None else f"{args.by} with {args.prompt}"
    samples = read_samples(directories)
    questions = draw(samples, args.questions, args.seed)
    samples = samples[samples.question.isin(questions)]
    grades = Grades(directories)
    todo = grades.todo(samples, questions, by)
    if not args.table:
        grades.mend()
        if args.by == "you":
            by_you(todo, grades)
        else:
            by_model(todo, grades, by, load(args.by, init_ranks()), prompt)
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
