"""What graders say of samples: the questions that are graded, the answers in doubt, and what is
right by a file of grades. grade.py makes such files.
"""

import random

from runtime.cli import as_input_error, require, say
from runtime.files import read_rows
from runtime.sampled import case_of, sample_table
from tasks.verifiers import plain_text


def choose_questions(lines, count):
    """-> the samples of at most so many of the cases that all runs have, in an order that depends
    only on their text: so grades are of use with other runs, and with more questions. `place`: of
    the case; `key`: equal for answers that are equal by the verifier `text`; `known`: whether it
    is a reference by it."""
    samples = sample_table(lines)
    runs = samples.groupby("case").run.nunique()
    shared = runs.index[runs == samples.run.nunique()]
    cases = sorted(shared, key=lambda case: random.Random(case).random())
    require(cases, "no question is in all of these directories with the same references")
    if left_out := len(runs) - min(count, len(cases)):
        kept = f"--questions {count}, of those in all directories"
        say(f"{left_out} of {len(runs)} questions are left out ({kept})")
    samples["place"] = samples.case.map({case: place for place, case in enumerate(cases[:count])})
    samples = samples.dropna(subset="place").sort_values("place", kind="stable")
    samples["key"] = [*map(plain_text, samples.answers)]
    pairs = zip(samples.key, samples.references)
    samples["known"] = [key in map(plain_text, references) for key, references in pairs]
    return samples


def in_doubt(samples, grades=()):
    """Of the samples those whose answers need a grade and have none, each answer once, shuffled
    within each case. No answer is wrong, and a reference is right."""
    doubtful = samples[samples.answered & ~samples.known].sample(frac=1, random_state=0)
    doubtful = doubtful.drop_duplicates(["case", "key"]).sort_values("place", kind="stable")
    return doubtful.loc[[at not in grades for at in zip(doubtful.case, doubtful.key)]]


def read_grades(path):
    """-> {(case, key): True, False, or None if the question is left out}."""
    grades = {}
    for row_number, row in enumerate(read_rows(path) if path.exists() else [], start=1):
        with as_input_error(f"{path}, row {row_number}: expected a grade of grade.py"):
            require(row["right"] in (True, False, None), f"right is {row['right']!r}")
            require(row.get("by", "you") == "you", "each grader has a file of its own")
            grades[case_of(row), plain_text(row["answer"])] = row["right"]
    return grades


def by_grades(samples, grades, name):
    """The samples of the cases that are graded, with `right` as the grades say it. They end before
    the first ungraded answer: later cases that happen to need no grade are the easy ones, and would
    raise pass@1."""
    ungraded = in_doubt(samples, grades)
    if len(ungraded):
        first, cases = ungraded.iloc[0], samples.place.max() + 1
        left_out = f"{cases - first.place:.0f} of {cases:.0f} questions are left out"
        say(f"{name}: {left_out}, from one with ungraded answers on: {first.question!r:.60}")
        samples = samples[samples.place < first.place]
    right = [
        sample.answered and (sample.known or grades.get((sample.case, sample.key)))
        for sample in samples.itertuples()
    ]
    samples = samples.assign(right=right)
    undecided = samples.case[samples.right.isna()]
    if left_out := undecided.nunique():
        say(f"{name}: {left_out} questions are left out, since an answer to each is undecided")
    return samples[~samples.case.isin(undecided)].astype({"right": bool})
