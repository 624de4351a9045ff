"""The picture of README.md and docs/lesson.md: one amount of orange, moved twice.

    python docs/figures/orange.py docs/figures/orange.svg

A square is all that the lesson's model can do with its question. A slice is a kind of solution with
an answer, and its area is their probability. The orange share of a slice is the reward of such a
sample, so the orange area of a square is the mean reward.
"""

import sys

import matplotlib.pyplot as plt
import torch

plt.rcParams |= {"svg.hashsalt": "orange", "font.size": 13, "axes.edgecolor": "silver"}
hues = ["#c3d5ee", "#c5e3d6", "#e3d0ea"]  # of the solutions A, B and C


def draw(axis, title, question, columns, widths, slices, names, hues, rewards, slip):
    """Columns, as wide as their probability, in slices of heights [columns, slices]. slip: the
    column and the slice of (A, "18")."""
    left, bottom, areas = widths.cumsum(0) - widths, slices.cumsum(1) - slices, widths * slices.T
    for k, R in enumerate(rewards.T):
        place = {"height": slices[:, k], "bottom": bottom[:, k], "align": "edge"}
        axis.bar(left + R % 1 * widths, width=(1 - R % 1) * widths, color=hues[k], **place)
        axis.bar(left, width=R * widths, color="#f0932b", label="reward", **place)
        outline = axis.bar(left, width=widths, fill=False, edgecolor="white", **place)
        # The slices of .025 are the wrong answers after A, and get small letters.
        for least, most, size in (0.026, 1, 13), (0.0249, 0.026, 9):
            shown = [names[k] if least <= x < most else "" for x in areas[k]]
            axis.bar_label(outline, shown, label_type="center", size=size)
    x, y = slip
    frame = dict(height=slices[x, y].item(), bottom=bottom[x, y].item(), align="edge", fill=False)
    axis.bar(left[x].item(), width=widths[x].item(), edgecolor="#b00020", linewidth=2, **frame)
    if (rewards == rewards[:, :1]).all():  # the slices of a column have the same reward
        axis.bar_label(outline, [f"{R:.3f}"[1:] for R in rewards[:, 0]], color="#a04b00", padding=2)
    axis.set(xlim=(0, 1), ylim=(0, 1), yticks=[], xticks=left + widths / 2, xticklabels=columns)
    axis.set_title(title + "\n", weight="bold", size=13)
    mean, square = ((areas * rewards.T**power).sum() for power in (1, 2))
    numbers = f"mean reward {mean:.3f}, SD {(square - mean**2) ** 0.5:.3f}"
    axis.set_xlabel(f"{question}\n{numbers}", labelpad=8)


prior = torch.tensor([0.5, 0.3, 0.2])  # pi(s|q)
likelihood = torch.tensor([[50, 40, 5, 5], [5, 9, 81, 5], [3, 1, 6, 90]]) / 100  # pi(a|s,q)
posterior = (prior[:, None] * likelihood / (prior @ likelihood)).T  # pi(s|a,q)
P, answers = likelihood[:, 0], ["14", "14 eggs", "18", "9"]
figure, (exact, verifree, cer) = plt.subplots(1, 3, figsize=(10.5, 5.3))
figure.subplots_adjust(left=0.01, right=0.99, bottom=0.21, top=0.75, wspace=0.14)
model = ["A\n3·4+2", "B\n3·(4+2)", "C\n3+4+2"], prior, likelihood, answers, [hues] * 4
question = "Is this answer verbatim?"
draw(exact, "exact match", question, *model, torch.eye(4)[[0, 0, 0]], (0, 2))
title = "→ averaged over the answers\nof each solution: VeriFree"
question = "Does this solution lead to “14”?"
draw(verifree, title, question, *model, P[:, None].expand(3, 4), (0, 2))
behind = [a + "\n" for a in answers], prior @ likelihood, posterior, "ABC", [[h] * 4 for h in hues]
title = "→ averaged over the solutions\nbehind each answer: CER"
question = "Do its solutions lead to “14”?"
draw(cer, title, question, *behind, (posterior @ P)[:, None].expand(4, 3), (2, 0))
figure.suptitle("“3 bags of 4 eggs and 2 more eggs. How many eggs?”   reference: 14", size=13)
colours = "orange, and the number above a column: reward   red: “18” after right work, a slip"
figure.text(0.5, 0.905, colours, ha="center", size=11, color="#555555")
figure.savefig(sys.argv[1], metadata={"Date": None})
