"""CER on three kinds of solution and four answers, small enough to check by hand."""

import argparse
import sys

import torch

sys.path.append(sys.path[0] + "/..")  # where cer.py and rloo.py are
from cer import cer, exact_cer
from rloo import leave_one_out

answers = ["14", "14 eggs", "18", "9"]
prior = torch.tensor([0.5, 0.3, 0.2])
A = [0.50, 0.40, 0.05, 0.05]  # 3*4=12; 12+2=14
B = [0.05, 0.09, 0.81, 0.05]  # 4+2=6; 3*6=18
C = [0.03, 0.01, 0.06, 0.90]  # 3+4=7; 7+2=9
likelihood = torch.tensor([A, B, C])
joint = prior[:, None] * likelihood
p_answer = joint.sum(0)
posterior = joint / p_answer
rho = exact_cer(prior, likelihood)[:, 0]


def show(name, values, width=8):
    cells = (value if isinstance(value, str) else f"{value:.3f}" for value in values)
    print(f"{name:34}", *(f"{cell:>{width}}" for cell in cells))


print('q = "3 bags of 4 eggs and 2 more eggs. How many eggs?"    a* = 14\n')
show("kind of solution s", "ABC")
show("prior      pi(s|q)", prior)
for u, answer in enumerate(answers):
    show(f"likelihood pi({answer}|s,q){'  = P' if u == 0 else ''}", likelihood[:, u])
for u, answer in enumerate(answers):
    show(f"posterior  pi(s|{answer},q)", posterior[:, u])
terms = zip(posterior[:, 1].tolist(), likelihood[:, 0].tolist())
product = " + ".join(f"{p:.3f} * {P:.2f}" for p, P in terms)
print(f"rho(14 eggs, 14) = posterior . P = {product} = {rho[1]:.3f}\n")

show("answer a", answers)
show("pi(a|q)", p_answer)
show("exact match with a*", torch.eye(4)[0])
show("CER, rho(a, a*)            (Eq. 3)", rho)
torch.manual_seed(0)
for N in 16, 1024:
    s = torch.multinomial(prior, N, replacement=True)
    a = torch.multinomial(likelihood[s], 1).squeeze(1)
    W, P = likelihood[s][:, a].T, likelihood[s, 0]  # [N, N], [N]
    R = cer(W.log(), P.log())
    show(f"R = D^-1 W P, {N:4} samples  (Eq. 8)", [R[a == u][0] for u in range(4)])
print("\nTheorem 2: over the model's own answers both have the same mean,")
print(f"    exact match {p_answer[0]:.6f}    CER {p_answer @ rho:.6f}")

# CER fails in the second group. Its third sample is a slip, a wrong answer after right work.
groups = {"A group of four samples (s, a)": "AABC", "With a slip, (A, 18)": "AAAC"}
for title, kinds in groups.items():
    W = likelihood[["ABC".index(kind) for kind in kinds]].T  # sample i gives answers[i]
    R = cer(W.log(), W[0].log())  # answers[0] is a*, so P is the first row
    print()
    show(title, [f"{kind}, {answer}" for kind, answer in zip(kinds, answers)], width=10)
    show("R", R, width=10)
    show("advantage, R - mean of the others", leave_one_out(R), width=10)


# ---------------------------------------------------------------- the same example as three squares

# Colours that colour-blind eyes tell apart.
KINDS = {"A": "#0b5fa5", "B": "#1b7f5c", "C": "#a83279"}
FILL, PALE_FILL, INK, LINE = "#e88427", "#f8d9b8", "#1c1e22", "#8a3d04"


def draw(path):
    """Draw the model, the solutions that lead to "14 eggs" and the reward of every answer. The
    squares have sides of length 1, so that a share of the area is a probability or a mean."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "by_hand", "font.size": 13.5, "text.color": INK}
    import matplotlib.pyplot as plt
    from matplotlib.offsetbox import AnchoredOffsetbox, HPacker, TextArea

    def box(axis, x, y, width, height, colour, alpha=1.0):
        style = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.5, "alpha": alpha}
        axis.add_patch(plt.Rectangle((x, y), width, height, **style))

    def write(axis, x, y, text, **style):
        axis.text(x, y, text, **{"ha": "center", "va": "center"} | style)

    def formula(axis, y, *parts):
        """Write (text, colour) pairs as one line below the square."""
        pieces = [TextArea(text, textprops={"color": colour}) for text, colour in parts]
        line = HPacker(children=pieces, pad=0, sep=0, align="baseline")
        place = {"bbox_to_anchor": (0.5, y), "bbox_transform": axis.transAxes, "pad": 0}
        axis.add_artist(AnchoredOffsetbox("upper center", child=line, frameon=False, **place))

    def short(x, digits=3):
        return f"{x:.{digits}f}".removeprefix("0")

    def terms(widths, heights, digits):
        """The formula of a mean: + w * h for each kind, in the colour of the kind and of h."""
        parts = []
        for kind, width, height in zip(KINDS, widths.tolist(), heights.tolist()):
            plus = [(" + ", INK)] if parts else []
            times = (short(width, digits) + "×", KINDS[kind])
            parts += [*plus, times, (short(height, 2), LINE if digits == 3 else KINDS[kind])]
        return parts

    figure, axes = plt.subplots(1, 3, figsize=(8.85, 5.1), facecolor="white")
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.24, top=0.75, wspace=0.24)
    question = "“3 bags of 4 eggs and 2 more eggs. How many eggs?”  The reference answer a* is 14."
    figure.text(0.5, 0.975, question, ha="center", va="top", fontsize=14)
    titles = {
        "The model": "width: prior π(s|q)\nheight: likelihood π(a|s,q)",
        "Solutions behind “14 eggs”": "width: posterior π(s|a,q)\nheight: P = π(a*|s,q)",
        "Every answer’s reward": "width: π(a|q)\nheight: reward",
    }
    for axis, (title, sides) in zip(axes, titles.items()):
        axis.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[], aspect="equal")
        axis.spines[:].set_color("#888888")
        write(axis, 0.5, 1.225, title, weight="bold")
        write(axis, 0.5, 1.09, sides)
    for axis in axes[1:]:
        write(axis, -0.11, 0.5, "→", fontsize=20)
    model, leading, rewards = axes
    chosen, P = answers.index("14 eggs"), likelihood[:, 0]

    x = 0
    for k, (kind, colour) in enumerate(KINDS.items()):
        width, y = prior[k].item(), 0
        for u, (answer, height) in enumerate(zip(answers, likelihood[k].tolist())):
            box(model, x, y, width, height, colour, 1 if u == chosen else 0.22)
            if height > 0.08 and (width > 0.4 or u != chosen):
                ink = "white" if u == chosen else INK
                write(model, x + width / 2, y + height / 2, answer, color=ink)
            y += height
        write(model, x + width / 2, -0.06, f"{kind} {short(width, 1)}", color=colour, weight="bold")
        x += width
    formula(model, -0.15, *terms(prior, likelihood[:, chosen], 1))
    formula(model, -0.25, (f"= π(14 eggs|q) = {short(p_answer[chosen])}", INK))

    x = 0
    for k, (kind, colour) in enumerate(KINDS.items()):
        width = posterior[k, chosen].item()
        box(leading, x, 0, width, 1, colour, 0.22)
        box(leading, x, 0, width, P[k].item(), FILL)
        name = f"{kind} {short(width)}" if width > 0.5 else kind
        place = 1.02 if kind == "C" else x + width / 2  # its column is too narrow for the name
        write(leading, place, -0.06, name, color=colour, weight="bold")
        x += width
    mean = rho[chosen].item()
    leading.axhline(mean, color=LINE, linewidth=1.6, linestyle="--")
    write(leading, 0.43, 0.55, f"P = {short(P[0], 2)}")
    write(leading, 0.43, mean - 0.07, f"mean: ρ = {short(mean)}")
    formula(leading, -0.15, *terms(posterior[:, chosen], P, 3))
    formula(leading, -0.25, (f"= ρ(14 eggs, 14) = {short(mean)}", LINE))

    x = 0
    for u, (answer, width) in enumerate(zip(answers, p_answer.tolist())):
        height = rho[u].item()
        box(rewards, x, 0, width, height, FILL if u == chosen else PALE_FILL)
        write(rewards, x + width / 2, height + 0.05, short(height), color=LINE)
        write(rewards, x + width / 2, -0.06, answer, fontsize=12)
        x += width
    outline = {"fill": False, "linestyle": "--", "linewidth": 1.6, "edgecolor": INK}
    star, areas = p_answer[0].item(), (p_answer * rho).tolist()
    rewards.add_patch(plt.Rectangle((0, 0), star, 1, clip_on=False, zorder=3, **outline))
    write(rewards, star / 2, 0.8, "exact\nmatch")
    write(rewards, 0.64, 0.8, "Exact match and\nthe bars have the\nsame area")
    formula(rewards, -0.15, (f"exact match: {short(star)}×1 = {short(star)}", INK))
    total = "+".join(short(area) for area in areas)
    formula(rewards, -0.25, (f"CER: {total}", LINE))
    formula(rewards, -0.35, (f"= {short(sum(areas))}, the same mean", LINE))

    figure.savefig(path, dpi=96, metadata={"Date": None})
    print(f"\nfigure: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", metavar="FILE", help="also draw the example, as .svg or .png")
    args = parser.parse_args()
    if args.figure:
        draw(args.figure)
