# %% [markdown]
"""The method with a policy that is no network, only two tables. The file ends with exercises.
README.md says what to read before it.

    python examples/two_tables.py     # ten seconds on one core

There is one kind of question. It has S solutions, and solution 0 is right. Solution s leads to
value s, and slips to another value with probability SLIP. Each value can be written in F forms
("14", "fourteen", ...), so there are S F answers. Answer a is value a // F in form a % F. It is
printed as "0c" if it is value 0 in form c. At the start all forms are equally likely. A reference
a* is value 0 in a random form, drawn anew for every question, so no form can be learned.

The file opens as a notebook in editors that know "# %%".
"""

# %%
import sys

import torch

sys.path += [sys.path[0] + "/..", ".."]  # where cer.py and rloo.py are, also for a notebook
from cer import cer
from rloo import leave_one_out

S, F, SLIP = 6, 16, 0.3
B, N, STEPS, SEEDS = 4, 8, 50, 5  # a step takes B questions and N samples of each
torch.set_num_threads(1)  # as in tasks/toy_model.py


# %% The policy: theta, the logits of pi(s), and phi, the logits of pi(a|s).
def policy():
    prior = torch.tensor([0.2] + [0.8 / (S - 1)] * (S - 1))
    value = torch.full((S, S), SLIP / (S - 1)).fill_diagonal_(1 - SLIP)
    phi = value.log().repeat_interleave(F, dim=1)  # [S, S F]
    return prior.log().requires_grad_(), phi.requires_grad_()


# %% One question: N samples (s_i, a_i), and their rewards. Here M = N.
def group(reward, theta, phi, a_star):
    pi = phi.softmax(1).tolist()  # plain numbers, so no gradient flows through R
    s = theta.softmax(0).multinomial(N, replacement=True).tolist()
    a = [torch.tensor(pi[s_i]).multinomial(1).item() for s_i in s]
    W = torch.tensor([[pi[s_j][a_i] for s_j in s] for a_i in a])  # [N, N]
    P = torch.tensor([pi[s_j][a_star] for s_j in s])  # [N]
    R = cer(W.log(), P.log())  # D^-1 W P
    if reward == "exact match":
        R = torch.tensor([float(a_i == a_star) for a_i in a])
    if reward == "perfect verifier":
        R = torch.tensor([float(a_i // F == 0) for a_i in a])
    A = leave_one_out(R)
    return s, a, W, P, R, A


# %% Training. One optimizer step minimizes -A log pi, averaged over the samples of B questions.
def train(reward, seed):
    torch.manual_seed(seed)
    theta, phi = policy()
    optimizer, curve = torch.optim.Adam([theta, phi], lr=0.05), []
    for _ in range(STEPS + 1):
        right = phi.softmax(1)[:, :F].sum(1)  # pi(value 0|s)
        curve.append([(theta.softmax(0) @ right).item(), 1 - right[0].item()])  # pass@1, slips
        optimizer.zero_grad()
        for _ in range(B):
            a_star = torch.randint(F, ()).item()
            s, a, W, P, R, A = group(reward, theta, phi, a_star)
            log_pi = theta.log_softmax(0)[s] + phi.log_softmax(1)[s, a]  # log pi(s_i, a_i)  [N]
            (-(A * log_pi).mean() / B).backward()  # adds to the gradients
        optimizer.step()
    return curve, theta, phi


# %% The results. pass@1 is the probability of value 0. Slips are wrong values after solution 0.
def show(name, values):
    print(f"{name:24}", *(f"{x:6.3f}" if isinstance(x, float) else f"{x:>6}" for x in values))


show("pass@1 after step", [*range(0, STEPS + 1, 25), "slips"])
for reward in "exact match", "CER", "perfect verifier":
    mean = torch.tensor([train(reward, seed)[0] for seed in range(SEEDS)]).mean(0)
    show(reward, [*mean[::25, 0].tolist(), mean[-1, 1].item()])

# %% Two groups in full. Row i and column i belong to sample i. A slip, that is, a wrong answer
# where column i has solution 0, gets little if other columns lead to its value. Otherwise it gets
# much of what a right answer gets. The first kind is common before training, the second after it.
for when, (theta, phi) in {"before": policy(), "after": train("CER", seed=6)[1:]}.items():
    s, a, W, P, R, A = group("CER", theta, phi, a_star=2)
    print(f"\nA group {when} training with CER. a* is 0c.")
    show("solution s", [*s, "R", "A"])
    show("P", P.tolist())
    for a_i, W_i, R_i, A_i in zip(a, W.tolist(), R.tolist(), A.tolist()):
        show(f"answer a = {a_i // F}{chr(97 + a_i % F)}      W", [*W_i, R_i, A_i])

# %% [markdown]
# Exercises. Start each from the file as it is, and guess before you run it.
#
# 1. Break CER with a slip. Let the policy begin with right work:
#        prior = torch.tensor([0.99] + [0.01 / (S - 1)] * (S - 1))
#    What are W, R and A in the first group? What can CER still learn from, and how far does it get?
#
# 2. M = 1. Let each row keep only its own solution. After the line of W, write
#        W = W * torch.eye(N)
#    What is R_i now? In the first group, what do 3h after solution 0 and 0a after solution 3 get,
#    and which of the two should get more? How many slips will be left?
#
# 3. Divide by the standard deviation, as GRPO does, and set STEPS = 100:
#        A = leave_one_out(R) / (R.std() + 1e-6)
#    Does it help? And if the policy uses some forms more often than others?
#        phi = value.log().repeat_interleave(F, dim=1) + 2 * torch.randn(F).repeat(S)
#
# 4. Fix the form. Set a_star = 0 in train, and STEPS = 100. Which reward gains by that, and why?
#
# 5. Let one answer in ten copy its solution, and set STEPS = 100. After the line of phi, write
#        phi = torch.cat([phi, torch.eye(S).mul(F / 9).add(1e-9).log()], dim=1)
#    No other solution gives this answer (6a copies solution 0). In the first group, what does 6a
#    get, and what 0j? What becomes of such answers with each reward?

# %% [markdown]
# What comes out. The numbers are pass@1, the mean over 5 seeds.
#
# |   |                              | step 25 | the end | because                                 |
# |---|------------------------------|---------|---------|-----------------------------------------|
# | 1 | CER, from .69                |         | .84     | All columns are equal, so all answers   |
# |   | perfect verifier             |         | .95     | get the same R, slips too, and A = 0.   |
# |   |                              |         |         | CER learns only from the few groups     |
# |   |                              |         |         | that hold a wrong solution.             |
# | 2 | CER, M = 1                   |         | .78     | R_i is P_i, whatever the answer: 3h     |
# |   | CER                          |         | .89     | gets .044 and 0a .004 (with all columns |
# |   |                              |         |         | .006 and .036). .18 slips are left      |
# |   |                              |         |         | instead of .06.                         |
# | 3 | CER, divided                 | .64     | .94     | Some groups count little, because their |
# |   | CER                          | .65     | .94     | reference has a rare form. Divided,     |
# |   | CER, unequal forms, divided  | .68     | .89     | they count fully, which helps until     |
# |   | CER, unequal forms           | .54     | .93     | some of them order the answers wrongly. |
# | 4 | exact match, fixed form      | .39     | .98     | Exact match makes this form likelier,   |
# |   | CER, fixed form              | .66     | .94     | and so gets a reward more often.        |
# | 5 | exact match, with copies     | .27     | .84     | In the first group 6a gets the P of its |
# |   | CER, with copies             | .56     | .66     | own solution, .039, and 0j only .035.   |
# |   |                              |         |         | Exact match never rewards 6a. At the    |
# |   |                              |         |         | end .29 and .02 of all answers copy.    |
