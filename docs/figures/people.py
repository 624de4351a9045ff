"""The picture of a real model's training on people's questions, from the stored samples.

    python docs/figures/people.py docs/figures/people.svg

A model of 1.5B parameters was trained for 30 steps with different rewards, where several references
list the wordings (experiments/people_trained), and where there is one reference in a rare wording
(experiments/rare_reference). Dots are shares of right answers to held-out questions, graded by
language models that did not know the reward. Bars are 1.96 standard errors, which count questions
and seeds.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas

plt.rcParams |= {"svg.hashsalt": "people", "font.size": 12, "axes.spines.right": False}
EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
TABLES = {
    "several references": ("people_trained/squad-rivals.csv", ["line"]),
    "one reference, in a rare wording": ("rare_reference/rare-reference.csv", ["data", "line"]),
}
REWARDS = {"before": "before", "exact": "exact match", "cer": "CER", "overlap": "shared words"}
REWARDS |= {"verifree": "VeriFree"}


def levels(file, question):
    """-> {run: (share of right answers, its standard error over questions and seeds)}. A question
    of which the readers left an answer undecided is left out."""
    samples = pandas.read_csv(EXPERIMENTS / file, keep_default_na=False)
    samples["read"] = pandas.to_numeric(samples.read)  # "" becomes NaN
    known = samples.groupby(question).read.transform(lambda read: read.notna().all())
    samples = samples[known]
    found = {}
    for run, own in samples.groupby("run"):
        shares = own.pivot_table("read", question, "seed")
        squared = shares.mean(axis=1).sem() ** 2
        squared += 0 if run == "before" else shares.mean().sem() ** 2  # one model before training
        found[run] = shares.mean(axis=1).mean(), squared**0.5
    return found


def main():
    _, axes = plt.subplots(1, 2, figsize=(9, 2.9), sharey=True, layout="constrained")
    for axis, (title, table) in zip(axes, TABLES.items()):
        found = levels(*table)
        for place, run in enumerate(REWARDS):
            share, error = found[run]
            color = {"before": "gray", "cer": "#e67e22"}.get(run, "#34495e")
            axis.errorbar(share, place, xerr=1.96 * error, fmt="o", color=color, capsize=3)
            axis.annotate(f"{share:.2f}".lstrip("0"), (share, place - 0.28), ha="center", size=10)
        axis.axvline(found["before"][0], color="gray", linewidth=0.8, linestyle=":")
        axis.set(title=title, xlim=(0, 1), xlabel="right answers", ylim=(4.5, -0.7))
        axis.set_xticks([0, 0.2, 0.4, 0.6, 0.8])
        axis.set_yticks(range(len(REWARDS)), REWARDS.values())
    plt.savefig(sys.argv[1], metadata={"Date": None})


if __name__ == "__main__":
    main()
