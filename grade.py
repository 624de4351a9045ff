"""The truth need not be a program: you say which answers are right, or another model says it.

    python grade.py runs/MY-JUDGE                                  # by you
    python grade.py runs/MY-JUDGE --by TIGER-Lab/general-verifier  # by a model
    python grade.py runs/BEFORE runs/AFTER --table                 # what the grades say

A directory is what judge.py, evaluate.py or train.py wrote. You see a question, its references, and
the answers of all directories, shuffled and without their rewards. You type the numbers of the
right ones. An answer that equals a reference (by the verifier `text`) is right and no answer is
wrong, so neither is asked. A model is asked about the same answers, so you can see how often you
agree with it before you let it grade the rest.

Each grade is saved at once, as a line of one file, and a second start goes on. It belongs to a
question with its references, an answer, and whoever gave it; the newest counts. To correct one,
take its line out of the file. Two people take two names (--name).
"""

from runtime import cli  # isort: split

import collections
import random
import textwrap
from pathlib import Path

from engine.checkpoints import mark_of
from engine.load import add_flags, load
from judge import say_judgement
from runtime.files import append_rows, read_rows
from runtime.ranks import init_ranks
from runtime.report import case_of, read_lines, say_pass_at_1
from tasks.data import Problem
from tasks.general_verifier import ask, read_prompt
from tasks.verifiers import plain_text

AT_ONCE = 64  # answers about which a model is asked together
KEYS = "the numbers of the right ones, Enter for none, ? to leave the question out, q to stop"
WORD = {True: "right", False: "wrong"}

# ----------------------------------------------------------------------------- samples and grades


def draw(lines, count, seed):
    """At most so many of the cases that all runs have -> {case: its lines}. Their order depends
    only on their text and the seed, so that grades are of use with other runs, and with more
    questions."""
    cases = collections.defaultdict(list)
    for line in lines:
        cases[case_of(line)].append(line)
    runs = {line["run"] for line in lines}
    in_all = [case for case, own in cases.items() if {line["run"] for line in own} == runs]
    cli.require(in_all, "no question is in all of these directories with the same references")
    order = sorted(in_all, key=lambda case: random.Random(f"{seed} {case[0]}").random())
    return {case: cases[case] for case in order[:count]}


def in_doubt(lines):
    """The answers of these lines that are neither empty nor equal to a reference, shuffled -> {key:
    answer}. Answers with the same key are equal by the verifier `text`."""
    clear = {*map(plain_text, lines[0]["references"])}
    answers = {plain_text(a): a for line in lines for a in line["answers"] if a}
    doubtful = sorted((key, answer) for key, answer in answers.items() if key not in clear)
    return dict(random.Random(lines[0]["question"]).sample(doubtful, len(doubtful)))


class Grades:
    """The file of grades, to which lines are only appended: said[by][case, key] is True, False, or
    None if the question is left out."""

    def __init__(self, path):
        self.path, self.said = path, collections.defaultdict(dict)
        rows = read_rows(path) if path.exists() else []
        for number, row in enumerate(rows, start=1):
            with cli.as_input_error(f"{path}, row {number}: expected a grade of grade.py"):
                cli.require(row["right"] in (True, False, None), f"right is {row['right']!r}")
                self.said[row["by"]][case_of(row), plain_text(row["answer"])] = row["right"]

    def save(self, case, answer, right, by, **more):
        row = {"question": case[0], "references": case[1], "answer": answer, "right": right}
        append_rows(self.path, [row | {"by": by} | more])
        self.said[by][case, plain_text(answer)] = right

    def column(self, cases, by):
        """The lines of the cases that this grader has graded, with `right` as this grader says it,
        and as the verifier said it. They end before the first ungraded answer: later cases that
        happen to need no grade are the easy ones, and would raise pass@1."""
        graded = []
        for number, (case, lines) in enumerate(cases.items()):
            said = {key: self.said[by].get((case, key), "missing") for key in in_doubt(lines)}
            if "missing" in said.values():
                left_out = f"{len(cases) - number} of {len(cases)} questions are left out"
                cli.say(f"{by}: {left_out}, from one with ungraded answers on: {case[0]!r:.60}")
                break
            if None not in said.values():
                said |= dict.fromkeys(map(plain_text, case[1]), True)
                for line in lines:
                    right = [bool(a) and said[plain_text(a)] for a in line["answers"]]
                    graded.append(line | {"right": right, "verifier's": line["right"]})
        return graded


# --------------------------------------------------------------------------------------- who grades


def by_person(todo, grades, by):
    """Ask about the answers to each question."""
    print(f"{len(todo)} questions have answers in doubt. Type {KEYS}.")
    for place, (case, answers) in enumerate(todo.items(), start=1):
        question, references = case
        print(f"\n{place} of {len(todo)}:\n{wrapped(question)}")
        print(f"reference:\n  {wrapped(' or '.join(references), 2)}")
        for number, answer in enumerate(answers, start=1):
            print(f"{number:>4}  {wrapped(cli.shorten(' '.join(answer.split()), 300), 6)}")
        reply = ask_numbers(answers)
        if reply is None:
            print("\nstopped; the same command goes on")
            return
        for answer, right in reply.items():
            grades.save(case, answer, right, by)


def ask_numbers(answers):
    """-> {answer: whether its number is typed}, with None for all to leave the question out; or
    None to stop, also by Ctrl-C or at the end of a pipe."""
    numbers = [str(number) for number in range(1, len(answers) + 1)]
    while True:
        try:
            reply = input("right: ").replace(",", " ").split()
        except (EOFError, KeyboardInterrupt, RuntimeError):  # the last one without any stdin
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
    asked = [(case, answer) for case, answers in todo.items() for answer in answers]
    for start in cli.progress("grade", range(0, len(asked), AT_ONCE), unit="batch"):
        some = asked[start : start + AT_ONCE]
        pairs = [
            (Problem(question, references[0], others=tuple(references[1:])), answer)
            for (question, references), answer in some
        ]
        verdicts, replies = ask(pairs, model, prompt)
        for (case, answer), right, reply in zip(some, verdicts, replies):
            grades.save(case, answer, right, by, reply=reply)


# -------------------------------------------------------------------------------------- the numbers


def say_agreement(one, other, of_one, of_other):
    """How far another grader accepts what one accepts, and three answers on which they differ."""
    both = [at for at in of_one if None not in (of_one[at], of_other.get(at))]
    differ = [at for at in both if of_one[at] != of_other[at]]
    print(f"\n{one} and {other} agree on {len(both) - len(differ)} of {len(both)} answers")
    for word in True, False:
        own = [of_other[at] for at in both if of_one[at] == word]
        print(f"  {other} accepts {sum(own)} of the {len(own)} that {one} calls {WORD[word]}")
    for (question, references), key in differ[:3]:
        word = WORD[of_one[(question, references), key]]
        print(f"  {key!r:.30} for {references[0]!r:.30}: {one} says {word}")


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("directories", nargs="+", metavar="DIR", help="of judge, evaluate or train")
    add("--by", default="you", metavar="you|MODEL", help="who grades: you, or a model's id or path")
    add("--name", default="you", help="your name, if several people grade")
    add("--prompt", help="file with another prompt for the model")
    add_flags(add)
    add("--grades", help="the file of grades (default: grades.jsonl in the first DIR)")
    add("--questions", type=cli.number(int, 1), default=50, help="grade at most K questions")
    add("--seed", type=int, default=0, help="random seed of the choice of questions")
    add("--table", action="store_true", help="ask nothing, show what the grades say")
    args = parser.parse_args()
    directories = [Path(each) for each in args.directories]
    prompt = args.prompt and read_prompt(args.prompt)
    lines = [line for directory in directories for line in read_lines(directory)]
    cases = draw(lines, args.questions, args.seed)
    path = Path(args.grades or directories[0] / "grades.jsonl")
    usable = path.suffix == ".jsonl" and path.parent.is_dir()
    cli.require(usable, f"--grades {path}: expected a file .jsonl in a directory that is there")
    grades = Grades(path)
    for directory in directories:
        other = directory / "grades.jsonl"
        if other.exists() and other.resolve() != path.resolve():
            cli.say(f"{other} is not read: one file holds the grades of a call (--grades)")
    by = args.name
    model = None
    if not args.table:
        if args.by != "you":
            model = load(args.by, init_ranks(), dtype=args.dtype, sampler=args.sampler)
            by = f"{Path(args.by)} {mark_of(model[0], prompt)}"  # other weights, another grader
        said = grades.said[by]
        todo = {}
        for case, own in cases.items():
            doubts = in_doubt(own).items()
            if new := [answer for key, answer in doubts if (case, key) not in said]:
                todo[case] = new
        if model:
            by_model(todo, grades, by, model, prompt)
        else:
            by_person(todo, grades, by)
    names = sorted(grades.said, key=lambda name: name != args.name)  # yours first
    columns = {name: column for name in names if (column := grades.column(cases, name))}
    if not columns:
        return print(f"{grades.path} has no grades of these questions")
    for name, column in columns.items():
        say_pass_at_1(column, name)
        of_verifier = [line | {"right": line["verifier's"]} for line in column]
        say_pass_at_1(of_verifier, "the run's own verifier")
    first, *others = columns
    for name in others:
        say_agreement(first, name, grades.said[first], grades.said[name])
    for name, column in columns.items():
        for run in dict.fromkeys(line["run"] for line in column if "rewards" in line):
            print(f"\n{run}, what is right by {name}:")
            say_judgement([line for line in column if line["run"] == run])


if __name__ == "__main__":
    cli.run_script(main)
