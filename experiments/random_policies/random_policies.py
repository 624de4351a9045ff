"""Slips and copies over random policies: it prints the tables of the page beside it.

    python experiments/random_policies/random_policies.py     # ten seconds on one core

The answers of a random policy are "14" (the reference), "14 eggs" (right, too), "18" and "9". Of
its solutions K are right, and two are wrong: B comes to 18, and C to 9. To "split" is to draw
uniformly from all shares that add up to 1.

    prior             1 is split over the K + 2 solutions
    a right solution  draws u uniformly between .5 and 1. u is split over the two right answers, and
                      1 - u over "18" and "9"
    a wrong solution  draws such a u for its own value, and 1 - u is split over the other answers

Only the policies are drawn. What is said of each is exact, by a sum over solutions or groups.
"""

import itertools
import sys
from pathlib import Path

import pandas
import torch
from torch.distributions import Dirichlet

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's modules
from benchmarks.measure import markdown
from cer import cer

EGGS = [0.50, 0.40, 0.05, 0.05], [0.05, 0.09, 0.81, 0.05], [0.03, 0.01, 0.06, 0.90]
EGGS = torch.tensor(EGGS, dtype=torch.float64)
PRIORS = torch.tensor([[0.05, 0.5, 0.45], [0.5, 0.3, 0.2], [0.9, 0.05, 0.05]], dtype=torch.float64)


def policies(K, number):
    """-> priors [number, K + 2] and likelihoods [number, K + 2, 4]. B and C come last."""
    torch.manual_seed(0)

    def split(n, *shape):
        return Dirichlet(torch.ones(n, dtype=torch.float64)).sample((number, *shape))

    u = 0.5 + 0.5 * torch.rand(number, K + 2, 1, dtype=torch.float64)
    right = torch.cat([u[:, :K] * split(2, K), (1 - u[:, :K]) * split(2, K)], -1)
    others = (1 - u[:, K:]) * split(3, 2)
    B = torch.cat([others[:, 0, :2], u[:, K], others[:, 0, 2:]], -1)
    C = torch.cat([others[:, 1], u[:, K + 1]], -1)
    return split(K + 2), torch.cat([right, B[:, None], C[:, None]], 1)


def of_its_own(K, number=10_000):
    """Each right solution gives one more answer, to which no other leads, so rarely that no other
    number changes. It receives P. -> how often P is below rho("14"), below that of both wordings,
    below the mean of right answers, and below the mean of all."""
    prior, likelihood = policies(K, number)
    P = likelihood[..., 0]
    of = (prior[:, None] @ likelihood)[:, 0]  # of each answer [number, 4]
    rho = ((prior * P)[:, None] @ likelihood)[:, 0] / of
    right = (of * rho)[:, :2].sum(1) / of[:, :2].sum(1)
    levels = rho[:, 0], rho[:, :2].amin(1), right, (prior * P).sum(1)
    return [(P[:, :K] < level[:, None]).double().mean().item() for level in levels]


def slip_to_18(prior, likelihood):
    """A policy with the solutions A, B and C, in all groups of four in which an A slips to "18" ->
    in how many the slip receives more than "14 eggs" or "14" in its place [2], and how often its
    advantage is above 0: in groups with a B and another A, a B and no other A, no B [3]."""
    pairs = [*itertools.product(range(3), range(4))]
    s, a = torch.tensor([*itertools.product(pairs, repeat=3)]).unbind(-1)  # the others [1728, 3]
    of = torch.cat([likelihood[:1].expand(len(s), 1, 4), likelihood[s]], 1)  # after each solution
    R = cer(of.mT.log(), of[:, :, 0].log())  # of every answer in each group [1728, 4]
    ahead = [(R[:, 2] > R[:, answer] + 1e-12).sum() for answer in (1, 0)]
    pushed_up = R[:, 2] > R.gather(1, a).mean(1) + 1e-12
    weight, A, B = (prior[s] * likelihood[s, a]).prod(1), (s == 0).any(1), (s == 1).any(1)
    share = [weight[kept & pushed_up].sum() / weight[kept].sum() for kept in (B & A, B & ~A, ~B)]
    return torch.stack(ahead), torch.stack(share)


def table(corner, columns, rows):
    cells = {name: [f"{x:.2f}".lstrip("0") for x in row] for name, row in rows.items()}
    return markdown(pandas.DataFrame.from_dict(cells, "index", columns=columns), corner)


def main():
    columns = '"14"', '"14" and "14 eggs"', "the mean of both", "the mean of all answers"
    print("An answer to which only one right solution leads receives less than\n")
    print(table("right solutions", columns, {K: of_its_own(K) for K in (1, 2, 3, 5)}))
    found = [slip_to_18(*policy) for policy in zip(*policies(1, 1000))]
    ahead, shares = (torch.stack(each).double() for each in zip(*found))
    print('A slip of A to "18" receives more in at least one group of four than, in its place,\n')
    ahead = {"of 1,000 policies": (ahead > 0).double().mean(0)}
    print(table("", ['"14 eggs"', '"14"'], ahead))
    print('How often a slip of A to "18" is pushed up in groups of four with\n')
    rows = {f"eggs, {prior.tolist()}": slip_to_18(prior, EGGS)[1] for prior in PRIORS.unbind()}
    rows["mean of 1,000 policies"] = shares.mean(0)
    print(table("", ["a B and another A", "a B and no other A", "no B"], rows), end="")


if __name__ == "__main__":
    main()
