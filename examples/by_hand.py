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


def draw(path):
    """Draw the model, the posterior of "14 eggs" and the reward of every answer. The squares have
    sides of length 1, so that a share of the area is a probability or a mean."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "by_hand", "font.size": 14}
    import matplotlib.pyplot as plt

    kinds, kind_hues = "ABC", ["#0b5fa5", "#1b7f5c", "#a83279"]  # also for colour-blind eyes
    fill, pale_fill, ink = "#e88427", "#f8d9b8", "#1c1e22"
    chosen = answers.index("14 eggs")
    P, shares = likelihood[:, 0], posterior[:, chosen]

    def short(x, digits=3):  # a probability below 1
        return f"{x:.{digits}f}"[1:]

    def columns(axis, widths, heights, bottom=0, **style):
        """Columns side by side -> their rectangles."""
        left = widths.cumsum(0) - widths
        style = {"edgecolor": "white", "linewidth": 0.5, "align": "edge"} | style
        return axis.bar(left, heights, widths, bottom, **style)

    def frame(axis, title, sides, widths, names, hues, formula):
        """The words around a square."""
        axis.set(xlim=(0, 1), ylim=(0, 1), yticks=[], aspect="equal")
        axis.set_title(title, weight="bold", pad=46)
        axis.text(0.5, 1.02, sides, ha="center", va="bottom")
        axis.set_xticks(widths.cumsum(0) - widths / 2, names)
        axis.tick_params(length=0)
        for label, hue in zip(axis.get_xticklabels(), hues):
            label.set_color(hue)
        axis.set_xlabel(formula, labelpad=10)

    figure, (model, behind, rewards) = plt.subplots(1, 3, figsize=(8.85, 4.9), facecolor="white")
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.17, top=0.73, wspace=0.2)
    figure.suptitle("“3 bags of 4 eggs and 2 more eggs. How many eggs?”   a* = 14", fontsize=15)
    for x in 0.334, 0.663:
        figure.text(x, 0.45, "→", ha="center", fontsize=20)

    for u, answer in enumerate(answers):
        heights, below = likelihood[:, u], likelihood[:, :u].sum(1)
        alpha = 1 if u == chosen else 0.22
        slices = columns(model, prior, heights, below, color=kind_hues, alpha=alpha)
        names = [answer if area > 0.1 else "" for area in prior * heights]
        model.bar_label(slices, names, label_type="center", color="white" if u == chosen else ink)
    sides = "width: prior π(s|q)\nheight: likelihood π(a|s,q)"
    names = [f"{kind} {short(p, 1)}" for kind, p in zip(kinds, prior)]
    formula = f"dark area:\nπ(14 eggs|q) = {short(p_answer[chosen])}"
    frame(model, "The model", sides, prior, names, kind_hues, formula)

    columns(behind, shares, torch.ones(3), color=kind_hues, alpha=0.22)
    columns(behind, shares, P, color=fill)
    behind.axhline(rho[chosen], color=ink, linestyle="--")
    behind.text(0.43, 0.53, f"P = {short(P[0], 2)}", ha="center")
    behind.text(0.43, 0.35, f"mean: ρ = {short(rho[chosen])}", ha="center")
    sides = "width: posterior π(s|a,q)\nheight: P = π(a*|s,q)"
    names = [f"A {short(shares[0])}", "B", "  C"]
    terms = " + ".join(f"{short(p)}×{short(height, 2)}" for p, height in zip(shares, P))
    formula = f"{terms}\n= ρ = {short(rho[chosen])}"
    frame(behind, "Behind “14 eggs”", sides, shares, names, kind_hues, formula)

    hues = [fill if u == chosen else pale_fill for u in range(4)]
    bars = columns(rewards, p_answer, rho, color=hues)
    rewards.bar_label(bars, [short(r) for r in rho])
    columns(rewards, p_answer[:1], 1, fill=False, edgecolor=ink, linestyle="--", linewidth=1.6)
    rewards.text(p_answer[0] / 2, 0.8, "exact\nmatch", ha="center", va="center", size=13)
    formula = f"bars and dashed column:\nboth areas are {short(p_answer @ rho)}"
    sides = "width: π(a|q)\nheight: reward"
    frame(rewards, "All rewards", sides, p_answer, answers, [ink] * 4, formula)

    figure.savefig(path, dpi=96, metadata={"Date": None})
    print(f"\nfigure: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", metavar="FILE", help="also draw the example, as .svg or .png")
    args = parser.parse_args()
    if args.figure:
        draw(args.figure)
