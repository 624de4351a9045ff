"""Load, check, train and copy the model. A run holds two copies of it:

- The *policy* is trained. Its fp32 weights are sharded over the ranks by FSDP2, and it computes in
  bf16. At a learning rate of 1e-6 Adam would hardly ever change bf16 weights, since its steps are
  smaller than their rounding.
- The *actor* samples, scores, evaluates and is saved. It is a plain bf16 model on every rank, so
  that no rank waits for another to sample or score. It is copied from the policy once per step.

On a CPU both compute in fp32.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from engine.cli import InputError, first_line, require
from engine.files import checkpoints
from engine.sampling import sampling_config
from engine.tokens import LOGITS_AT_ONCE, vocabulary

# A base model ends its text with one token, a chat model its turn with another. Stop at either.
STOPS = {"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "<end_of_turn>"}


# ------------------------------------------------------------------------------------------ loading


def load(name_or_dir, device, check=True):
    """Load the actor or the verifier, in bf16 on a GPU and in fp32 on a CPU -> (model, tokenizer).
    check=False is for a model that only generates, as the verifier does. It may have any layout."""
    if Path(name_or_dir).is_dir():
        check_directory(Path(name_or_dir))
    tokenizer = from_pretrained(AutoTokenizer, name_or_dir)
    on_gpu = torch.device(device).type == "cuda"
    model = load_model(name_or_dir, device, torch.bfloat16 if on_gpu else torch.float32)
    reset_generation_config(model, tokenizer)
    if check:
        check_model(model, tokenizer)
    return model, tokenizer


def load_model(name_or_dir, device, dtype):
    """Load a Hugging Face causal language model, in eval mode."""
    options = {"dtype": dtype, "attn_implementation": "sdpa", "use_safetensors": True}
    return from_pretrained(AutoModelForCausalLM, name_or_dir, **options).to(device).eval()


def check_directory(path):
    """Raise InputError with what a local directory lacks, since the library's errors do not say."""
    if runs := checkpoints(path):
        raise InputError(f"{path} is a run, not a model; its last checkpoint is {runs[-1][1]}")
    names = {file.name for file in path.iterdir()}
    formats = {Path(name).suffix for name in names} & {".bin", ".gguf"}
    instead = f" ({', '.join(formats)} is not read)" if formats else ""
    for name, there in {
        "safetensors weights" + instead: any(name.endswith(".safetensors") for name in names),
        "config.json": "config.json" in names,
        "tokenizer.json": names & {"tokenizer.json", "vocab.json", "tokenizer.model"},
    }.items():
        require(there, f"cannot load the model {path}: it has no {name}")


def from_pretrained(auto_class, name_or_dir, **options):
    try:
        return auto_class.from_pretrained(name_or_dir, trust_remote_code=False, **options)
    except Exception as error:  # the library raises errors of many types for broken files
        where = "" if Path(name_or_dir).is_dir() else "no such directory, and "
        raise InputError(
            f"cannot load the model {name_or_dir} ({where}{first_line(error)}): expected a "
            "directory with a config, a tokenizer and safetensors, or the id of one on the hub"
        ) from error


def reset_generation_config(model, tokenizer):
    """Drop the hub's generation settings (top-k 20, penalties), which generate() would merge into
    ours. Embeddings are often padded past the vocabulary. Those ids are never sampled. (A trained
    model gives them next to no probability, so scoring leaves them in the softmax.)"""
    stops = model.generation_config.eos_token_id or []
    stops = {*([stops] if isinstance(stops, int) else stops), tokenizer.eos_token_id}
    stops |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.content in STOPS}
    stops = sorted(i for i in stops - {None} if i < len(tokenizer))
    require(stops, "neither the model nor the tokenizer has an end-of-text token")
    rows = model.get_input_embeddings().weight.shape[0]
    model.generation_config = GenerationConfig(
        eos_token_id=stops,
        pad_token_id=stops[0],  # only padding: a completion ends at its first stop
        suppress_tokens=sorted(set(range(len(tokenizer), rows)).difference(stops)) or None,
    )


@torch.no_grad()
def check_model(model, tokenizer):
    """Check on two sampled tokens what the method assumes, or raise InputError: sampling uses the
    model's own distribution (temperature 1, no top-k or top-p), the logits are lm_head of the last
    hidden state, and attention covers the whole context."""
    name, ids = model.config.model_type, len(tokenizer)
    encoder = name in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    require(not encoder, f"{name} is an encoder; expected a model that generates text")
    laid_out = hasattr(model, "lm_head") and hasattr(model.base_model, "layers")
    require(laid_out, f"{name} is not supported: it is not laid out as Llama and Qwen are")
    dropouts = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    dropout = getattr(model.config, "attention_dropout", 0) or max(dropouts, default=0)
    require(not dropout, f"{name}: dropout must be 0, or training is not on-policy")
    rows = model.get_input_embeddings().weight.shape[0]
    require(ids <= rows, f"the tokenizer has {ids} ids, more than the model has embeddings")
    try:
        vocab = vocabulary(tokenizer)
    except ValueError as error:
        raise InputError(str(error)) from error
    prompt = torch.tensor([vocab.encode(r"so \boxed")], device=model.device)
    config = sampling_config(
        model,
        max_new_tokens=2,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    full_attention = {type(layer) for layer in out.past_key_values.layers} == {DynamicLayer}
    require(full_attention, f"{name}: only full attention is supported (no sliding window)")
    for logits, scores in zip(out.logits, out.scores):
        unchanged = torch.equal(logits[:, :ids], scores[:, :ids])
        require(unchanged, f"{name} is not supported: generate() changes its logits")
    hidden = model.base_model(input_ids=prompt, use_cache=False).last_hidden_state
    difference = model.lm_head(hidden[:, -1]).float() - out.logits[0]
    # The limit allows for bf16 rounding. A scale or a soft cap on the logits exceeds it.
    alike = difference.norm() <= 0.1 * out.logits[0].norm()
    require(alike, f"{name} is not supported: its logits are not lm_head(hidden state)")


# ------------------------------------------------------------------------------------------- memory

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
    free = torch.tensor(free_memory(), dtype=torch.float64)
    dist.all_reduce(free, op=dist.ReduceOp.MIN)
    free, on_gpu = free.item(), torch.cuda.is_available()
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


# ----------------------------------------------------------------------------------------- training


class Policy(torch.nn.Module):
    """The trained model, sharded over all ranks (even over one) by FSDP2, with fp32 shards and
    gradient sums. On GPUs it computes in bf16 and recomputes activations in the backward pass.

    model: a Hugging Face model on the CPU. cpu_offload keeps shards, gradients and Adam in CPU
    memory. Gradients are then moved there once per step, not after every micro-batch.
    """

    def __init__(self, model, cpu_offload=False):
        super().__init__()
        self.model = model.train()
        self.sync_every_batch = not cpu_offload
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else model.device
        options = {}
        if on_gpu:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
            model.activation_checkpointing_enable()
        if cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
        for layer in model.base_model.layers:
            fully_shard(layer, **options)
        fully_shard(self, **options)

    def forward(self, ids, at):
        """ids [b, L], padded on the right; at [b, L], bool, False in the first column
        -> log pi(ids[at] | all ids before it) [number of Trues], fp32.

        Causal attention sees nothing to the right, so right-padded rows need no mask.
        """
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        # The state at position t - 1 predicts the token at t.
        return token_logprobs(hidden[:, :-1][at[:, 1:]], self.model.lm_head, ids[at])


def token_logprobs(hidden, lm_head, targets, chunk=LOGITS_AT_ONCE):
    """log softmax(lm_head(hidden))[targets], hidden [n, D], targets [n] -> [n], fp32.

    Only the logits of one chunk of tokens are held at a time. They are recomputed in the backward
    pass. The logits of one row of 4,096 tokens over a vocabulary of 151,936 would take 2.3 GiB in
    fp32, and their gradient as much again.
    """

    def piece(h, y):
        logits = lm_head(h)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # fp64 stays fp64
        return -F.cross_entropy(logits, y, reduction="none")

    pieces = zip(hidden.split(chunk), targets.split(chunk))
    return torch.cat([checkpoint(piece, h, y, use_reentrant=False) for h, y in pieces])


@torch.no_grad()
def copy_weights(policy, actor):
    """Copy policy -> actor. Gathering in the actor's precision (bf16 on GPUs) halves the bytes."""
    for copy, trained in zip(actor.parameters(), policy.parameters(), strict=True):
        copy.copy_(trained.to(copy.dtype).full_tensor())
