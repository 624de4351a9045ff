"""CER on three kinds of solution and four answers, small enough to check by hand."""

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
