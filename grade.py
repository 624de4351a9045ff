"""You say which answers are right, where no program can: pass@1 and judge.py's table by your word.

    python grade.py runs/BEFORE runs/AFTER

Each directory was written by judge.py, evaluate.py or train.py (its first and last evaluation).
You see a question, its references and the answers of all runs, shuffled; not who gave them, nor
which reward they received. You type the numbers of the right ones. What equals a reference (by the
verifier `text`) is right and no answer is wrong, without asking. What you say is saved at once, in
grades.jsonl of the first directory, and a second start goes on where the first one stopped. Grades
that the other directories have are used, too.
"""

from runtime import cli  # isort: split

import random
from pathlib import Path

import pandas
from report import say_judgement, say_pass_at_1

from runtime.files import append_rows, read_rows, references_of
from tasks.verifiers import plain_text

HOW = "the numbers of the right ones, Enter for none, ? to leave the question out, q to stop"


def read_run(directory):
    """The lines that a script wrote about its answers, of train.py those of the first and the last
    evaluation -> (by judge.py or not, lines)."""
    path = directory / "evaluations.jsonl"
    rows = read_rows(path if path.exists() else directory / "samples.jsonl", log=True)
    cli.require(rows, f"{path} is empty: train.py evaluates with --eval-dataset")
    ends = rows[0].get("step"), rows[-1].get("step")
    return "rewards" in rows[0], [row for row in rows if row.get("step") in ends]


def samples_of(directory):
    """-> a dict for each sample: run, question, references, answer ("" if there is none), and
    verifier, what the verifier of the run said."""
    by_judge, rows = read_run(directory)
    samples, names = [], ["answers", "right"] if by_judge else ["answer", "correct"]
    for row in rows:
        run = str(directory) + (f", step {row['step']}" if "step" in row and not by_judge else "")
        pairs = zip(*(row[name] if by_judge else [row[name]] for name in names))
        same = {"run": run, "question": row["question"], "references": references_of(row)}
        samples += [same | {"answer": answer or "", "verifier": right} for answer, right in pairs]
    return samples


def key(question, answer):
    """Two answers that are equal by the verifier `text` have one grade."""
    return question, plain_text(answer or "")


def ask(question, references, answers):
    """Let the user grade the answers -> {answer: right, None if the question is left out}. EOFError
    to stop."""
    numbered = {str(number): answer for number, answer in enumerate(answers, start=1)}
    print(f"{question}\nreference: {' or '.join(references)}")
    for number, answer in numbered.items():
        print(f"{number:>4}  {' '.join(answer.split())}")
    while True:
        reply = input("right: ").replace(",", " ").split()
        if reply == ["q"]:
            raise EOFError
        if reply == ["?"]:
            return dict.fromkeys(answers)
        if {*reply} <= {*numbered}:
            return {answer: number in reply for number, answer in numbered.items()}
        print(f"expected {HOW}")


def grade(samples, drawn, files):
    """Ask about what is neither clear nor in the files, and save it in the first -> ({key: right,
    None if left out}, the questions that are done)."""
    of_question = {question: samples[samples.question == question] for question in drawn}
    said = {}
    for question, own in of_question.items():
        said |= {key(question, reference): True for reference in own.references.sum()}
        said |= {key(question, ""): False}
    for path in filter(Path.exists, files):
        for row in read_rows(path, log=True):
            said[key(row["question"], row["answer"])] = row["right"]
    for number, (question, own) in enumerate(of_question.items(), start=1):
        answers = {key(question, answer): answer for answer in own.answer}
        asked = [answer for of, answer in answers.items() if of not in said]
        random.Random(question).shuffle(asked)
        if asked:
            print(f"\n{number} of {len(drawn)}: ", end="")
            try:
                verdicts = ask(question, dict.fromkeys(own.references.sum()), asked)
            except (EOFError, KeyboardInterrupt):
                print("\nstopped; start it again to go on")
                # Not even what is clear in later ones: questions without a doubt are the easy ones.
                return said, drawn[: number - 1]
            for answer, right in verdicts.items():
                append_rows(files[0], [{"question": question, "answer": answer, "right": right}])
                said[key(question, answer)] = right
    return said, drawn


def main():
    parser = cli.Parser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="DIR", help="written by judge, evaluate or train")
    add("--questions", type=cli.number(int, 1), default=50, help="grade at most K questions")
    add("--seed", type=int, default=0, help="random seed of the choice of questions")
    args = parser.parse_args()
    samples = pandas.DataFrame(sum(map(samples_of, args.runs), []))
    in_runs = samples.groupby("question").run.nunique()
    common = list(in_runs.index[in_runs == samples.run.nunique()])
    cli.require(common, "no question is in all of these runs")
    # In an order that does not depend on what else is there, so that grades are of use with other
    # runs and a larger K.
    common.sort(key=lambda question: random.Random(f"{args.seed} {question}").random())
    print(f"{len(common)} questions. Type {HOW}.")
    files = [directory / "grades.jsonl" for directory in args.runs]
    said, done = grade(samples, common[: args.questions], files)
    samples["you"] = [said.get(key(*pair)) for pair in zip(samples.question, samples.answer)]
    graded = {*done} - {*samples.question[samples.you.isna()]}
    cli.require(graded, "no question is graded")
    say_pass_at_1(samples[samples.question.isin(graded)])
    for directory in args.runs:
        by_judge, rows = read_run(directory)
        rows = [row for row in rows if by_judge and row["question"] in graded]
        for row in rows:
            row["right"] = [said[key(row["question"], answer)] for answer in row["answers"]]
        if rows:
            print(f"\n{directory} by your grades")
            say_judgement(rows)


if __name__ == "__main__":
    cli.run_script(main)
