"""The tables and the picture of the page, from clean_toy.csv.

python experiments/clean_toy/tables.py
"""

import math
import sys
from pathlib import Path

import pandas

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from experiments.toy.compare_rewards import T  # noqa: E402

CSV = Path(__file__).with_name("clean_toy.csv")
PICTURE = CSV.with_suffix(".svg")
NAMES = {
    "kept-exact": "kept: equal to the reference",
    "kept-rule": "kept: right by a program",
    "kept-cer": "kept by CER",
    "kept-verifree": "kept by P",
    "kept-overlap": "kept by shared words",
    "kept-em": "solutions by P, with the reference",
    "rloo-cer": "RLOO: cer",
    "rloo-verifree": "RLOO: verifree",
    "rloo-exact": "RLOO: exact",
    "rloo-rule": "RLOO: rule",
    "rloo-cer-after-kept": "one round kept by CER, then RLOO: cer",
    "bare": "fine-tuned on bare references",
}


def read(machine):
    """A line for each arm, round and seed of a machine, with the samples and CPU seconds since the
    start. Machine 1 ran both comparisons, 2 the other arms too, from starts of its own. Of the
    others machine 1 has one pair of fold and seed, which is left out."""
    lines = pandas.read_csv(CSV)
    lines = lines[lines.machine == machine]
    lines = lines.groupby(["arm", "round"]).filter(lambda own: len(own) > 1)
    lines["cpu"] = lines[["sample", "score", "train"]].sum(axis=1)
    lines = lines.sort_values(["fold", "seed", "arm", "round"])
    pair = ["fold", "seed"]
    costs = lines.groupby([*pair, "arm"])[["cpu", "samples"]].cumsum()
    first = lines[(lines.arm == "kept-cer") & (lines["round"] == 1)].set_index(pair)
    after = lines.arm == "rloo-cer-after-kept"  # it begins where this round ends
    before = first.reindex(lines[after].set_index(pair).index)[["cpu", "samples"]]
    costs[after] += before.to_numpy()
    lines[["cpu", "samples"]] = costs
    return lines


def name_of(arm, round_):
    name = "start" if arm == "start" else NAMES[arm]
    if arm.startswith("kept") and arm != "kept-em":
        name += f", {round_} round" + ("s" if round_ > 1 else "")
    return name


def table(lines):
    """The mean of each arm and round over its pairs of fold and seed."""
    rows = {}
    for (arm, round_), own in lines.groupby(["arm", "round"]):
        name = name_of(arm, round_)
        cells = {"new": short(own.new.mean()), "greedy": short(own.greedy.mean())}
        cells |= {"whole triples": short(own.whole.mean()), "known": short(own.known.mean())}
        cells |= {"samples": f"{own.samples.mean():,.0f}" if arm != "start" else "0"}
        cells |= {"CPU seconds": f"{own.cpu.mean():.0f}", "runs": str(len(own))}
        rows[name] = cells
    return pandas.DataFrame(rows).T


def markdown(lines):
    """The rows of the page's table."""
    rows = table(lines)
    head = ["| | " + " | ".join(rows) + " |", "|---" * (len(rows.columns) + 1) + "|"]
    return head + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.iterrows()]


def difference(lines, one, other, what="new"):
    """(arm, round) minus (arm, round), paired by fold and seed -> the mean, the ends of its 95%
    interval by a t-test, and the number of pairs."""
    values = [
        lines[(lines.arm == arm) & (lines["round"] == round_)].set_index(["fold", "seed"])[what]
        for arm, round_ in (one, other)
    ]
    pairs = (values[0] - values[1]).dropna()
    half = T[len(pairs) - 2] * pairs.std() / math.sqrt(len(pairs))
    return pairs.mean(), pairs.mean() - half, pairs.mean() + half, len(pairs)


PRIMARY = [(("kept-cer", 1), ("kept-exact", 1)), (("kept-cer", 2), ("rloo-cer", 1))]
DESCRIBED = [
    (("kept-cer", 2), ("kept-cer", 1)),
    (("kept-rule", 2), ("kept-rule", 1)),
    (("kept-cer", 1), ("kept-verifree", 1)),
    (("kept-cer", 1), ("kept-em", 1)),
    (("kept-cer", 1), ("rloo-verifree", 1)),
    (("rloo-cer-after-kept", 1), ("kept-cer", 1)),
]


def short(number):
    return f"{round(number, 3) + 0.0:.3f}".replace("0.", ".")  # + 0.0: without a -.000


def in_words(mean, low, high, _):
    return f"{short(mean)} ({short(low)} to {short(high)})"


def differences(lines, compared):
    """The rows of a table: each pair of (arm, round), and the difference between them."""
    for one, other in compared:
        found = difference(lines, one, other)
        yield f"| {name_of(*one)} | {name_of(*other)} | {in_words(*found)} | {found[-1]} |"


def draw(lines):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "cer"
    colors = {"cer": "tab:orange", "exact": "tab:gray", "verifree": "tab:blue", "rule": "tab:green"}
    colors |= {"overlap": "tab:purple", "em": "tab:cyan"}
    means = lines.groupby(["arm", "round"])[["new", "samples", "cpu"]].mean().fillna(0)
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for axis, cost, label in zip(axes, ("samples", "cpu"), ("samples drawn", "CPU seconds")):
        for arm in means.index.unique("arm"):
            kind, _, rest = arm.partition("-")
            reward, _, after = rest.partition("-after-")
            if reward not in colors:
                continue
            begin = ("kept-cer", 1) if after else ("start", 0)
            curve = pandas.concat([means.loc[[begin]], means.loc[[arm]]])
            style = {"kept": "-o", "rloo": "--^" if after else ":s"}[kind]
            axis.plot(
                curve[cost], curve.new, style, color=colors[reward], label=NAMES[arm], markersize=5
            )
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("pass@1 on new questions")
    axes[1].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def main():
    first = read(1)
    second = read(2)
    print(*markdown(first), "", *differences(first, PRIMARY), "", sep="\n")
    print(*markdown(second), "", *differences(second, PRIMARY + DESCRIBED), sep="\n")
    draw(second)


if __name__ == "__main__":
    main()
