"""The figure and the table of the two tables: examples/two_tables.py in batches, in many settings.

    python benchmarks/two_tables_figure.py     # runs/two_tables.png, in a minute
    python benchmarks/two_tables_figure.py --forms 16 --lr .05 .1 .2 .4

K policies, one for each seed, are trained at once. A step samples N answers to each of B questions.
There are S solutions and V = S F answers. pass@1 is the probability of value 0 in any form. Slips
are wrong values after the right solution. ".8 at" is the first step with a mean pass@1 of .8.
"""

import itertools
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

sys.path.append(sys.path[0] + "/..")  # where cer.py and rloo.py are
from cer import cer
from engine.cli import Parser, number, require, run_script
from plot import COLOURS
from rloo import leave_one_out

CURVES = {"Rule+CER": "rule+cer", "CER": "cer", "VeriFree": "verifree", "exact match": "exact"}
CURVES |= {"perfect verifier": "rule"}  # drawn last, dashed, as others lie under it

# ------------------------------------------------------------------------------------ the training


def two_tables(K, F, slip, skew=0.0, S=6):
    """The policy before training -> theta [K, S], phi [K, S, V]. The right solution has probability
    0.2. The forms are equally likely, or their logits have the standard deviation skew."""
    prior = torch.tensor([0.2] + [0.8 / (S - 1)] * (S - 1))
    value = torch.full((S, S), slip / (S - 1)).fill_diagonal_(1 - slip).clamp_min(1e-4)
    phi = (value.log()[:, :, None] + skew * torch.randn(K, 1, 1, F)).flatten(2)
    return prior.log().repeat(K, 1).requires_grad_(), phi.requires_grad_()


def judge(reward, theta, phi, s, a, reference, M, divide_by_std=False):
    """Samples s, a [K, B, N] and references [K, B] -> R [K, B, N], and the losses [K, B]."""
    (K, B, N), F = s.shape, phi.shape[-1] // theta.shape[-1]
    reference = reference[..., None].expand_as(a)
    log_pi = phi.log_softmax(-1)[torch.arange(K)[:, None, None], s]  # of all answers  [K, B, N, V]
    log_P = log_pi.detach().gather(-1, reference[..., None])[..., 0]  # log pi(a*|s_j)  [K, B, N]
    log_W = log_pi.detach().gather(-1, a[:, :, None].expand(K, B, N, N)).mT  # log pi(a_i|s_j)
    if M < N:  # the own solution, others at random (cer.py first takes all that gave the answer)
        keys = torch.eye(N) + torch.rand(log_W.shape)
        log_W[keys < keys.topk(M).values[..., -1:]] = -torch.inf
    R_cer, right = cer(log_W, log_P), (a // F == 0).float()
    R = {
        "exact match": (a == reference).float(),
        "perfect verifier": right,
        "VeriFree": log_P.exp(),
        "CER": R_cer,
        "Rule+CER": (right + R_cer) / 2,  # with a perfect rule
    }[reward]
    A = leave_one_out(R)
    # GRPO divides by the group's standard deviation. The paper does not.
    A = A / (R.std(-1, keepdim=True) + 1e-6) if divide_by_std else A
    # In place of the sampled answer VeriFree teaches the reference, weighted by its probability R.
    taught, weight = (reference, R) if reward == "VeriFree" else (a, A)
    log_pi_s = theta.log_softmax(-1).gather(-1, s.flatten(1)).view_as(s)
    log_pi_a = log_pi.gather(-1, taught[..., None])[..., 0]
    return R, -(A * log_pi_s + weight * log_pi_a).mean(-1)


def train(reward, forms=8, slip=0.3, skew=0.0, N=8, M=None, questions=4, steps=100, seeds=200,
          seed=0, fixed_form=False, divide_by_std=False,
          optimizer=torch.optim.Adam, lr=0.05):  # fmt: skip
    """Train one policy per seed -> pass@1 and slips left, both [seeds, steps + 1]. M = None means
    M = N. With fixed_form the question is the same at every step, and its reference has form 0."""
    torch.manual_seed(seed)
    theta, phi = two_tables(seeds, forms, slip, skew)
    optimizer, curves = optimizer([theta, phi], lr=lr), []
    for _ in range(steps + 1):
        pi_s, pi_a = theta.detach().softmax(-1), phi.detach().softmax(-1)
        right = pi_a[..., :forms].sum(-1)  # pi(value 0|s)  [K, S]
        curves.append(torch.stack([(pi_s * right).sum(-1), 1 - right[:, 0]]))
        reference = torch.randint(1 if fixed_form else forms, (seeds, questions))
        s = pi_s.multinomial(questions * N, replacement=True)  # [K, B N]
        a = pi_a[torch.arange(seeds)[:, None], s].flatten(0, 1).multinomial(1)
        s, a = s.view(seeds, questions, N), a.view(seeds, questions, N)
        R, losses = judge(reward, theta, phi, s, a, reference, M or N, divide_by_std)
        optimizer.zero_grad()
        losses.mean(1).sum().backward()  # the policies share no weights
        optimizer.step()
    return torch.stack(curves, -1)


# ------------------------------------------------------------------------- the table and the figure


def draw_panel(axis, title, curves, seeds, steps, **options):
    """curves: name -> its options. A name begins with its reward. Also prints a line for each."""
    columns = range(0, steps + 1, max(1, steps // 4))
    print(f"\n{title:28}" + "".join(f"{t:6}" for t in columns) + "   slips  .8 at")
    for name, setting in curves.items():
        reward = name.split(",")[0]
        found = train(reward, seeds=seeds, steps=steps, **options | setting)
        pass_at_1, slips = found.mean(1)
        reached = next((t for t in range(steps + 1) if pass_at_1[t] >= 0.8), "-")
        row = "".join(f"{x:6.3f}" for x in pass_at_1[columns])
        print(f"  {name:26}{row}{slips[-1]:8.3f}{reached:>7}", flush=True)
        colour = COLOURS[CURVES[reward]]
        paler = 0.65 ** [line.get_color() for line in axis.lines].count(colour)
        style = "--" if reward == "perfect verifier" else "-"
        width = 4 if reward == "Rule+CER" else 1.5  # the curves on top of it leave its edges
        axis.plot(pass_at_1, style, color=colour, alpha=paler, linewidth=width, label=name)
        band = 1.96 * found[0].std(0) / seeds**0.5
        edges = pass_at_1 - band, pass_at_1 + band
        axis.fill_between(range(steps + 1), *edges, color=colour, alpha=0.2)
    axis.set(title=title, xlabel="step", ylabel="pass@1", ylim=(0, 1.02))
    if others := [line for line in axis.lines if line.get_label() not in CURVES]:
        axis.legend(handles=others, frameon=False, loc="lower right")


def main():
    parser = Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, number(int, 1)
    add("--forms", type=count, nargs="+", default=[1, 4, 16], help="a panel for each")
    add("--lr", type=number(float, 0), nargs="+", default=[0.05], help="learning rates, likewise")
    add("--M", type=count, nargs="+", default=[8, 4, 2, 1], help="a curve for each")
    add("--slip", type=number(float, 0, 1), default=0.3, help="probability of a slip")
    add("--N", type=number(int, 2), default=8, help="samples of a question")
    add("--steps", type=count, default=100, help="optimizer steps")
    add("--seeds", type=number(int, 2), default=200, help="policies trained at once")
    add("--out", type=Path, default=Path("runs/two_tables.png"), help="the figure")
    args = parser.parse_args()
    require(max(args.M) <= args.N, f"--M {max(args.M)}: expected at most --N, which is {args.N}")
    require(args.out.suffix in (".png", ".svg", ".pdf"), f"--out {args.out}: expected .png or .svg")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # in tensors this small, threads mostly wait for each other

    panels = {}
    for F, lr in itertools.product(args.forms, args.lr):
        panels[f"forms: {F}, lr: {lr:g}"] = dict.fromkeys(CURVES, {"forms": F, "lr": lr})
    panels["forms: 8, by M"] = {f"CER, M = {M}": {"M": M} for M in args.M}
    panels["forms: 8, a* fixed"] = dict.fromkeys(CURVES, {"fixed_form": True})
    panels["forms: 8, unequal"] = dict.fromkeys(["perfect verifier", "CER"], {"skew": 2.0})
    panels["forms: 8, unequal"]["CER, divided by std"] = {"skew": 2.0, "divide_by_std": True}
    rows = -(-len(panels) // 3)
    figure = plt.figure(figsize=(9.5, 3 * rows), layout="constrained")
    for place, (title, curves) in enumerate(panels.items(), start=1):
        axis = figure.add_subplot(rows, 3, place)
        same = {"slip": args.slip, "N": args.N, "steps": args.steps, "seeds": args.seeds}
        draw_panel(axis, title, curves, **{"lr": args.lr[0]} | same)
    lines = figure.axes[0].lines
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), frameon=False)
    figure.savefig(args.out, dpi=180)


if __name__ == "__main__":
    run_script(main)
