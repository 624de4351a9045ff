"""Load a model and its tokenizer, check that the method's assumptions hold for it, and save it."""

import contextlib
import functools
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer
from transformers.utils.peft_utils import find_adapter_config_file

from engine import slots
from engine.sampling import generate, sampling_config
from engine.tokens import vocabulary
from runtime.cli import InputError, as_input_error, message_of, require, say

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SLOTS_ON = "cuda"  # the device of engine/slots.py


def add_flags(add):
    """The flags of every script that loads a model to sample from it: see load."""
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="auto: bf16 on a GPU, else fp32")
    about = "auto: engine/slots.py on a GPU, if the model allows it; generate: Hugging Face's"
    add("--sampler", default="auto", choices=["auto", "generate"], help=about)


def load(name_or_dir: str | Path, device, *checks, dtype: str = "auto", sampler: str = "generate"):
    """Load the actor or the verifier -> (model, tokenizer). dtype: "fp32", "bf16", or "auto", which
    is bf16 on a GPU and fp32 on a CPU. sampler: "generate", Hugging Face's, or "auto", which is
    engine/slots.py on a GPU that can sample from this model with it.

    checks: functions of (model, tokenizer) that raise an error if the model does not do what the
    method assumes: check_sampling, and cer.check_scoring. A verifier that only generates has none.
    An error in a check is reported as "FAMILY is not supported (reason)"."""
    tokenizer = from_pretrained(AutoTokenizer, name_or_dir)
    model = load_model(name_or_dir, device, find_dtype(dtype, device))
    reset_generation_config(model, tokenizer)
    with as_input_error(f"{model.config.model_type} is not supported"):
        for check in checks:
            check(model, tokenizer)
    choose_sampler(model, tokenizer, sampler)
    return model, tokenizer


def find_dtype(dtype, device):
    """The torch dtype that --dtype means on a device."""
    if dtype == "auto":
        dtype = "bf16" if torch.device(device).type == "cuda" else "fp32"
    return DTYPES[dtype]


def load_model(name, device, dtype):
    """Load a Hugging Face causal language model, in eval mode."""
    options = {"dtype": dtype, "attn_implementation": "sdpa", "use_safetensors": True}
    model, info = from_pretrained(AutoModelForCausalLM, name, output_loading_info=True, **options)
    lost = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    require(not lost, f"the model {name} lacks {len(lost)} weights, such as {lost[:2]}")
    model = model.to(device).eval()
    model.set_attn_implementation("sdpa")  # a config's `_attn_implementation` overrides the option
    fuse_norms(model)
    return model


@torch.no_grad()
def fuse_norms(model):
    """Let torch compute each RMSNorm of the usual kind, in one kernel on a GPU. The library's takes
    seven or eight, half of all kernels of a decode step."""
    for norm in model.modules():
        if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon"):
            x = torch.randn(8, len(norm.weight), dtype=norm.weight.dtype, device=norm.weight.device)
            if torch.allclose(rms_norm(norm, x), norm(x), rtol=0.02, atol=0.02):
                norm.forward = functools.partial(rms_norm, norm)


def rms_norm(norm, x):
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def from_pretrained(auto_class, name_or_dir, **options):
    expected = "an id on the hub, or a directory such as RUN/checkpoints/step-K"
    with as_input_error(f"cannot load the model {name_or_dir}, expected {expected}"):
        # Where peft is installed, the library would add the adapter to its base model, frozen.
        is_adapter = find_adapter_config_file(str(name_or_dir))
        require(not is_adapter, "it is an adapter (LoRA): merge it into its model first")
        return auto_class.from_pretrained(name_or_dir, trust_remote_code=False, **options)


def reset_generation_config(model, tokenizer):
    """Drop the hub's generation settings (top-k 20, penalties), which generate() would merge into
    ours, and set model.tokenizer_size. Embeddings are often padded past the vocabulary. Ids from
    tokenizer_size on are never sampled. (A trained model gives them next to no probability, so
    scoring leaves them in the softmax.)"""
    model.tokenizer_size = 1 + max(tokenizer.get_vocab().values())
    stops = model.generation_config.eos_token_id  # None, an id or a list
    # A base model ends its text with one token, a chat model its turn with another. Stop at either,
    # and at padding, which some models write in place of an end.
    stops = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])}
    stops |= {tokenizer.pad_token_id, turn_end(tokenizer)}
    usable = sorted(i for i in stops - {None} if i < model.tokenizer_size)
    require(usable, "neither the model nor the tokenizer has an end-of-text token")
    # pad_token_id is only padding: a completion ends at its first stop.
    model.generation_config = GenerationConfig(eos_token_id=usable, pad_token_id=usable[0])


def turn_end(tokenizer):
    """The token with which the chat template ends an assistant's turn: the first added token after
    an answer, or, since some templates end only turns that are followed by another, between an
    answer and a question. None if there is no such token, or if the template fails."""
    added = tokenizer.added_tokens_decoder
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "ANSWER"}]
    for more in [], chat[:1]:
        with contextlib.suppress(Exception):  # a template is a program
            text = tokenizer.apply_chat_template(chat + more, tokenize=False)
            after = tokenizer.encode(text.split("ANSWER")[1], add_special_tokens=False)
            return next(i for i in after if i in added and added[i].content.strip())


def export(model, tokenizer, directory: str | Path) -> None:
    """Save both in a directory that transformers 4 and 5 read as the same model. Many servers still
    use 4. It looks for the settings of RoPE at the top of config.json, and takes a base of 10,000
    without a word if there is none. It knows neither what 5 calls some settings (num_experts) and
    tokenizer classes, nor 5's list of special tokens."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for_4 = {name: getattr(model.config, name) for name in model.config.attribute_map}
    scaling = dict(getattr(model.config, "rope_parameters", None) or {})
    for name in "rope_theta", "partial_rotary_factor":
        if name in scaling:
            for_4[name] = scaling.pop(name)
    if scaling.get("rope_type", "default") != "default":
        for_4["rope_scaling"] = scaling
    add_to_json(Path(directory) / "config.json", for_4)
    for_4 = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads all of tokenizer.json, also in 5
        "additional_special_tokens": tokenizer.extra_special_tokens,
        "extra_special_tokens": {},  # a dict in 4
    }
    add_to_json(Path(directory) / "tokenizer_config.json", for_4)


def add_to_json(path, entries):
    content = json.loads(path.read_text(encoding="utf-8")) | entries
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
    ids, rows = model.tokenizer_size, model.get_input_embeddings().weight.shape[0]
    require(ids <= rows, f"the tokenizer has {ids} ids, more than the model has embeddings")
    require(all(p.isfinite().all() for p in model.parameters()), "its weights are not finite")
    prompt = torch.tensor([vocabulary(tokenizer).encode(r"so \boxed")], device=model.device)
    both = dict(output_logits=True, output_scores=True, return_dict_in_generate=True)
    config = sampling_config(max_new_tokens=2, **both)
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    layers = {type(layer) for layer in out.past_key_values.layers}
    require(layers == {DynamicLayer}, "it needs full attention in all layers (no sliding window)")
    for logits, scores in zip(out.logits, out.scores):
        require(torch.equal(logits[:, :ids], scores[:, :ids]), "generate() changes its logits")


def choose_sampler(model, tokenizer, sampler="auto"):
    """On a GPU let engine/slots.py sample from the model, unless a line says why not."""
    if sampler == "generate" or model.device.type != SLOTS_ON:
        return
    model.sample_pieces = slots.sample_pieces
    if reason := try_slots(model, vocabulary(tokenizer).encode(r"so \boxed")):
        model.sample_pieces = None
        say(f"sampling with Hugging Face's generate(): {reason}")


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
