"""The shortest complete program of the method. Its policy is nothing but two tables.

    python examples/two_tables.py     # a table, and docs/two_tables.png, in about a minute

There is one kind of question. It has S solutions, and solution 0 is right. Solution s leads to
value s, and slips to another value with probability `slip`. Each value can be written in F forms
("14", "fourteen", ...), so there are V = S F answers, and answer a has the value a // F. The policy
is two tables of logits, theta for pi(s) and phi for pi(a|s). A reference is value 0 in a random
form, drawn anew for every question, so that no form can be learned. pass@1 is the probability of
value 0 in any form. "Slips" are wrong values after the right solution.

A step samples N answers to each of B questions. K policies, one for each seed, are trained at once.
"""

import argparse
import sys

import matplotlib.pyplot as plt
import torch
from tqdm import tqdm

sys.path.append(sys.path[0] + "/..")  # where cer.py and rloo.py are
from cer import cer
from rloo import leave_one_out

# -------------------------------------------------------------------------------------- the method


def two_tables(K, F, slip, skew=0.0, S=6):
    """The policy before training -> theta [K, S], phi [K, S, V]. The right solution has probability
    0.2. The forms are equally likely, or their logits have the standard deviation skew."""
    prior = torch.tensor([0.2] + [0.8 / (S - 1)] * (S - 1))
    value = torch.full((S, S), slip / (S - 1)).fill_diagonal_(1 - slip).clamp_min(1e-4)
    phi = (value.log()[:, :, None] + skew * torch.randn(K, 1, 1, F)).flatten(2)
    return prior.log().repeat(K, 1).requires_grad_(), phi.requires_grad_()


def sample(theta, phi, B, N):
    """-> solutions s and answers a [K, B, N], and log pi(.|s) of all answers [K, B, N, V]."""
    s = theta.softmax(-1).multinomial(B * N, replacement=True).view(-1, B, N)
    log_pi = phi.log_softmax(-1)[torch.arange(len(s))[:, None, None], s]
    a = log_pi.exp().flatten(0, 2).multinomial(1).view_as(s)
    return s, a, log_pi


def compute_rewards(reward, a, reference, log_pi, F, M):
    """a and reference [K, B, N], log pi(.|s) [K, B, N, V] -> R [K, B, N]."""
    N = a.shape[-1]
    log_P = log_pi.gather(-1, reference[..., None])[..., 0]  # log pi(a*|s_j)  [K, B, N]
    log_W = log_pi.gather(-1, a[:, :, None].expand(-1, -1, N, -1)).mT  # log pi(a_i|s_j)  [.., N, N]
    if M < N:  # the own solution, others at random (cer.py first takes all that gave the answer)
        keys = torch.eye(N) + torch.rand(log_W.shape)
        log_W[keys < keys.topk(M).values[..., -1:]] = -torch.inf
    R_cer = cer(log_W, log_P)
    return {
        "exact match": (a == reference).float(),
        "perfect verifier": (a // F == 0).float(),
        "VeriFree": log_P.exp(),
        "CER": R_cer,
        "Rule+CER": ((a // F == 0) + R_cer) / 2,  # with a perfect rule
    }[reward]


def rloo_loss(reward, theta, phi, reference, N, M, divide_by_std=False):
    """The loss of one step, summed over the K policies. reference [K, B]."""
    F = phi.shape[-1] // theta.shape[-1]
    reference = reference[..., None].expand(-1, -1, N)
    s, a, log_pi = sample(theta, phi, reference.shape[1], N)
    R = compute_rewards(reward, a, reference, log_pi.detach(), F, M)  # [K, B, N]
    A = leave_one_out(R)
    # GRPO divides by the group's standard deviation. The paper does not.
    A = A / (R.std(-1, keepdim=True) + 1e-6) if divide_by_std else A
    # In place of the sampled answer VeriFree teaches the reference, weighted by its probability R.
    taught, weight = (reference, R) if reward == "VeriFree" else (a, A)
    log_pi_s = theta.log_softmax(-1).gather(-1, s.flatten(1)).view_as(s)
    log_pi_a = log_pi.gather(-1, taught[..., None])[..., 0]
    return -(A * log_pi_s + weight * log_pi_a).mean((1, 2)).sum()


def train(reward, forms=8, slip=0.3, skew=0.0, N=8, M=None, questions=4, steps=100, seeds=200,
          seed=0, fixed_form=False, divide_by_std=False,
          optimizer=torch.optim.Adam, lr=0.05):  # fmt: skip
    """Train one policy per seed -> pass@1 and slips left, both [seeds, steps + 1]. M = None means
    M = N. With fixed_form the question is the same at every step, and its reference has form 0."""
    torch.manual_seed(seed)
    theta, phi = two_tables(seeds, forms, slip, skew)
    optimizer, curves = optimizer([theta, phi], lr=lr), []
    for _ in range(steps + 1):
        right = phi.detach().softmax(-1)[..., :forms].sum(-1)  # pi(value 0|s)  [K, S]
        curves.append(torch.stack([(theta.detach().softmax(-1) * right).sum(-1), 1 - right[:, 0]]))
        reference = torch.randint(1 if fixed_form else forms, (seeds, questions))
        optimizer.zero_grad()
        rloo_loss(reward, theta, phi, reference, N, M or N, divide_by_std).backward()
        optimizer.step()
    return torch.stack(curves, -1)


# ------------------------------------------------------------------------ the table and the figure

COLOURS = {"Rule+CER": "#CC79A7", "CER": "#0072B2", "VeriFree": "#009E73", "exact match": "#D55E00"}
COLOURS |= {"perfect verifier": "#000000"}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--forms", type=int, nargs="+", default=[1, 4, 16], help="a panel for each")
    parser.add_argument("--M", type=int, nargs="+", default=[1, 2, 4, 8], help="a curve for each")
    parser.add_argument("--out", default="docs/two_tables.png", help="the figure")
    flags = {"slip": 0.3, "N": 8, "questions": 4, "steps": 100, "seeds": 200}
    for flag, default in flags.items():
        parser.add_argument(f"--{flag}", type=type(default), default=default, help="in every run")
    args = parser.parse_args()

    # Title of a panel -> name of a curve -> its options. The name begins with the curve's reward.
    title = "CER follows the verifier (forms: {})"
    panels = {title.format(F): dict.fromkeys(COLOURS, {"forms": F}) for F in args.forms}
    panels["A larger M leaves fewer slips"] = {f"CER, M = {M}": {"M": M} for M in args.M}
    panels["A fixed form: exact match overtakes CER"] = dict.fromkeys(COLOURS, {"fixed_form": True})
    panels["Unequal forms slow CER"] = dict.fromkeys(["CER", "perfect verifier"], {"skew": 2.0})
    panels["Unequal forms slow CER"]["CER, divided by std"] = {"skew": 2.0, "divide_by_std": True}
    steps = range(args.steps + 1)
    columns = steps[:: max(1, args.steps // 4)]
    figure, axes = plt.subplots(2, -(-len(panels) // 2), figsize=(11, 6.5), layout="constrained")
    for (title, runs), axis in zip(tqdm(panels.items(), disable=None), axes.flat):
        y, top = (1, 1.3 * args.slip or None) if "slips" in title else (0, 1.02)
        tqdm.write(f"\n{title:40}" + "".join(f"{t:6}" for t in columns) + "   slips")
        for name, options in runs.items():
            curves = train(name.split(",")[0], **options, **{f: getattr(args, f) for f in flags})
            mean, band = curves.mean(1), 1.96 * curves.std(1) / args.seeds**0.5  # [2, steps + 1]
            row = "".join(f"{x:6.3f}" for x in mean[0, columns])
            tqdm.write(f"  pass@1, {name:30}{row}{mean[1, -1]:8.3f}")
            colour = COLOURS.get(name, plt.cm.cividis(len(axis.lines) / len(runs)))
            axis.plot(mean[y], ls="--" if "verifier" in name else "-", label=name, color=colour)
            axis.fill_between(steps, (mean - band)[y], (mean + band)[y], color=colour, alpha=0.2)
        axis.set(title=title, xlabel="step", ylabel=("pass@1", "slips left")[y], ylim=(0, top))
        axis.legend(frameon=False, loc=("lower right", "upper right")[y])
    figure.savefig(args.out, dpi=110)
