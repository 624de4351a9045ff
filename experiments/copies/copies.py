"""What CER does to answers that copy their working: the tables of the page beside it.

    python experiments/copies/copies.py

It reads what compare_rewards.py --copies has written, and counts in stored samples, by the rule
that was written down there before anybody counted: a box copies its working if it has more than six
words and, where its solution is stored, if it is also found there verbatim, apart from upper and
lower case and what stands at its ends.
"""

import re
import sys
from pathlib import Path

import pandas

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's modules
from benchmarks.measure import ROOT, markdown
from engine.tokens import split_answer
from experiments.toy.compare_rewards import differences
from runtime.files import read_rows

EXPERIMENTS = ROOT / "experiments"
# A column of the table: a file, which holds answers without their solutions, and the model in it.
COLUMNS = ("squad-rivals", "1.5B"), ("squad-gpu", "1.5B"), ("squad-gpu", "135M")
COLUMNS += (("squad-control", "135M"),)


def of_toy(path):
    """The toy with copies in its demonstrations -> a table with a row for each reward, means over
    its seeds (lowest to highest), and CER minus exact match."""
    lines = pandas.read_csv(path)
    columns = {"pass@1 start": "pass@1 before", "pass@1 end": "after"}
    columns |= {"copies start": "copies before", "copies end": "after"}
    columns |= {"mean reward at the start": "mean reward, 10 steps"}
    columns |= {"mean reward at the end": "last quarter"}
    of_name = lines.groupby("name", sort=False)
    cells = of_name[[*columns]].agg(lambda x: f"{x.mean():.3f} ({x.min():.2f} to {x.max():.2f})")
    cells = cells.map(lambda cell: cell.replace("0.", "."))
    cells.columns = columns.values()
    cells.insert(0, "seeds", of_name.seed.count().map(str))
    return markdown(cells, "reward"), differences(lines, ["pass@1 end"])


def long(answer):
    return len(answer.split()) > 6


def plain(text):
    """In lower case, from the first letter or digit to the last."""
    return re.sub(r"^\W+|\W+$", "", text.lower())


def copies_working(answer, solution):
    return long(answer) and plain(answer) in solution.lower()


def of_runs():
    """How many of the boxes are long -> a table with a row for each reward."""
    cells = {}
    for name, model in COLUMNS:
        samples = pandas.read_csv(EXPERIMENTS / f"people_trained/{name}.csv", keep_default_na=False)
        kept = (samples.answer != "") & (samples.get("model", model) == model)
        for run, boxes in samples[kept].groupby("run").answer:
            count = boxes.map(long).sum()
            cell = f"{count} of {len(boxes)}, {count / len(boxes):.1%}"
            cells.setdefault(f"{name}, {model}", {})[run] = cell
    return pandas.DataFrame(cells).fillna("")


def with_solutions():
    """Of asked-texts.jsonl: the boxes, the long ones, and those of them that copy their working."""
    counts = [0, 0, 0]
    for row in read_rows(EXPERIMENTS / "asking/asked-texts.jsonl"):
        for text in row["texts"]:
            start, answer = split_answer(text) or (0, "")
            counts[0] += bool(answer)
            counts[1] += long(answer)
            counts[2] += copies_working(answer, text[:start])
    return "{} boxes, {} over six words, {} of these copied".format(*counts)


if __name__ == "__main__":
    print(*of_toy(EXPERIMENTS / "copies/copies-toy.csv"), sep="\n")
    print(markdown(of_runs(), "boxes over six words") + with_solutions())
