import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import group_of, on_devices, tiny_model, trained_tokenizer
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import rloo
from engine import policy
from engine.tokens import vocabulary
from rloo import TrainingRow, leave_one_out, microbatches, rloo_rows, update, verifree_rows
from rollout import to_group
from tasks import toy
from tasks.data import Problem


def test_each_sample_is_compared_with_the_mean_of_the_others():
    assert leave_one_out(torch.tensor([1.0, 0.0, 0.5])).tolist() == [0.75, -0.75, 0.0]
    R = torch.rand(16, dtype=torch.float64)
    assert torch.allclose(leave_one_out(R), (R - R.mean()) * 16 / 15)
    with pytest.raises(ValueError, match="at least 2"):
        leave_one_out(R[:1])


def test_rewards_of_long_references_have_advantages_and_rounding_has_none():
    R = torch.tensor([3e-9, 1e-9, 1e-9, 1e-9])
    assert torch.allclose(leave_one_out(R) * 1e9, leave_one_out(R * 1e9))
    for same in 0.3, 3e-9:
        assert not leave_one_out(torch.full((16,), same)).any()


def test_the_baseline_is_independent_of_the_sample_so_the_gradient_is_unbiased():
    """E[A_i grad log pi(i)] over all draws of N samples equals the gradient of the mean reward."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([1.0, 0.0, 0.4], dtype=torch.float64)
    [true] = torch.autograd.grad(logits.softmax(0) @ reward, logits)
    logp, loss = logits.log_softmax(0), 0.0
    for draw in map(list, itertools.product(range(3), repeat=2)):  # N = 2
        probability, weights = logp[draw].sum().exp().detach(), leave_one_out(reward[draw]) / 2
        loss = loss + probability * rloo.policy_gradient_loss(logp[draw], weights)
    [expected] = torch.autograd.grad(-loss, logits)
    assert torch.allclose(expected, true, atol=1e-12)


def test_rewards_are_constants_and_a_clipped_ratio_would_change_nothing():
    """One update per batch on the weights that sampled it: the ratio is 1 and PPO's gradient is
    RLOO's, which is why there is no pass for old log-probabilities."""
    logp, R = (torch.rand(8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    A = leave_one_out(R)
    rloo.policy_gradient_loss(logp, A).backward()
    assert R.grad is None
    ratio = (logp - logp.detach()).exp()
    clipped = torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
    assert torch.equal(torch.autograd.grad(-clipped.sum(), logp)[0], logp.grad)


# --------------------------------------------------------------- the gradient that the update takes

TEXTS = ["3*4=12 \\boxed{12} eggs", "3+4 so \\boxed{7}.", "no box", "\\boxed{seven}"]


def rloo_formula(logp_of, group, R, A):
    """The mean over samples of A_i times the log-prob of all that was sampled."""
    samples = zip(A.tolist(), group.completions)
    return [A_i * logp_of(group.prompt, completion) for A_i, completion in samples]


def verifree_formula(logp_of, group, R, A):
    """The same for the solution alone, and R_i times the log-prob of "{a*}" after it."""
    reference = vocabulary(toy.build_tokenizer()).encode("{" + group.problem.reference + "}")
    terms = []
    for i, completion in enumerate(group.completions):
        solution = completion[: group.solution_lengths[i]]
        terms.append(A[i].item() * logp_of(group.prompt, solution))
        if group.answers[i] is not None:
            terms[-1] = terms[-1] + R[i].item() * logp_of(group.context(i), reference)
    return terms


def naive_logprobs(model, ids):
    """log pi(ids[t] | ids[:t]) for t > 0 -> [len(ids) - 1]."""
    ids = torch.tensor([ids])
    return model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def gradient_of_update(model, rows, budget, **options):
    """-> (loss, gradient): what a step of plain SGD subtracts, before it was clipped."""
    before = flat(p.detach().clone() for p in model.parameters())
    sharded = policy.Policy(model, **options)
    loss, norm = update(sharded, torch.optim.SGD(sharded.parameters()), rows, 1.0, budget)
    after = flat(p.detach().full_tensor() for p in sharded.parameters())
    return loss, (before - after).cpu() * max(1.0, norm + 1e-6)


def rms_norm(self, hidden):
    """transformers' own goes through fp32, whatever the model's precision."""
    return F.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


@pytest.mark.parametrize("budget, offload", [(1, False), (64, True), (10_000, False)])
@pytest.mark.parametrize(
    "rows_of, formula", [(rloo_rows, rloo_formula), (verifree_rows, verifree_formula)]
)
def test_the_update_takes_the_gradient_of_the_formula(
    tokenizer, monkeypatch, rows_of, formula, budget, offload
):
    """In fp64, whatever the micro-batches: the step of plain SGD is minus the gradient."""
    monkeypatch.setattr(Qwen3RMSNorm, "forward", rms_norm)
    naive, trained = (tiny_model(len(tokenizer), initializer_range=0.1).double() for _ in range(2))
    groups = [group_of(tokenizer, TEXTS, "7"), group_of(tokenizer, TEXTS[::-1], "7 eggs")]
    rewards = [torch.tensor([0.5, 0.25, 0.0, 0.125]), torch.full((4,), 0.5)]  # a zero-advantage one

    def logp_of(prompt, completion):
        return naive_logprobs(naive, prompt + completion)[len(prompt) - 1 :].sum()

    terms, rows = [], []
    for group, R in zip(groups, rewards):
        A = leave_one_out(R)
        terms += formula(logp_of, group, R, A)
        rows += rows_of(group, R, A, tokenizer)
    loss = -torch.stack(terms).mean()
    loss.backward()

    update_loss, ours = gradient_of_update(trained, rows, budget, cpu_offload=offload)
    assert update_loss == pytest.approx(loss.item(), abs=1e-10)
    assert (ours - flat(p.grad for p in naive.parameters())).abs().max() < 1e-10


def test_verifree_closes_the_box_as_the_model_does():
    """A tokenizer that merges the brace with what follows, and a model that prefers the merged
    token. The step's direction against the gradient of pi(a*|s), summed over all closing tokens;
    with a bare "}" in every row the cosine is far lower."""
    pieces = r"\\boxed|\{|\}\n*|\d|\$|[^{}\\\d$]+"
    tokenizer = trained_tokenizer("q: so \\boxed{14}\n$$", pieces)
    vocab, model = vocabulary(tokenizer), tiny_model(len(tokenizer), seed=1)
    context, spelled = vocab.encode("q: so \\boxed"), vocab.encode("{14")
    [bare], closers = vocab.encode("}"), vocab.beginning_with(b"}")

    def log_pi(closer):
        return naive_logprobs(model, context + spelled + [closer])[len(context) - 1 :].sum()

    def direction(objective):
        weights = list(model.parameters())
        return flat(torch.autograd.grad(objective, weights, materialize_grads=True))

    pi = torch.stack([log_pi(closer) for closer in closers]).exp()
    assert pi[closers.index(bare)] < 0.2 * pi.sum()
    draws = torch.multinomial(pi.detach(), 64, replacement=True).tolist()
    prompt, box = context[:-2], context[-2:]
    completions = [box + spelled + [closers[draw]] for draw in draws]
    group = to_group(tokenizer, [], Problem("q", "14"), prompt, completions, [0.0] * 64)
    assert group.answers == ["14"] * 64
    rows = verifree_rows(group, torch.ones(64), torch.zeros(64), tokenizer)
    terms = [naive_logprobs(model, row.ids) @ torch.tensor(row.weights[1:]) for row in rows]
    true, ours, naive = map(direction, (pi.sum().log(), torch.stack(terms).mean(), log_pi(bare)))
    cosines = [F.cosine_similarity(true, g, dim=0).item() for g in (ours, naive)]
    print(f"\ncosine {cosines[0]:.3f}; with a bare brace {cosines[1]:.3f}")
    assert cosines[0] > 0.95 and cosines[1] < 0.9


def example_rows(rows=13, vocabulary_size=64):
    generator, made = torch.Generator().manual_seed(3), []
    for length in [2 + (i * i) % 29 for i in range(rows)]:
        ids = torch.randint(vocabulary_size, (length,), generator=generator).tolist()
        made.append(TrainingRow(ids, [0.0] + torch.randn(length - 1, generator=generator).tolist()))
    return made


@on_devices
@pytest.mark.parametrize("family, tied", [("qwen3", False), ("llama", True)])
def test_the_policy_has_the_gradient_of_the_formula_in_every_layout(device, family, tied):
    """FSDP2, checkpointing, chunks and padding against one row at a time: to rounding in fp32, and
    on a GPU, which computes in bf16, by direction."""
    naive, trained = (tiny_model(64, family, tied, initializer_range=0.1) for _ in range(2))
    rows = example_rows()
    for row in rows:
        logp = naive_logprobs(naive, row.ids)
        (-(torch.tensor(row.weights[1:]) @ logp) / len(rows)).backward()
    _, ours = gradient_of_update(trained.to(device), rows, 64)
    theirs = flat(p.grad for p in naive.parameters())
    error = (ours - theirs).norm() / theirs.norm()
    assert error < (1e-4 if device == "cpu" else 0.05)


@pytest.mark.parametrize("weight", [0.0, 1.0, float("inf"), float("nan")])
def test_an_update_without_a_gradient_or_without_a_finite_one_changes_nothing(weight):
    model, rows = policy.Policy(tiny_model(64)), []
    for row in example_rows():
        rows.append(TrainingRow(row.ids, [0.0, *(weight * w for w in row.weights[1:])]))
    before = flat(p.full_tensor().clone() for p in model.parameters())
    loss, grad_norm = update(model, torch.optim.SGD(model.parameters()), rows, 1e-2, 64)
    after = flat(p.full_tensor() for p in model.parameters())
    assert torch.equal(before, after) == (weight != 1.0)
    assert math.isfinite(grad_norm) == math.isfinite(weight)
    assert weight != 0.0 or (loss, grad_norm) == (0.0, 0.0)


def test_every_rank_runs_equally_many_microbatches_within_the_budget(monkeypatch):
    rows, world, shares = example_rows(200), 3, []
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    for rank in range(world):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        shares.append(list(microbatches(rows, 50)))
    assert len({len(share) for share in shares}) == 1
    made = [batch for share in shares for batch in share]
    assert all(ids.numel() <= 50 or len(ids) == 1 for ids, _ in made)
    assert sum(ids.numel() for ids, _ in made) < 1.1 * sum(len(row.ids) for row in rows)
    dealt = sorted(w for _, weights in made for w in weights.flatten().tolist() if w)
    assert dealt == sorted(w for row in rows for w in row.weights if w)
