import math

import pytest
import torch
import torch.distributed as dist
from conftest import example_rows, group_of, on_devices, tiny_model
from naive import completion_logprobs
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from engine import load, policy
from engine.tokens import vocabulary
from reward_functions import ask_judges
from rloo import TrainingRow, leave_one_out, microbatches, update, verifree_rows
from rollout import to_group
from tasks.data import Problem


def test_each_sample_is_compared_with_the_mean_of_the_others():
    assert leave_one_out(torch.tensor([1.0, 0.0, 0.5])).tolist() == [0.75, -0.75, 0.0]
    R = torch.rand(16, dtype=torch.float64)
    assert torch.allclose(leave_one_out(R), (R - R.mean()) * 16 / 15)
    long_reference = torch.tensor([3e-9, 1e-9, 1e-9, 1e-9])
    assert torch.allclose(leave_one_out(long_reference) * 1e9, leave_one_out(long_reference * 1e9))
    for same in 0.3, 3e-9:  # rounding is no advantage
        assert not leave_one_out(torch.full((16,), same)).any()
    with pytest.raises(ValueError, match="at least 2"):
        leave_one_out(R[:1])


# --------------------------------------------------------------- the gradient that the update takes

TEXTS = ["3*4=12 \\boxed{12} eggs", "3+4 so \\boxed{7}.", "no box", "\\boxed{seven}"]


def verifree_formula(model, tokenizer, group, R, A):
    """For each sample A_i times the log-prob of its solution, and R_i times that of "{a*}" after
    it. (The formula of the other rewards is examples/one_file.py's: test_one_file.py.)"""
    reference, terms = tokenizer.encode("{" + group.problem.reference + "}"), []
    for i, box in enumerate(group.boxes):
        prompt, solution = group.prompt, group.solution(i)
        terms.append(A[i] * completion_logprobs(model, prompt, solution).sum())
        if box:
            log_pi = completion_logprobs(model, prompt + solution, reference).sum()
            terms[i] = terms[i] + R[i] * log_pi
    return terms


def by_verifree(model, tokenizer, group):
    [judged] = ask_judges([group], {"actor"}, model, tokenizer)
    return judged


def naive_objective(model, row):
    """What the loss negates: the sum over a row's tokens of weight * log pi."""
    return torch.tensor(row.weights[1:]) @ completion_logprobs(model, row.ids[:1], row.ids[1:])


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def gradient_of_update(model, rows, budget, **options):
    """-> (loss, gradient): what a step of plain SGD subtracts, before it was clipped."""
    before = flat(p.detach().clone() for p in model.parameters())
    sharded = policy.Policy(model, **options)
    loss, norm = update(sharded, torch.optim.SGD(sharded.parameters()), rows, 1.0, budget)
    after = flat(p.detach().full_tensor() for p in sharded.parameters())
    return loss, (before - after).cpu() * max(1.0, norm + 1e-6)


@pytest.mark.parametrize("budget, offload", [(1, False), (64, True), (10_000, False)])
def test_the_update_takes_verifrees_gradient(tokenizer, monkeypatch, budget, offload):
    """In fp64, whatever the micro-batches: the step of plain SGD is minus the gradient."""
    monkeypatch.setattr(Qwen3RMSNorm, "forward", load.rms_norm)  # without a pass through fp32
    naive, trained = (tiny_model(len(tokenizer), initializer_range=0.1).double() for _ in range(2))
    groups = [group_of(tokenizer, TEXTS, "7"), group_of(tokenizer, TEXTS[::-1], "7 eggs")]
    rewards = [torch.tensor([0.5, 0.25, 0.0, 0.125]), torch.full((4,), 0.5)]  # a zero-advantage one

    terms, rows = [], []
    for group, R in zip(groups, rewards):
        A = leave_one_out(R)
        terms += verifree_formula(naive, tokenizer, group, R, A)
        rows += verifree_rows(by_verifree(naive, tokenizer, group), R, A, tokenizer)
    loss = -torch.stack(terms).mean()
    loss.backward()

    update_loss, ours = gradient_of_update(trained, rows, budget, cpu_offload=offload)
    assert update_loss == pytest.approx(loss.item(), abs=1e-10)
    assert (ours - flat(p.grad for p in naive.parameters())).abs().max() < 1e-10


def test_verifree_closes_the_box_as_the_model_does(own_tokenizer):
    """With a tokenizer that merges the brace with what follows. The rows, averaged over the tokens
    with which the model closes its box, have the gradient of log pi(a*|s), which sums over them."""
    tokenizer = own_tokenizer
    tokenizer.add_tokens(["}\n", "}."])
    vocab, model = vocabulary(tokenizer), tiny_model(len(tokenizer))
    prompt, box, spelled = map(vocab.encode, ("q: so ", "\\boxed", "{14"))
    completions = [box + spelled + [closer] for closer in vocab.beginning_with(b"}")]
    N = len(completions)
    group = to_group(tokenizer, [], Problem("q", "14"), prompt, completions, [0.0] * N)
    judged = by_verifree(model, tokenizer, group)
    rows = verifree_rows(judged, torch.ones(N), torch.zeros(N), tokenizer)
    assert N == 3 and group.answers == ["14"] * N

    ways = [completion_logprobs(model, prompt + box, ids[len(box) :]).sum() for ids in completions]
    log_pi, taught = torch.stack(ways), torch.stack([naive_objective(model, row) for row in rows])
    average = log_pi.softmax(0).detach() @ taught
    weights = list(model.parameters())
    ours, true = (flat(torch.autograd.grad(x, weights)) for x in (average, log_pi.logsumexp(0)))
    assert (ours - true).norm() < 1e-4 * true.norm()


def test_verifree_teaches_each_reference_as_often_as_the_model_uses_it(tokenizer, monkeypatch):
    """The rows, averaged over the draw, have the gradient of R = P, the sum over the references."""
    model, references = tiny_model(len(tokenizer)), ["7", "seven eggs", "14"]
    judged = by_verifree(model, tokenizer, group_of(tokenizer, [r"3+4 so \boxed{7}"], references))
    context = judged.group.prompt + judged.group.solution(0)
    R = judged.scores.P_of_samples()
    weights, taught, P = list(model.parameters()), 0.0, 0.0
    for k, share in enumerate(judged.scores.log_references.softmax(0)[:, 0].tolist()):
        monkeypatch.setattr(torch, "multinomial", lambda p, n, k=k: torch.tensor([[k]]))
        [row] = verifree_rows(judged, R, torch.zeros(1), tokenizer)
        ids = tokenizer.encode("{" + references[k] + "}")
        assert row.ids == context + ids
        taught = taught + share * naive_objective(model, row)
        P = P + completion_logprobs(model, context, ids).sum().exp()
    # R counts all tokens that can close a box, a row only one: all are "}" here but for rare ones.
    ours, true = (flat(torch.autograd.grad(x, weights)) for x in (taught, P))
    assert torch.cosine_similarity(ours, true, 0) > 0.999


@on_devices
@pytest.mark.parametrize("family, tied", [("qwen3", False), ("llama", True)])
def test_the_policy_has_the_gradient_of_the_formula_in_every_layout(device, family, tied):
    """FSDP2, checkpointing, chunks and padding against one row at a time: to rounding in fp32, and
    on a GPU, which computes in bf16, by direction."""
    naive, trained = (tiny_model(64, family, tied, initializer_range=0.1) for _ in range(2))
    rows = example_rows()
    for row in rows:
        (-naive_objective(naive, row) / len(rows)).backward()
    _, ours = gradient_of_update(trained.to(device), rows, 64)
    theirs = flat(p.grad for p in naive.parameters())
    error = (ours - theirs).norm() / theirs.norm()
    assert error < (1e-4 if device == "cpu" else 0.05)


@pytest.mark.parametrize("weight", [0.0, 1.0, float("inf"), float("nan")])
def test_an_update_without_a_gradient_or_without_a_finite_one_changes_nothing(weight):
    model, rows = policy.Policy(tiny_model(64)), example_rows()
    rows = [TrainingRow(row.ids, [0.0] + [weight * w for w in row.weights[1:]]) for row in rows]
    before = flat(p.full_tensor().clone() for p in model.parameters())
    _, grad_norm = update(model, torch.optim.SGD(model.parameters()), rows, 1e-2, 64)
    after = flat(p.full_tensor() for p in model.parameters())
    assert torch.equal(before, after) == (weight != 1.0)
    assert math.isfinite(grad_norm) == math.isfinite(weight) and (grad_norm == 0) == (weight == 0)


def test_every_rank_runs_equally_many_microbatches_within_the_budget(monkeypatch):
    rows, shares = example_rows(200), []
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        shares.append(list(microbatches(rows, 50)))
    assert len(shares[0]) == len(shares[1]) == len(shares[2])
    made = [batch for share in shares for batch in share]
    assert all(ids.numel() <= 50 or len(ids) == 1 for ids, _ in made)
    assert sum(ids.numel() for ids, _ in made) < 1.1 * sum(len(row.ids) for row in rows)
    dealt = sorted(w for _, weights in made for w in weights.flatten().tolist() if w)
    assert dealt == sorted(w for row in rows for w in row.weights if w)
