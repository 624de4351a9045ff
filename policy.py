"""Tokens: pi_theta, the language model. Load it, sample from it, score with it, train it.

The only file that knows padding, masks and the shift by one. Two copies of the model serve one run:
- the *policy* is trained: fp32 weights sharded over the ranks by FSDP2, bf16 compute. Adam at a
  learning rate of 1e-6 moves bf16 weights almost never: the update is smaller than their rounding.
- the *actor* samples, scores, evaluates and is saved: a plain Hugging Face model in bf16 on every
  rank, a copy of the policy made once a step, so that no rank waits for another meanwhile.
On a CPU both compute in fp32.
"""

import datetime
import logging
import os
import types
from dataclasses import dataclass

import jinja2
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
)
from transformers.cache_utils import DynamicLayer

from data import InputError, Problem, chat_messages, first_line
from vocabulary import vocabulary

# A base model ends its text with one token, a chat model its turn with another: stop on either.
STOPS = {"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "<end_of_turn>"}


# ------------------------------------------------------------------------------------------ loading


def load(name_or_dir, device, scores=True):
    """The actor, in bf16 on a GPU and fp32 on a CPU, and its tokenizer -> (model, tokenizer).
    scores=False: a model that only has to generate, as a verifier does, may be of any layout."""
    tokenizer = from_pretrained(AutoTokenizer, name_or_dir)
    on_gpu = torch.device(device).type == "cuda"
    model = load_model(name_or_dir, device, torch.bfloat16 if on_gpu else torch.float32)
    neutralise_generation(model, tokenizer)
    if scores:
        check_model(model, tokenizer)
    return model, tokenizer


def load_model(name_or_dir, device, dtype):
    """A Hugging Face causal language model, in eval mode."""
    options = {"dtype": dtype, "attn_implementation": "sdpa", "use_safetensors": True}
    return from_pretrained(AutoModelForCausalLM, name_or_dir, **options).to(device).eval()


def require_memory(name_or_dir, microbatch_tokens, longest_row, cpu_offload):
    """Refuse a run that cannot fit before it loads anything: an estimate, from the shapes alone."""
    config, cuda = from_pretrained(AutoConfig, name_or_dir), torch.cuda.is_available()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            model.tie_weights()
        hidden, mlp, layers = config.hidden_size, config.intermediate_size, len(model.model.layers)
    except Exception as error:  # a door: transformers refuses in a dozen ways
        what = f"{name_or_dir}: not laid out as Llama, Qwen and most others are; not supported"
        raise InputError(f"{what} ({first_line(error)})") from error
    parameters = sum(p.numel() for p in model.parameters())
    width = 2 if cuda else 4  # bytes of a value in the actor and of an activation

    def needed(ranks, tokens, cpu_offload):
        """-> GB for (the model, a micro-batch)."""
        policy = 16 * parameters / ranks  # fp32 weights, gradients, Adam's two moments
        policy = 0 if cpu_offload and cuda else policy
        kept = layers * hidden + 2 * (8 * hidden + 4 * mlp)  # each layer's input, and one layer
        logits = 3 * 4 * LOGITS_AT_ONCE * config.vocab_size
        return (width * parameters + policy) / 1e9, (width * tokens * kept + logits) / 1e9

    (available, where), world = memory(), dist.get_world_size()
    tokens = max(microbatch_tokens, longest_row)
    state, batch = needed(world, tokens, cpu_offload)
    if state + batch <= available:
        return
    ways = {f"torchrun on {k} GPUs": (k, tokens, cpu_offload) for k in range(world + 1, 65) if cuda}
    ways = dict([way for way in ways.items() if sum(needed(*way[1])) <= available][:1])
    ways["--cpu-offload"] = world, tokens, True
    ways[f"--microbatch-tokens {longest_row}"] = world, longest_row, cpu_offload
    ways = [way for way, how in ways.items() if sum(needed(*how)) <= available]
    raise InputError(
        f"{name_or_dir} needs about {state:.0f} GB for weights, gradients and Adam of a "
        f"{parameters / 1e9:.1f}B model at world size {world}, and {batch:.0f} GB for a batch of "
        f"{tokens} tokens; {where} has {available:.0f} GB: "
        + (f"use {' or '.join(ways)}" if ways else "use a smaller model")
    )


def memory():
    """-> (GB that one rank can use, where)."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] / 1e9, "this GPU"
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return whole / int(os.environ.get("LOCAL_WORLD_SIZE", 1)), "this machine"


def from_pretrained(auto_class, name_or_dir, **options):
    try:
        return auto_class.from_pretrained(name_or_dir, trust_remote_code=False, **options)
    except Exception as error:  # a door: broken files raise a dozen kinds
        if os.path.isdir(name_or_dir):
            what = f"{name_or_dir}: not a Hugging Face model directory ({first_line(error)})"
            raise InputError(what) from error
        raise InputError(
            f"cannot load the model {name_or_dir}: no such directory, and the Hugging Face hub did "
            f"not give it ({first_line(error)}); a local directory works too: --model DIR"
        ) from error


def neutralise_generation(model, tokenizer):
    """Replace the hub's generation settings (top-k 20, penalties): generate() would merge them into
    ours. The ids of the embedding's last rows spell no token and are never sampled (a trained model
    gives them next to no probability, so scores leave them in the softmax)."""
    stops = model.generation_config.eos_token_id or []
    stops = {*([stops] if isinstance(stops, int) else stops), tokenizer.eos_token_id}
    stops |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.content in STOPS}
    stops = sorted(i for i in stops - {None} if i < len(tokenizer))
    if not stops:
        raise InputError("neither the model nor the tokenizer names a token that ends the text")
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
    if not (hasattr(model, "lm_head") and hasattr(model.base_model, "layers")):
        raise InputError(f"{kind}: not laid out as Llama, Qwen and most others are; not supported")
    if getattr(model.config, "attention_dropout", 0):
        raise InputError(f"{kind}: attention_dropout must be 0, or training is not on-policy")
    if ids > model.get_input_embeddings().weight.shape[0]:
        raise InputError(f"the tokenizer has {ids} ids, more than the model has embeddings")
    prompt = torch.tensor([vocabulary(tokenizer).encode(r"so \boxed")], device=model.device)
    config = sampling_config(model, max_new_tokens=2, output_logits=True, output_scores=True)
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    if {type(layer) for layer in out.past_key_values.layers} != {DynamicLayer}:
        raise InputError(f"{kind}: only full attention is supported (no sliding window, no linear)")
    for logits, scores in zip(out.logits, out.scores):
        assert torch.equal(logits[:, :ids], scores[:, :ids]), "generate() changes the logits"
    hidden = model.base_model(input_ids=prompt, use_cache=False).last_hidden_state
    difference = model.lm_head(hidden[:, -1]).float() - out.logits[0]
    if difference.norm() > 0.1 * out.logits[0].norm():  # bf16 rounds; a scale or soft cap shows
        raise InputError(f"{kind}: its logits are not lm_head(hidden state); not supported")


def encode_prompt(tokenizer, problem):
    """The paper's prompt as token ids, through the chat template; plain text where the tokenizer
    has none."""
    messages = chat_messages(problem)
    if tokenizer.chat_template:
        options = {"add_generation_prompt": True, "return_dict": False}
        try:
            return tokenizer.apply_chat_template(messages, **options)
        except jinja2.TemplateError as error:
            raise InputError(
                f"the chat template refuses the prompt: {first_line(error)}"
            ) from error
    return tokenizer.encode("".join(message["content"] + "\n\n" for message in messages))


# ----------------------------------------------------------------------------------------- sampling


@dataclass(frozen=True)
class Rollout:
    """One question with its N samples."""

    problem: Problem
    prompt: list[int]
    completions: list[list[int]]  # N, as sampled, the stop token included
    texts: list[str]  # N, the same as text
    cuts: list[int]  # N; completions[i][:cuts[i]] is the solution s_i (no answer: all of it)
    answers: list[str | None]  # N; a_i, or None: no closed box, or cut off by the length limit
    truncated: list[bool]  # N; cut off by the length limit
    entropies: list[float]  # N; of the next token, in nats, mean over the completion

    @property
    def answered(self):
        return [i for i, answer in enumerate(self.answers) if answer is not None]

    def context(self, i):
        """q and s_i as token ids, up to just before the brace of the box."""
        return self.prompt + self.completions[i][: self.cuts[i]]


def sample(model, tokenizer, problems, prompts, n, max_new_tokens, **settings):
    """n samples of each problem -> list[Rollout]. prompts: token ids; settings: of generate."""
    vocab = vocabulary(tokenizer)
    rows = [prompt for prompt in prompts for _ in range(n)]
    completions, entropies = generate(model, rows, max_new_tokens, **settings)
    rollouts = []
    for k, (problem, prompt) in enumerate(zip(problems, prompts)):
        of_problem = slice(k * n, (k + 1) * n)
        group = completions[of_problem]
        truncated = [ids[-1] not in model.generation_config.eos_token_id for ids in group]
        # Cut off by the length limit is no answer, even after a box: the model had not finished.
        found = [None if cut else vocab.locate_answer(ids) for ids, cut in zip(group, truncated)]
        rollouts.append(
            Rollout(
                problem=problem,
                prompt=prompt,
                completions=group,
                texts=[vocab.join(ids).decode("utf-8", "replace") for ids in group],
                cuts=[f[0] if f else len(ids) for f, ids in zip(found, group)],
                answers=[f[1] if f else None for f in found],
                truncated=truncated,
                entropies=entropies[of_problem],
            )
        )
    return rollouts


def sampling_config(model, temperature=1.0, top_p=1.0, top_k=0, **settings):
    """The defaults are the model's own distribution. temperature 0 is greedy; top_k 0 is all."""
    greedy = {"do_sample": False}
    drawn = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    return GenerationConfig(
        **(drawn if temperature > 0 else greedy),
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id,
        suppress_tokens=model.generation_config.suppress_tokens,
        return_dict_in_generate=True,
        **settings,
    )


class EntropyProbe(LogitsProcessor):
    """Looks at the logits of every step of generate() and hands them on as they are."""

    def __init__(self):
        self.steps = []  # [rows] each

    def __call__(self, ids, logits):
        self.steps.append(Categorical(logits=logits.float(), validate_args=False).entropy())
        return logits


@torch.no_grad()
def generate(model, prompts, max_new_tokens, piece=256, progress=None, **settings):
    """Sampled completions of prompts (lists of ids) -> (lists of ids, each up to its first stop;
    for each the mean entropy of its next tokens under the model, in nats).

    model.generate() runs in pieces of a few hundred tokens. Between pieces the finished rows leave
    the batch and the KV cache, so that the last long rows do not drag the others along. As many
    rows start as fit in memory for one piece more; when they have grown too long to fit, some wait
    with what they have and go on later, in a batch of their own length. settings: of
    sampling_config. progress(k) is called when k more rows are finished.
    """
    completions, entropies = [[] for _ in prompts], [0.0] * len(prompts)
    stops = set(model.generation_config.eos_token_id)
    budget = tokens_that_fit(model)
    waiting = list(range(len(prompts)))
    while waiting:
        # The shortest first, padded on the left, so that all rows end in one column.
        waiting.sort(key=lambda i: len(prompts[i]) + len(completions[i]))
        rows = [prompts[i] + completions[i] for i in waiting]
        _, start = next(batches([len(row) + piece for row in rows], budget))
        alive, waiting = waiting[:start], waiting[start:]
        ids = pad(rows[:start], left=True).to(model.device)
        mask = pad([[1] * len(row) for row in rows[:start]], left=True).to(model.device)
        cache = None
        while alive:
            room = max_new_tokens - min(len(completions[i]) for i in alive)
            config = sampling_config(model, max_new_tokens=min(piece, room), **settings)
            probe = EntropyProbe()
            out = model.generate(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                generation_config=config,
                logits_processor=[probe],
            )
            sampled = out.sequences[:, ids.shape[1] :].tolist()
            entropy = torch.stack(probe.steps, 1).tolist()
            keep = []
            for row, i in enumerate(alive):
                new = sampled[row][: max_new_tokens - len(completions[i])]
                stop = next((t for t, token in enumerate(new) if token in stops), None)
                new = new if stop is None else new[: stop + 1]
                completions[i] += new
                entropies[i] += sum(entropy[row][: len(new)])
                if stop is None and len(completions[i]) < max_new_tokens:
                    keep.append(row)
            if progress:
                progress(len(alive) - len(keep))
            fit = max(1, budget // (out.sequences.shape[1] + piece))
            if waiting and len(keep) < fit // 2:
                fit = 0  # half empty: all wait, and the next batch is full
            waiting += [alive[row] for row in keep[fit:]]
            keep = keep[:fit]
            alive = [alive[row] for row in keep]
            if alive:
                rows = torch.tensor(keep, device=model.device)
                ids, cache = out.sequences[rows], out.past_key_values
                mask = F.pad(mask[rows], (0, ids.shape[1] - mask.shape[1]), value=1)
                cache.batch_select_indices(rows)
    return completions, [total / len(ids) for total, ids in zip(entropies, completions)]


def pad(lists, left=False):
    """Lists of numbers -> one tensor [len(lists), longest], filled with 0."""
    width = max(map(len, lists))
    fill = [[0] * (width - len(numbers)) for numbers in lists]
    pairs = zip(fill, lists) if left else zip(lists, fill)
    return torch.tensor([first + second for first, second in pairs])


def tokens_that_fit(model):
    """Tokens to hold at once: their KV cache may take half of the GPU's free memory, or 4 GiB on a
    CPU, and what one layer computes when they are read in the other half."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    kv = 2 * config.num_hidden_layers * kv_heads * head_dim
    layer = 4 * (config.hidden_size + config.intermediate_size)
    bytes_a_token = max(kv, layer) * model.dtype.itemsize  # Qwen3-4B in bf16: 144 KiB, by its KV
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] // 2 // bytes_a_token
    return (4 << 30) // bytes_a_token


# ----------------------------------------------------------------------------------------- training


def shard(model, cpu_offload=False):
    """The policy, of a model on the CPU: FSDP2 over all ranks (also over one), fp32 shards and
    gradient sums, bf16 compute on GPUs, activations recomputed in the backward pass. Adds
    .logprobs(ids). cpu_offload keeps shards, gradients and Adam in the CPU's memory."""
    options = {}
    if torch.cuda.is_available():
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options["mp_policy"] = bf16
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for layer in model.base_model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.logprobs = types.MethodType(logprobs, model)
    register_fsdp_forward_method(model, "logprobs")
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:  # the older name
        model.gradient_checkpointing_enable()
    return model.train()


def logprobs(model, ids):
    """ids [b, L], padded on the right -> log pi(ids[:, t] | ids[:, :t]) [b, L], fp32; 0 at t = 0.

    Causal attention sees nothing to the right, so right-padded rows need no mask; pads need weight
    0 in the loss.
    """
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return F.pad(token_logprobs(hidden[:, :-1], model.lm_head, ids[:, 1:]), (1, 0))


LOGITS_AT_ONCE = 1024  # tokens


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


@dataclass(frozen=True)
class Row:
    """One training row. The loss is -sum(weights * log pi(ids)), with one weight for each token."""

    ids: list[int]
    weights: list[float]


def batches(lengths, budget):
    """Cut ascending lengths into runs whose padded size stays in the budget -> (start, end)."""
    start = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or (end + 1 - start) * lengths[end] > budget:
            yield start, end
            start = end


def microbatches(rows, token_budget):
    """This rank's share of the rows, in padded batches of ids [b, L] and weights [b, L].

    All rows (the same list on every rank) are sorted by length and dealt round-robin, and batches
    are cut by the length of the longest row dealt to any rank. So all ranks run equally many
    batches of nearly equal size, as FSDP's collective calls need, and hardly anything is padding.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    blank = Row(rows[0].ids[:1], [0.0])
    rows = sorted(rows + [blank] * (-len(rows) % world), key=lambda row: len(row.ids))
    mine, longest = rows[rank::world], [len(row.ids) for row in rows[world - 1 :: world]]
    for start, end in batches(longest, token_budget):
        batch = mine[start:end]
        yield pad([row.ids for row in batch]), pad([row.weights for row in batch])


@torch.no_grad()
def copy_weights(policy, actor):
    """policy -> actor, in the actor's precision."""
    for ours, theirs in zip(actor.parameters(), policy.parameters(), strict=True):
        ours.copy_(theirs.full_tensor())


# -------------------------------------------------------------------------------------------- ranks


def init_ranks():
    """Join the process group of torchrun, or open one of a single process -> device."""
    transformers.utils.logging.disable_progress_bar()  # "loading", "writing": not what we wait for
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    # Ranks wait for the one that samples longest, and for the one that writes.
    patience = datetime.timedelta(hours=2)
    if dist.is_initialized():
        pass
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=patience)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_rank() > 0:  # one rank speaks for all
        for handler in logging.getLogger().handlers:
            handler.setLevel(logging.ERROR)
    return compute_device()


def compute_device():
    """Where this rank computes."""
    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def gather(part):
    """Every rank's list, end to end, on every rank."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return [item for part in parts for item in part]
