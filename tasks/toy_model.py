"""The toy's language model: a real Qwen3 of 125K parameters, with a byte-level BPE tokenizer that
is trained on the task's own text.

A short supervised start (`warm_start`) teaches it to compute and to use all 8 forms. Most of its
demonstrations use the wrong method, so the model mixes up the methods, and reinforcement learning
has to teach it the right one. Tokenizer and model run through the same code as Qwen3-4B.
"""

import itertools
import random

import torch
import torch.distributed as dist
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from engine.export import export
from engine.tokens import pad
from runtime.cli import as_input_error, is_rank_0, say
from runtime.files import append_rows
from tasks import toy

# What train.py uses on this task instead of the paper's settings for 4B models. LEARNING_RATE and
# LORA_RATE hold for the toy's own model only.
FLAGS = {
    "dataset": "toy",
    "steps": 200,
    "questions": 16,
    "samples": 8,
    "max_new_tokens": 32,
    "eval_dataset": "toy-test",
    "eval_runs": 4,
    "eval_every": 20,
}
LEARNING_RATE = {"lr": 6e-4, "lr_end": 0.1}
LORA_RATE = {"lr": 2e-3, "lr_end": 0.1}

# This chat template keeps the last message up to the request for a box, which is the question.
CHAT_TEMPLATE = r"{{ messages[-1]['content'].split('\nPlease reason')[0] + '\n' }}"
# No token spans two of these parts. Digits are single tokens, and `boxed` and `{` stay separate.
PARTS = r"\\boxed|[{}]|\d| ?\p{L}+| ?[^\s\p{L}\d{}]|\s+"


def build_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PARTS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    rng, (_, train) = random.Random(0), toy.stories()
    texts = ["".join(toy.demonstration(rng, train)) for _ in range(4000)]
    tokenizer.train_from_iterator(texts + list(toy.NUMBERS), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer):
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=168,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=128,
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        initializer_range=0.06,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3ForCausalLM(config)


def make_model(directory, args):
    """Make the toy's own model for a run, unless the run is resumed -> the directory."""
    torch.set_num_threads(1)  # the model is so small that threads only wait for each other
    if is_rank_0() and not args.resume:
        warm_start(directory, args.seed)
    dist.barrier()
    return str(directory)


def warm_start(directory, seed, steps=900, withheld=()):
    """Train the toy's model on demonstrations and save it, with its tokenizer, in directory.
    withheld: combinations of which nothing is demonstrated. (The tokenizer has read them, but a
    digit is always a token, so it is the same without them.)"""
    torch.manual_seed(seed % 2**63)
    rng, (_, train) = random.Random(seed), toy.stories(withheld=withheld)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    pairs = (tokenizer(list(toy.demonstration(rng, train)))["input_ids"] for _ in itertools.count())
    finetune(model, pairs, steps, batch=64, lr=8e-3, stop=tokenizer.eos_token_id)
    with as_input_error(f"cannot save {directory}"):
        export(model, tokenizer, directory)


def finetune(model, demonstrations, steps, batch, lr, stop):
    """Train a Hugging Face model with a loop of its own, for programs without ranks. (Others use
    sft.py.) demonstrations: an iterator of (prompt ids, completion ids). The model learns the
    completion, followed by the token `stop`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, betas=(0.9, 0.95))
    warm_up = 0.05 if steps > 20 else 0.0  # a share of the steps; torch fails if it is one step
    rates = dict(max_lr=lr, total_steps=steps, pct_start=warm_up, cycle_momentum=False)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, **rates)
    for step in range(1, steps + 1):
        ids, labels = [], []
        for prompt, completion in itertools.islice(demonstrations, batch):
            ids.append(prompt + completion + [stop])
            labels.append([-100] * len(prompt) + completion + [stop])  # -100: not learned
        inputs, targets = pad(ids).to(model.device), pad(labels, value=-100).to(model.device)
        loss = model(input_ids=inputs, labels=targets, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % max(1, steps // 10) == 0:
            say(f"supervised start {step}/{steps}  loss {loss.item():.3f}")


def write_toy(directory):
    """The toy for a program that knows files only -> its model's directory, 2,000 questions to
    train on, and 200 held out."""
    torch.set_num_threads(1)  # as make_model does
    model, files = directory / "start", [directory / name for name in ("toy", "toy-test")]
    warm_start(model, seed=0)
    for file in files:
        append_rows(file, toy.rows(file.name))
    return model, *files
