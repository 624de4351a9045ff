"""Decide how the policy fits into memory beside the actor."""

import os

import torch
import torch.distributed as dist

from engine.cli import InputError, require
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
    what = f"the longest prompt and --max-new-tokens add up to {longest_row} tokens"
    positions = getattr(actor.config, "max_position_embeddings", longest_row)
    require(longest_row <= positions, f"{what}, but the model has {positions} positions")
    free, on_gpu = min(all_gather([free_memory()])), torch.cuda.is_available()
    most = max(longest_row, microbatch_tokens or MOST_TOKENS["cuda" if on_gpu else "cpu"])
    least = most if microbatch_tokens else longest_row
    for offload in [False, True] if on_gpu and not cpu_offload else [cpu_offload]:
        fixed = memory_needed(actor, 0, offload)
        fitting = int((free - fixed) / (memory_needed(actor, 1, offload) - fixed))
        if fitting >= least:
            tokens = min(most, fitting)
            needed = memory_needed(actor, tokens, offload)
            where = "policy and Adam in CPU memory" if offload else ""
            where += ", since they do not fit on the GPU" if offload > cpu_offload else ""
            line = (
                f"memory: {where}{'; ' if offload else ''}{tokens:,} tokens in a micro-batch, "
                f"about {needed / 1e9:.3g} of {free / 1e9:.3g} GB beside the actor"
            )
            return tokens, offload, line
    advice = "more GPUs (torchrun), shorter rows or a smaller model"
    if microbatch_tokens and fitting >= longest_row:
        advice = f"--microbatch-tokens {longest_row}"
    needed = memory_needed(actor, least, offload)
    raise InputError(
        f"training at world size {dist.get_world_size()} with {least} tokens in a micro-batch "
        f"needs about {needed / 1e9:.3g} GB beside the actor, and {free / 1e9:.3g} GB are free: "
        f"use {advice}"
    )


def memory_needed(actor, tokens, cpu_offload):
    """Bytes that the policy needs on each rank with so many tokens in a micro-batch, estimated from
    the shapes alone."""
    config, layers, ranks = actor.config, actor.base_model.layers, dist.get_world_size()
    on_gpu = torch.cuda.is_available()
    parameters, in_layers = (sum(p.numel() for p in m.parameters()) for m in (actor, layers))
    # fp32 weights, gradients and Adam's two moments. With offload, only gradients stay on the GPU.
    state = 4 * parameters if cpu_offload and on_gpu else 16 * parameters / ranks
    # FSDP's root group is the embeddings: gathered, their gradient, and its sum over the ranks.
    root = (8 + 4 / ranks) * (parameters - in_layers)
    # What is kept: each layer's input, the activations of one layer (on a CPU, of all layers) and
    # their gradient, and the logits of a chunk.
    one_layer = 8 * config.hidden_size + 4 * config.intermediate_size
    layers_held = 1 if on_gpu else len(layers)
    kept = len(layers) * config.hidden_size + (layers_held + 1) * one_layer
    logits = 3 * 4 * LOGITS_AT_ONCE * config.vocab_size
    return state + root + actor.dtype.itemsize * kept * tokens + logits


def free_memory():
    """Free bytes of this rank's GPU, or on a CPU its share of the machine's whole memory."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
