"""Draw the paper's figures from the files of a run.

    python plot.py RUN --question K        # Fig. 2: where the rewards of one question come from
    python plot.py RUN [RUN ...]           # learning curves; seeds of the same run are averaged

RUN is a directory that train.py wrote. --question is the index of a group in samples.jsonl; 0 is
the first and -1 the last. Figures are SVG unless --out has another ending.
"""

import math
from pathlib import Path

import matplotlib
import numpy
import pandas

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import PowerNorm
from matplotlib.ticker import MaxNLocator

from engine.cli import Parser, require, run_script
from engine.files import read_flags, read_rows

matplotlib.rcParams |= {
    "text.parse_math": False,  # answers may contain a $
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe-Ito


# --------------------------------------------------------------------------------- one question


def draw_group(group, out):
    """Draw R = (D^-1 W) P for one question (Fig. 2). Rows are the samples' answers and columns
    their solutions. Both are sorted by reward, so that answers from the same solutions form a
    block. P is drawn above. Its dot product with a row of D^-1 W is that row's CER. R differs from
    it for an empty box, and with rule+cer."""
    require("log_W" in group, "this group has no matrices, because its reward was not CER")
    require(
        group["columns"],
        "no sample of this group has an answer, so there is nothing to draw; docs/explore.html "
        "shows its samples",
    )
    R, answers = group["R"], group["answers"]

    def rank(i):  # best first, equal answers side by side, samples without an answer last
        return answers[i] is None, -R[i], answers[i] or "", i

    rows = sorted(range(len(R)), key=rank)
    columns = sorted(group["columns"], key=rank)
    P = numpy.exp(pandas.Series(group["log_P"], group["columns"])[columns].to_numpy())[None]
    log_W = pandas.DataFrame(group["log_W"], group["distinct_answers"], group["columns"])
    log_W = log_W.astype(float).fillna(-numpy.inf)  # null: not among the M
    W = numpy.exp(log_W.sub(log_W.max(axis=1), axis=0))  # the factor of each row cancels
    posterior = W.div(W.sum(axis=1), axis=0)
    # A sample without an answer has no row in W, and gets nan.
    posterior = posterior.reindex([answers[i] for i in rows])[columns].to_numpy()

    cells = 0.3 * (len(rows) + 1)  # height of the rows of both matrices, in inches
    height = cells + 2.2
    shape = {"width_ratios": [max(4, len(columns)), 1.3], "height_ratios": [1, len(rows)]}
    figure, axes = plt.subplots(2, 2, figsize=(9.5, height), gridspec_kw=shape)
    between = 0.3 / (cells / 2)  # 0.3 inches, as a share of the mean height of the axes
    figure.subplots_adjust(top=1 - 0.6 / height, bottom=1.3 / height, wspace=0.04, hspace=between)
    axes[0, 1].set_visible(False)
    draw_matrix(axes[0, 0], P, "Greens", digits=3)
    draw_matrix(axes[1, 0], posterior, "Blues", digits=2, top=1.0)
    draw_matrix(axes[1, 1], numpy.array(R)[rows, None], "Oranges", digits=3)
    # Draw a line wherever the answer changes, so that the cells between two lines have one answer.
    for y in changes([answers[i] for i in rows]):
        axes[1, 0].axhline(y, color="white", linewidth=3)
        axes[1, 1].axhline(y, color="white", linewidth=3)
    for x in changes([answers[j] for j in columns]):
        axes[0, 0].axvline(x, color="white", linewidth=3)
        axes[1, 0].axvline(x, color="white", linewidth=3)
    axes[0, 0].set_yticks([0], ["P = π(a*|s)"])
    axes[1, 0].set_yticks(range(len(rows)), [label(answers[i], group["reference"]) for i in rows])
    names = [label(answers[j], group["reference"]) for j in columns]
    axes[1, 0].set_xticks(range(len(columns)), names, rotation=90, fontsize=8)
    axes[1, 0].set_xlabel("solutions, named by the answer each led to   (= : it is a*)", fontsize=9)
    axes[1, 0].set_title("D⁻¹W: the posterior, which solutions lead to the answer", fontsize=9)
    axes[1, 1].set_title("R" if "verdicts" in group else "R = D⁻¹W P", fontsize=9)
    question = shorten(" ".join(group["question"].split()), 100)
    title = f"{question}\nreference a* = {shorten(group['reference'], 60)}"
    title += f", step {group['step']}" if group["step"] else ""
    figure.suptitle(title, fontsize=10, y=1.0, va="top")
    save(figure, out)


def draw_matrix(axis, values, colours, digits, top=None):
    """Draw coloured cells with their numbers. The colour follows the square root of the value, so
    that .1 can be told from 0."""
    top = top or values.max() or 1.0
    axis.imshow(values, cmap=colours, norm=PowerNorm(0.5, vmin=0, vmax=1.3 * top), aspect="auto")
    for (y, x), value in numpy.ndenumerate(values):
        if not math.isnan(value):
            ink = "white" if value > 0.6 * top else "#222222"
            text = f"{value:.{digits}f}".removeprefix("0")
            axis.text(x, y, text, ha="center", va="center", fontsize=7.5, color=ink)
    axis.set(xticks=[], yticks=[])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def changes(names):
    """The positions between cells where two neighbours differ."""
    return [k - 0.5 for k in range(1, len(names)) if names[k] != names[k - 1]]


def label(answer, reference):
    if answer is None:
        return "(no answer)"
    return ("=  " if answer == reference else "") + shorten(answer or "(empty)", 22)


def shorten(text, most):
    return text if len(text) <= most else text[: most - 1] + "…"


# --------------------------------------------------------------------------------------- the curves

PANELS = [  # (name in metrics.jsonl, x axis, title)
    ("reward", "step", "mean reward"),
    ("pass_at_1", "step", "pass@1, held out"),
    ("pass_at_1", "minutes", "pass@1, by minutes"),
    ("exact_match", "step", "exact match with the reference"),
    ("zero_advantage_groups", "step", "zero-advantage groups"),
    ("answered", "step", "samples with an answer"),
    ("truncated", "step", "samples that were cut off"),
    ("entropy", "step", "entropy, nats per token"),
]


def draw_curves(runs, names, out, window=10):
    """Draw one panel per metric. Runs with the same name (they differ in the seed) are thin lines,
    with their mean. All metrics except pass@1 are averaged over the last `window` steps."""
    groups = {}
    for run, name in zip(runs, names):
        groups.setdefault(name, []).append(read_metrics(run))
    there = {key for of_name in groups.values() for metrics in of_name for key in metrics}
    panels = [panel for panel in PANELS if panel[0] in there]
    columns = min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for (key, over, title), axis in zip(panels, axes.flat):
        smooth = 1 if key == "pass_at_1" else window
        for number, (name, of_name) in enumerate(groups.items()):
            found = [metrics[key].dropna() for metrics in of_name if key in metrics]
            if not found:
                continue
            smoothed = [curve.rolling(smooth, min_periods=1).mean() for curve in found]
            seeds = pandas.concat(smoothed, axis=1, join="inner")  # [steps, seeds]
            x = seeds.index
            if over == "minutes":
                x = pandas.concat([metrics.minutes for metrics in of_name], axis=1).mean(axis=1)[x]
            colour = COLOURS[number % len(COLOURS)]
            dashes = "-" if number < len(COLOURS) else "--"
            marker = "o" if len(seeds) == 1 else None
            axis.plot(x, seeds.mean(axis=1), dashes, label=name, color=colour, marker=marker)
            axis.plot(x, seeds, color=colour, linewidth=0.5, alpha=0.5)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=over == "step", steps=[1, 2, 5, 10]))
        axis.set_xlabel(over + (f" (mean of {window})" if smooth > 1 else ""))
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=columns, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / (3 * rows) * math.ceil(len(groups) / columns)))
    save(figure, out)


def read_log(path):
    lines = read_rows(path)
    require(lines, f"{path} is empty: the run has no step yet")
    return lines


def read_metrics(run):
    """metrics.jsonl as a table indexed by step, with the minutes of training up to each step."""
    lines = pandas.DataFrame(read_log(run / "metrics.jsonl")).set_index("step")
    parts = lines.reindex(columns=["seconds"]).seconds  # missing if only step 0 is there
    seconds = parts.map(lambda of_step: sum(of_step.values()), na_action="ignore").fillna(0)
    return lines.assign(minutes=seconds.cumsum() / 60)


def names_of(runs):
    """Name each run by its reward and by the other flags in which the runs differ, except seed."""
    flags = [read_flags(run) for run in runs]
    names = [name for name in flags[0] if name not in ("reward", "seed")]
    differ = [name for name in names if len({repr(of_run.get(name)) for of_run in flags}) > 1]
    return [
        ", ".join([of_run["reward"], *(f"{name} {of_run.get(name)}" for name in differ)])
        for of_run in flags
    ]


def save(figure, out):
    figure.savefig(out, bbox_inches="tight", dpi=110)
    plt.close(figure)
    print(out)


def main():
    parser = Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run")
    parser.add_argument("--question", type=int, metavar="K", help="index of a group, from 0")
    parser.add_argument("--out", help="output file, .svg, .png or .pdf (default: in the first RUN)")
    args = parser.parse_args()
    runs = [Path(run) for run in args.runs]
    default = "curves.svg" if args.question is None else f"question-{args.question}.svg"
    out = Path(args.out or runs[0] / default)
    formats = plt.gcf().canvas.get_supported_filetypes()
    require(out.suffix[1:] in formats, f"--out {out}: expected a name that ends in .svg or .png")
    if args.question is None:
        return draw_curves(runs, names_of(runs), out)
    require(len(runs) == 1, "--question takes one RUN")
    groups = read_log(runs[0] / "samples.jsonl")
    inside = -len(groups) <= args.question < len(groups)
    require(inside, f"--question must be from 0 to {len(groups) - 1}, got {args.question}")
    draw_group(groups[args.question], out)


if __name__ == "__main__":
    run_script(main)
