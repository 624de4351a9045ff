"""The paper's figures from a run's own files.

    python plot.py RUN --question K        # its Fig. 2: how the rewards of one question came about
    python plot.py RUN [RUN ...]           # learning curves; runs that differ in the seed are one

RUN is a directory that train.py wrote. --question counts the groups in samples.jsonl, from 0 (from
the end with -1). Figures are written as SVG, or as whatever --out ends in.
"""

import itertools
import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import PowerNorm

from data import Parser, parse_json, require, require_writable, run_script

matplotlib.rcParams |= {
    "text.parse_math": False,  # answers may hold a $
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe-Ito


def text_of(path):
    require(path.is_file(), f"no {path}: is {path.parent} a run of train.py?")
    return path.read_text(encoding="utf-8")


def read_lines(path):
    return [parse_json(line, path) for line in text_of(path).splitlines()]


# --------------------------------------------------------------------------------- one question


def draw_group(group, out):
    """Fig. 2: R = (D^-1 W) P for one question. A row is a sample's answer, a column a sample's
    solution; both are sorted by reward, so that answers from the same solutions form a block."""
    require("W" in group, "this group has no W: it was not rewarded by CER")
    require(group["columns"], "no sample of this group has an answer: there is nothing to draw")
    R, answers, rows_of_W = group["R"], group["answers"], group["distinct_answers"]

    def rank(i):  # the best first, equal answers side by side, those without an answer last
        return answers[i] is None, -R[i], answers[i] or "", i

    rows = sorted(range(len(R)), key=rank)
    columns = sorted(group["columns"], key=rank)
    at = [group["columns"].index(j) for j in columns]
    W = []
    for i in rows:
        row = [math.nan] * len(at)  # no answer, no row of W
        if answers[i] is not None:
            row = [group["W"][rows_of_W.index(answers[i])][k] for k in at]
        W.append([w / (sum(row) or 1.0) for w in row])
    P = [group["P"][k] for k in at]

    height = 0.3 * len(rows) + 1.1  # inches
    figure, axes = plt.subplots(
        *(1, 3),
        figsize=(9.5, height),
        gridspec_kw={"width_ratios": [1.3, max(4, len(at)), 1.3], "wspace": 0.06},
    )
    figure.subplots_adjust(top=1 - 0.75 / height, bottom=0.3 / height)
    parts = (
        (axes[0], [[R[i]] for i in rows], "Oranges", "R  (reward)"),
        (axes[1], W, "Blues", "D⁻¹W  (which solutions lead to the answer)"),
        (axes[2], [[p] for p in P], "Greens", "P  (a*)"),
    )
    for axis, values, colours, title in parts:
        top = 1.0 if axis is axes[1] else max(max(row) for row in values) or 1.0
        # The root of the value as its colour: a share of a tenth can be told from none.
        scale = PowerNorm(0.5, vmin=0, vmax=1.3 * top)
        axis.imshow(values, cmap=colours, norm=scale, aspect="auto")
        for y, x in itertools.product(range(len(values)), range(len(values[0]))):
            if math.isnan(values[y][x]):
                continue
            ink = "white" if values[y][x] > 0.6 * top else "#222222"
            digits = 2 if axis is axes[1] else 3
            text = f"{values[y][x]:.{digits}f}".removeprefix("0")
            axis.text(x, y, text, ha="center", va="center", fontsize=7.5, color=ink)
        axis.set_title(title, fontsize=10)
        axis.set_xticks([]), axis.set_yticks([])
        axis.spines[:].set_visible(False)
    axes[2].set_ylim(axes[0].get_ylim())  # cells of one height, also with fewer columns than rows
    # A line wherever the answer changes: what lies between two lines is one and the same answer.
    for y in range(1, len(rows)):
        if answers[rows[y]] != answers[rows[y - 1]]:
            axes[0].axhline(y - 0.5, color="white", linewidth=3)
            axes[1].axhline(y - 0.5, color="white", linewidth=3)
    for x in range(1, len(columns)):
        if answers[columns[x]] != answers[columns[x - 1]]:
            axes[1].axvline(x - 0.5, color="white", linewidth=3)
            axes[2].axhline(x - 0.5, color="white", linewidth=3)
    labels = [label(answers[i], group["reference"]) for i in rows]
    axes[0].set_yticks(range(len(rows)), labels)
    axes[0].tick_params(length=0)
    axes[1].set_xlabel("solutions, in the order of the answers they led to", fontsize=9)
    axes[2].yaxis.tick_right()
    axes[2].set_yticks(range(len(columns)), [label(answers[j], None) for j in columns], fontsize=8)
    axes[2].tick_params(length=0)
    question = shorten(" ".join(group["question"].split()), 100)
    reference = shorten(group["reference"], 60)
    title = f"{question}\nreference a* = {reference}"
    title += f", step {group['step']}" if group["step"] else ""
    figure.suptitle(title, fontsize=10, y=1.0, va="top")
    save(figure, out)


def label(answer, reference):
    if answer is None:
        return "(no answer)"
    return ("=  " if answer == reference else "") + shorten(answer or "(empty)", 22)


def shorten(text, most):
    return text if len(text) <= most else text[: most - 1] + "…"


# --------------------------------------------------------------------------------------- the curves

PANELS = {
    "reward": "mean reward",
    "pass_at_1": "pass@1, held out",
    "exact_match": "exact match with the reference",
    "solution_tokens": "tokens of a solution",
}


def draw_curves(runs, out, window=10):
    """Four panels. Runs whose flags differ in the seed alone are drawn as their mean and range."""
    groups = {}
    for run in runs:
        path = run / "config.json"
        flags = parse_json(text_of(path), path).get("flags", {})
        # A seed of the toy has its own warm start: no other model, but another seed.
        model = "" if "warm-start" in str(flags.get("model")) else flags.get("model")
        flags = {k: v for k, v in flags.items() if k != "seed"} | {"model": model}
        key = json.dumps(flags)
        groups.setdefault(key, []).append((flags, read_lines(run / "metrics.jsonl")))
    names = label_runs([members[0][0] for members in groups.values()])

    figure, axes = plt.subplots(2, 2, figsize=(9, 5.6), sharex=True)
    for (key, title), axis in zip(PANELS.items(), axes.flat):
        for number, (name, members) in enumerate(zip(names, groups.values())):
            curves = [curve(lines, key, window) for _, lines in members]
            steps = sorted(set.intersection(*(set(values) for values in curves)))
            if not steps:
                continue
            values = [[values[step] for values in curves] for step in steps]
            style = {"color": COLOURS[number % len(COLOURS)]}
            dashes = "-" if number < len(COLOURS) else "--"
            mean = [sum(v) / len(v) for v in values]
            axis.plot(steps, mean, dashes, label=name, linewidth=1.6, **style)
            low, high = [min(v) for v in values], [max(v) for v in values]
            if len(members) > 1:
                axis.fill_between(steps, low, high, alpha=0.15, linewidth=0, **style)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_ylim(bottom=0)
    for axis in axes[1]:
        axis.set_xlabel("step")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    columns = min(len(labels), 7)
    figure.legend(handles, labels, loc="upper center", ncol=columns, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    save(figure, out)


def label_runs(all_flags):
    """The reward, and whatever else the runs do not share."""
    shared = all_flags[0].items()
    differ = {k for flags in all_flags for k, v in flags.items() if (k, v) not in shared}
    differ -= {"reward", "verifier_model"}
    return [
        ", ".join([flags["reward"], *(f"{k} {flags[k]}" for k in sorted(differ))])
        for flags in all_flags
    ]


def curve(lines, key, window):
    """step -> value; what is logged at every step as the mean of the last `window` steps."""
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    if key == "pass_at_1":
        return dict(points)
    values = [value for _, value in points]
    return {
        step: sum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1)
        for i, (step, _) in enumerate(points)
    }


def save(figure, out):
    figure.savefig(out, bbox_inches="tight", dpi=110)
    plt.close(figure)
    print(out)


def main():
    parser = Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run")
    parser.add_argument("--question", type=int, metavar="K", help="the K-th group of samples.jsonl")
    parser.add_argument("--out", help="the picture (default: in the first RUN)")
    args = parser.parse_args()
    runs = [Path(run) for run in args.runs]
    default = "curves.svg" if args.question is None else f"question-{args.question}.svg"
    out = Path(args.out or runs[0] / default)
    require_writable(out.parent)
    formats = plt.gcf().canvas.get_supported_filetypes()
    require(out.suffix[1:] in formats, f"--out {out}: expected a name that ends in .svg or .png")
    if args.question is None:
        return draw_curves(runs, out)
    require(len(runs) == 1, "--question takes one RUN")
    groups = read_lines(runs[0] / "samples.jsonl")
    inside = -len(groups) <= args.question < len(groups)
    require(inside, f"--question must be from 0 to {len(groups) - 1}, got {args.question}")
    draw_group(groups[args.question], out)


if __name__ == "__main__":
    run_script(main)
