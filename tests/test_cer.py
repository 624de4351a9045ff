"""CER against its specification: the naive scorer, and what the paper promises on distributions
small enough to enumerate."""

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import group_of, on_devices, tiny_model
from torch.utils.flop_counter import FlopCounterMode

import cer
from cer import answer_logprobs, choose_solutions, exact_cer, rewards
from engine.load import load
from engine.tokens import pad, vocabulary
from rollout import sample
from tasks import data

# ------------------------------------------------------------ the scorer and its specification


@torch.no_grad()
def naive_logprobs(model, tokenizer, contexts, answer):
    """The definition: for every context a full forward pass for every prefix of the answer, and the
    whole vocabulary searched for the tokens that finish it."""
    table = vocabulary(tokenizer).bytes
    path = tokenizer.encode("{" + answer, add_special_tokens=False)
    missing = [b"".join(table[t] for t in path[i:]) + b"}" for i in range(len(path) + 1)]
    closers = [[v for v, piece in enumerate(table) if piece.startswith(m)] for m in missing]
    result = []
    for context in contexts:
        ways, so_far = [], 0.0
        for i in range(len(path) + 1):
            ids = torch.tensor([context + path[:i]], device=model.device)
            logp = model(input_ids=ids).logits[0, -1].float().log_softmax(-1)
            ways.append(so_far + logp[closers[i]].exp().sum().log())
            so_far = so_far + logp[path[i]] if i < len(path) else so_far
        result.append(torch.stack(ways).logsumexp(0))
    return torch.stack(result)


ANSWERS = ["14", "1", r"\frac{1}{2}", r"(-\infty, 3]", " 14 ", "", "größer als 5 µm", "日本 🙂"]
ANSWERS += ["14 eggs"]


def contexts_of(tokenizer):
    solutions = ["", "3*4=12; 12+2=14 eggs\n" * 4, "so it is", "2+2=4;\n"]
    contexts = [tokenizer.encode(f"Ana has {text}\\boxed") for text in solutions]
    return [*contexts, contexts[0][:1]]


def check_against_naive(model, tokenizer, limit=1e-4):
    contexts = contexts_of(tokenizer)
    fast = answer_logprobs(model, tokenizer, contexts, ANSWERS)
    assert fast.shape == (len(ANSWERS), len(contexts)) and fast.dtype == torch.float32
    naive = torch.stack([naive_logprobs(model, tokenizer, contexts, a) for a in ANSWERS])
    assert (fast - naive).abs().max() < limit
    return fast


@on_devices
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_scores_equal_naive_full_forwards(device, tokenizer, family, tied):
    check_against_naive(tiny_model(len(tokenizer) + 11, family, tied).to(device), tokenizer)


@on_devices
def test_scores_in_bf16_are_as_near_as_the_naive_ones(device, tokenizer):
    """Two ways to round the same numbers: neither is nearer to fp32 than the other, in the median
    over answers and contexts. The log-probs lie around -30; bf16 keeps 8 bits."""
    model, rounded = (tiny_model(len(tokenizer)).to(device) for _ in range(2))
    rounded.to(torch.bfloat16)
    contexts = contexts_of(tokenizer)
    exact = answer_logprobs(model, tokenizer, contexts, ANSWERS)
    fast = answer_logprobs(rounded, tokenizer, contexts, ANSWERS)
    naive = torch.stack([naive_logprobs(rounded, tokenizer, contexts, a) for a in ANSWERS])
    assert fast.dtype == torch.float32
    assert (fast - exact).abs().median() < 0.3 and (naive - exact).abs().median() < 0.3


def test_scores_equal_naive_with_the_real_tokenizer(qwen_tokenizer):
    check_against_naive(tiny_model(151_936, hidden_size=16, num_hidden_layers=1), qwen_tokenizer)


@pytest.mark.parametrize("at_once, logits", [(1024, 1024), (12, 1024), (1, 1), (40, 20)])
def test_the_cut_into_passes_and_batches_changes_nothing(tokenizer, monkeypatch, at_once, logits):
    model = tiny_model(len(tokenizer))
    whole = check_against_naive(model, tokenizer)
    monkeypatch.setattr(cer, "ANSWER_TOKENS_AT_ONCE", at_once)
    monkeypatch.setattr(cer, "TOKENS_AT_ONCE", 5 * at_once)
    monkeypatch.setattr(cer, "LOGITS_AT_ONCE", logits)
    assert (check_against_naive(model, tokenizer) - whole).abs().max() < 1e-4


def test_the_price_of_scoring(tokenizer):
    """In floating-point operations, so that no clock is needed: against one full forward pass for
    each pair, and of many answers against one."""
    model, spelled = tiny_model(len(tokenizer)), tokenizer.encode("Ana has")
    contexts = [spelled[:1] * (256 + 16 * j) for j in range(16)]
    answers = [rf"\frac{{{i}}}{{7}}" for i in range(16)]

    def flops(function):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            function()
        return counter.get_total_flops()

    def ours(U):
        return flops(lambda: answer_logprobs(model, tokenizer, contexts, answers[:U]))

    def naive():
        for answer in answers[:11]:  # U = 10 and a*
            ids = pad([c + tokenizer.encode("{" + answer) for c in contexts])
            model.base_model(input_ids=ids, use_cache=False)

    assert flops(naive) > 8 * ours(11)
    assert ours(16) < 3 * ours(1)


def test_nothing_to_score_and_what_cannot_be_scored(tokenizer):
    """Eager attention would add a mask of 0s and 1s; flash-attention would ignore it."""
    model = tiny_model(len(tokenizer))
    assert answer_logprobs(model, tokenizer, [], ["14"]).shape == (1, 0)
    assert answer_logprobs(model, tokenizer, [[5]], []).shape == (0, 1)
    with pytest.raises(ValueError, match="at least one token"):
        answer_logprobs(model, tokenizer, [[]], ["14"])
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="sdpa"):
        answer_logprobs(model, tokenizer, [[5]], ["14"])


def test_finished_answers_exclude_each_other(tokenizer):
    """So the probabilities of any set of them sum to at most 1."""
    model = tiny_model(len(tokenizer))
    texts = {piece.decode() for piece in vocabulary(tokenizer).bytes if piece.isalnum()}
    context = tokenizer.encode(r"\boxed")
    total = answer_logprobs(model, tokenizer, [context], sorted(texts)).exp().sum()
    assert 0 < total < 1


# ---------------------------------------------------------------------------------- the mathematics


def finite_distribution(S=7, A=5, seed=0):
    """pi(s) [S] and pi(a|s) [S, A], fp64."""
    generator = torch.Generator().manual_seed(seed)
    prior = torch.rand(S, dtype=torch.float64, generator=generator)
    likelihood = torch.rand(S, A, dtype=torch.float64, generator=generator) ** 3
    return prior / prior.sum(), likelihood / likelihood.sum(1, keepdim=True)


def test_exact_cer_is_the_conditional_expectation_written_out():
    prior, likelihood = finite_distribution()
    rho = exact_cer(prior, likelihood)
    for a in range(5):
        for b in range(5):
            joint = [prior[s] * likelihood[s, a] for s in range(7)]
            expected = sum(j * likelihood[s, b] for s, j in enumerate(joint)) / sum(joint)
            assert rho[a, b] == pytest.approx(expected.item(), abs=1e-14)
    impossible = exact_cer(torch.tensor([1.0]), torch.tensor([[1.0, 0.0]]))[1]
    assert impossible.tolist() == [0.0, 0.0]  # an answer that no solution leads to


@pytest.mark.parametrize("seed", range(5))
def test_theorem_1_a_correct_answer_earns_at_least_its_probability(seed):
    """rho(a*, a*) = E[p^2] / E[p] >= E[p] = pi(a*|q), p = pi(a*|s,q); with equality where every
    solution is as likely to give it."""
    prior, likelihood = finite_distribution(seed=seed)
    assert (exact_cer(prior, likelihood).diagonal() > prior @ likelihood).all()
    likelihood[:, 0] = 0.2
    likelihood[:, 1:] *= 0.8 / likelihood[:, 1:].sum(1, keepdim=True)
    gap = exact_cer(prior, likelihood).diagonal() - prior @ likelihood
    assert abs(gap[0]) < 1e-15 and (gap[1:] > 1e-3).all()


@pytest.mark.parametrize("seed", range(5))
def test_theorem_2_the_expected_reward_is_that_of_exact_match(seed):
    prior, likelihood = finite_distribution(seed=seed)
    rho, p_answer = exact_cer(prior, likelihood), prior @ likelihood
    # pi(a|q) is also the expected exact match with reference a
    assert (p_answer @ rho - p_answer).abs().max() < 1e-12
    # and for each answer the rewards over all references are probabilities: they sum to 1
    assert (rho >= 0).all() and (rho.sum(1) - 1).abs().max() < 1e-12


def test_the_estimator_converges_to_exact_cer():
    prior, likelihood = finite_distribution()
    s = torch.multinomial(prior, 1_000_000, replacement=True)
    R = cer.cer(likelihood[s].T.log(), likelihood[s, 2].log())
    assert (R - exact_cer(prior, likelihood)[:, 2]).abs().max() < 0.003


def test_cer_equals_the_matrix_formula():
    W, P = torch.rand(6, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    naive = torch.diag(1 / W.sum(1)) @ W @ P
    assert torch.allclose(cer.cer(W.log(), P.log()), naive, atol=1e-15)


def test_cer_of_masked_tiny_and_broken_numbers():
    """A row that is masked gets 0; proportions are kept far below the smallest float; nan shows."""
    rows = [[-torch.inf, -torch.inf], [-1.0, -torch.inf], [-2000.0, -2001.0], [torch.nan, 0.0]]
    R = cer.cer(torch.tensor(rows), torch.tensor([-0.5, -torch.inf])).tolist()
    P = math.exp(-0.5)
    assert R[:3] == [0.0, pytest.approx(P), pytest.approx(P / (1 + math.exp(-1)))]
    assert math.isnan(R[3])


def test_the_solutions_that_produced_an_answer_come_first():
    answer_of_solution = [0, 1, 0, 2, 0, 1]
    for M in range(1, 7):
        chosen = choose_solutions(3, answer_of_solution, M)
        assert chosen.sum(1).tolist() == [M] * 3
        for u in range(3):
            own = [j for j, a in enumerate(answer_of_solution) if a == u]
            assert chosen[u, own].sum() == min(M, len(own))
    others = torch.stack([choose_solutions(3, answer_of_solution, 2)[2] for _ in range(300)]).sum(0)
    assert others[3] == 300 and (others[[0, 1, 2, 4, 5]] > 30).all()  # at random among the others


# ------------------------------------------------------------------------------------- one question


def rewards_of(tokenizer, texts, reference, M=None):
    """-> (R, Matrices) of hand-written samples. That R is Eq. 8: test_rewards.py, random texts."""
    group = group_of(tokenizer, texts, reference)
    model = tiny_model(len(tokenizer))
    return rewards(model, tokenizer, group.prompt, group.completions, reference, M)


TEXTS = ["3*4 \\boxed{12}", "3+4 \\boxed{7}", "12 \\boxed{12} eggs", "no box", "\\boxed{seven}"]


def test_a_distinct_answer_is_scored_once(tokenizer, monkeypatch):
    scored = mock.Mock(side_effect=answer_logprobs)
    monkeypatch.setattr(cer, "answer_logprobs", scored)
    R, matrices = rewards_of(tokenizer, TEXTS, reference="7")
    assert scored.call_args.args[3] == matrices.distinct_answers == ["12", "7", "seven"]
    assert matrices.columns == [0, 1, 2, 4] and R[3] == 0 and R[0] == R[2] != R[1]
    assert matrices.log_W.shape == (3, 4)
    assert torch.equal(matrices.log_P, matrices.log_W[1])  # a* is "7"


def test_m_1_judges_each_answer_by_a_solution_that_produced_it(tokenizer):
    R, matrices = rewards_of(tokenizer, TEXTS[:3], "seven", M=1)
    P = matrices.log_P.exp()
    assert R[1] == P[1] and R[0] == R[2] and R[0] in (P[0], P[2])


def test_rewards_under_autocast_keep_fp32(tokenizer):
    """As a trainer in mixed precision calls it: bf16 passes, but R is an fp32 average."""
    plain, _ = rewards_of(tokenizer, TEXTS, "7")
    with torch.autocast("cpu", torch.bfloat16):
        R, matrices = rewards_of(tokenizer, TEXTS, "7")
        row = [matrices.distinct_answers.index(answer) for answer in ("12", "7", "12", "seven")]
        again = cer.cer(matrices.log_W.double(), matrices.log_P.double())[row]
    assert R.dtype == torch.float32 and (R - plain).abs().max() < 0.1
    assert (R[matrices.columns] - again).abs().max() < 1e-6


def test_a_long_answer_does_not_hold_all_its_logits(tokenizer):
    """The largest logits that lm_head gives, for an answer of 600 digits after four contexts."""
    model, largest = tiny_model(len(tokenizer), max_position_embeddings=1024), []
    model.lm_head.register_forward_hook(lambda *args: largest.append(args[2].shape[:2].numel()))
    contexts = contexts_of(tokenizer)[1:4]
    scores = answer_logprobs(model, tokenizer, contexts, ["7" * 600, "7"])
    assert max(largest) <= 1024 and scores.isfinite().all()


def test_cer_needs_torch_transformers_and_one_file_of_ours():
    code = "import sys, cer; print(*sorted(m for m in sys.modules if m.startswith('engine')))"
    loads = "'fsdp' in str([m for m in sys.modules if 'torch' not in m]), 'pyarrow' in sys.modules"
    root = Path(cer.__file__).parent
    command = [sys.executable, "-c", f"{code}; print({loads})"]
    out = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["engine engine.tokens", "False False"]


def test_theorem_2_on_a_language_model(toy_model_dir):
    """The mean of pi(a*|s), the mean CER and the rate of exact match estimate one number."""
    model, tokenizer = load(toy_model_dir, "cpu")
    pilots = data.load_problems("toy-test", 8)
    given = Counter()  # for a reference, an answer that the model gives, to any of eight questions
    for k, pilot in enumerate(sample(model, tokenizer, pilots, 64, max_new_tokens=32)):
        given.update((k, answer) for answer in pilot.answers if answer)
    (k, a_star), _ = given.most_common(1)[0]
    problem = data.Problem(pilots[k].question, a_star)
    N, groups, estimates = 64, 40, {"P": [], "CER": [], "exact": []}
    for group in sample(model, tokenizer, [problem] * groups, N, 32):
        R, matrices = rewards(model, tokenizer, group.prompt, group.completions, a_star)
        estimates["CER"].append(R.mean())
        estimates["P"].append(matrices.log_P.exp().sum() / N)  # no answer: P = 0
        estimates["exact"].append(group.answers.count(a_star) / N)
    mean = {name: torch.tensor(values).mean() for name, values in estimates.items()}
    error = {name: torch.tensor(values).std() / groups**0.5 for name, values in estimates.items()}
    assert mean["exact"] > 0.01  # there is something to compare
    for name in "P", "CER":
        spread = (error[name] ** 2 + error["exact"] ** 2) ** 0.5
        assert abs(mean[name] - mean["exact"]) < 3 * spread, (mean, error)
