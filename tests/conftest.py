import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import data
import policy
import toy
from policy import Rollout
from vocabulary import vocabulary

torch.set_num_threads(1)  # models this small only lose by threads that wait for each other

SHARED = Path(__file__).parents[2] / "shared" / "data"  # real rows and the real Qwen3 tokenizer


@pytest.fixture(autouse=True)
def ranks():
    """A process group of one, as train.py and evaluate.py open."""
    policy.init_ranks()
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tokenizer():
    return toy.build_tokenizer()


@pytest.fixture(scope="session")
def qwen_tokenizer():
    if not (SHARED / "qwen3_tokenizer").is_dir():
        pytest.skip("the real Qwen3 tokenizer is not here")
    return AutoTokenizer.from_pretrained(SHARED / "qwen3_tokenizer")


@pytest.fixture(scope="session")
def shared_data():
    if not SHARED.is_dir():
        pytest.skip("the sample data sets are not here")
    return SHARED


def tiny_model(rows, family="qwen3", tied=True, seed=0, **settings):
    """Random weights with grouped-query attention, larger than usual so that mistakes show."""
    torch.manual_seed(seed)
    make, model = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
    }[family]
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    shape |= dict(num_key_value_heads=2, intermediate_size=64, max_position_embeddings=512)
    shape |= dict(vocab_size=rows, tie_word_embeddings=tied, initializer_range=0.3)
    config = make(**{**shape, **settings})
    return model(config).eval()


@pytest.fixture(scope="session")
def toy_model_dir(tmp_path_factory):
    """The toy's model after a short warm start: it boxes answers, mostly wrong ones."""
    directory = tmp_path_factory.mktemp("toy") / "model"
    toy.warm_start(directory, seed=0, steps=150)
    return directory


@torch.no_grad()
def naive_logprobs(model, tokenizer, contexts, answer):
    """The definition: for every context a full forward pass for every prefix of the answer, and the
    whole vocabulary searched for the tokens that finish it."""
    table = vocabulary(tokenizer).bytes
    path = tokenizer.encode("{" + answer, add_special_tokens=False)
    missing = [b"".join(table[t] for t in path[i:]) + b"}" for i in range(len(path) + 1)]
    closers = [[v for v, piece in enumerate(table) if piece.startswith(m)] for m in missing]
    result = []
    for context in contexts:
        ways, so_far = [], 0.0
        for i in range(len(path) + 1):
            logits = model(input_ids=torch.tensor([context + path[:i]])).logits
            logp = logits[0, -1].float().log_softmax(-1)
            ways.append(so_far + logp[closers[i]].exp().sum().log())
            so_far = so_far + logp[path[i]] if i < len(path) else so_far
        result.append(torch.stack(ways).logsumexp(0))
    return torch.stack(result)


def rollout_of(tokenizer, texts, reference):
    """A rollout with hand-written completions."""
    vocab, stop = vocabulary(tokenizer), tokenizer.eos_token_id
    completions = [tokenizer.encode(text) + [stop] for text in texts]
    found = [vocab.locate_answer(ids) for ids in completions]
    return Rollout(
        problem=data.Problem("How many eggs?", reference, "toy"),
        prompt=tokenizer.encode("How many eggs?\n"),
        completions=completions,
        texts=texts,
        cuts=[f[0] if f else len(ids) for f, ids in zip(found, completions)],
        answers=[f[1] if f else None for f in found],
        truncated=[False] * len(texts),
        entropies=[0.0] * len(texts),
    )
