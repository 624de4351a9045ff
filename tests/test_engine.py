"""The language model underneath: tokens as bytes, sampling, the policy."""

import json
import re

import pytest
import torch
import torch.distributed as dist
from conftest import on_devices, tiny_model
from gpu import QWEN3_4B
from one_file import log_probs
from safetensors.torch import load_file, save_file
from tokenizers import decoders, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, Qwen3Config

from engine import load, memory, policy, sampling
from engine.sampling import generate
from engine.tokens import split_answer, vocabulary
from rollout import encode_prompt, sample
from runtime.cli import InputError
from tasks import data, toy_model

# ------------------------------------------------------------------------------------------- tokens


def test_the_bytes_of_the_tokens_spell_the_text(tokenizer, qwen_tokenizer):
    texts = "3*4=12;\n\\boxed{14 eggs}", "größer 日本 🙂 \u200b\t", "$\\boxed{(-\\infty, 3]}$."
    for vocab in vocabulary(tokenizer), vocabulary(qwen_tokenizer):
        for text in *texts, "{<|im_end|>":  # the name of a special token is ordinary text
            assert vocab.join(vocab.encode(text)) == text.encode()
    end, think = qwen_tokenizer.convert_tokens_to_ids(["<|im_end|>", "<think>"])
    of_qwen = vocabulary(qwen_tokenizer).bytes
    assert of_qwen[end] == b"" and of_qwen[think] == b"<think>"  # the latter is not special


def test_tokenizers_that_cannot_be_scored_are_refused():
    prefixed, merged, plain = (toy_model.build_tokenizer() for _ in range(3))
    prefixed.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    merged.add_tokens(["boxed{"])
    plain.backend_tokenizer.decoder = decoders.Fuse()
    reasons = "changes .* and is not supported", "merges 'boxed' and '{'", "only byte-level"
    for tokenizer, reason in zip((prefixed, merged, plain), reasons):
        with pytest.raises(ValueError, match=reason):
            vocabulary(tokenizer)


def test_every_math500_reference_is_cut_at_a_token_boundary(qwen_tokenizer, shared_data):
    vocab = vocabulary(qwen_tokenizer)
    for problem in data.load_problems(shared_data / "math500.jsonl"):
        for after in "$.", "$", "", ".\n", "\\]":
            text = f"The answer is $\\boxed{{{problem.reference}}}{after}"
            ids = vocab.encode(text)
            cut, answer, closing = vocab.locate_answer(ids)
            assert answer == problem.reference and closing.startswith("}")
            assert vocab.join(ids[:cut]) == text[: split_answer(text)[0]].encode()


def test_sampled_ids_are_cut_as_they_are(qwen_tokenizer):
    """A sampler may spell "boxed" letter by letter, merge the closing brace with what follows, and
    break a character in two."""
    vocab = vocabulary(qwen_tokenizer)
    letters, half = [i for c in r"so \boxed" for i in vocab.encode(c)], [vocab.bytes.index(b"\xf0")]
    cases = [  # solution, what follows -> answer, closing
        (letters, vocab.encode("{14}$."), "14", "}"),
        (letters, vocab.encode("{14}\n$$"), "14", "}\n"),  # one token
        (half + letters, vocab.encode("{14}"), "14", "}"),
    ]
    for solution, rest, answer, closing in cases:
        assert vocab.locate_answer(solution + rest) == (len(solution), answer, closing)
    no_text = [*letters, *vocab.encode("{"), *half, *vocab.encode("}")]
    assert vocab.locate_answer(no_text) is None


# ----------------------------------------------------------------------------------------- sampling


def save(directory, model, tokenizer, **generation):
    model.generation_config = GenerationConfig(**generation)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_the_hubs_generation_settings_do_not_reach_the_sampler(tokenizer, tmp_path):
    """load() itself asserts that scores equal logits; here it has something to undo."""
    stop, model = tokenizer.eos_token_id, tiny_model(2 * len(tokenizer), initializer_range=0.02)
    penalties = dict(repetition_penalty=1.5, top_k=20, temperature=0.3, no_repeat_ngram_size=2)
    save(tmp_path, model, tokenizer, do_sample=True, eos_token_id=[stop, 7], **penalties)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"_attn_implementation": "eager"}))
    model, _ = load.load(tmp_path, "cpu")
    assert model.config._attn_implementation == "sdpa"
    assert model.generation_config.repetition_penalty in (None, 1.0)
    assert model.generation_config.eos_token_id == sorted({stop, 7})  # its stop ids are kept
    rows, _ = generate(model, [[5, 6]] * 64, max_new_tokens=8)
    assert max(i for row in rows for i in row) < len(tokenizer)  # others spell no token


@pytest.fixture
def loaded(device, tokenizer, tmp_path):
    directory = save(tmp_path, tiny_model(len(tokenizer)), tokenizer)
    return load.load(directory, device)[0].float()


PROMPTS = [[5, 6, 7], [9] * 11, [30], [8, 8, 30, 31, 99], [100, 101]] * 3


@torch.no_grad()
def one_by_one(model, prompt, max_new_tokens):
    """Greedy decoding without cache, padding or generate() -> ids, mean entropy."""
    ids, entropies = list(prompt), []
    while len(entropies) < max_new_tokens:
        logp = log_probs(model, ids)[-1]
        entropies.append(-(logp.exp() * logp).sum().item())
        ids.append(logp.argmax().item())
        if ids[-1] in model.generation_config.eos_token_id:
            break
    return ids[len(prompt) :], pytest.approx(sum(entropies) / len(entropies), abs=1e-4)


@on_devices
def test_pieces_and_dropped_rows_change_no_token(loaded, monkeypatch):
    likely = [generate(loaded, PROMPTS, 9, temperature=0)[0][i][4] for i in (0, 1)]
    loaded.generation_config.eos_token_id = sorted(set(likely))  # so that rows end early
    expected, decoded = [one_by_one(loaded, prompt, 9) for prompt in PROMPTS], []
    loaded.lm_head.register_forward_hook(lambda *args: decoded.append(len(args[2])))
    monkeypatch.setattr(sampling, "row_bytes", lambda model, tokens, more: tokens + more)
    for fits, piece in (10_000, 256), (60, 256), (60, 3), (20, 1):
        decoded.clear()
        monkeypatch.setattr(sampling, "bytes_that_fit", lambda model, fits=fits: fits)
        rows, entropies = generate(loaded, PROMPTS, 9, piece=piece, temperature=0)
        assert list(zip(rows, entropies)) == expected
    assert len(set(map(len, rows))) > 1
    assert sum(decoded) == sum(map(len, rows))  # in pieces of 1, finished rows cost nothing


@on_devices
def test_samples_follow_the_models_distribution(loaded):
    p = log_probs(loaded, [5, 6, 7])[-1].exp().detach().cpu()
    first = torch.tensor([row[0] for row in generate(loaded, [[5, 6, 7]] * 4000, 1)[0]])
    frequency = first.bincount(minlength=len(p)) / 4000
    assert (frequency - p).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_a_group_says_what_was_sampled(toy_model_dir):
    model, tokenizer = load.load(toy_model_dir, "cpu")
    [problem], answered = data.load_problems("toy-test", 1), 0
    [group] = sample(model, tokenizer, [problem], 24, 18)
    assert group.problem is problem and group.prompt == encode_prompt(tokenizer, problem)
    for i, ids in enumerate(group.completions):
        assert group.truncated[i] == (tokenizer.eos_token_id not in ids)
        if group.answers[i] is not None:
            box, answered = f"{{{group.answers[i]}}}", answered + 1
            assert group.texts[i].startswith(tokenizer.decode(group.solution(i)) + box)
    assert 0 < answered < 24  # 18 tokens are too few for some


def test_one_long_prompt_shortens_no_other_sample(tokenizer, capsys):
    model = tiny_model(len(tokenizer), max_position_embeddings=64)
    load.reset_generation_config(model, tokenizer)
    model.generation_config.eos_token_id = [tokenizer.pad_token_id]  # hardly ever sampled
    prompts = [[9] * 4, [9] * 60, [9] * 70]
    lengths = [len(ids) for ids in generate(model, prompts, 16, temperature=0)[0]]
    assert lengths == [16, 4, 1]
    assert "the model has 64 positions: 2 samples get less than" in capsys.readouterr().err


BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
LETTER = f"Which?\nA: x\n{BOXED} Please only provide the letter of the answer in the box."


def test_the_prompt_with_and_without_a_chat_template(tokenizer, qwen_tokenizer):
    number, letter = data.Problem("How many?", "14"), data.Problem("Which?\nA: x", "A", "letter")
    assert tokenizer.decode(encode_prompt(tokenizer, number)) == "How many?\n"
    assert qwen_tokenizer.decode(encode_prompt(qwen_tokenizer, letter)) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{LETTER}<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(InputError, match=r"question 'Q<eos>' has a control token, \['<eos>'\]"):
        encode_prompt(tokenizer, data.Problem("Q<eos>", "14"))
    plain = toy_model.build_tokenizer()
    plain.chat_template = None
    for problem, text in (number, f"How many?\n{BOXED}"), (letter, LETTER):
        prompt = plain.decode(encode_prompt(plain, problem))
        assert prompt == f"You are a helpful assistant.\n\n{text}\n\n"


# ------------------------------------------------------------------------------------------- policy


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
REFUSED = {
    "no sliding window": dict(family="mistral", sliding_window=8),
    "not laid out as Llama": dict(family="bert", is_decoder=True),
    "dropout must be 0": dict(attention_dropout=0.1),
    "dynamic RoPE is not supported": dict(rope_parameters=DYNAMIC),
    "more than the model has embeddings": dict(vocab_size=50),
}


@pytest.mark.parametrize("says, config", REFUSED.items())
def test_models_that_would_be_scored_wrongly_are_refused(tokenizer, tmp_path, says, config):
    save(tmp_path, tiny_model(len(tokenizer), **config), tokenizer)
    with pytest.raises(InputError, match=says):
        load.load(tmp_path, "cpu")


OFFLOADED = "policy and Adam in CPU memory, since they do not fit on the GPU; 16,384 tokens"
PLANS = [  # GB of the card, ranks, flags -> the line of the log, or what is refused
    (83, 1, {}, "memory: 9,827 tokens"),
    (24, 1, {}, "6144 tokens .* about 22.9 GB .* and 15.5 GB are free: use more GPUs"),
    (141, 1, dict(cpu_offload=True), "memory: policy and Adam in CPU memory; 16,384 tokens"),
    (83, 1, dict(microbatch_tokens=16_384), OFFLOADED),
    (34, 1, dict(microbatch_tokens=16_384), "16384 tokens in a micro-batch need"),
]


def test_the_policy_is_fitted_into_the_free_memory(monkeypatch):
    """Qwen3-4B's shape, rows of 6,144 tokens (the paper's lengths), beside the actor's 8 GB."""
    config = Qwen3Config(**QWEN3_4B, tie_word_embeddings=True, max_position_embeddings=40_960)
    with torch.device("meta"):
        actor = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    taken = 2 * sum(p.numel() for p in actor.parameters())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "all_gather", lambda part: part)
    for card, ranks, flags, expected in PLANS:
        monkeypatch.setattr(memory, "free_memory", lambda card=card: card * 1e9 - taken)
        monkeypatch.setattr(dist, "get_world_size", lambda ranks=ranks: ranks)
        try:
            tokens, offload, says = memory.plan_memory(actor, 6144, **flags)
            assert f"{tokens:,} tokens" in says and offload == ("CPU memory" in says)
        except InputError as error:
            says = str(error)
        assert re.search(expected, says), (card, ranks, flags)


def test_chunked_logprobs_equal_the_log_softmax():
    """No more than a chunk's logits are made at a time: in the forward pass, and again backward."""
    hidden, targets = torch.randn(21, 16, requires_grad=True), torch.randint(50, (21,))
    lm_head, made = torch.nn.Linear(16, 50, bias=False), []
    naive = lm_head(hidden).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    lm_head.register_forward_hook(lambda module, inputs, logits: made.append(len(logits)))
    fast = policy.token_logprobs(hidden, lm_head, targets, chunk=5)
    grads = [torch.autograd.grad(x.square().sum(), [hidden, lm_head.weight]) for x in (naive, fast)]
    for ours, theirs in zip([fast, *grads[1]], [naive, *grads[0]]):
        assert torch.allclose(ours, theirs, atol=1e-4)
    assert sorted(made) == [1] * 2 + [5] * 8


def test_a_bf16_checkpoint_is_trained_in_fp32(tmp_path):
    tiny_model(64).to(torch.bfloat16).save_pretrained(tmp_path)
    trained = policy.Policy(load.load_model(tmp_path, "cpu", "auto"))
    whole = load.load_model(tmp_path, "cpu", torch.float32)
    for ours, theirs in zip(trained.parameters(), whole.parameters(), strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours.full_tensor(), theirs)


def test_memory_and_disk_of_the_host_are_checked(tmp_path, monkeypatch):
    with torch.device("meta"):
        actor = tiny_model(64, hidden_size=4096, num_hidden_layers=4).to(torch.bfloat16)
    size = sum(p.numel() for p in actor.parameters())
    said = f"4 more checkpoints would take {4 * 14 * size / 1e9:.3g} of"
    assert said in memory.check_host(actor, tmp_path, False, 4)
    with pytest.raises(InputError, match="more checkpoints .* free disk: use a smaller --keep"):
        memory.check_host(actor, tmp_path, False, 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "host memory: about 6" in memory.check_host(actor, tmp_path, False, 1)
    monkeypatch.setattr(memory, "container_limit", lambda: 5e9)
    with pytest.raises(InputError, match="host memory: about 6.* of 5 GB"):
        memory.check_host(actor, tmp_path, False, 1)


def test_weights_that_are_missing_or_not_numbers_are_refused(tokenizer, tmp_path):
    """Otherwise the library fills in random ones."""
    path = save(tmp_path, tiny_model(len(tokenizer)), tokenizer) / "model.safetensors"
    weights = load_file(path)
    nan = weights | {"model.norm.weight": torch.full((32,), torch.nan)}
    lost = {name: weight for name, weight in weights.items() if "layers.1.mlp" not in name}
    for changed, says in (nan, "not finite"), (lost, r"lacks 3 weights, such as .*layers.1.mlp"):
        save_file(changed, path, {"format": "pt"})
        with pytest.raises(InputError, match=says):
            load.load(tmp_path, "cpu")


@pytest.mark.parametrize("family", ["gpt2", "opt", "falcon"])
def test_a_verifier_of_another_layout_generates(tokenizer, family):
    torch.manual_seed(0)
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).eval()
    load.reset_generation_config(model, tokenizer)
    rows, _ = generate(model, [[5, 6], [7, 8, 9]], 4, temperature=1e-42)  # as good as greedy
    assert rows == generate(model, [[5, 6], [7, 8, 9]], 4, temperature=0)[0]
