"""Load a model and its tokenizer, choose who samples from it, and make the policy of it."""

import contextlib
import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils.peft_utils import find_adapter_config_file

from engine import slots
from engine.checks import check_config, check_tokens, check_weights, try_slots, weight_files
from engine.lora import LoraPolicy
from engine.policy import Policy
from engine.sampling import generate
from runtime.cli import as_input_error, require, say
from runtime.files import checkpoints

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SLOTS_ON = "cuda"  # the device of engine/slots.py


def add_flags(add):
    """The flags of every script that loads a model to sample from it: see load."""
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="auto: bf16 on a GPU, else fp32")
    add("--sampler", default="auto", choices=["auto", "generate"], help="generate: Hugging Face's")


def load(name_or_dir: str | Path, device, *checks, dtype: str = "auto", sampler: str = "generate"):
    """Load the actor or the verifier -> (model, tokenizer). dtype: "fp32", "bf16", or "auto", which
    is bf16 on a GPU and fp32 on a CPU. sampler: "generate", Hugging Face's, or "auto", which is
    engine/slots.py on a GPU that can sample from this model with it.

    checks: functions of (model, tokenizer) that raise an error if the model does not do what the
    method assumes: check_sampling, and cer.check_scoring. Without any it has to generate at least.
    An error in a check is reported as "FAMILY is not supported (reason)"."""
    tokenizer = load_tokenizer(name_or_dir)
    model = load_model(name_or_dir, device, find_dtype(dtype, device))
    reset_generation_config(model, tokenizer)
    with as_input_error(f"{model.config.model_type} is not supported"):
        for check in checks or [check_generating]:
            check(model, tokenizer)
    choose_sampler(model, tokenizer, sampler)
    return model, tokenizer


def check_generating(model, tokenizer):
    """A verifier may need a cache of its own, as MiniMax does."""
    generate(model, [tokenizer.encode("so")], 2, name="check", temperature=0)


def make_policy(name_or_dir, actor, offload, lora, rounding, seed):
    """-> what is trained: the model, loaded once more, or with --lora the actor itself."""
    if lora:
        return LoraPolicy(actor, lora, rounding, seed)
    return Policy(load_model(name_or_dir, "cpu", "auto"), offload, actor.dtype, rounding)


def find_dtype(dtype, device):
    """The torch dtype that --dtype means on a device."""
    auto = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    return (DTYPES | {"auto": auto})[dtype]


def load_tokenizer(name):
    """The tokenizer that tokenizer.json holds. AutoTokenizer would build some classes, such as
    GPT2Tokenizer and every tokenizer of a Qwen2, anew from its vocabulary, with rules of their own
    for where digits and spaces are split."""
    tokenizer = from_pretrained(PreTrainedTokenizerFast, name)
    check_tokens(name, tokenizer)
    return tokenizer


def load_model(name, device, dtype):
    """Load a Hugging Face causal language model, in eval mode. dtype: a torch dtype, or "auto",
    which is that of its files. (The library's "auto" is what config.json says.)"""
    check_config(name, from_pretrained(AutoConfig, name))
    with as_input_error(f"cannot load the model {name}"):
        files = weight_files(name)
        stored = stored_dtype(files)
    dtype = stored if dtype == "auto" else dtype
    options = {"dtype": dtype, "attn_implementation": "sdpa", "use_safetensors": True}
    options["ignore_mismatched_sizes"] = True  # check_weights refuses them
    model, info = from_pretrained(AutoModelForCausalLM, name, output_loading_info=True, **options)
    check_weights(name, info, model, files)
    model = model.to(device).eval()
    model.set_attn_implementation("sdpa")  # a config's `_attn_implementation` overrides the option
    fuse_norms(model)
    return model


TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float32}


def stored_dtype(files):
    """The type in which training reads these files: that of all their tensors if it has two bytes,
    else fp32."""
    found = set()
    for path in files:
        with safe_open(path, "pt") as file:
            found |= {file.get_slice(key).get_dtype() for key in file.keys()}
    other = sorted(found - {*TYPES})
    require(not other, f"weights in {other} are quantized: take the original in bf16 or fp32")
    return TYPES[found.pop()] if len(found) == 1 else torch.float32


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
    last = max(checkpoints(name_or_dir), default=(0, "RUN/checkpoints/step-K"))[1]
    expected = f"an id on the hub, or a directory such as {last}"
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
    stops = stops if isinstance(stops, list) else [stops]
    are_ids = all(i is None or type(i) is int for i in stops)
    require(are_ids, f"expected the ids of tokens as eos_token_id, got {stops}")
    # A base model ends its text with one token, a chat model its turn with another. Stop at either,
    # and at padding, which some models write in place of an end.
    stops = {*stops, tokenizer.eos_token_id, tokenizer.pad_token_id, turn_end(tokenizer)}
    known = [i for i in stops - {None} if 0 <= i < model.tokenizer_size]
    usable = sorted(i for i in known if is_control(tokenizer, i))
    ordinary = [tokenizer.decode([i]) for i in known if i not in usable]
    only = f", only ordinary text ({ordinary})" if ordinary else ""
    require(usable, f"neither the model nor the tokenizer has an end-of-text token{only}")
    if ordinary:
        say(f"samples do not stop at {ordinary}, although a config names it: it is ordinary text")
    # pad_token_id is only padding: a completion ends at its first stop.
    model.generation_config = GenerationConfig(eos_token_id=usable, pad_token_id=usable[0])


def is_control(tokenizer, i):
    """Whether this token marks something, as <|im_end|> does: no text is encoded as it, or it was
    added beside the tokens of text. A config that names no end has the default of its class, whose
    id may be an exclamation mark."""
    added = tokenizer.added_tokens_decoder.get(i)
    if added and not added.special:
        return True
    text = added.content if added else tokenizer.decode([i])
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) != [i]


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


def choose_sampler(model, tokenizer, sampler="auto"):
    """On a GPU let engine/slots.py sample from the model, unless a line says why not."""
    if sampler == "generate" or model.device.type != SLOTS_ON:
        return
    model.sample_pieces = slots.sample_pieces
    if reason := try_slots(model, tokenizer.encode(r"so \boxed", add_special_tokens=False)):
        model.sample_pieces = None
        say(f"sampling with Hugging Face's generate(): {reason}")
