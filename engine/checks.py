"""Check that a model is what its files say, and as the method assumes: check_sampling,
check_training and cer.check_scoring raise an error if it is not. try_slots says why engine/slots.py
cannot sample from it."""

import json
import logging
from hashlib import sha1
from pathlib import Path

import numpy
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import cached_file

from engine.sampling import generate, sampling_config
from engine.tokens import vocabulary
from runtime.cli import InputError, as_input_error, message_of, require

# ----------------------------------------------------------------------------- is it what was saved

# Where tokenizers differ: digits, line ends, several spaces, other scripts, accents.
TEXT = "In 1987 10,000 eggs,\r\n\n\n  it's   3.14\t x=-12;}\n größer cafe\u0301 日本語 Привет 2²🙂"


def check_tokens(name, tokenizer):
    with as_input_error(f"the model {name} has no tokenizer.json"):
        of_file = Tokenizer.from_file(cached_file(name, "tokenizer.json"))
    of_file.no_truncation()
    of_file.no_padding()
    expected = of_file.encode(TEXT, add_special_tokens=False).ids
    same = tokenizer.encode(TEXT, add_special_tokens=False) == expected
    require(same, f"the tokenizer of {name} gives other tokens than its tokenizer.json")


def check_config(name, config):
    is_quantized = getattr(config, "quantization_config", None)
    require(not is_quantized, f"the model {name} is quantized: take its original in bf16 or fp32")
    anew = f"youtu is not supported ({name}): a row of its embeddings becomes 0 at each loading"
    require(config.model_type != "youtu", anew)
    router = getattr(config, "output_router_logits", False)  # whose loss would be added
    require(not router, f"{name}/config.json: set output_router_logits to false")
    # The library would read a broken file as none, and forget at which tokens the model stops.
    if path := find_file(name, "generation_config.json"):
        with as_input_error(f"{path}: expected JSON"):
            json.loads(Path(path).read_text(encoding="utf-8"))


def refuse_unknown(record):
    """The library warns of settings of RoPE that it does not use, and goes on without them."""
    message = record.getMessage()
    require("Unrecognized" not in message, f"config.json: {message}")
    return True


OF_ROPE = logging.getLogger("transformers.modeling_rope_utils")
OF_ROPE.setLevel(logging.WARNING)  # what else it warns of is shown
OF_ROPE.addFilter(refuse_unknown)


def find_file(name, file):
    """The path of a file of a model, or None if the model has none."""
    return cached_file(name, file, _raise_exceptions_for_missing_entries=False)


def weight_files(name):
    """The files that hold the weights of a model."""
    single, index = (find_file(name, f"model.safetensors{end}") for end in ("", ".index.json"))
    both = "model.safetensors and model.safetensors.index.json: remove the one that is out of date"
    require(not (single and index), f"two sets of weights, {both}")
    if not index:
        return [single] if single else []
    shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()
    return [cached_file(name, shard) for shard in sorted({*shards})]


OF_A_MODEL = "config.json generation_config.json tokenizer.json tokenizer_config.json".split()
OF_A_MODEL += ["special_tokens_map.json", "chat_template.jinja"]


def mark_of(name, *more):
    """A mark of a model that changes with every byte of its files (weights, config, stop tokens,
    tokenizer and chat template), and with what else is given."""
    digest = sha1(repr(more).encode())  # faster than others, and nobody forges a model here
    files = [find_file(name, file) for file in OF_A_MODEL] + weight_files(name)
    for path in (each for each in files if each and Path(each).stat().st_size):
        content = numpy.memmap(path, mode="r")  # without a copy
        digest.update(f"{Path(path).name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:6]


def check_weights(name, info, model, files):
    """info: what from_pretrained has found, without what it knows to be harmless, which are the
    frequencies of RoPE, and a head that is tied to the embeddings and equal to them. The model must
    hold what the files hold, up to the rounding to another type."""
    lost = [*info["missing_keys"], *info["mismatched_keys"]]
    for names, what in (lost, "lacks"), (info["unexpected_keys"], "has no use for"):
        some = sorted(map(str, names))[:2]
        require(not names, f"the model {name} {what} {len(names)} weights, such as {some}")
    inside = f"{model.base_model_prefix}."  # may be left out in a file
    loaded = revert_weight_conversion(model, model.state_dict())  # with the names of the files
    loaded = {key.removeprefix(inside): weight for key, weight in loaded.items()}
    for path in files:
        with safe_open(path, "pt") as file:
            for key in file.keys():
                held = loaded.get(key.removeprefix(inside))
                if held is None:  # known to be harmless
                    continue
                stored = file.get_tensor(key)
                dtype = stored.dtype if stored.itemsize < held.itemsize else held.dtype
                pair = stored.to(dtype), held.to(dtype)
                equal = torch.equal(*pair) or torch.allclose(*pair, rtol=0, atol=0, equal_nan=True)
                differs = f"{Path(path).name} holds another {key} than what is loaded"
                require(equal, f"the model {name}: {differs} (a second copy, or set anew?)")


# ------------------------------------------------------------------------------- does it sample so


NOISE = "attention_dropout", "router_jitter_noise", "input_jitter_noise"  # in training mode


@torch.no_grad()
def check_sampling(model, tokenizer):
    """Check, on two sampled tokens, that the model samples from its own distribution (temperature
    1, no top-k or top-p), with attention over the whole context, and as it is trained. Raises an
    error otherwise."""
    noise = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    noise += [getattr(model.config, name, 0) for name in NOISE]
    require(not any(noise), "dropout and router noise must be 0, or training is not on-policy")
    require(hasattr(model.base_model, "layers"), "it is not laid out as Llama and Qwen are")
    rope = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
    require(rope not in ("dynamic", "longrope"), f"{rope} RoPE depends on a batch's longest row")
    ids, embeddings = model.tokenizer_size, model.get_input_embeddings().weight.shape[0]
    require(ids <= embeddings, f"the tokenizer has {ids} ids, more than the model has embeddings")
    require(all(p.isfinite().all() for p in model.parameters()), "its weights are not finite")
    prompt = torch.tensor([vocabulary(tokenizer).encode(r"so \boxed")], device=model.device)
    both = dict(output_logits=True, output_scores=True, return_dict_in_generate=True)
    config = sampling_config(max_new_tokens=2, **both)
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    cache = out.past_key_values
    require(type(cache) is DynamicCache, f"it needs a cache of its own, {type(cache).__name__}")
    layers = {type(layer) for layer in cache.layers}
    require(layers == {DynamicLayer}, "it needs full attention in all layers (no sliding window)")
    for logits, scores in zip(out.logits, out.scores):
        require(torch.equal(logits[:, :ids], scores[:, :ids]), "generate() changes its logits")


@torch.no_grad()
def check_training(policy, actor):
    """Check that the policy's log-probabilities, in training mode, are the actor's: noise in
    training mode would give the update other ones than those that sampled."""
    stop = actor.generation_config.eos_token_id[0]
    ids = torch.tensor([[stop, *range(8)]], device=policy.device)
    logits = actor(input_ids=ids, use_cache=False).logits[0, :-1].float()
    expected = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    at = torch.arange(9, device=policy.device)[None] > 0
    difference = (policy(ids, at) - expected).abs().mean().item()
    family, limit = actor.config.model_type, 0.1 if actor.dtype == torch.bfloat16 else 1e-3
    # FSDP would compute them in the type of the others, and spread() moves what is not rounded.
    kept = [name for name, p in actor.named_parameters() if p.dtype != actor.dtype]
    mixed = f"{family} is not supported in {actor.dtype}: some weights stay in another type"
    require(not kept, f"{mixed}, such as {kept[:1]}: use --dtype fp32")
    same = f"{family} is not supported: its log-probabilities in training mode differ"
    require(difference < limit, f"{same} by {difference:.2g}")
    policy.reshard()  # FSDP keeps the embeddings gathered after a forward pass


@torch.no_grad()
def try_slots(model, prompt):
    """Sample 24 tokens of two prompts, each twice, with graphs that are replayed and rows that are
    moved -> why not, or None: attention is not full, it fails (torch's flash attention refuses old
    cards, types of four bytes and some sizes of heads), or entropies differ from those of plain
    forward passes."""
    if {type(layer) for layer in DynamicCache(config=model.config).layers} != {DynamicLayer}:
        return "not all of its layers have full attention"
    prompts = 2 * [prompt[:1], prompt]
    # Random models in bf16 differ by up to .01, and by .05 to .5 if a wrong key is read.
    limit = 0.05 if model.dtype.itemsize == 2 else 1e-3
    try:
        sampled = generate(model, prompts, 24, piece=12, name="check", stops=[])
    except InputError:  # of a graph, which leaves torch unusable
        raise
    except Exception as error:
        return f"engine/slots.py fails ({message_of(error)})"
    for prompt, ids, entropy in zip(prompts, *sampled):
        logits = model(input_ids=torch.tensor([prompt + ids], device=model.device)).logits
        p = logits[0, len(prompt) - 1 : -1, : model.tokenizer_size].float().softmax(-1)
        difference = abs(torch.special.entr(p).sum(-1).mean().item() - entropy)
        if not difference < limit:
            return f"in engine/slots.py entropies differ by {difference:.2g} nats"
