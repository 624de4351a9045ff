"""What grade.py reads and writes: the samples of other scripts, which of their answers are in
doubt, and the grades that you or a model gave."""

import random

import pandas

from runtime.cli import require
from runtime.files import append_rows, read_rows, to_jsonl, write_atomically
from tasks.verifiers import plain_text


def read_lines(directory):
    """The lines of judge.py or of an evaluation. Of a run's evaluations, whose lines have a step,
    these are the first and the last."""
    is_run = (directory / "config.json").exists()
    lines = read_rows(directory / ("evaluations.jsonl" if is_run else "samples.jsonl"), log=True)
    require(lines, f"{directory} has no evaluation: train.py makes them with --eval-dataset")
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
    require(questions, "no question is in all of these directories")
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
