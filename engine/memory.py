"""Decide how the policy fits into memory beside the actor, and check the host's memory and disk."""

import bisect
import contextlib
import functools
import math
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from engine.cli import InputError, require
from engine.files import existing
from engine.ranks import all_gather
from engine.tokens import LOGITS_AT_ONCE

MOST_TOKENS = {"cuda": 16384, "cpu": 4096}  # per micro-batch; a CPU gains nothing from more


def plan_memory(actor, longest_row, microbatch_tokens=None, cpu_offload=False):
    """Decide how to fit the policy beside the actor -> (tokens in a micro-batch, whether to offload
    to the CPU, a line for the log). longest_row: most tokens of a prompt and its completion.

    By default a micro-batch holds as many tokens as fit, at least one row. If one row, or the
    micro-batch that microbatch_tokens asks for, does not fit, the policy and Adam move to CPU
    memory. If it does not fit there either, this raises InputError before the policy is loaded. All
    ranks decide alike, by the smallest free memory of any rank."""
    positions = getattr(actor.config, "max_position_embeddings", None) or longest_row
    need = f"the longest prompt, --max-new-tokens and the longest reference take {longest_row}"
    require(longest_row <= positions, f"the model has {positions} positions, and {need}")
    free, ranks = 0.97 * min(all_gather([free_memory()])), dist.get_world_size()
    on_gpu = torch.cuda.is_available()
    most = max(longest_row, microbatch_tokens or MOST_TOKENS["cuda" if on_gpu else "cpu"])
    least = most if microbatch_tokens else longest_row
    ways = [False, True] if on_gpu and not cpu_offload else [cpu_offload]
    for offload in ways:
        # The memory grows with the tokens, so a bisection finds how many fit.
        needed = functools.partial(memory_needed, actor, offload, ranks)
        tokens = bisect.bisect(range(most + 1), free, key=needed) - 1
        if tokens >= least:
            where = "policy and Adam in CPU memory" if offload else ""
            where += ", since they do not fit on the GPU" if offload > cpu_offload else ""
            line = (
                f"memory: {where}{'; ' if where else ''}{tokens:,} tokens in a micro-batch, about "
                f"{needed(tokens) / 1e9:.3g} of {free / 1e9:.3g} GB beside the actor"
            )
            return tokens, offload, line

    smallest = min(memory_needed(actor, offload, ranks, least) for offload in ways)
    raise InputError(
        f"{least} tokens in a micro-batch need about {smallest / 1e9:.3g} GB beside the actor, and "
        f"{free / 1e9:.3g} GB are free: use more GPUs (torchrun), shorter rows or a smaller model"
    )


def memory_needed(actor, cpu_offload, ranks, tokens):
    """Bytes that the policy needs on each rank with so many tokens in a micro-batch, estimated from
    the shapes alone. docs/running.md compares it with simulated peaks."""
    config, layers = actor.config, actor.base_model.layers
    on_gpu = torch.cuda.is_available()
    parameters, in_layers = (sum(p.numel() for p in m.parameters()) for m in (actor, layers))
    # fp32 weights, gradients and Adam's two moments. With offload, only gradients stay on the GPU.
    state = 4 * parameters if cpu_offload and on_gpu else 16 * parameters / ranks
    # What is kept: each layer's input, the activations of one layer (on a CPU, of all layers) and
    # their gradient.
    one_layer = 8 * config.hidden_size + 4 * config.intermediate_size
    layers_held = 1 if on_gpu else len(layers)  # Policy recomputes activations on GPUs alone
    kept = len(layers) * config.hidden_size + (layers_held + 1) * one_layer
    # FSDP's root group is the embeddings. They are gathered, and there is the gradient of lm_head,
    # while the layers run backward. After that the root's gradient is summed over the ranks.
    root, head = parameters - in_layers, config.vocab_size * config.hidden_size
    backward = 2 * root + 4 * head + actor.dtype.itemsize * kept * tokens
    logits = 3 * 4 * LOGITS_AT_ONCE * config.vocab_size
    return state + max(backward, (6 + 4 / ranks) * root) + logits


def check_host(actor, out, cpu_offload, checkpoints):
    """Check that the host's memory and the disk will do -> a line for the log. checkpoints: how
    many more are on the disk at a time, at most."""
    parameters = sum(p.numel() for p in actor.parameters())
    GB, ranks_here = 1e9, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    wanted = checkpoints * (12 + actor.dtype.itemsize) * parameters / GB
    disk = shutil.disk_usage(existing(out)).free / GB
    line = f"{checkpoints} more checkpoints would take {wanted:.3g} of {disk:.3g} GB of free disk"
    require(wanted < disk, f"--out {out}: {line}: use a smaller --keep")
    if not torch.cuda.is_available():
        return line  # plan_memory has looked at the host's memory
    # Every rank loads the weights, in bf16, before they are sharded. Pinned memory comes in powers
    # of two, so offload takes more than its 16 bytes. A save holds the actor and some files.
    loading = 2 * parameters * ranks_here / GB
    offloaded = 20 * parameters * ranks_here / dist.get_world_size() / GB if cpu_offload else 0
    needed = max(loading, offloaded + 2 * parameters / GB + 6)
    with open("/proc/meminfo") as file:
        available = next(line for line in file if "MemAvailable" in line)
    free = min(int(available.split()[1]) * 1024, container_limit()) / GB
    host = f"host memory: about {needed:.3g} of {free:.3g} GB are needed"
    require(needed < free, host)
    return f"{host}; {line}"


def free_memory():
    """Free bytes of this rank's GPU, or on a CPU its share of the machine's whole memory."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(whole, container_limit()) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def container_limit():
    """Bytes of memory that the container may use. Beyond them it is killed without a message."""
    with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says "max"
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    return math.inf
