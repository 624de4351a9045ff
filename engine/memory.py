"""All arithmetic of bytes: how the policy fits into memory beside the actor, how many rows can be
sampled at a time, and whether the host and the disk are large enough."""

import os
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from engine.tokens import LOGITS_AT_ONCE
from runtime.cli import InputError, require
from runtime.files import checkpoints
from runtime.ranks import all_gather

MOST_TOKENS = {"cuda": 16384, "cpu": 4096}  # per micro-batch; a CPU gains nothing from more


def plan_memory(actor, longest_row, microbatch_tokens=None, cpu_offload=False, lora=None):
    """Decide how to fit the policy beside the actor -> (tokens in a micro-batch, whether to offload
    to the CPU, a line for the log). longest_row: most tokens of a prompt, its completion and its
    reference.

    On a GPU a micro-batch holds as many tokens as fit, at least one row. If one row, or the
    micro-batch that microbatch_tokens asks for, does not fit, the policy and Adam move to CPU
    memory, except those of --lora, which are small. If it does not fit there either, this raises
    InputError before the policy is loaded. All ranks decide alike, by the smallest free memory of
    any rank. On a CPU nothing is estimated."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    most = max(longest_row, microbatch_tokens or MOST_TOKENS[device])
    if device == "cpu":
        return most, cpu_offload, f"memory: {most:,} tokens in a micro-batch"
    least = most if microbatch_tokens else longest_row
    free = 0.97 * min(all_gather([free_on_gpu()]))
    for offload in [cpu_offload] if cpu_offload or lora else [False, True]:
        fixed, of_token = memory_needed(actor, offload, dist.get_world_size(), lora)
        tokens = min(most, int((free - fixed) / of_token))
        if tokens >= least:
            needed = (fixed + tokens * of_token) / 1e9
            line = f"memory: {tokens:,} tokens in a micro-batch, about {needed:.3g} of "
            line += f"{free / 1e9:.3g} GB beside the actor"
            # On the host the policy is loaded in the type of its files, mostly the actor's.
            held, what = actor.dtype.itemsize * actor.num_parameters(), "the policy's weights"
            if offload:
                # 16 bytes for each parameter, and more since pinned memory comes in powers of two.
                held += 20 * actor.num_parameters() / dist.get_world_size()
                what = "policy and Adam"
                line += "; policy and Adam in CPU memory"
            elif lora:
                held = sum(weight.nbytes for weight in actor.base_model.layers.parameters())
                what = "the loaded weights"
            elif stay := moments_stay(actor):
                line += f"; {stay}"
            require(not (lack := host_lacks(what, held)), lack)
            return tokens, offload, line
    need = f"{least} tokens in a micro-batch need about {(fixed + least * of_token) / 1e9:.3g} GB"
    helps = "shorter rows or a smaller model" if lora else "--lora 32 or more GPUs (torchrun)"
    raise InputError(f"{need} beside the actor, and {free / 1e9:.3g} are free: use {helps}")


def linear_layers(actor, rank):
    """The layers with an A and a B, {name: torch.nn.Linear}. InputError if these are not all that
    have matrices (experts are no linear layers), or if one is too small."""
    inside = actor.base_model.layers
    linear = {name: m for name, m in inside.named_modules() if isinstance(m, torch.nn.Linear)}
    matrices = [name for name, p in inside.named_parameters() if p.dim() > 1]
    others = [name for name in matrices if name.removesuffix(".weight") not in linear]
    family, least = actor.config.model_type, min(min(m.weight.shape) for m in linear.values())
    require(not others, f"--lora trains linear layers, which {family}'s {others[:1]} is not")
    require(rank <= least, f"--lora {rank} is more than {least}, the smallest size of a layer")
    return linear


def trained_parameters(actor, lora):
    """How many parameters are trained: all, or A and B of each linear layer."""
    if not lora:
        return actor.num_parameters()
    layers = linear_layers(actor, lora).values()
    return lora * sum(layer.in_features + layer.out_features for layer in layers)


def memory_needed(actor, cpu_offload, ranks, lora=None):
    """Bytes that the policy needs on each rank -> without a micro-batch, and for each token of one.
    Estimated from the shapes alone. docs/machines.md compares it with simulated peaks."""
    config, layers = actor.config, actor.base_model.layers
    parameters = trained_parameters(actor, lora)
    # fp32 weights, gradients and Adam's two moments. With offload, only gradients stay on the GPU.
    state = 4 * parameters if cpu_offload else 16 * parameters / ranks
    # FSDP gathers its root group, and there is the gradient of lm_head. The root group holds the
    # embeddings, or with --lora, which freezes these, all A and B, in fp32.
    root, head = 4 * parameters, 0
    if not lora:
        root = 2 * (parameters - sum(p.numel() for p in layers.parameters()))
        head = config.vocab_size * config.hidden_size
    logits = 3 * 4 * LOGITS_AT_ONCE * config.vocab_size  # and their gradient
    # Of a token: each layer's input, the activations of one layer and their gradient.
    one_layer = 8 * config.hidden_size + 4 * config.intermediate_size
    kept = len(layers) * config.hidden_size + 2 * one_layer
    return state + root + 4 * head + logits, actor.dtype.itemsize * kept


def host_lacks(what, held):
    """What the host lacks to hold this, so many bytes for each rank, or None."""
    need, free = held * int(os.environ.get("LOCAL_WORLD_SIZE", 1)), free_on_host()
    if need > free:
        return f"{what} need about {need / 1e9:.3g} of {free / 1e9:.3g} GB of free CPU memory"


MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# A container's limit, and what it uses, in versions 2 and 1.
OF_CGROUPS = (".", "max", "current"), ("memory", "limit_in_bytes", "usage_in_bytes")


def free_on_host():
    """The bytes of memory that are free on the host, or in the container, where that has a limit.
    What only keeps files at hand counts as free."""
    free = [1024 * int(re.search(r"MemAvailable: *(\d+)", MEMINFO.read_text())[1])]
    for folder, *names in OF_CGROUPS:
        limit, used, kinds = (CGROUP / folder / f"memory.{name}" for name in (*names, "stat"))
        if limit.is_file() and (most := limit.read_text().strip()).isdigit():
            of_files = re.search(r"^(total_)?inactive_file (\d+)", kinds.read_text(), re.M)[2]
            free.append(int(most) - int(used.read_text()) + int(of_files))
    return min(free)


def moments_stay(actor):
    """Why Adam's moments have to stay on the GPU while the actor samples, or None: then they lie in
    CPU memory meanwhile, to make room for the keys and values of engine/slots.py."""
    # Of each rank one buffer of 8 bytes for each parameter, rounded up to a power of two.
    share = actor.num_parameters() / dist.get_world_size()
    lack = host_lacks("they", 2 ** int(8 * share).bit_length())
    if getattr(actor, "sample_pieces", None) is None:
        lack = "generate() has no use for the room"
    return lack and f"Adam's moments stay on the GPU while it samples: {lack}"


def check_disk(actor, out, most, lora=None):
    """Check that the checkpoints of a run, at most so many at a time, fit on the disk -> a line for
    the log."""
    more = max(1, most - len(checkpoints(out)))
    # fp32 weights and Adam's moments take 12 bytes for each parameter that is trained.
    size = more * (12 * trained_parameters(actor, lora) + saved_bytes(actor, lora))
    return check_room(out, size, f"{more} more checkpoints would", "use a smaller --keep")


def saved_bytes(actor, lora=None):
    """What the model takes on the disk, with its adapter, which is in fp32."""
    adapter = 4 * trained_parameters(actor, lora) if lora else 0
    return actor.dtype.itemsize * actor.num_parameters() + adapter


def check_room(out, size, what, helps):
    """Check that so many bytes fit on the disk -> a line for the log."""
    free = shutil.disk_usage(out).free
    line = f"disk: {what} take {size / 1e9:.3g} of {free / 1e9:.3g} GB"
    require(size < free, f"--out {out}: {line}: {helps}")
    return line


# ---------------------------------------------------------------------------------------- sampling

ROWS_AT_ONCE = 512  # of engine/slots.py, whose logits are held
READ_AT_ONCE = 8192  # tokens of its prefill


def row_bytes(model, tokens, more):
    """The memory of a row of so many tokens that samples `more`: its keys and values; in the
    prefill the activations of one layer and the attention mask; its logits. Equal rows share a
    prefill, and take less than this."""
    kv, layer, logits = bytes_of(model)
    mask = 6 * tokens * (tokens + more)  # bool, and twice in bf16
    return (tokens + more) * kv + tokens * layer + mask + logits


def bytes_of(model):
    """Of a token, its keys and values, and its activations in one layer; six copies of the logits
    of a row."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    kv = 2 * config.num_hidden_layers * kv_heads * head_dim
    mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size  # as in GPT-2
    layer = 4 * (config.hidden_size + mlp)
    # Qwen3-4B in bf16: 144 KiB of keys and values
    return kv * model.dtype.itemsize, layer * model.dtype.itemsize, 6 * 4 * config.vocab_size


def bytes_that_fit(model):
    """95% of the GPU's free memory, or 4 GiB on a CPU."""
    return 0.95 * free_on_gpu() if model.device.type == "cuda" else 4 << 30


def free_on_gpu():
    """The bytes that are free, without those that torch keeps for later."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def tokens_that_fit(model, rows, smallest):
    """How many tokens' keys and values fit into the free memory, beside the activations of one
    layer of a prefill, and the logits of as many rows as can be seated at once, if each has the
    smallest number of tokens. Top-p sorts logits, which takes 44 bytes for each."""
    kv, layer, logits = bytes_of(model)
    free = bytes_that_fit(model) - READ_AT_ONCE * layer
    seated = min(rows, ROWS_AT_ONCE, free // (smallest * kv + 2 * logits))
    return int((free - seated * 2 * logits) / kv)
