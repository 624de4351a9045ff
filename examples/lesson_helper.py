"""What docs/lesson.md uses and does not explain: a plot of its curves, and a count of the answers
that a toy model gives."""

import re
from collections import Counter

import matplotlib
import torch

from rollout import sample
from tasks import toy
from tasks.data import load_problems

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw_curves(curves, path):
    """Draw the share of right answers by step, the mean of 5 steps. curves: {name: a list for each
    step, whose first number is that share}."""
    figure, axis = plt.subplots(figsize=(6.5, 2.8))
    for (name, curve), style in zip(curves.items(), ("C1--", "C0")):
        right = torch.tensor(curve)[:, 0].unfold(0, 5, 1).mean(1)
        axis.plot(range(5, len(curve) + 1), right, style, label=name)
    axis.set(xlabel="step", ylabel="right answers", ylim=(0, 1))
    axis.legend()
    figure.savefig(path, bbox_inches="tight")


WORDS = sorted(set(toy.NUMBERS) - set(map(str, range(100))), key=len, reverse=True)


def form_of(answer):
    """The form of an answer, shown for the number 14 and the unit eggs."""
    answer = re.sub("|".join(WORDS), "fourteen", re.sub(r"\d+", "14", answer))
    return re.sub("|".join(toy.UNITS), "eggs", answer)


def result_of(work):
    """What the last step of the work leads to. (Of "3*4=12; 12+2" it is 14.)"""
    x, sign, y = (re.findall(r"(\d+)([*+])(\d+)", work) or [(0, "+", 0)])[-1]
    return int(x) * int(y) if sign == "*" else int(x) + int(y)


def count_answers(model, tokenizer, questions, N):
    """Sample questions that were not trained on -> shares of right answers, slips and wrong
    solutions, and of the right answers that of each form."""
    torch.manual_seed(0)
    kinds = Counter()
    forms = Counter()
    for group in sample(model, tokenizer, load_problems("toy-test", questions), N, 32):
        reference = group.problem.reference
        for work, answer in zip(group.texts, group.answers):
            if toy.same_number(answer or "", reference):
                kinds["right"] += 1
                forms[form_of(answer)] += 1
            else:
                slip = result_of(work) == toy.value_of(reference)
                kinds["slip" if slip else "wrong solution"] += 1
    shares = {kind: kinds[kind] / kinds.total() for kind in ("right", "slip", "wrong solution")}
    for form in toy.FORMS:
        form = form.format(n=14, word="fourteen", unit="eggs")
        shares[f"right, as {form}"] = forms[form] / max(1, forms.total())
    return shares
