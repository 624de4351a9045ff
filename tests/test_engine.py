"""The language model underneath: tokens as bytes, sampling, the policy."""

import random

import pytest
import torch
import torch.distributed as dist
from conftest import on_devices, tiny_model, trained_tokenizer
from measure import SHAPES, prompts_that_end
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from engine import load, memory, policy, sampling
from engine.cli import InputError
from engine.sampling import generate
from engine.tokens import Vocabulary, split_answer, vocabulary
from rollout import encode_prompt, sample, to_group
from tasks import data

# ------------------------------------------------------------------------------------------- tokens


def test_the_bytes_of_the_tokens_spell_the_text(tokenizer, qwen_tokenizer):
    texts = "3*4=12;\n\\boxed{14 eggs}", "größer 日本 🙂 \u200b\t", "$\\boxed{(-\\infty, 3]}$."
    for vocab in vocabulary(tokenizer), vocabulary(qwen_tokenizer):
        for text in texts:
            assert vocab.join(vocab.encode(text)) == text.encode()


def test_special_tokens_spell_nothing_and_their_names_are_text(qwen_tokenizer):
    vocab = vocabulary(qwen_tokenizer)
    assert len(vocab.bytes) == 151_669
    assert vocab.bytes[151_645] == b""  # <|im_end|>
    assert vocab.bytes[qwen_tokenizer.convert_tokens_to_ids("<think>")] == b"<think>"  # not special
    assert vocab.join(vocab.encode("{<|im_end|>")) == b"{<|im_end|>"


def test_tokenizers_that_cannot_be_scored_are_refused():
    with pytest.raises(ValueError, match="changes .* and is not supported"):
        vocabulary(trained_tokenizer(r"\boxed{", add_prefix_space=True))
    with pytest.raises(ValueError, match="merges 'boxed' and '{'"):
        vocabulary(trained_tokenizer(r"\boxed{"))
    whole_words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"so": 0})))
    with pytest.raises(ValueError, match="only byte-level tokenizers"):
        vocabulary(whole_words)


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
    """A sampler may spell "boxed" letter by letter, and break a character in two."""
    vocab = vocabulary(qwen_tokenizer)
    odd = [i for c in "so \\boxed{1" for i in vocab.encode(c)] + vocab.encode("4}$.")
    cut, answer, closing = vocab.locate_answer(odd)
    assert answer == "14" and vocab.join(odd[:cut]) == b"so \\boxed" and cut == 9
    assert closing == "}"
    assert vocab.locate_answer(vocab.encode("\\boxed{14}\n$$")).closing == "}\n"  # one token
    assert odd[:cut] != vocab.encode("so \\boxed")
    half = [vocab.bytes.index(b"\xf0")]
    ids = half + vocab.encode("so \\boxed") + vocab.encode("{") + half + vocab.encode("}")
    cut, answer, closing = vocab.locate_answer(ids)
    assert closing == "}" and vocab.join(ids[:cut]).endswith(b"\\boxed") and answer == "\ufffd"


def test_a_brace_inside_a_token_is_no_answer(tokenizer):
    vocab, glued = vocabulary(tokenizer), object.__new__(Vocabulary)
    glued.bytes = [*vocab.bytes, b"boxed{1"]
    ids = [*vocab.encode("\\"), len(vocab.bytes), *vocab.encode("4}")]
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
    padded = tiny_model(2 * len(tokenizer), initializer_range=0.02)
    model, _ = load.load(save(tmp_path, padded, tokenizer, **settings), "cpu")
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
    """Greedy decoding without cache, padding or generate()."""
    stops, ids = set(model.generation_config.eos_token_id), list(prompt)
    for _ in range(max_new_tokens):
        logits = model(input_ids=torch.tensor([ids], device=model.device)).logits
        ids.append(logits[0, -1].argmax().item())
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


@on_devices
@pytest.mark.parametrize("piece, fits", [(1, 20), (3, 60), (3, 10_000), (256, 60), (256, 10_000)])
def test_pieces_and_dropped_rows_change_no_token(loaded, monkeypatch, piece, fits):
    likely = [generate(loaded, PROMPTS, 9, temperature=0)[0][i][4] for i in (0, 1)]
    loaded.generation_config.eos_token_id = sorted(set(likely))  # so that rows end early
    monkeypatch.setattr(sampling, "tokens_that_fit", lambda model: fits)
    rows, entropies = generate(loaded, PROMPTS, 9, piece=piece, temperature=0)
    assert rows == [one_by_one(loaded, prompt, 9) for prompt in PROMPTS]
    for prompt, row, entropy in zip(PROMPTS, rows, entropies):
        ids = torch.tensor([prompt + row], device=loaded.device)
        p = loaded(input_ids=ids).logits[0, len(prompt) - 1 : -1].softmax(-1)
        assert entropy == pytest.approx(-(p * p.log()).sum(-1).mean().item(), abs=1e-4)
    assert len(set(map(len, rows))) > 1


def test_finished_rows_cost_nothing(loaded):
    """What is decoded, in rows times steps, for lengths as training sees them (log-normal, cut at 4
    times the mean): at least 1.5 times less than with one call that ends when the last row does."""
    rng, decoded = random.Random(0), []
    lengths = [min(64, max(1, round(rng.lognormvariate(2.53, 0.7)))) for _ in range(64)]
    loaded.lm_head.register_forward_hook(lambda *args: decoded.append(len(args[2])))
    with prompts_that_end(lengths) as prompts:
        rows, _ = generate(loaded, prompts, 64, piece=8, temperature=0)
    assert [len(row) for row in rows] == lengths
    assert 1.5 * sum(decoded) < 64 * max(lengths)


@on_devices
def test_samples_follow_the_models_distribution(loaded):
    ids = torch.tensor([[5, 6, 7]], device=loaded.device)
    p = loaded(input_ids=ids).logits[0, -1].detach().softmax(0).cpu()
    first = torch.tensor([row[0] for row in generate(loaded, [[5, 6, 7]] * 4000, 1)[0]])
    frequency = first.bincount(minlength=len(p)) / 4000
    assert (frequency - p).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_a_group_says_what_was_sampled(toy_model_dir):
    model, tokenizer = load.load(toy_model_dir, "cpu")
    problems = data.load_problems("toy-test", 4)
    groups = sample(model, tokenizer, problems, 6, 18)
    vocab, stop, answered = vocabulary(tokenizer), tokenizer.eos_token_id, 0
    for problem, group in zip(problems, groups):
        assert group.problem is problem and group.prompt == encode_prompt(tokenizer, problem)
        for i, ids in enumerate(group.completions):
            assert (ids[-1] == stop) != group.truncated[i] and stop not in ids[:-1]
            if group.answers[i] is not None:
                answered += 1
                assert vocab.join(group.context(i)).endswith(b"\\boxed")
                assert group.texts[i].split("\\boxed{")[1].startswith(group.answers[i] + "}")
    assert 0 < answered < 24  # 18 tokens are too few for some


def test_a_closed_box_is_an_answer_also_where_the_text_was_cut_off(tokenizer):
    vocab = vocabulary(tokenizer)
    texts = ["\\boxed{7} and then", "\\boxed{7} no, \\boxed{8", "\\bo"]
    completions = [vocab.encode(text) for text in texts]
    stops, problem = [tokenizer.eos_token_id], data.Problem("q", "7")
    group = to_group(tokenizer, stops, problem, [5], completions, [0.0] * 3)
    assert group.answers == ["7", "7", None] and group.truncated == [True] * 3
    assert group.context(0) == [5, *vocab.encode("\\boxed")]
    assert group.solution_lengths[2] == len(completions[2])


BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
LETTER = f"Which?\nA: x\n{BOXED} Please only provide the letter of the answer in the box."


def test_the_prompt_with_and_without_a_chat_template(tokenizer):
    problem = data.Problem("How many?", "14")
    assert tokenizer.decode(encode_prompt(tokenizer, problem)) == "How many?\n"
    plain = tokenizer.__class__(tokenizer_object=tokenizer._tokenizer, eos_token="<eos>")
    letter = data.Problem("Which?\nA: x", "A", "letter")
    for asked, text in (problem, f"How many?\n{BOXED}"), (letter, LETTER):
        prompt = plain.decode(encode_prompt(plain, asked))
        assert prompt == f"You are a helpful assistant.\n\n{text}\n\n"


def test_the_real_chat_template(qwen_tokenizer):
    ids = encode_prompt(qwen_tokenizer, data.Problem("Which?\nA: x", "A", "letter"))
    assert qwen_tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{LETTER}<|im_end|>\n<|im_start|>assistant\n"
    )


# ------------------------------------------------------------------------------------------- policy


REFUSED = {
    "no sliding window": dict(family="mistral", sliding_window=8),
    "not laid out as Llama": dict(family="bert", is_decoder=True),
    "dropout must be 0": dict(attention_dropout=0.1),
    "more than the model has embeddings": dict(vocab_size=50),
}


@pytest.mark.parametrize("says, config", REFUSED.items())
def test_models_that_would_be_scored_wrongly_are_refused(tokenizer, tmp_path, says, config):
    save(tmp_path, tiny_model(len(tokenizer), **config), tokenizer)
    with pytest.raises(InputError, match=says):
        load.load(tmp_path, "cpu")


PLANS = [  # GB of the card, ranks, flags -> (tokens, offloaded), or what is refused
    (141, 1, {}, (16_384, False)),
    (83, 1, {}, (9_625, False)),
    (40, 1, {}, (16_384, True)),
    (24, 1, {}, "with 6144 .* about 25.2 GB beside the actor, and 16 GB are free: use more"),
    (10, 1, {}, "with 6144 .* about 25.2 GB beside the actor, and 1.96 GB are free: use more"),
    (83, 2, {}, (16_384, False)),
    (141, 1, dict(cpu_offload=True), (16_384, True)),
    (141, 1, dict(microbatch_tokens=5_000), (6_144, False)),
    (83, 1, dict(microbatch_tokens=16_384), (16_384, True)),
    (34, 1, dict(microbatch_tokens=16_384), "with 16384 .* use --microbatch-tokens 6144"),
]


@pytest.mark.parametrize("card, ranks, flags, says", PLANS)
def test_the_policy_is_fitted_into_the_memory_that_is_free(monkeypatch, card, ranks, flags, says):
    """Qwen3-4B's shape, rows of 6,144 tokens (the paper's lengths), the actor's 8 GB taken."""
    config = Qwen3Config(**SHAPES["qwen3-4b"], dtype=torch.bfloat16)
    with torch.device("meta"):
        actor = AutoModelForCausalLM.from_config(config)
        actor.tie_weights()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    taken = 2 * sum(p.numel() for p in actor.parameters())
    monkeypatch.setattr(memory, "free_memory", lambda: card * 1e9 - taken)
    monkeypatch.setattr(memory, "all_gather", lambda part: part)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    if isinstance(says, str):
        with pytest.raises(InputError, match=says):
            memory.plan_memory(actor, 6144, **flags)
    else:
        tokens, offload, sentence = memory.plan_memory(actor, 6144, **flags)
        assert (tokens, offload) == says
        by_itself = offload and "cpu_offload" not in flags
        assert ("since they do not fit on the GPU" in sentence) == by_itself
        assert f"{tokens:,} tokens in a micro-batch" in sentence


@pytest.mark.parametrize("chunk, chunks", [(1, 21), (5, 5), (1024, 1)])
def test_chunked_logprobs_equal_the_log_softmax(chunk, chunks):
    """No more than a chunk's logits are made at a time: in the forward pass, and again backward."""
    hidden, targets = torch.randn(21, 16, requires_grad=True), torch.randint(50, (21,))
    lm_head, made = torch.nn.Linear(16, 50, bias=False), []
    naive = lm_head(hidden).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    lm_head.register_forward_hook(lambda module, inputs, logits: made.append(len(logits)))
    fast = policy.token_logprobs(hidden, lm_head, targets, chunk)
    assert torch.allclose(fast, naive, atol=1e-6)
    grads = [torch.autograd.grad(x.square().sum(), [hidden, lm_head.weight]) for x in (naive, fast)]
    for a, b in zip(*grads):
        assert torch.allclose(a, b, atol=1e-4)
    assert max(made) <= chunk and len(made) == 2 * chunks


@on_devices
def test_the_actor_follows_the_policy(device):
    trained, actor = (tiny_model(64, seed=seed).to(device) for seed in (1, 2))
    actor = actor.to(torch.bfloat16)
    trained = policy.Policy(trained)
    policy.copy_weights(trained, actor)
    for ours, theirs in zip(actor.parameters(), trained.parameters(), strict=True):
        assert torch.equal(ours, theirs.full_tensor().to(torch.bfloat16))
