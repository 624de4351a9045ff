"""The model: load it, check it, train it, copy it. Two copies of it serve one run:

- the *policy* is trained: fp32 weights sharded over the ranks by FSDP2, bf16 compute. Adam at a
  learning rate of 1e-6 moves bf16 weights almost never: the update is smaller than their rounding.
- the *actor* samples, scores, evaluates and is saved: a plain Hugging Face model in bf16 on every
  rank, a copy of the policy made once a step, so that no rank waits for another meanwhile.

On a CPU both compute in fp32.
"""

import os
import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.cache_utils import DynamicLayer

from data import InputError, first_line, require
from engine.sampling import sampling_config
from engine.tokens import vocabulary

# A base model ends its text with one token, a chat model its turn with another: stop on either.
STOPS = {"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "<end_of_turn>"}
LOGITS_AT_ONCE = 1024  # tokens whose logits are held at a time, here and in scoring


# ------------------------------------------------------------------------------------------ loading


def load(name_or_dir, device, check=True):
    """The actor or the verifier, in bf16 on a GPU and fp32 on a CPU -> (model, tokenizer).
    check=False: a model that only has to generate, as the verifier does, may be of any layout."""
    tokenizer = from_pretrained(AutoTokenizer, name_or_dir)
    on_gpu = torch.device(device).type == "cuda"
    model = load_model(name_or_dir, device, torch.bfloat16 if on_gpu else torch.float32)
    neutralise_generation(model, tokenizer)
    if check:
        check_model(model, tokenizer)
    return model, tokenizer


def load_model(name_or_dir, device, dtype):
    """A Hugging Face causal language model, in eval mode."""
    options = {"dtype": dtype, "attn_implementation": "sdpa", "use_safetensors": True}
    return from_pretrained(AutoModelForCausalLM, name_or_dir, **options).to(device).eval()


def from_pretrained(auto_class, name_or_dir, **options):
    try:
        return auto_class.from_pretrained(name_or_dir, trust_remote_code=False, **options)
    except Exception as error:  # broken files raise a dozen kinds
        raise InputError(
            f"cannot load the model {name_or_dir} ({first_line(error)}): expected a directory with "
            "a config, a tokenizer and safetensors, or the id of one that the hub gives"
        ) from error


def neutralise_generation(model, tokenizer):
    """Replace the hub's generation settings (top-k 20, penalties): generate() would merge them into
    ours. The ids of the embedding's last rows spell no token and are never sampled (a trained model
    gives them next to no probability, so scores leave them in the softmax)."""
    stops = model.generation_config.eos_token_id or []
    stops = {*([stops] if isinstance(stops, int) else stops), tokenizer.eos_token_id}
    stops |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.content in STOPS}
    stops = sorted(i for i in stops - {None} if i < len(tokenizer))
    require(stops, "neither the model nor the tokenizer names a token that ends the text")
    rows = model.get_input_embeddings().weight.shape[0]
    model.generation_config = GenerationConfig(
        eos_token_id=stops,
        pad_token_id=stops[0],  # only fills: what was sampled ends at the first stop
        suppress_tokens=sorted(set(range(len(tokenizer), rows)).difference(stops)) or None,
    )


@torch.no_grad()
def check_model(model, tokenizer):
    """What the method takes for granted, checked once on two sampled tokens: the sampler uses the
    model's own distribution (temperature 1, nothing filtered), the logits are lm_head of the last
    hidden state, and attention is over the whole context."""
    kind, ids = model.config.model_type, len(tokenizer)
    laid_out = hasattr(model, "lm_head") and hasattr(model.base_model, "layers")
    require(laid_out, f"{kind}: not laid out as Llama, Qwen and most others are; not supported")
    dropouts = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    dropout = getattr(model.config, "attention_dropout", 0) or max(dropouts, default=0)
    require(not dropout, f"{kind}: dropout must be 0, or training is not on-policy")
    rows = model.get_input_embeddings().weight.shape[0]
    require(ids <= rows, f"the tokenizer has {ids} ids, more than the model has embeddings")
    prompt = torch.tensor([vocabulary(tokenizer).encode(r"so \boxed")], device=model.device)
    looking = dict(return_dict_in_generate=True, output_logits=True, output_scores=True)
    config = sampling_config(model, max_new_tokens=2, **looking)
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    full_attention = {type(layer) for layer in out.past_key_values.layers} == {DynamicLayer}
    require(full_attention, f"{kind}: only full attention is supported (no sliding window)")
    for logits, scores in zip(out.logits, out.scores):
        unchanged = torch.equal(logits[:, :ids], scores[:, :ids])
        require(unchanged, f"{kind}: generate() changes its logits; not supported")
    hidden = model.base_model(input_ids=prompt, use_cache=False).last_hidden_state
    difference = model.lm_head(hidden[:, -1]).float() - out.logits[0]
    # bf16 rounds; a scale or a soft cap shows
    alike = difference.norm() <= 0.1 * out.logits[0].norm()
    require(alike, f"{kind}: its logits are not lm_head(hidden state); not supported")


def require_room(actor, microbatch_tokens, longest_row, cpu_offload):
    """Refuse rows longer than the model's positions, and a run that cannot fit in memory, before
    the policy is loaded beside the actor."""
    what = f"the longest prompt and --max-new-tokens are {longest_row} tokens"
    positions = getattr(actor.config, "max_position_embeddings", longest_row)
    require(longest_row <= positions, f"{what}, and the model knows {positions} positions")
    tokens, free = max(microbatch_tokens, longest_row), free_memory()
    needed = memory_needed(actor, tokens, cpu_offload)
    smaller = memory_needed(actor, longest_row, cpu_offload) <= free
    help = "more GPUs (torchrun), --cpu-offload or a smaller model"
    require(
        needed <= free,
        f"training at world size {dist.get_world_size()} with {tokens} tokens in a micro-batch "
        f"needs about {needed / 1e9:.0f} GB beside the actor, and {free / 1e9:.0f} GB are there: "
        f"use {f'--microbatch-tokens {longest_row}' if smaller else help}",
    )


def memory_needed(actor, tokens, cpu_offload):
    """Bytes that the policy takes on each rank with so many tokens in a micro-batch: an estimate,
    from the shapes alone."""
    config, layers, ranks = actor.config, actor.base_model.layers, dist.get_world_size()
    parameters, in_layers = (sum(p.numel() for p in m.parameters()) for m in (actor, layers))
    # fp32 weights, gradients, Adam's two moments. Offloaded: gradients until the step's end.
    offloaded = cpu_offload and torch.cuda.is_available()
    state = 4 * parameters if offloaded else 16 * parameters / ranks
    # FSDP's root group, the embeddings: gathered, their gradient, and its sum over the ranks.
    root = (8 + 4 / ranks) * (parameters - in_layers)
    # Each layer's input is kept, and all of one layer; and the logits of a chunk.
    one_layer = 2 * (8 * config.hidden_size + 4 * config.intermediate_size)
    kept = actor.dtype.itemsize * (len(layers) * config.hidden_size + one_layer)
    return state + root + kept * tokens + 3 * 4 * LOGITS_AT_ONCE * config.vocab_size


def free_memory():
    """Bytes that this rank can use: of its GPU, or its share of the machine's."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


# ----------------------------------------------------------------------------------------- training


def shard(model, cpu_offload=False):
    """The policy, of a model on the CPU: FSDP2 over all ranks (also over one), fp32 shards and
    gradient sums; on GPUs bf16 compute, and activations recomputed in the backward pass. Adds
    .logprobs(ids). cpu_offload keeps shards, gradients and Adam in the CPU's memory; gradients then
    go there once a step (.sync_every_batch), not after every micro-batch."""
    options = {}
    if torch.cuda.is_available():
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options["mp_policy"] = bf16
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for layer in model.base_model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.sync_every_batch = not cpu_offload
    model.logprobs = types.MethodType(logprobs, model)
    register_fsdp_forward_method(model, "logprobs")
    if torch.cuda.is_available():  # a CPU has the memory, and recomputing takes a fifth of its time
        older_name = model.gradient_checkpointing_enable
        getattr(model, "activation_checkpointing_enable", older_name)()
    return model.train()


def logprobs(model, ids):
    """ids [b, L], padded on the right -> log pi(ids[:, t] | ids[:, :t]) [b, L], fp32; 0 at t = 0.

    Causal attention sees nothing to the right, so right-padded rows need no mask; pads need weight
    0 in the loss.
    """
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return F.pad(token_logprobs(hidden[:, :-1], model.lm_head, ids[:, 1:]), (1, 0))


def token_logprobs(hidden, lm_head, targets, chunk=LOGITS_AT_ONCE):
    """log softmax(lm_head(hidden))[targets], hidden [..., D], targets [...] -> [...], fp32.

    Never holds all the logits: a chunk of tokens at a time, recomputed in the backward pass. The
    logits of one row of 4,096 tokens over a vocabulary of 151,936 would take 2.3 GiB in fp32, and
    as much again for their gradient.
    """

    def piece(h, y):
        logits = lm_head(h)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # fp64 stays fp64
        return -F.cross_entropy(logits, y, reduction="none")

    pieces = zip(hidden.flatten(0, -2).split(chunk), targets.flatten().split(chunk))
    logp = torch.cat([checkpoint(piece, h, y, use_reentrant=False) for h, y in pieces])
    return logp.view_as(targets)


@torch.no_grad()
def copy_weights(policy, actor):
    """policy -> actor, in the actor's precision (rounded before it is gathered: half the bytes)."""
    for copy, trained in zip(actor.parameters(), policy.parameters(), strict=True):
        copy.copy_(trained.to(copy.dtype).full_tensor())
