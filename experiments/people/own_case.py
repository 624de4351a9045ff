"""CER in its own case: people's questions on passages, for judge.py and grade.py.

    python experiments/people/own_case.py rows squad_human.jsonl --lines 100-399 --out squad.jsonl
    python experiments/people/own_case.py csv runs/squad --name squad --lines 1-9 --by FILE > CSV
    python experiments/people/own_case.py table CSV

Each line of squad_human.jsonl has a passage, a question, and references, what several people have
answered. `rows` makes {"question": worked examples, passage and question, "answer": references}.
Two worked examples stand before each passage, because the model that is judged
(Qwen2.5-Coder-1.5B-Instruct) hardly ever boxes its answer without them.

`csv` writes a line for each sample of a directory of judge.py, graded by grade.py. Rewards are
given for each reference: since rho is linear in them, those of all references are their sums.
`table` computes every number of the page beside it.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy
import pandas
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's modules
from cer import cer
from measure import interval, question_aucs, rate_rewards
from reward_functions import f1, words
from rloo import leave_one_out
from runtime.sampled import read_lines
from tasks.grades import by_grades, choose_questions, read_grades
from tasks.verifiers import plain_text

EXAMPLES = r"""Answer a question about a passage. Reason in one sentence, then box a short answer, as in the examples.

Passage: The Ashford Canal was dug between 1788 and 1796 by teams of local farmers, who were paid in grain. It was closed to ships in 1921, when the railway bridge made its locks useless.
Question: Why did ships stop using the canal?
Solution: The passage says that it was closed when the railway bridge made its locks useless. \boxed{the railway bridge}

Passage: Lichens grow slowly, often less than a millimetre a year. Because they take in everything from the air, they are used to measure its pollution.
Question: What can be measured with lichens?
Solution: They take in everything from the air, so they are used to measure how polluted it is. \boxed{air pollution}
"""  # noqa: E501


def numbers(text):
    """ "3,5-7" -> [3, 5, 6, 7]"""
    spans = [[int(end) for end in span.split("-")] for span in text.split(",")]
    return [k for span in spans for k in range(span[0], span[-1] + 1)]


def rows(lines):
    """-> rows for judge.py."""
    return [
        {
            "question": f"{EXAMPLES}\nPassage: {line['passage']}\n"
            f"Question: {line['question'].strip()}\nSolution:",
            "answer": line["references"],
        }
        for line in lines
    ]


# -------------------------------------------------------------------------------------- the samples


def sample_lines(directory, name, lines, by):
    """-> a row for each sample. Of a list, such as cer, the numbers are those of the references."""
    groups = read_lines(directory)
    right_of = {group["question"]: group["right"] for group in groups}
    if by != "verifier":
        path = directory / by
        samples = choose_questions(groups, len(groups))
        graded = by_grades(samples, read_grades(path), path).groupby("case")
        right_of = {own.question.iloc[0]: own.right.tolist() for _, own in graded}
    for line, group in zip(numbers(lines), groups, strict=True):
        log_W = torch.tensor(finite(group["log_W"])).view(
            len(group["distinct_answers"]), len(group["columns"])
        )
        log_references = torch.tensor(finite(group["log_references"]))
        posterior = log_W.softmax(1)
        row_of = {answer: k for k, answer in enumerate(group["distinct_answers"])}
        rho = torch.stack([cer(log_W, log_P) for log_P in log_references], 1)  # [U, K]
        columns = {i: c for c, i in enumerate(group["columns"])}
        zeros = [0.0] * len(group["references"])
        rights = right_of.get(group["question"], [None] * len(group["answers"]))
        for i, (answer, right) in enumerate(zip(group["answers"], rights)):
            of_sample = {"data": name, "line": line, "sample": i, "answer": answer or ""}
            plain = plain_text(answer or "")
            of_sample["right"] = None if right is None else int(right)
            of_sample["text"] = [
                int(bool(answer) and plain == plain_text(each)) for each in group["references"]
            ]
            of_sample["cer"] = rho[row_of[answer]].tolist() if answer else zeros
            P = log_references[:, columns[i]].exp().tolist() if i in columns else zeros
            of_sample["verifree"] = P
            of_sample["exact"] = [int(answer == each) for each in group["references"]]
            overlaps = [f1(words(answer or ""), words(each)) for each in group["references"]]
            of_sample["overlap"] = overlaps
            if answer:
                of_sample["columns"] = len(columns)
                of_sample["spread"] = 1 / (posterior[row_of[answer]] ** 2).sum().item()
            yield of_sample


def finite(rows):
    """null, as JSON has -inf, to -inf."""
    return [[-math.inf if x is None else x for x in row] for row in rows]


def written(value):
    if isinstance(value, list):
        return " ".join(f"{x:.4g}" for x in value)
    if value is None or value != value:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else value


# -------------------------------------------------------------------------------------- the numbers

NAMES = "cer", "verifree", "exact", "text", "overlap", "overlap+cer"


def read_csv(path):
    """-> a DataFrame whose rewards are lists over the references, without the questions that were
    left out or not graded."""
    samples = pandas.read_csv(path, keep_default_na=False)
    for name in "cer", "verifree", "exact", "text", "overlap":
        samples[name] = samples[name].astype(str).str.split().map(lambda xs: [float(x) for x in xs])
    right = samples.right.astype(str).map({"1": True, "0": False})  # else it is left out
    samples = samples.assign(right=right, answered=samples.answer != "")[right.notna()]
    return samples.astype({"right": bool})


def with_rewards(samples, which):
    """One number a reward: of the first reference, of one reference (its index), or of all."""
    of_all = {"cer": sum, "verifree": sum, "exact": max, "text": max, "overlap": max}
    frame = samples[["data", "line", "answer", "right", "answered"]].copy()
    for name, over in of_all.items():
        frame[name] = samples[name].map(over if which == "all" else lambda xs: xs[which])
    frame["overlap+cer"] = (frame.overlap + frame.cer) / 2
    return frame.set_index("line")


def tell(samples):
    """Print question 1 for one data set."""
    groups = samples.groupby("line")
    shares = samples[["answered", "right"]].mean().round(3).to_dict()
    verbatim = samples.exact.map(max).mean()
    graded = samples[samples.answered]
    by_text = graded.text.map(max) == 1
    agree = (graded.right == by_text).mean()
    print(
        f"{len(groups)} questions, {len(samples)} samples: {shares}, verbatim {verbatim:.3f}, "
        f"equal as text {samples.text.map(max).mean():.3f}"
    )
    print(f"the truth and `text` agree on {agree:.3f} of the {len(graded)} answered samples")
    tables = {}
    for which in (0, "all"):
        frame = with_rewards(samples, which)
        both, table = rate_rewards(frame, list(NAMES))
        of_groups = frame.groupby(level=0)[list(NAMES)]
        table["median of best"] = of_groups.max().median()
        table["groups < 1e-4"] = (of_groups.max() < 1e-4).mean()
        table["groups equal"] = (of_groups.nunique() == 1).mean()
        tables[which] = aucs = question_aucs(frame[frame.answered], list(NAMES))
        rights = frame[frame.answered].groupby(level=0).right
        pairs = (rights.sum() * (rights.size() - rights.sum())).sum()
        products = advantage_products(frame, list(NAMES))
        title = "one reference (the first)" if which == 0 else "all references"
        print(f"\n{title}: {both} questions with right and wrong answers, {pairs} pairs")
        print(table.round(3).to_string())
        differences = aucs[:, :1] - aucs[:, 1:]
        say_differences("AUC: cer minus", NAMES[1:], differences)
        say_differences("AUC: overlap+cer minus", ["overlap"], aucs[:, 5:] - aucs[:, 4:5])
        box, difference = any_box(frame)
        print(f"all samples, aim of 1 for any box: {box:.3f}; cer minus it: ", end="")
        print("{:.3f} ({:.3f} to {:.3f})".format(*difference))
        say_aims("all samples,", products)
        products = advantage_products(frame[frame.answered], list(NAMES))
        for name, *values in zip(NAMES, *interval(products, aim)):
            print("answered samples, aim: {} {:.3f} ({:.3f} to {:.3f})".format(name, *values))
        say_aims("answered samples,", products)
    say_differences("AUC: all minus one reference,", NAMES, tables["all"] - tables[0])


def advantage_products(samples, names):
    """What aim adds up: A . A, A . T and T . T of each question and reward, with A the advantages
    of the reward and T those of the truth -> [questions, rewards, 3]."""
    products = []
    for _, group in samples.groupby(level=0):
        if len(group) > 1:
            A = leave_one_out(torch.tensor(group[names].to_numpy(float).T))  # [rewards, n]
            T = leave_one_out(torch.tensor(group.right.to_numpy(float)))  # [n]
            products.append(torch.stack([(A * A).sum(1), A @ T, (T @ T).expand(len(A))], 1).numpy())
    return numpy.array(products).reshape(-1, len(names), 3)


def aim(products):
    """The cosine of all A with all T. nan where one of them is 0."""
    AA, AT, TT = products.sum(0).T
    norms = numpy.sqrt(AA * TT)
    return numpy.divide(AT, norms, out=numpy.full_like(AT, math.nan), where=norms > 0)


def any_box(frame):
    """The aim, over all samples, of a reward of 1 for any box; and CER's minus it, low, high."""
    products = advantage_products(frame.assign(box=frame.answered.astype(float)), ["box", "cer"])
    difference = interval(products, lambda drawn: aim(drawn)[1] - aim(drawn)[0])
    return aim(products)[0], difference


def say_aims(title, products):
    of = interval(products, lambda drawn: aim(drawn)[0] - aim(drawn)[1:])
    for name, *values in zip(NAMES[1:], *of):
        print("{} aim: cer minus {}: {:.3f} ({:.3f} to {:.3f})".format(title, name, *values))


def say_differences(title, names, differences):
    of = interval(differences)
    for name, *numbers_ in zip(names, *of):
        print(f"{title} {name}: {numbers_[0]:.3f} ({numbers_[1]:.3f} to {numbers_[2]:.3f})")


def wordings(samples):
    """Print question 2: how much the wording of the reference matters."""
    differ = pairs = questions = 0
    ratios = []
    for _, group in samples[samples.answered].groupby("line"):
        distinct = numpy.array(group.drop_duplicates("answer").cer.tolist())  # [U, K]
        best = distinct.max(0)
        if len(best) < 2 or len(distinct) < 2:
            continue
        questions += 1
        ratios.append(best.min() / best.max())
        for k in range(len(best)):
            for other in range(k):
                x = distinct[:, k]
                y = distinct[:, other]
                order = numpy.sign(x[:, None] - x) * numpy.sign(y[:, None] - y)
                pairs += len(x) * (len(x) - 1) // 2
                differ += int((order < 0).sum()) // 2
    print(f"{questions} questions, {pairs} pairs of answers: two wordings disagree on {differ}")
    if not ratios:
        return
    low, middle, high = numpy.quantile(ratios, [0.25, 0.5, 0.75])
    print(
        f"the largest reward under the rarest wording over that under the likeliest: median "
        f"{middle:.3f}, quartiles {low:.3f} and {high:.3f}"
    )


def ordered_differently(frame):
    """Pairs of a right and a wrong answer, ordered by CER and by P, in opposite ways -> how often
    each is right. Ties are in neither number."""
    cer_right = P_right = 0
    for _, group in frame[frame.answered].groupby(level=0):
        right, wrong = (group[group.right == x] for x in (True, False))
        by_cer = right.cer.to_numpy()[:, None] - wrong.cer.to_numpy()
        by_P = right.verifree.to_numpy()[:, None] - wrong.verifree.to_numpy()
        cer_right += int(((by_cer > 0) & (by_P < 0)).sum())
        P_right += int(((by_cer < 0) & (by_P > 0)).sum())
    return cer_right, P_right


def beyond_P(samples):
    """Print question 3: where CER differs from P, and who is right there."""
    for which in (0, "all"):
        frame = with_rewards(samples, which)
        frame = frame[frame.answered]
        near = ((frame.cer / frame.verifree.clip(lower=1e-30) - 1).abs() < 0.12).mean()
        print(f"reference {which}: R is within 12% of P for {near:.3f} of {len(frame)} samples")
        counts = ordered_differently(frame)
        print("  of pairs that they order differently CER is right in {}, P in {}".format(*counts))
    answered = samples[samples.answered]
    spread, columns = (answered[name].astype(float) for name in ("spread", "columns"))
    print(f"a posterior spreads over {spread.mean():.2f} of {columns.mean():.2f} columns")


# Of the right answers only these count.
KINDS = {
    "equal as text": lambda frame: frame.text == 1,
    "not equal as text": lambda frame: frame.text == 0,
    "not verbatim": lambda frame: frame.exact == 0,
    "no word in common": lambda frame: frame.overlap == 0,
}


def aucs_of(kind, samples, which="all"):
    """AUCs of each question where of the right answers only one kind counts."""
    frame = with_rewards(samples, which)
    kept = frame.answered & (~frame.right | KINDS[kind](frame))
    return question_aucs(frame[kept], list(NAMES))


def aucs_in_turn(kind, samples):
    """The same, with each reference in turn as the only one, averaged over those with which the
    question has right answers of this kind."""
    found = []
    for _, group in samples.groupby("line"):
        by_reference = [aucs_of(kind, group, k) for k in range(len(group.cer.iloc[0]))]
        by_reference = [aucs[0] for aucs in by_reference if len(aucs)]
        if by_reference:
            found.append(numpy.mean(by_reference, 0))
    return numpy.array(found)


def other_wordings(samples):
    """Print question 5, AUC where of the right answers only some count. Declared was "not
    verbatim", for MATH500."""
    for kind in KINDS:
        say_kind(kind, aucs_of(kind, samples))
    kind = "no word in common"
    say_kind(f"{kind}, each reference in turn as the only one", aucs_in_turn(kind, samples))


def say_kind(title, aucs):
    print(f"{title}: {len(aucs)} questions")
    if len(aucs):
        print(f"AUC: {dict(zip(NAMES, aucs.mean(0).round(3).tolist()))}")
        spread = aucs.std(0, ddof=1) if len(aucs) > 1 else aucs[0] * math.nan
        print(f"standard deviation over questions: {dict(zip(NAMES, spread.round(3).tolist()))}")
        say_differences("AUC: cer minus", NAMES[1:], aucs[:, :1] - aucs[:, 1:])


def less_than_the_mean(samples):
    """Print how many verbatim samples receive less than the mean P of their group's solutions."""
    frame = with_rewards(samples, "all")
    frame = frame[frame.answered]
    frame["mean"] = frame.groupby(level=0).verifree.transform("mean")
    verbatim = frame[frame.exact == 1]
    less = verbatim[verbatim.cer < verbatim["mean"] - 1e-6]
    print(
        f"{len(less)} of {len(verbatim)} verbatim samples, in {less.index.nunique()} of "
        f"{verbatim.index.nunique()} questions, receive less than their group's mean P"
    )


PARTS = tell, wordings, beyond_P, other_wordings, less_than_the_mean


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("rows", help="make rows for judge.py")
    make.add_argument("file", type=Path)
    make.add_argument("--lines", required=True, help="which lines, from 0, such as 3,5,100-399")
    make.add_argument("--out", type=Path, required=True)
    to_csv = commands.add_parser("csv", help="print a line for each sample of judge.py")
    to_csv.add_argument("directory", type=Path)
    to_csv.add_argument("--name", required=True)
    to_csv.add_argument("--lines", required=True, help="as for rows")
    to_csv.add_argument("--by", required=True, help="a file of grades, or verifier: the run's own")
    numbers_of = commands.add_parser("table", help="print the numbers of the section")
    numbers_of.add_argument("file", type=Path)
    args = parser.parse_args()
    if args.command == "rows":
        lines = [json.loads(line) for line in args.file.open()]
        made = rows([lines[k] for k in numbers(args.lines)])
        args.out.write_text("".join(json.dumps(row) + "\n" for row in made))
        print(f"{args.out}: {len(made)} rows")
    elif args.command == "csv":
        lines = sample_lines(args.directory, args.name, args.lines, args.by)
        table = pandas.DataFrame({k: written(x) for k, x in line.items()} for line in lines)
        table.to_csv(sys.stdout, index=False)
    else:
        samples = read_csv(args.file)
        for name, of_data in samples.groupby("data", sort=False):
            print(f"\n==== {name}")
            for part in PARTS:
                part(of_data)
                print()
        print("==== people's questions together")
        people = [each for _, each in samples[samples.data != "math500"].groupby("data")]
        for kind in KINDS:
            say_kind(kind, numpy.concatenate([aucs_of(kind, each) for each in people]))


if __name__ == "__main__":
    main()
