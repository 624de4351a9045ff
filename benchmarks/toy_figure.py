"""The picture of README: the toy with four rewards. A thin line is a seed.

    python benchmarks/toy_figure.py docs/toy.svg

The runs of results/toy-seeds-0-19.csv were measured before, in the middle and at the end.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas

sys.path.append(sys.path[0] + "/..")  # where plot.py is
from measure import COLOURS

import plot  # noqa: F401, its settings

plt.rcParams |= {"svg.hashsalt": "toy", "axes.spines.top": False, "axes.spines.right": False}
STEPS = [0, 100, 200]
MEASURED = ["pass@1 start", "pass@1 middle", "pass@1 end"]

lines = pandas.read_csv(Path(__file__).parent / "results/toy-seeds-0-19.csv")
figure, axis = plt.subplots(figsize=(7, 3))
labels = {"cer": "CER", "verifree": "VeriFree", "rule": "a program", "exact": "exact match"}
for name, label in labels.items():
    runs = lines[lines.name == name][MEASURED]  # [20 seeds, 3]
    style = "--"
    if name in ("cer", "exact"):
        style = "-"
        axis.plot(STEPS, runs.T, color=COLOURS[name], alpha=0.25, linewidth=1)
    axis.plot(STEPS, runs.mean(), style, label=label, color=COLOURS[name], linewidth=2.5)
axis.set(xlabel="step", ylabel="right answers\n(thin: one seed)", ylim=(0, 1), xticks=STEPS)
axis.legend(loc="lower right", frameon=False)
figure.savefig(sys.argv[1], bbox_inches="tight", metadata={"Date": None})
