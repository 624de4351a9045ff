"""examples/one_file.py is the specification: the fast code gives the same rewards and the same
gradient. test_cer.py compares the log-probabilities, also of unusual answers and tokenizers."""

import one_file
import pytest
import torch
from conftest import group_of
from test_rloo import flat, gradient_of_update

import cer
from engine.load import load
from reward_functions import Judged
from rloo import leave_one_out, rloo_rows
from rollout import sample
from tasks.data import load_problems


@pytest.fixture(scope="module")
def sampled(toy_model_dir):
    """The toy's model, its tokenizer, three groups that it sampled, and one written by hand."""
    model, tokenizer = load(toy_model_dir, "cpu")
    torch.manual_seed(1)
    groups = sample(model, tokenizer, load_problems("toy", 3), 6, 18)
    answers = [answer for group in groups for answer in group.answers]
    assert None in answers and len(set(answers)) > 6
    texts = [r"so \boxed{}", r"\boxed{7} \boxed{14}", "no box", r"\boxed{ 14 }", r"\boxed{14", "so"]
    return model, tokenizer, [*groups, group_of(tokenizer, texts, "14")]


def test_the_rewards_are_those_of_one_file(sampled):
    model, tokenizer, groups = sampled
    for group in groups:
        inputs = group.prompt, group.completions, group.problem.reference
        R, _ = cer.rewards(model, tokenizer, *inputs)
        slow = one_file.naive_rewards(model, tokenizer, *inputs)
        assert (R - slow).abs().max() < 1e-6
        ways = one_file.log_pi, one_file.log_pi_all_ways  # here a brace is a token of its own
        plain, all_ways = (way(model, tokenizer, group.prompt, "14 eggs").item() for way in ways)
        assert plain == pytest.approx(all_ways, abs=1e-5)
        both = [group.problem.reference, "twenty eggs"]  # Eq. 8 is linear in P
        other = one_file.naive_rewards(model, tokenizer, *inputs[:2], both[1])
        R, _ = cer.rewards(model, tokenizer, *inputs[:2], both)
        assert (R - slow - other).abs().max() < 1e-6


@pytest.mark.parametrize("budget", [1, 10_000])
def test_the_update_takes_the_gradient_of_one_file(sampled, toy_model_dir, budget):
    model, tokenizer, groups = sampled
    rows, loss, size = [], 0.0, sum(len(group.completions) for group in groups)
    for group in groups:
        R = torch.rand(6)
        A = leave_one_out(R)
        rows += rloo_rows(Judged(group, None, None), R, A, tokenizer)
        for ids, A_i in zip(group.completions, A):
            loss -= A_i * one_file.completion_logprobs(model, group.prompt, ids).sum() / size
    slow = flat(torch.autograd.grad(loss, list(model.parameters())))
    trained, _ = load(toy_model_dir, "cpu")
    fast_loss, fast = gradient_of_update(trained, rows, budget)
    assert fast_loss == pytest.approx(loss.item(), rel=1e-5)
    assert (fast - slow).norm() < 1e-5 * slow.norm()
