"""The figure and the table of the two tables: examples/two_tables.py in batches, in many settings.

    python experiments/two_tables/two_tables_figure.py    # runs/two_tables.png, in two minutes
    python experiments/two_tables/two_tables_figure.py --forms 16 --lr .05 .1 .2 .4
    python experiments/two_tables/two_tables_figure.py --asked --seeds 50     # runs/asked.png
    python experiments/two_tables/two_tables_figure.py --copies --seeds 50    # runs/copies.png

K policies, one for each seed, are trained at once. A step samples N answers to each of B questions.
There are S solutions and V = S F answers. pass@1 is the probability of value 0 in any form. Slips
are wrong values after the right solution. ".8 at" is the first step with a mean pass@1 of .8.
With --asked there is one answer more, which says nothing, and a judge who pays it by its face. With
--copies there is one answer more for each solution, which copies it, and no other leads there.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's modules
import plot  # noqa: F401, its settings
from cer import cer
from rloo import leave_one_out
from runtime.cli import Parser, number, run_script

# ------------------------------------------------------------------------------------ the training


S = 6
NOTHING, COPIES = torch.ones(S, 1), torch.eye(S)  # further answers, and who gives them


def two_tables(K, F, slip, skew=0.0, more=None):
    """The policy before training -> theta [K, S], phi [K, S, V]. The right solution has probability
    0.2. The forms are equally likely, or their logits have the standard deviation skew. more
    [S, X]: the probabilities of X further answers, the last ones, after each solution."""
    prior = torch.tensor([0.2] + [0.8 / (S - 1)] * (S - 1))
    value = torch.full((S, S), slip / (S - 1)).fill_diagonal_(1 - slip).clamp_min(1e-4)
    phi = (value.log()[:, :, None] + skew * torch.randn(K, 1, 1, F)).flatten(2)
    if more is not None:
        odds = more / (1 - more.sum(-1, keepdim=True)) * phi.exp().sum(-1, keepdim=True)
        phi = torch.cat([phi, odds.clamp_min(1e-9).log()], -1)
    return prior.log().repeat(K, 1).requires_grad_(), phi.requires_grad_()


# What a 1.5B model that is asked gives to right and wrong answers, and to the question, repeated:
# in the first trial, and in that of experiments/asking.
ASKED, ASKED_LATER = (0.70, 0.28, 0.83), (0.75, 0.24, 0.85)


def judge(reward, theta, phi, s, a, reference, M, by_std=False, asked=ASKED, more=0):
    """Samples s, a [K, B, N] and references [K, B] -> R [K, B, N], and the losses [K, B]. more: how
    many further answers there are."""
    (K, _, N), values = s.shape, phi.shape[2] - more  # values: the answers that are one
    k, reference = torch.arange(K)[:, None, None], reference[..., None]  # both before [K, B, N]
    log_pi = phi.log_softmax(-1)  # of all answers after all solutions  [K, S, V]
    of_reference = log_pi.detach()[k, torch.arange(S), reference]  # log pi(a*|s)  [K, B, S]
    log_W = log_pi.detach()[k[..., None], s[:, :, None], a[..., None]]  # log pi(a_i|s_j)
    if M < N:  # as in cer.py: first the solutions that gave this answer, then others at random
        own = a[..., None] == a[..., None, :]
        first = own.int().argmax(-1)[..., None].expand_as(own)  # equal answers share their choice
        keys = own + torch.rand(log_W.shape).gather(-2, first)
        log_W[keys < keys.topk(M).values[..., -1:]] = -torch.inf
    R_cer = cer(log_W, of_reference.gather(-1, s))
    right = (a < values // S).float()
    exact = (a == reference).float()
    R = {
        "exact match": exact,
        "perfect verifier": right,
        "VeriFree": of_reference.gather(-1, s).exp(),
        "CER": R_cer,
        "Rule+CER": (right + R_cer) / 2,  # with a perfect rule
        "average of CER and exact match": (exact + R_cer) / 2,
        "asked": torch.where(a >= values, asked[2], torch.where(right > 0, *asked[:2])),
    }[reward]
    A = leave_one_out(R)
    # GRPO divides by the group's standard deviation. The paper does not.
    A = A / (R.std(-1, keepdim=True) + 1e-6) if by_std else A
    # In place of the sampled answer VeriFree teaches the reference, weighted by its probability R.
    taught, weight = (reference, R) if reward == "VeriFree" else (a, A)
    log_pi_s = theta.log_softmax(-1).gather(-1, s.flatten(1)).view_as(s)
    return R, -(A * log_pi_s + weight * log_pi[k, s, taught]).mean(-1)


def train(reward, forms=8, slip=0.3, skew=0.0, N=8, M=None, questions=4, steps=100, seeds=200,
          fixed_form=False, optimizer=torch.optim.Adam, lr=0.05, by_std=False,
          more=None, asked=ASKED):  # fmt: skip
    """Train one policy per seed -> pass@1, slips left and the share of further answers (see
    two_tables), [3, seeds, steps + 1]. M = None means M = N. With fixed_form the question is the
    same at every step, and its reference has form 0. asked: what a judge who is asked gives to
    right, wrong and further answers."""
    torch.manual_seed(0)
    theta, phi = two_tables(seeds, forms, slip, skew, more)
    further = phi.shape[2] - S * forms
    optimizer, curves = optimizer([theta, phi], lr=lr), []
    for _ in range(steps + 1):
        pi_s, pi_a = theta.detach().softmax(-1), phi.detach().softmax(-1)
        right = pi_a[..., :forms].sum(-1)  # pi(value 0|s)  [K, S]
        others = (pi_s * pi_a[..., S * forms :].sum(-1)).sum(-1)
        curves.append(torch.stack([(pi_s * right).sum(-1), 1 - right[:, 0], others]))
        reference = torch.randint(1 if fixed_form else forms, (seeds, questions))
        s = pi_s.multinomial(questions * N, replacement=True).view(seeds, questions, N)
        a = pi_a[torch.arange(seeds)[:, None, None], s].flatten(0, 2).multinomial(1).view_as(s)
        R, losses = judge(reward, theta, phi, s, a, reference, M or N, by_std, asked, further)
        optimizer.zero_grad()
        losses.mean(1).sum().backward()  # the policies share no weights
        optimizer.step()
    return torch.stack(curves, -1)


# ------------------------------------------------------------------------- the table and the figure

# The reward of a curve -> its colour, dashes and width, from the bottom of a panel to its top.
CURVES = {  # reward -> colour, dashes, width
    "perfect verifier": ("silver", "-", 7),
    "Rule+CER": ("#CC79A7", ":", 4),
    "VeriFree": ("#009E73", "-.", 2),
    "exact match": ("#D55E00", "--", 2.5),
    "CER": ("#0072B2", "-", 2),
}
FURTHER = {  # in the pictures with further answers
    "asked": ("#CC0000", "-", 2.5),
    "average of CER and exact match": ("#8C564B", ":", 4),
}


def draw_panel(axis, title, curves, steps, **options):
    """curves: name -> its own options. A name begins with its reward. Also prints a table."""
    columns = range(0, steps + 1, max(1, steps // 4))
    print(f"\n{title:28}" + "".join(f"{t:6}" for t in columns) + "   slips  .8 at")
    for name, own in curves.items():
        reward = name.split(",")[0]
        found = train(reward, steps=steps, **options | own)
        mean, slips, _ = found.mean(1)
        reached = next((t for t in range(steps + 1) if mean[t] >= 0.8), "-")
        row = "".join(f"{x:6.3f}" for x in mean[columns])
        print(f"  {name:26}{row}{slips[-1]:8.3f}{reached:>7}", flush=True)
        colour, dashes, width = CURVES[reward]
        dashes = dashes if name in CURVES else ("-", "--", "-.", ":")[len(axis.lines)]
        axis.plot(mean, dashes, color=colour, linewidth=width, label=name)
        band = 1.96 * found[0].std(0) / len(found[0]) ** 0.5
        axis.fill_between(range(steps + 1), mean - band, mean + band, color=colour, alpha=0.2)
    axis.set(title=title, ylabel="pass@1", ylim=(0, 1.02))
    if others := [line for line in axis.lines if line.get_label() not in CURVES]:
        axis.legend(handles=others, frameon=False, loc="lower right", fontsize="x-small")


def draw_asked(out, seeds):
    """With CER, exact match, and a judge who is asked and gives .83 to answers that say nothing,
    which are 2% at the start. Prints a table, too, also with .1% and for judges who give less."""
    curves = {"exact match": {}, "CER": {}}
    for nothing in 0.57, 0.70, 0.83:
        name = f"asked, nothing receives {nothing:.2f}".replace("0.", ".")
        curves[name] = {"asked": (*ASKED[:2], nothing)}
    curves["asked, as in asking"] = {"asked": ASKED_LATER}
    drawn = "exact match", "CER", "asked, nothing receives .83"
    draw_more(out, seeds, NOTHING, "answers that say nothing", (0.001, 0.02), 0.02, curves, drawn)


def draw_copies(out, seeds):
    """With answers that copy their solution, 10% at the start. Prints a table, also with 2% and
    30%."""
    average = "average of CER and exact match"
    rewards = "perfect verifier", average, "VeriFree", "exact match", "CER"
    curves = {name: {} for name in rewards}
    what = "answers that copy their solution"
    draw_more(out, seeds, COPIES, what, (0.02, 0.1, 0.3), 0.1, curves, rewards)


def draw_more(out, seeds, more, what, shares, drawn_share, curves, drawn):
    """Pass@1 and the share of further answers by step, means over the seeds, for each share at the
    start. Of the last step also the lowest and the highest seed. curves: name -> its own options. A
    name begins with its reward."""
    columns = [0, 100, 200, 300, 600]
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3), sharey=True, layout="constrained")
    width = max(map(len, curves)) + 1
    for share in shares:
        for name, own in curves.items():
            reward = name.split(",")[0]
            found = train(reward, steps=600, seeds=seeds, more=share * more, **own)
            for axis, title, curve in zip(axes, ("pass@1", what), found[[0, 2]]):
                mean = curve.mean(0)
                numbers = "".join(f"{x:6.3f}" for x in mean[columns])
                numbers += "  ({:.3f} to {:.3f})".format(*curve[:, -1].aminmax())
                what_of = f"{share:.1%} at the start, {title:{len(what) + 2}}{name:{width}}"
                print(what_of + numbers, flush=True)
                if share == drawn_share and name in drawn:
                    colour, dashes, size = (CURVES | FURTHER)[reward]
                    axis.plot(mean, dashes, color=colour, linewidth=size, label=reward)
                    axis.set(title=f"{title}, simulated", xlabel="step", ylim=(-0.02, 1.02))
    axes[0].legend(frameon=False, loc="best", fontsize="small")
    figure.savefig(out, dpi=150)


def main():
    parser = Parser(description=__doc__.split("\n\n")[0])
    add, count = parser.add_argument, number(int, 1)
    add("--forms", type=count, nargs="+", default=[1, 4, 16], help="a panel for each")
    add("--lr", type=number(float, 0), nargs="+", default=[0.05], help="learning rates, likewise")
    add("--steps", type=count, default=100, help="optimizer steps")
    add("--seeds", type=number(int, 2), default=200, help="policies trained at once")
    add("--asked", action="store_true", help="draw what asking does, with an answer more")
    add("--copies", action="store_true", help="draw what CER does, with answers that copy")
    add("--out", type=Path, help="the figure (default: runs/two_tables.png, asked.png, copies.png)")
    args = parser.parse_args()
    name = "asked" if args.asked else "copies" if args.copies else "two_tables"
    args.out = args.out or Path("runs", f"{name}.png")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # in tensors this small, threads mostly wait for each other
    if args.asked:
        return draw_asked(args.out, args.seeds)
    if args.copies:
        return draw_copies(args.out, args.seeds)

    same = {"steps": args.steps, "seeds": args.seeds, "lr": args.lr[0]}
    panels = {}  # title -> (its options, its curves)
    every = dict.fromkeys(CURVES, {})
    for F, lr in [(F, lr) for F in args.forms for lr in args.lr]:
        panels[f"forms: {F}, lr: {lr:g}"] = {"forms": F, "lr": lr}, every
    panels["forms: 8, by M"] = {}, {f"CER, M = {M}": {"M": M} for M in (8, 4, 2, 1)}
    panels["forms: 8, a* fixed"] = {"fixed_form": True}, every
    unequal = {"perfect verifier": {}, "CER": {}, "CER, divided by std": {"by_std": True}}
    panels["forms: 8, unequal"] = {"skew": 2.0}, unequal
    rows = -(-len(panels) // 3)
    figure = plt.figure(figsize=(9.5, 3 * rows), layout="constrained")
    for place, (title, (options, curves)) in enumerate(panels.items(), start=1):
        draw_panel(figure.add_subplot(rows, 3, place), title, curves, **same | options)
    figure.legend(handles=figure.axes[0].lines, loc="outside upper center", ncols=5, frameon=False)
    figure.supxlabel("step (probability of a slip .3, N = 8 samples)")
    figure.savefig(args.out, dpi=180)


if __name__ == "__main__":
    run_script(main)
