"""CER against its specification, naive.py, and what the paper promises on distributions
small enough to enumerate."""

import contextlib
import copy
import itertools
import math
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import group_of, on_devices, tiny_model
from naive import log_pi, log_probs
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedTokenizerFast

import cer
from cer import answer_logprobs, choose_solutions, exact_cer, read_answers, rewards
from engine.load import load
from engine.tokens import vocabulary

# ------------------------------------------------------------ the scorer and its specification


ANSWERS = ["14", "1", r"\frac{1}{2}", r"(-\infty, 3]", " 14 ", "", "größer als 5 µm", "日本 🙂"]
ANSWERS += ["14 eggs", r"\text{(C)}"]


def contexts_of(tokenizer):
    solutions = ["", "3*4=12; 12+2=14 eggs\n" * 4, "so it is", "2+2=4;\n"]
    contexts = [tokenizer.encode(f"Ana has {text}\\boxed") for text in solutions]
    return [*contexts, contexts[0][:1]]


def scores_of(model, tokenizer):
    """All answers after all contexts -> (by answer_logprobs, by naive.py)."""
    contexts = contexts_of(tokenizer)
    fast = answer_logprobs(model, tokenizer, contexts, ANSWERS)
    assert fast.shape == (len(ANSWERS), len(contexts)) and fast.dtype == torch.float32
    naive = [[log_pi(model, tokenizer, c, answer).item() for c in contexts] for answer in ANSWERS]
    return fast, torch.tensor(naive, device=fast.device)


@on_devices
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_scores_equal_naive_full_forwards(device, tokenizer, family, tied):
    model = tiny_model(len(tokenizer) + 11, family, tied).to(device)
    fast, naive = scores_of(model, tokenizer)
    assert (fast - naive).abs().max() < 1e-4


def test_an_answer_for_which_there_is_no_room_is_never_written(tokenizer):
    """A model has no positions for it after the longest context. Sampling ends there, too."""
    contexts, tokens = contexts_of(tokenizer), vocabulary(tokenizer).encode("{14 eggs")
    room = max(map(len, contexts)) + len(tokens)
    for positions, last in (room, True), (room - 1, False):
        model = tiny_model(len(tokenizer), max_position_embeddings=positions)
        scores = answer_logprobs(model, tokenizer, contexts, ["14 eggs"])[0]
        for context, score in zip(contexts, scores.tolist()):
            if len(context) == max(map(len, contexts)) and not last:
                assert score == -math.inf
            else:
                naive = log_pi(model, tokenizer, context, "14 eggs").item()
                assert score == pytest.approx(naive, abs=1e-4)


def test_a_long_answer_does_not_part_the_contexts(tokenizer, monkeypatch):
    """All are read together, as beside a usual pass, so that their prompt is read once."""
    contexts, answers = contexts_of(tokenizer)[:4], ["14", "9", "1, 2, 3 and " * 9]
    model = tiny_model(len(tokenizer))
    expected = answer_logprobs(model, tokenizer, contexts, answers)
    monkeypatch.setattr(cer, "ANSWER_TOKENS_AT_ONCE", 20)
    monkeypatch.setattr(cer, "TOKENS_AT_ONCE", 4 * (max(map(len, contexts)) + 20))
    read = mock.Mock(side_effect=cer.read_contexts)
    monkeypatch.setattr(cer, "read_contexts", read)
    scores = answer_logprobs(model, tokenizer, contexts, answers)
    assert torch.allclose(scores, expected, atol=1e-4)
    assert [len(call.args[1]) for call in read.call_args_list] == [4]


def test_scores_equal_naive_with_a_tokenizer_like_qwens(qwen_tokenizer):
    """It merges braces. The embeddings have rows for which there are no tokens."""
    rows = len(vocabulary(qwen_tokenizer).bytes) + 11
    model = tiny_model(rows, hidden_size=16, num_hidden_layers=1)
    fast, naive = scores_of(model, qwen_tokenizer)
    assert (fast - naive).abs().max() < 1e-4


def test_scores_equal_naive_where_the_brace_changes_the_tokens_before_it():
    """As SmolLM2's tokenizer does, this one spells "(C)}" with ")}", and "(C)}}" with "}}"."""
    letters, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), [("}", "}"), (")", "}")]
    ids = {token: i for i, token in enumerate([*letters, "}}", ")}"])}
    backend = Tokenizer(models.BPE(ids, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert [tokenizer.encode(text)[-1] for text in ("(C)}", "(C)}}")] == [ids[")}"], ids["}}"]]
    fast, naive = scores_of(tiny_model(len(tokenizer)), tokenizer)
    assert (fast - naive).abs().max() < 1e-4


def test_the_cut_into_passes_and_batches_changes_nothing(tokenizer, monkeypatch):
    """And the logits of at most LOGITS_AT_ONCE tokens are held at a time."""
    model, held = tiny_model(len(tokenizer)), []
    inputs = model, tokenizer, contexts_of(tokenizer), [*ANSWERS, "7" * 99]
    whole = answer_logprobs(*inputs)
    model.lm_head.register_forward_hook(lambda *args: held.append(args[2].shape[:2].numel()))
    for answer_tokens, logits in (12, 1024), (40, 20), (1, 1):
        monkeypatch.setattr(cer, "ANSWER_TOKENS_AT_ONCE", answer_tokens)
        monkeypatch.setattr(cer, "TOKENS_AT_ONCE", 5 * answer_tokens)
        monkeypatch.setattr(cer, "LOGITS_AT_ONCE", logits)
        held.clear()
        assert (answer_logprobs(*inputs) - whole).abs().max() < 1e-4
        assert max(held) <= logits


def test_what_cannot_be_scored_is_refused(tokenizer):
    """Eager attention would add a mask of 0s and 1s; flash-attention would ignore it."""
    plain, training, eager = (tiny_model(len(tokenizer)) for _ in range(3))
    training.train()
    eager.set_attn_implementation("eager")
    cases = [(training, [[5]], "eval mode"), (eager, [[5]], "sdpa")]
    for model, contexts, says in [(plain, [[5], []], "at least one token"), *cases]:
        with pytest.raises(ValueError, match=says):
            answer_logprobs(model, tokenizer, contexts, ["14"])


def test_a_model_that_is_scored_otherwise_in_parts_is_refused(tokenizer, monkeypatch):
    """Here with the positions of every answer off by one."""

    def shifted(model, answers, lengths, last, cache):
        return read_answers(model, answers, lengths + 1, last, cache)

    monkeypatch.setattr(cer, "read_answers", shifted)
    with pytest.raises(ValueError, match="scoring an answer in parts changes"):
        cer.check_scoring(tiny_model(len(tokenizer)), tokenizer)


@pytest.mark.parametrize("pairs, refused", [(1, False), (2, True)])
def test_what_is_rounded_counts_in_the_mean_of_the_four_pairs(
    tokenizer, monkeypatch, pairs, refused
):
    """A pair of a context and an answer that is off by three times the limit of fp32, 1e-3; then
    two of them."""
    model = tiny_model(len(tokenizer))

    def rounded(model, answers, lengths, last, cache):
        for states in read_answers(model, answers, lengths, last, cache):
            logp = model.lm_head(states).log_softmax(-1)
            off = model.lm_head(1.01 * states).log_softmax(-1)
            by = 0.01 * 3e-3 / (off - logp).abs().mean(dim=(1, 2))  # [contexts]
            by[pairs:] = 0
            yield (1 + by[:, None, None]) * states if states.shape[1] == first else states

    first = 1 + len(tokenizer.encode("{14 eggs", add_special_tokens=False))
    monkeypatch.setattr(cer, "read_answers", rounded)
    says = pytest.raises(ValueError, match="in parts") if refused else contextlib.nullcontext()
    with says:
        cer.check_scoring(model, tokenizer)


@torch.no_grad()
def test_an_answers_score_is_the_probability_of_sampling_it(toy_model_dir):
    """Every way to go on after a context is followed, token by token, until the box is closed or
    its probability is below 1e-3. The ways to an answer add up to its score."""
    model, tokenizer = load(toy_model_dir, "cpu")
    vocab = vocabulary(tokenizer)
    context = vocab.encode("Ana has 3 bags of 4 eggs. How many eggs?\n3*4=12\n\\boxed")
    found, open_ways = Counter(), [(context, 0.0)]
    while open_ways:
        ids, so_far = open_ways.pop()
        logp = so_far + log_probs(model, ids)[-1]
        for token in (logp > math.log(1e-3)).nonzero()[:, 0].tolist():
            if box := vocab.locate_answer([*ids, token]):
                found[box.answer] += logp[token].exp().item()
            else:
                open_ways.append(([*ids, token], logp[token]))
    answers, probabilities = zip(*found.most_common())
    scores = answer_logprobs(model, tokenizer, [context], answers)[:, 0].exp()
    assert scores[:20].tolist() == pytest.approx(probabilities[:20], rel=1e-2)
    assert 0.5 < scores.sum() < 1  # finished answers exclude each other


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
    for a, b in itertools.product(range(5), repeat=2):
        joint = [prior[s] * likelihood[s, a] for s in range(7)]
        expected = sum(joint[s] * likelihood[s, b] for s in range(7)) / sum(joint)
        assert rho[a, b] == pytest.approx(expected.item(), abs=1e-14)
    impossible = exact_cer(torch.tensor([1.0]), torch.tensor([[1.0, 0.0]]))[1]
    assert impossible.tolist() == [0.0, 0.0]  # an answer that no solution leads to


@pytest.mark.parametrize("seed", range(5))
def test_theorem_1_a_correct_answer_receives_at_least_its_probability(seed):
    """rho(a*, a*) = E[p^2] / E[p] >= E[p] = pi(a*|q), p = pi(a*|s,q); with equality where every
    solution is as likely to give it."""
    prior, likelihood = finite_distribution(seed=seed)
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
    # With several references a* is the event that the answer is one of them. It is as if the model
    # wrote one text for all of them, which is likely after s as the sum says.
    merged = torch.stack([likelihood[:, 0], likelihood[:, 1], likelihood[:, 2:].sum(1)], 1)
    of_event = exact_cer(prior, torch.cat([likelihood, merged[:, 2:]], 1))[:5, 5]
    assert (of_event - rho[:, 2:].sum(1)).abs().max() < 1e-12
    assert (p_answer @ of_event - p_answer[2:].sum()).abs() < 1e-12


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
    produced = torch.tensor([0, 1, 0, 2, 0, 1])
    for M in range(1, 7):
        chosen = choose_solutions(3, produced.tolist(), M)
        own = produced == torch.arange(3)[:, None]
        assert chosen.sum(1).tolist() == [M] * 3
        assert (chosen & own).sum(1).tolist() == [min(M, count) for count in (3, 2, 1)]
    others = sum(choose_solutions(3, produced.tolist(), 2)[2].int() for _ in range(300))
    assert others[3] == 300 and others.min() > 30  # at random among the others


# ------------------------------------------------------------------------------------- one question


def rewards_of(tokenizer, texts, reference, M=None):
    """-> (R, Matrices) of hand-written samples. That R is Eq. 8: test_rewards.py, random texts."""
    group, model = group_of(tokenizer, texts, reference), tiny_model(len(tokenizer))
    return rewards(model, tokenizer, group.prompt, group.completions, reference, M)


TEXTS = ["3*4 \\boxed{12}", "3+4 \\boxed{7}", "12 \\boxed{12} eggs", "no box", "\\boxed{seven}"]


def test_the_prompt_of_a_question_is_read_once(tokenizer):
    """Counted in tokens that enter the model; and the scores are those of naive.py. One context
    is the beginning of another, and one solution is empty."""
    model, vocab = tiny_model(len(tokenizer)), vocabulary(tokenizer)
    read = []
    model.base_model.embed_tokens.register_forward_hook(
        lambda *args: read.append(args[1][0].numel())
    )
    prompt = vocab.encode("How many eggs?\n" * 9)
    rest = [vocab.encode(text) for text in ("", "3*4=12;", "3*4=12; so \\boxed", "9 \\boxed")]
    contexts = [prompt + solution for solution in rest]
    scores = cer.answer_logprobs(model, tokenizer, contexts, ["14", "9"])
    spelled = sum(len(vocab.encode("{" + answer)) for answer in ("14", "9"))
    shared, longest = len(prompt) - 1, max(map(len, rest)) + 1  # the last token of the prompt again
    assert sum(read) == shared + len(contexts) * (longest + spelled)
    slow = [[log_pi(model, tokenizer, c, answer) for c in contexts] for answer in ("14", "9")]
    assert (scores - torch.tensor(slow)).abs().max() < 1e-4
    read.clear()
    cer.answer_logprobs(model, tokenizer, contexts[1:2], ["14"])  # alone it is read in one pass
    assert read[0] == len(contexts[1])


def test_a_distinct_answer_is_scored_once(tokenizer, monkeypatch):
    scored = mock.Mock(side_effect=answer_logprobs)
    monkeypatch.setattr(cer, "answer_logprobs", scored)
    R, matrices = rewards_of(tokenizer, TEXTS, reference="7")
    assert scored.call_args.args[3] == matrices.distinct_answers == ["12", "7", "seven"]
    assert matrices.columns == [0, 1, 2, 4] and matrices.log_W.shape == (3, 4)
    assert torch.equal(matrices.log_P, matrices.log_W[1])  # a* is "7"


def test_two_references_that_the_tokenizer_makes_one_count_once(tokenizer):
    """As Qwen's tokenizer does with the two codes of é. Otherwise P could exceed 1. (That P of
    several is their sum: test_rewards.py, random texts.)"""
    composing = copy.deepcopy(tokenizer)
    composing.backend_tokenizer.normalizer = normalizers.NFC()
    twice, _ = rewards_of(composing, TEXTS, ["caf\xe9", "cafe\u0301"])
    assert torch.equal(twice, rewards_of(composing, TEXTS, "caf\xe9")[0])


def test_a_reference_is_drawn_in_proportion_to_its_probability(tokenizer):
    """Also where all of them are too small for a float. And none without a closed box."""
    answers, references = ["7", None, "8"], ["7", "seven", "it is 7"]
    log_references = torch.tensor([[0.6, 0.3], [0.3, 0.1], [0.1, 0.6]]).log()
    log_references[:, 1] -= 1000
    scores = cer.Scores(answers, references, ["7", "8"], [0, 2], torch.zeros(2, 2), log_references)
    draws = [scores.sample_references() for _ in range(2000)]
    for i, shares in (0, [0.6, 0.3, 0.1]), (2, [0.3, 0.1, 0.6]):
        found = [sum(draw[i] == each for draw in draws) / 2000 for each in references]
        assert found == pytest.approx(shares, abs=0.05)
    _, nothing = rewards_of(tokenizer, ["no box"] * 3, references)
    assert nothing.sample_references() == {}


def test_inputs_that_would_give_wrong_rewards_are_refused(tokenizer):
    group = group_of(tokenizer, [r"so \boxed{7}", r"\boxed{8}"], "7")
    prompt, completions, padding = group.prompt, group.completions, tokenizer.pad_token_id
    whole = [prompt + ids for ids in completions]
    cases = [
        ((torch.tensor(prompt), completions, "7"), "lists of token ids"),
        ((prompt, whole, "7"), "begin with the prompt"),
        ((prompt, [[len(tokenizer)]], "7"), "not in the tokenizer's range"),
        *(((prompt, completions, bad), "must be a string, or") for bad in (7, ["7", 7], [], None)),
        ((prompt, completions, "7", 0), "M must be at least 1"),
        *(((prompt, completions, bad), "a box, or has unmatched") for bad in (r"\boxed{7}", "7}")),
        (([prompt], completions, "7"), "lists of token ids"),
        (([padding] + prompt, completions, "7"), "are padded"),
        ((prompt + [padding], completions, "7"), "are padded"),
        ((prompt, [[padding] * 2 + ids for ids in whole], "7"), "are padded"),
    ]
    model = tiny_model(len(tokenizer))
    rewards(model, tokenizer, prompt, [whole[0], [padding] + completions[1]], "7")  # these may
    for inputs, says in cases:
        with pytest.raises(ValueError, match=says):
            rewards(model, tokenizer, *inputs)


def test_a_model_in_ddp_is_scored_as_it_is_and_shards_are_refused(tokenizer):
    group, model = group_of(tokenizer, TEXTS, "7"), tiny_model(len(tokenizer))
    inputs = tokenizer, group.prompt, group.completions, "7"
    wrapped = torch.nn.parallel.DistributedDataParallel(model).eval()
    cer.check_scoring(wrapped, tokenizer)
    assert torch.equal(rewards(wrapped, *inputs)[0], rewards(model, *inputs)[0])
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="needs whole weights"):
        rewards(model, *inputs)
