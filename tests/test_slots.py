"""engine/slots.py against Hugging Face's generate() and plain forward passes. The CPU takes the
part of a GPU: see emulated.py."""

import importlib
from unittest import mock

import emulated
import pytest
import torch
from conftest import needs_cuda, tiny_model
from transformers import GenerationConfig

from engine import load, lora, memory, sampling, slots
from engine.slots import Slots
from runtime.cli import InputError

STOPS = [*range(1, 60, 6)]
OP = []  # the emulated one


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    """As if there was one, of a kind that will do."""
    monkeypatch.setattr(slots, "as_graph", emulated.as_graph)
    monkeypatch.setattr(load, "SLOTS_ON", "cpu")
    OP.append(torch.library.Library("aten", "IMPL"))
    OP[0].impl("_flash_attention_forward", emulated.flash, "CPU")
    yield
    while OP:
        OP.pop()._destroy()


@pytest.fixture(params=["qwen3", "llama"])
def model(request):
    """Eight heads of queries, two of keys. Its distribution is sharp, and rows end."""
    return make(request.param)


def make(family, **settings):
    heads = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=16, hidden_size=64)
    model = tiny_model(440, family, num_hidden_layers=3, **heads | settings)
    model.tokenizer_size = 421  # of 440
    model.generation_config = GenerationConfig(eos_token_id=STOPS, pad_token_id=1)
    model.set_attn_implementation("sdpa")
    return model


def prompts():
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 11, 1, 5, 2, 20, 7] * 3
    return [torch.randint(10, 200, (n,), generator=generator).tolist() for n in lengths]


def by_slots(model, *inputs, **settings):
    """engine.sampling.generate, as for a model that is fit for slots."""
    with mock.patch.object(model, "sample_pieces", slots.sample_pieces, create=True):
        return sampling.generate(model, *inputs, **settings)


@pytest.mark.parametrize("fits, piece", [(10_000, 128), (10_000, 12), (150, 12)])
def test_greedy_tokens_are_those_of_generate(model, monkeypatch, fits, piece):
    """With room for all, in pieces, and with room for few, so that rows wait and are read again."""
    monkeypatch.setattr(slots, "tokens_that_fit", lambda *_: fits)
    expected, theirs = sampling.generate(model, prompts(), 40, temperature=0)
    rows, entropies = by_slots(model, prompts(), 40, piece=piece, temperature=0)
    assert rows == expected and entropies == pytest.approx(theirs, abs=1e-4)
    assert {row[-1] in STOPS for row in rows} == {True, False} and len(set(map(len, rows))) > 3
    assert model.config._attn_implementation == "sdpa"


def test_after_a_step_of_lora_it_samples_with_the_new_weights(model):
    trained = lora.LoraPolicy(model, 4, "dither", seed=0)
    before, _ = by_slots(model, prompts(), 20, 12, temperature=0)
    for B in trained.B:
        B.data.to_local().normal_(0, 0.1)
    trained.copy_weights(model)
    after, _ = by_slots(model, prompts(), 20, 12, temperature=0)
    assert after == sampling.generate(model, prompts(), 20, temperature=0)[0] != before


def plain_entropy(model, prompt, ids):
    """-> the mean entropy of the sampled tokens by one forward pass, and their distributions."""
    logits = model(input_ids=torch.tensor([prompt + ids], device=model.device)).logits
    logits = logits[0, len(prompt) - 1 : -1].float()
    logits[:, model.tokenizer_size :] = -torch.inf
    p = logits.softmax(-1)
    return torch.special.entr(p).sum(-1).mean().item(), p


SCALES = {"granite": {"logits_scaling": 0.5}, "cohere": {"logit_scale": 2.0}}


def test_logits_are_set_aside_for_the_rows_that_find_a_place(model, monkeypatch):
    """Else a small card had no room for keys, and sampled one row at a time."""
    kv, layer, logits = memory.bytes_of(model)
    free = memory.READ_AT_ONCE * layer + 40 * (100 * kv + 2 * logits)
    monkeypatch.setattr(memory, "bytes_that_fit", lambda model: free)
    assert memory.tokens_that_fit(model, 512, 100) == 40 * 100
    assert memory.tokens_that_fit(model, 4, 100) > 40 * 100  # there are no more rows


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "llama", *SCALES])
def test_each_token_is_drawn_from_a_plain_forward_pass(family, monkeypatch):
    """The entropy of the distribution of each step, which differs from that of a plain forward pass
    wherever a key is wrong. Granite and Cohere scale their logits. Equal prompts are read once."""
    model = make(family, **SCALES.get(family, {}))
    monkeypatch.setattr(slots, "tokens_that_fit", lambda *_: 500)
    repeated = [prompt for prompt in prompts() for _ in range(2)]
    for prompt, ids, entropy in zip(repeated, *by_slots(model, repeated, 40, 16)):
        expected, p = plain_entropy(model, prompt, ids)
        assert entropy == pytest.approx(expected, abs=1e-4)
        assert p.gather(1, torch.tensor(ids)[:, None]).min() > 0


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_top_k_and_top_p_as_in_generate(model):
    """How often each first token is drawn, in four standard errors."""
    settings = dict(temperature=0.7, top_p=0.9, top_k=50)
    drawn = {}
    for name, sampler in ("ours", by_slots), ("theirs", sampling.generate):
        rows, _ = sampler(model, [[5, 6]] * 4000, 1, **settings)
        drawn[name] = torch.tensor(rows).flatten().bincount(minlength=440) / 4000
    largest = (drawn["ours"] - drawn["theirs"]).abs() - 4 * (drawn["theirs"] / 2000).sqrt()
    assert largest.max() < 2e-3 and (drawn["ours"] > 0).sum() < 60


# ------------------------------------------------------------------------------- which sampler


def wrong_keys(slots, length, alive):
    """Slots.next(), but the last key is not seen."""
    NEXT(slots, length, alive)
    slots.used = (slots.used - 1).clamp_min(1)


NEXT, COPY = Slots.next, Slots.copy
FAULTS = {  # attribute of Slots, what is planted
    "kept rows are not moved": ("copy", lambda slots, stretches: None),
    "the last key is not seen": ("next", wrong_keys),
}


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def chosen(model, tokenizer, capfd):
    load.choose_sampler(model, tokenizer)
    return model.sample_pieces, capfd.readouterr().err


@BOTH
def test_it_is_chosen_where_it_agrees(model, tokenizer, capfd, monkeypatch, dtype):
    made, moved, as_graph = [], [], slots.as_graph
    monkeypatch.setattr(slots, "as_graph", lambda step: made.append(step) or as_graph(step))
    monkeypatch.setattr(Slots, "copy", lambda self, some: moved.extend(some) or COPY(self, some))
    assert chosen(model.to(dtype), tokenizer, capfd) == (slots.sample_pieces, "")
    assert len(made) == 2 and len(moved) == 2 + 3  # of equal prompts, and of kept rows


@BOTH
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_keys_are_found_at_load(model, tokenizer, capfd, monkeypatch, fault, dtype):
    monkeypatch.setattr(Slots, *FAULTS[fault])
    sampler, said = chosen(model.to(dtype), tokenizer, capfd)
    assert sampler is None and "generate(): in engine/slots.py entropies differ by" in said
    assert model.config._attn_implementation == "sdpa"


UNFIT = [
    ("mistral", {"sliding_window": 8}, "not all of its layers have full attention"),
    ("qwen3", {"head_dim": 12}, "engine/slots.py fails (head_size should be a multiple of 8"),
    ("stablelm", {"hidden_size": 128}, "missing 1 required keyword-only argument: 'slots'"),
    ("nanochat", {}, None),  # a soft cap of the logits, which the model itself applies
    ("mistral", {"sliding_window": None}, None),
]


@pytest.mark.parametrize("family, settings, says", UNFIT)
def test_other_models_keep_generate(tokenizer, capfd, family, settings, says):
    sampler, said = chosen(make(family, **settings), tokenizer, capfd)
    assert (sampler is None) == bool(says) and (says or "") in said
    assert said.count("\n") == bool(says)


def test_what_cannot_be_captured_is_an_error_at_load(tokenizer, monkeypatch):
    model = make("qwen3")
    model.lm_head.register_forward_hook(lambda module, inputs, out: out * float(out.max() > -1e9))
    with pytest.raises(InputError, match="use --sampler generate .*not permitted when"):
        load.choose_sampler(model, tokenizer)
    assert model.config._attn_implementation == "sdpa"


def test_what_the_op_refuses_keeps_generate(tokenizer, capfd):
    """As an old card or fp32 would be: here a CPU, on which torch has no such op."""
    OP.pop()._destroy()
    sampler, said = chosen(make("qwen3"), tokenizer, capfd)
    assert sampler is None and "engine/slots.py fails (Could not run" in said


@needs_cuda
def test_on_cuda_it_samples_what_plain_passes_say(tokenizer, capfd, monkeypatch):
    monkeypatch.undo()
    model = make("qwen3", num_attention_heads=4).cuda()
    assert (
        "engine/slots.py fails (FlashAttention only support fp16 and bf16"
        in chosen(model, tokenizer, capfd)[1]
    )
    assert chosen(model.bfloat16(), tokenizer, capfd) == (slots.sample_pieces, "")
    monkeypatch.setattr(slots, "tokens_that_fit", lambda *_: 300)
    for prompt, ids, entropy in zip(prompts(), *by_slots(model, prompts(), 40, 12)):
        assert plain_entropy(model, prompt, ids)[0] == pytest.approx(entropy, abs=0.05)


@pytest.mark.parametrize("name", ["train", "evaluate", "judge"])
def test_scripts_sample_with_it(script, quick, toy_model_dir, monkeypatch, name):
    some = f"--model {toy_model_dir} --dataset toy --limit 2 --max-new-tokens 24"
    flags = {"train": f"{quick} --steps 1", "evaluate": some, "judge": f"{some} --samples 2"}[name]
    module = importlib.import_module(name)
    monkeypatch.setattr(slots, "sample_pieces", sampled := mock.Mock(wraps=slots.sample_pieces))
    assert script(module, f"{flags} --sampler generate --out 1")[0] == 0 and not sampled.called
    code, _, err = script(module, f"{flags} --out 2")
    assert code == 0 and "generate()" not in err, err
    assert sampled.call_count > 1  # of which one at load


def test_train_moves_the_moments_where_it_is_crowded(script, quick, monkeypatch):
    train = importlib.import_module("train")
    for crowded, flags in (True, ""), (False, ""), (True, "--cpu-offload"):
        moves = crowded and not flags  # with offload they are in CPU memory already
        monkeypatch.setattr(train, "moments_stay", lambda _, found=crowded: not found)
        moved = mock.Mock(side_effect=train.moments_on_host)
        with mock.patch.object(train, "moments_on_host", moved):
            assert script(train, f"{quick} --steps 1 --out {crowded}{flags} {flags}")[0] == 0
        assert [each.args[1] for each in moved.call_args_list] == [moves] * 3  # and evaluations


def test_logits_that_are_no_numbers_end_it(model):
    model.lm_head.weight.data[50] = torch.nan
    with pytest.raises(InputError, match="logits are not finite"):
        by_slots(model, [[5, 6]], 20)
