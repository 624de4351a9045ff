"""Draw the paper's figures from the files of a run.

    python plot.py RUN --question K        # Fig. 2: where the rewards of one question come from
    python plot.py RUN                     # learning curves
    python plot.py RUN RUN --out FILE.svg  # the mean and the range of the seeds

RUN is a directory that train.py wrote, or for --question judge.py. --question is the index of a
group in samples.jsonl; 0 is the first and -1 the last. Figures are SVG unless --out has another
ending.
"""

from runtime.cli import Parser, printable, require, run_script, say, shorten  # isort: split

import io
import math
import os
from pathlib import Path

import numpy
import pandas

os.environ["MPLBACKEND"] = "Agg"  # a notebook's, which may not be installed, would be refused
import matplotlib
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names

from runtime.files import read_config, read_rows, write_atomically

CJK = "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans"
matplotlib.rcdefaults()  # without the user's matplotlibrc
matplotlib.rcParams |= {
    "text.parse_math": False,  # answers may contain a $
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 13,
    # matplotlib takes a missing character from the next font, if that is installed.
    "font.family": ["DejaVu Sans", *(font for font in CJK if font in get_font_names())],
    "axes.titlesize": 14,
}


# --------------------------------------------------------------------------------- one question


def draw_group(group, out):
    """Draw R = (D^-1 W) P for one question (Fig. 2). Rows are the samples' answers and columns
    their solutions. Both are sorted by reward. P is drawn above. Its dot product with a row of
    D^-1 W is that row's CER. R differs from it for an empty box, and where the reward is another.
    """
    require("log_W" in group, "this group has no W and P (judge.py and --reward cer keep them)")
    require(group["columns"], "no sample of this group has an answer, so there is nothing to draw")
    R, answers, distinct = group["R"], group["answers"], group["distinct_answers"]

    def place(i):  # best first, equal answers side by side, samples without an answer last
        return answers[i] is None, -R[i], answers[i] or "", i

    rows, columns = sorted(range(len(R)), key=place), sorted(group["columns"], key=place)
    log_P = pandas.Series(group["log_P"], group["columns"], dtype=float).fillna(-numpy.inf)
    P = numpy.exp(log_P[columns].to_numpy())
    log_W = pandas.DataFrame(group["log_W"], distinct, group["columns"], dtype=float)
    W = numpy.exp(log_W.sub(log_W.max(axis=1), axis=0))  # the factor of each row cancels
    posterior = W.div(W.sum(axis=1), axis=0)  # nan where log_W is null: not among the M
    # A sample without an answer has no row in W, and gets nan.
    posterior = posterior.reindex([answers[i] for i in rows])[columns].to_numpy()

    figure = Figure(figsize=(10.5, 0.33 * len(rows) + 3), layout="constrained")
    axes = figure.subplot_mosaic(
        [["P", "."], ["W", "R"]],
        width_ratios=[max(4, len(columns)), 1.3],
        height_ratios=[1, len(rows)],
    )
    draw_matrix(axes["P"], P[None], "Greens", digits=3)
    draw_matrix(axes["W"], posterior, "Blues", digits=2, top=1.0)
    draw_matrix(axes["R"], numpy.array(R)[rows, None], "Oranges", digits=3)
    names = [name_of(answer, group["references"]) for answer in answers]
    axes["P"].set_yticks([0], ["P = π(a*|s)"])
    axes["W"].set_yticks(range(len(rows)), [names[i] for i in rows])
    axes["W"].set_xticks(range(len(columns)), [names[j] for j in columns], rotation=90, fontsize=11)
    axes["W"].set_xlabel("solutions, named by the answer that each led to")
    axes["W"].set_title("D⁻¹W: the posterior, which solutions lead to the answer")
    axes["R"].set_title("R")
    question = text_of(group["question"], 90)
    reference = text_of(" or ".join(group["references"]), 60)
    step = f"step {group['step']}: " if "step" in group else ""
    figure.suptitle(f"{step}{question}\na* = {reference}", fontsize=13)
    save(figure, out)


def draw_matrix(axis, values, colours, digits, top=None):
    """Draw coloured cells with their numbers. The colour follows the square root of the value, so
    that .1 can be told from 0."""
    top = top or values.max() or 1.0
    axis.imshow(values, cmap=colours, norm=PowerNorm(0.5, vmin=0, vmax=1.3 * top), aspect="auto")
    for (y, x), value in numpy.ndenumerate(values):
        if not math.isnan(value):
            ink = "white" if value > 0.6 * top else "black"
            text = f"{value:.{digits}f}".removeprefix("0")
            if digits > 2 and 0 < value < 0.5 * 10**-digits:  # P and R; shares stay .00
                text = f"{value:.0e}"
            axis.text(x, y, text, ha="center", va="center", fontsize=9.5, color=ink)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def name_of(answer, references):
    if answer is None:
        return "(no answer)"
    return (text_of(answer, 22) or "(empty)") + (" = a*" if answer in references else "")


def text_of(text, most):
    """A text on one line of a figure."""
    return shorten(printable(" ".join(text.split())), most)


# --------------------------------------------------------------------------------------- the curves

PANELS = {  # name in metrics.jsonl: title
    "reward": "mean reward",
    "pass_at_1": "pass@1, held out",
    "answer_tokens": "tokens of an answer",
    "zero_advantage_groups": "zero-advantage groups",
    "answered": "samples with an answer",
    "truncated": "samples that were cut off",
    "entropy": "entropy, nats per token",
}


def draw_curves(runs, names, out):
    """Draw one panel per metric. Runs with the same name differ in the seed: a line is their mean,
    and its band goes from the lowest to the highest. That of a single seed is 1.96 standard errors,
    if they were logged. All metrics except pass@1 are means over the last ten steps."""
    tables = [pandas.DataFrame(read_log(run / "metrics.jsonl")) for run in runs]
    tables = [table.groupby("step").first() for table in tables]  # an evaluation is a line, too
    last = max(table.index[-1] for table in tables)
    for run, table in zip(runs, tables):
        if table.index[-1] < last:
            say(f"{run} ends at step {table.index[-1]} of {last}: later steps are drawn without it")
    panels = [key for key in PANELS if any(key in table for table in tables)]
    height = math.ceil(len(panels) / 4)
    figure = Figure(figsize=(13, 3.1 * height), layout="constrained")
    for place, key in enumerate(panels, start=1):
        axis = figure.add_subplot(height, 4, place, title=PANELS[key], xlabel="step")
        for name in dict.fromkeys(names):
            seeds = [table for table, of in zip(tables, names) if of == name and key in table]
            if seeds:
                draw_seeds(axis, seeds, key, name)
        axis.set_ylim(bottom=0)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(figure, out)


def draw_seeds(axis, tables, key, label):
    """Draw the mean of the seeds that have a step, and a band."""
    curves = [table[key].astype(float).dropna() for table in tables]
    y = pandas.concat(curves, axis=1).sort_index()  # [steps, seeds], nan where a seed has no step
    y = y.rolling(1 if key == "pass_at_1" else min(10, len(y))).mean().dropna(how="all")
    mean, low, high = y.mean(axis=1), y.min(axis=1), y.max(axis=1)
    if len(tables) == 1 and f"{key}_stderr" in tables[0]:
        error = 1.96 * tables[0][f"{key}_stderr"][y.index].astype(float)
        low, high = mean - error, mean + error
    [line] = axis.plot(mean, label=label, marker="o" if len(mean) == 1 else None)
    axis.fill_between(y.index, low, high, alpha=0.2, linewidth=0, color=line.get_color())


def read_log(path):
    lines = read_rows(path)
    require(lines, f"{path} is empty: the run has no step yet")
    return lines


def names_of(runs):
    """Name each run by its reward and by the other flags in which the runs differ, except seed."""
    flags = [read_config(run)["flags"] for run in runs]
    differ = [name for name in flags[0] if len({repr(of.get(name)) for of in flags}) > 1]
    differ = [name for name in differ if name not in ("reward", "seed")]
    return [
        ", ".join([of["reward"], *(f"{name} {of.get(name)}" for name in differ)]) for of in flags
    ]


def save(figure, out):
    image = io.BytesIO()
    figure.savefig(image, format=out.suffix[1:], bbox_inches="tight", dpi=110)
    write_atomically(out, image.getvalue())
    print(out)


def main():
    parser = Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory of a run")
    parser.add_argument("--question", type=int, metavar="K", help="group in samples.jsonl, from 0")
    parser.add_argument("--out", help="output file, .svg, .png or .pdf (default: in the RUN)")
    args = parser.parse_args()
    runs = [Path(run) for run in args.runs]
    default = "curves.svg" if args.question is None else f"question-{args.question}.svg"
    require(args.out or len(runs) == 1, "where do curves of several runs go? --out FILE.svg")
    out = Path(args.out or runs[0] / default)
    require(out.suffix in (".svg", ".png", ".pdf"), f"--out {out}: expected .svg, .png or .pdf")
    if args.question is None:
        return draw_curves(runs, names_of(runs), out)
    require(len(runs) == 1, "--question takes one RUN")
    groups = read_log(runs[0] / "samples.jsonl")
    inside = -len(groups) <= args.question < len(groups)
    require(inside, f"--question must be from 0 to {len(groups) - 1}, got {args.question}")
    draw_group(groups[args.question], out)


if __name__ == "__main__":
    run_script(main)
