import json
import os
import random

import measure
import pytest
import torch
from conftest import tiny_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

import data
import policy
from data import InputError, split_answer
from policy import Rollout, Row, generate, microbatches, pad, sample
from vocabulary import Vocabulary, vocabulary

# ----------------------------------------------------------------------------------- the vocabulary


def test_the_bytes_of_the_tokens_spell_the_text(tokenizer, qwen_tokenizer):
    for tok in tokenizer, qwen_tokenizer:
        vocab = vocabulary(tok)
        for text in (
            "3*4=12;\n\\boxed{14 eggs}",
            "größer 日本 🙂 \u200b\t",
            "$\\boxed{(-\\infty, 3]}$.",
        ):
            assert vocab.join(vocab.encode(text)) == text.encode()


def test_special_tokens_spell_nothing(qwen_tokenizer):
    vocab = vocabulary(qwen_tokenizer)
    assert len(vocab) == 151_669
    assert vocab.bytes[151_645] == b""  # <|im_end|>
    assert vocab.bytes[qwen_tokenizer.convert_tokens_to_ids("<think>")] == b"<think>"  # not special


def byte_fallback_tokenizer(prepend):
    """SentencePiece's family in small: characters, and bytes for what they do not cover."""
    pieces = ["<eos>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *map(chr, range(33, 127))]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    backend = Tokenizer(model)
    replace = normalizers.Replace(" ", "▁")
    steps = [normalizers.Prepend("▁"), replace] if prepend else [replace]
    backend.normalizer = normalizers.Sequence(steps)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def test_byte_fallback_tokenizers_spell_too():
    vocab = vocabulary(byte_fallback_tokenizer(prepend=False))
    text = "so it is \\boxed{14 µm 🙂}"
    assert vocab.join(vocab.encode(text)) == text.encode() and vocab.bytes[0] == b""
    cut, answer = vocab.locate_answer(vocab.encode(text))
    assert answer == "14 µm 🙂" and vocab.join(vocab.encode(text)[:cut]) == b"so it is \\boxed"
    assert [vocab.bytes[i] for i in vocab.beginning_with(b"}")] == [b"}", b"}"]  # also as a byte


def test_a_tokenizer_that_adds_a_space_is_refused():
    with pytest.raises(InputError, match="does not give .* back"):
        vocabulary(byte_fallback_tokenizer(prepend=True))


def test_the_name_of_a_special_token_is_text(qwen_tokenizer):
    vocab = vocabulary(qwen_tokenizer)
    assert vocab.join(vocab.encode("{<|im_end|>")) == b"{<|im_end|>"


def test_beginning_with_is_a_search_of_the_whole_vocabulary(qwen_tokenizer):
    vocab = vocabulary(qwen_tokenizer)
    for prefix in b"}", b"4}", b"{}", "µ}".encode():
        naive = [i for i, piece in enumerate(vocab.bytes) if piece.startswith(prefix)]
        assert sorted(vocab.beginning_with(prefix)) == naive
    assert len(vocab.beginning_with(b"}")) == 186


def test_every_math500_reference_is_cut_at_a_token_boundary(qwen_tokenizer, shared_data):
    vocab = vocabulary(qwen_tokenizer)
    for problem in data.load_problems(shared_data / "math500.jsonl"):
        for after in "$.", "$", "", ".\n", "\\]":
            text = f"The answer is $\\boxed{{{problem.reference}}}{after}"
            ids = vocab.encode(text)
            cut, answer = vocab.locate_answer(ids)
            assert answer == problem.reference
            assert vocab.join(ids[:cut]) == text[: split_answer(text)[0]].encode()


def test_sampled_ids_are_cut_as_they_are(qwen_tokenizer):
    """A sampler may spell "boxed" letter by letter; re-tokenising would give other ids."""
    vocab = vocabulary(qwen_tokenizer)
    odd = [i for c in "so \\boxed{1" for i in vocab.encode(c)] + vocab.encode("4}$.")
    cut, answer = vocab.locate_answer(odd)
    assert answer == "14" and vocab.join(odd[:cut]) == b"so \\boxed" and cut == 9
    assert odd[:cut] != vocab.encode("so \\boxed")


def test_half_a_character_does_not_shift_the_cut(qwen_tokenizer):
    vocab = vocabulary(qwen_tokenizer)
    half = vocab.encode("🙂")[:1] if len(vocab.encode("🙂")) > 1 else [vocab.bytes.index(b"\xf0")]
    ids = half + vocab.encode("so \\boxed") + vocab.encode("{") + half + vocab.encode("}")
    cut, answer = vocab.locate_answer(ids)
    assert vocab.join(ids[:cut]).endswith(b"\\boxed") and answer == "\ufffd"


def test_a_brace_inside_a_token_is_no_answer(tokenizer):
    vocab = vocabulary(tokenizer)
    vocab_bytes = list(vocab.bytes)
    merged = len(vocab_bytes)
    glued = object.__new__(Vocabulary)
    glued.bytes = [*vocab_bytes, b"boxed{1"]
    ids = [*vocab.encode("\\"), merged, *vocab.encode("4}")]
    assert glued.join(ids) == b"\\boxed{14}" and glued.locate_answer(ids) is None


# ----------------------------------------------------------------------------------------- sampling


def save(directory, model, tokenizer, **generation):
    model.generation_config = GenerationConfig(**generation)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_the_hubs_generation_settings_do_not_reach_the_sampler(tokenizer, tmp_path):
    """load() itself asserts that scores equal logits; here it has something to undo."""
    stop = tokenizer.eos_token_id
    penalties = dict(repetition_penalty=1.5, top_k=20, temperature=0.3, no_repeat_ngram_size=2)
    settings = dict(do_sample=True, eos_token_id=[stop, 7], **penalties)
    directory = save(tmp_path, tiny_model(len(tokenizer) + 5), tokenizer, **settings)
    model, _ = policy.load(directory, "cpu")
    assert model.generation_config.repetition_penalty in (None, 1.0)
    assert model.generation_config.eos_token_id == sorted({stop, 7})  # its stop ids are kept


def test_rows_that_spell_no_token_are_never_sampled(tokenizer, tmp_path):
    directory = save(tmp_path, tiny_model(2 * len(tokenizer), initializer_range=0.02), tokenizer)
    model, _ = policy.load(directory, "cpu")
    rows, _ = generate(model, [[5, 6]] * 64, max_new_tokens=8)
    assert max(i for row in rows for i in row) < len(tokenizer)


@pytest.fixture
def loaded(tokenizer, tmp_path):
    directory = save(tmp_path, tiny_model(len(tokenizer)), tokenizer)
    return policy.load(directory, "cpu")[0]


PROMPTS = [[5, 6, 7], [9] * 11, [30], [8, 8, 30, 31, 99], [100, 101]] * 3


def one_call(model, prompt, max_new_tokens):
    """Greedy decoding without cache, padding or generate()."""
    stops, ids = set(model.generation_config.eos_token_id), list(prompt)
    for _ in range(max_new_tokens):
        with torch.no_grad():
            ids.append(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item())
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("piece", [1, 3, 256])
@pytest.mark.parametrize("fits", [20, 60, 10_000])
def test_pieces_and_dropped_rows_change_no_token(loaded, monkeypatch, piece, fits):
    likely = [generate(loaded, PROMPTS, 9, temperature=0)[0][i][4] for i in (0, 1)]
    loaded.generation_config.eos_token_id = sorted(set(likely))  # so that rows end early
    monkeypatch.setattr(policy, "tokens_that_fit", lambda model: fits)
    finished = []
    settings = dict(piece=piece, temperature=0, progress=finished.append)
    rows, entropies = generate(loaded, PROMPTS, 9, **settings)
    assert rows == [one_call(loaded, prompt, 9) for prompt in PROMPTS]
    for prompt, row, entropy in zip(PROMPTS, rows, entropies):
        logits = loaded(input_ids=torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1]
        p = logits.softmax(-1)
        assert entropy == pytest.approx(-(p * p.log()).sum(-1).mean().item(), abs=1e-4)
    assert len(set(map(len, rows))) > 1 and sum(finished) == len(PROMPTS)


def test_finished_rows_cost_nothing(loaded, monkeypatch):
    """What is decoded, in rows times steps, for lengths as training sees them (log-normal, cut at 4
    times the mean): at least 1.5 times less than with one call that ends when the last row does."""
    rng = random.Random(0)
    lengths = [min(64, max(1, round(rng.lognormvariate(2.53, 0.7)))) for _ in range(64)]
    decoded = []

    class Ends(policy.EntropyProbe):  # the first token of a prompt says where its row ends
        def __call__(self, ids, logits):
            decoded.append(len(ids))
            ends = torch.tensor(lengths)[ids[:, 0] - 5] == ids.shape[1]
            logits = super().__call__(ids, logits)
            logits[:, stops] = torch.where(ends, torch.inf, -torch.inf)[:, None]
            return logits

    stops = loaded.generation_config.eos_token_id
    monkeypatch.setattr(policy, "EntropyProbe", Ends)
    rows, _ = generate(loaded, [[5 + row] for row in range(64)], 64, piece=4, temperature=0)
    assert [len(row) for row in rows] == lengths
    assert 1.5 * sum(decoded) < 64 * max(lengths)


def test_samples_follow_the_models_distribution(loaded):
    with torch.no_grad():
        p = loaded(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(0)
    first = torch.tensor([row[0] for row in generate(loaded, [[5, 6, 7]] * 4000, 1)[0]])
    frequency = first.bincount(minlength=len(p)) / 4000
    assert (frequency - p).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_a_rollout_says_what_was_sampled(toy_model_dir):
    model, tokenizer = policy.load(toy_model_dir, "cpu")
    problems = data.load_problems("toy-test", 4)
    prompts = [policy.encode_prompt(tokenizer, problem) for problem in problems]
    rollouts = sample(model, tokenizer, problems, prompts, 6, 18)
    vocab, stop, answered = vocabulary(tokenizer), tokenizer.eos_token_id, 0
    for problem, prompt, rollout in zip(problems, prompts, rollouts):
        assert rollout.problem is problem and rollout.prompt == prompt
        for i, ids in enumerate(rollout.completions):
            assert (ids[-1] == stop) != rollout.truncated[i] and stop not in ids[:-1]
            if rollout.answers[i] is not None:
                answered += 1
                assert not rollout.truncated[i]
                assert vocab.join(rollout.context(i)).endswith(b"\\boxed")
                assert rollout.texts[i].split("\\boxed{")[1].startswith(rollout.answers[i] + "}")
    assert 0 < answered < 24  # 18 tokens are too few for some


def test_prompts_without_a_chat_template_are_plain_text(tokenizer):
    problem = data.Problem("How many?", "14")
    assert tokenizer.decode(policy.encode_prompt(tokenizer, problem)) == "How many?\n"
    plain = tokenizer.__class__(tokenizer_object=tokenizer._tokenizer, eos_token="<eos>")
    text = plain.decode(policy.encode_prompt(plain, problem))
    assert text.startswith(data.SYSTEM) and "How many?\n" + data.INSTRUCTION in text


def test_the_real_chat_template(qwen_tokenizer):
    ids = policy.encode_prompt(qwen_tokenizer, data.Problem("Q?\nA: x", "A", "letter"))
    assert qwen_tokenizer.decode(ids) == (
        f"<|im_start|>system\n{data.SYSTEM}<|im_end|>\n<|im_start|>user\nQ?\nA: x\n"
        f"{data.INSTRUCTION}{data.LETTER_ONLY}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_tokenizer_that_merges_the_brace_is_refused():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(["\\boxed{"] * 9, trainer)
    with pytest.raises(InputError, match="merges 'boxed' and '{'"):
        vocabulary(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize(
    "config, says",
    [
        (dict(family="mistral", sliding_window=8), "no sliding window"),
        (dict(attention_dropout=0.1), "attention_dropout must be 0"),
        (dict(vocab_size=50), "more than the model has embeddings"),
    ],
)
def test_models_that_would_be_scored_wrongly_are_refused(tokenizer, tmp_path, config, says):
    rows = config.pop("vocab_size", len(tokenizer))
    save(tmp_path, tiny_model(rows, **config), tokenizer)
    with pytest.raises(InputError, match=says):
        policy.load(tmp_path, "cpu")


QWEN3_4B = dict(hidden_size=2560, num_hidden_layers=36, intermediate_size=9728, head_dim=128)
QWEN3_4B |= dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=151_936)


@pytest.mark.parametrize(
    "available, offload, says",
    [
        (141, False, None),
        (80, False, "about 72 GB .* 4.0B model at world size 1.* has 80 GB: .*torchrun on 2 GPUs"),
        (48, False, "48 GB: use torchrun on 3 GPUs or --cpu-offload$"),
        (48, True, None),
        (80, True, None),
        (4, False, "use a smaller model"),
    ],
)
def test_a_run_that_cannot_fit_is_refused(tmp_path, monkeypatch, available, offload, says):
    config = Qwen3Config(**QWEN3_4B, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(policy.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(policy, "memory", lambda: (available, "this GPU"))
    if says is None:
        policy.require_memory(tmp_path, 16_384, 6144, offload)
    else:
        with pytest.raises(InputError, match=says):
            policy.require_memory(tmp_path, 16_384, 6144, offload)


def test_a_directory_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(InputError, match="not a Hugging Face model directory"):
        policy.load(str(tmp_path), "cpu")


# ----------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("chunk", [1, 5, 1024])
def test_chunked_logprobs_equal_the_log_softmax(chunk):
    hidden = torch.randn(3, 7, 16, requires_grad=True)
    lm_head = torch.nn.Linear(16, 50, bias=False)
    targets = torch.randint(50, (3, 7))
    naive = lm_head(hidden).log_softmax(-1).gather(2, targets[..., None])[..., 0]
    fast = policy.token_logprobs(hidden, lm_head, targets, chunk)
    assert torch.allclose(fast, naive, atol=1e-6)
    grads = [torch.autograd.grad(x.square().sum(), [hidden, lm_head.weight]) for x in (naive, fast)]
    for a, b in zip(*grads):
        assert torch.allclose(a, b, atol=1e-4)


def peak_gib(function):
    """How much memory the process grows at most; Linux resets its peak on request."""
    return measure.measure(function)[2]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_the_logits_of_long_rows_are_never_all_held():
    lm_head = torch.nn.Linear(16, 40_000, bias=False)

    def grown(tokens, logprobs):
        hidden, ids = torch.randn(tokens, 16, requires_grad=True), torch.zeros(tokens).long()
        return peak_gib(lambda: logprobs(hidden, ids).sum().backward())

    def chunked(hidden, ids):
        return policy.token_logprobs(hidden, lm_head, ids, chunk=256)

    def naive(hidden, ids):
        return lm_head(hidden).log_softmax(-1).gather(1, ids[:, None])

    logits = 4096 * 40_000 * 4 / 2**30  # GiB, in fp32
    assert grown(4096, naive) > 1.5 * logits
    long, short = grown(4096, chunked), grown(512, chunked)
    assert long < 0.35 * logits and long < short + 0.1 * logits


def example_rows(rows=13, vocabulary_size=64):
    generator = torch.Generator().manual_seed(3)
    lengths = [2 + (i * i) % 29 for i in range(rows)]
    return [
        Row(
            torch.randint(vocabulary_size, (length,), generator=generator).tolist(),
            [0.0] + torch.randn(length - 1, generator=generator).tolist(),
        )
        for length in lengths
    ]


@pytest.mark.parametrize("family, tied", [("qwen3", True), ("qwen3", False), ("llama", False)])
@pytest.mark.parametrize("budget, cpu_offload", [(1, False), (64, True), (10_000, False)])
def test_the_sharded_policy_has_the_gradient_of_the_formula(family, tied, budget, cpu_offload):
    """FSDP2, checkpointing, chunks, padding and micro-batches against one row at a time."""
    naive, sharded = (tiny_model(64, family, tied, initializer_range=0.1) for _ in range(2))
    sharded, rows = policy.shard(sharded, cpu_offload), example_rows()
    for row in rows:
        ids = torch.tensor([row.ids])
        logp = naive(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
        (-(torch.tensor(row.weights[1:]) @ logp[:, 0])).backward()
    seen = 0
    for ids, weights in microbatches(rows, budget):
        seen += len(ids)
        (-(weights * sharded.logprobs(ids)).sum()).backward()
    assert seen == len(rows)
    for (name, a), b in zip(naive.named_parameters(), sharded.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad.full_tensor(), atol=2e-5 * a.grad.abs().max()), name


def test_microbatches_keep_to_the_budget_and_waste_little():
    rows = example_rows(200)
    batches = list(microbatches(rows, 100))
    assert all(ids.numel() <= 100 or len(ids) == 1 for ids, _ in batches)
    padded, real = sum(ids.numel() for ids, _ in batches), sum(len(row.ids) for row in rows)
    assert padded < 1.1 * real


def test_every_rank_runs_equally_many_microbatches(monkeypatch):
    rows, world = example_rows(50), 3
    monkeypatch.setattr(policy.dist, "get_world_size", lambda: world)
    shares = []
    for rank in range(world):
        monkeypatch.setattr(policy.dist, "get_rank", lambda rank=rank: rank)
        shares.append(list(microbatches(rows, 60)))
    assert len({len(share) for share in shares}) == 1
    dealt = sorted(
        w for share in shares for _, weights in share for w in weights.flatten().tolist()
    )
    expected = sorted(w for row in rows for w in row.weights)
    assert [w for w in dealt if w] == [w for w in expected if w]


def test_the_actor_follows_the_policy():
    trained, actor = (tiny_model(64, seed=seed) for seed in (1, 2))
    actor = actor.to(torch.bfloat16)
    trained = policy.shard(trained)
    policy.copy_weights(trained, actor)
    for ours, theirs in zip(actor.parameters(), trained.parameters(), strict=True):
        assert torch.equal(ours, theirs.full_tensor().to(torch.bfloat16))


def test_pad():
    assert pad([[1, 2], [3]]).tolist() == [[1, 2], [3, 0]]
    assert pad([[1, 2], [3]], left=True).tolist() == [[1, 2], [0, 3]]


def test_rollout_context_is_question_and_solution():
    rollout = Rollout(data.Problem("q", "a"), [1, 2], [[3, 4, 5]], [""], [2], ["x"], [False], [0])
    assert rollout.context(0) == [1, 2, 3, 4] and rollout.answered == [0]
