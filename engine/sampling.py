"""Sampling: a question's prompt as token ids, N completions by Hugging Face's generate(), and each
completion cut into solution and answer. It knows nothing of rewards.
"""

import copy
from dataclasses import dataclass

import jinja2
import torch
from torch.distributions import Categorical
from transformers import LogitsProcessor

from data import InputError, Problem, chat_messages, first_line
from engine.cli import progress
from engine.tokens import batches, pad, vocabulary


@dataclass(frozen=True)
class Rollout:
    """One question with its N samples."""

    problem: Problem
    prompt: list[int]
    completions: list[list[int]]  # N, as sampled, the stop token included
    texts: list[str]  # N, the same as text
    cuts: list[int]  # N; completions[i][:cuts[i]] is the solution s_i (no answer: all of it)
    answers: list[str | None]  # N; a_i, or None: no closed box
    truncated: list[bool]  # N; cut off by the length limit
    entropies: list[float]  # N; of the next token, in nats, mean over the completion

    @property
    def answered(self):
        return [i for i, answer in enumerate(self.answers) if answer is not None]

    def context(self, i):
        """q and s_i as token ids, up to just before the brace of the box."""
        return self.prompt + self.completions[i][: self.cuts[i]]


def encode_prompt(tokenizer, problem):
    """The prompt as token ids, through the chat template; plain text where the tokenizer has
    none."""
    messages = chat_messages(problem)
    if tokenizer.chat_template:
        options = {"add_generation_prompt": True, "return_dict": False}
        try:
            return tokenizer.apply_chat_template(messages, **options)
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template refuses: {first_line(error)}") from error
    return tokenizer.encode("".join(message["content"] + "\n\n" for message in messages))


def sample(model, tokenizer, questions, n, max_new_tokens, **options):
    """n samples of each question -> list[Rollout]. questions: (Problem, prompt ids); options: of
    generate."""
    rows = [prompt for _, prompt in questions for _ in range(n)]
    completions, entropies = generate(model, rows, max_new_tokens, **options)
    stops, rollouts = model.generation_config.eos_token_id, []
    for k, (problem, prompt) in enumerate(questions):
        mine = slice(k * n, (k + 1) * n)
        group = problem, prompt, completions[mine], entropies[mine]
        rollouts.append(to_rollout(vocabulary(tokenizer), stops, *group))
    return rollouts


def to_rollout(vocab, stops, problem, prompt, completions, entropies):
    """An answer is in the last closed box, whether or not the completion was cut off later: base
    models often run on after it."""
    found = [vocab.locate_answer(ids) for ids in completions]
    return Rollout(
        problem=problem,
        prompt=prompt,
        completions=completions,
        texts=[vocab.join(ids).decode("utf-8", "replace") for ids in completions],
        cuts=[f[0] if f else len(ids) for f, ids in zip(found, completions)],
        answers=[f[1] if f else None for f in found],
        truncated=[ids[-1] not in stops for ids in completions],
        entropies=entropies,
    )


# ----------------------------------------------------------------------------------------- generate


def sampling_config(model, temperature=1.0, top_p=1.0, top_k=0, **settings):
    """The defaults are the model's own distribution. temperature 0 is greedy; top_k 0 is all."""
    if temperature > 0:
        settings |= dict(do_sample=True, temperature=temperature, top_p=top_p, top_k=top_k)
    config = copy.deepcopy(model.generation_config)  # its stops, and what is never sampled
    config.update(**settings)
    return config


class EntropyProbe(LogitsProcessor):
    """Looks at the logits of every step of generate() and hands them on as they are."""

    def __init__(self):
        self.steps = []  # [rows] each

    def __call__(self, ids, logits):
        self.steps.append(Categorical(logits=logits.float(), validate_args=False).entropy())
        return logits


@torch.no_grad()
def generate(model, prompts, max_new_tokens, piece=512, name="sample", **settings):
    """Sampled completions of prompts (lists of ids) -> (lists of ids, each up to its first stop;
    for each the mean entropy of its next tokens under the model, in nats).

    model.generate() runs in pieces of a few hundred tokens. After each piece the finished rows
    leave, and the shortest of the others, as many as fit in memory, make up the next batch: so the
    last long rows do not drag the others along. A piece reads its rows anew, which costs one
    forward pass and saves carrying their KV cache about. settings: of sampling_config.
    """
    completions, entropies = [[] for _ in prompts], [0.0] * len(prompts)
    stops, budget = set(model.generation_config.eos_token_id), tokens_that_fit(model)
    running = list(range(len(prompts)))
    bar = progress(name, total=len(prompts), unit="sample")
    while running:
        running.sort(key=lambda i: len(prompts[i]) + len(completions[i]))
        rows = [prompts[i] + completions[i] for i in running]
        _, fit = next(batches([len(row) + piece for row in rows], budget))
        batch, rows, running = running[:fit], rows[:fit], running[fit:]
        ids = pad(rows, side="left").to(model.device)  # on the left, so that all end in one column
        mask = pad([[1] * len(row) for row in rows], side="left").to(model.device)
        room = max_new_tokens - min(len(completions[i]) for i in batch)
        config = sampling_config(model, max_new_tokens=min(piece, room), **settings)
        probe = EntropyProbe()
        probing = dict(generation_config=config, logits_processor=[probe])
        sampled = model.generate(ids, attention_mask=mask, **probing)[:, ids.shape[1] :].tolist()
        for i, new, entropy in zip(batch, sampled, torch.stack(probe.steps, 1).tolist()):
            new = new[: max_new_tokens - len(completions[i])]
            stop = next((t for t, token in enumerate(new, start=1) if token in stops), None)
            completions[i] += new[:stop]
            entropies[i] += sum(entropy[: len(new[:stop])])
            if stop is None and len(completions[i]) < max_new_tokens:
                running.append(i)
            else:
                bar.update()
    bar.close()
    return completions, [total / len(ids) for total, ids in zip(entropies, completions)]


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
