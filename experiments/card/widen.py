"""Make of a small Qwen2 a model of Qwen3-4B's size that says what the small one says.

    python experiments/card/widen.py QWEN2.5-1.5B WIDE       # 4.0B parameters, 8 GB in bf16

It is for timing whole steps of the paper's run, with real samples, where the weights of Qwen3-4B
are not at hand. Channels, heads, neurons and layers are added. What is added reads, and writes
nothing: its weights are random where they read from the channels, and 0 where they write to them.
So the function is the same, up to the rounding of the norms' weights to bf16. (Random and not 0,
because products of zeros take less power, and a card may then be faster.) Training moves all.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's modules
from engine.export import export  # noqa: E402
from engine.load import load_model  # noqa: E402

QWEN3_4B = dict(hidden_size=2560, num_hidden_layers=36, intermediate_size=9728)
QWEN3_4B |= dict(num_attention_heads=32, num_key_value_heads=8)

WRITERS = "embed_tokens", "o_proj", "down_proj"
HEADS = {"q_proj": (0, "queries"), "k_proj": (0, "keys"), "v_proj": (0, "keys")}
HEADS |= {"o_proj": (1, "queries")}  # the side of the weight on which the heads are


def head_places(old, new, size):
    """Where the heads go -> {kind: (rows of the large model, the small one's that go there)}. The
    large model has fewer queries for each head of keys, so it takes copies of these heads."""
    group, fewer = (c.num_attention_heads // c.num_key_value_heads for c in (old, new))
    copies = -(-group // fewer)
    assert copies * old.num_key_value_heads <= new.num_key_value_heads, "too few heads of keys"
    keys, queries = range(copies * old.num_key_value_heads), range(old.num_attention_heads)
    places = {"keys": [(k, k // copies) for k in keys], "queries": []}
    for q in queries:
        key, rest = divmod(q, group)
        copy, place = divmod(rest, fewer)
        places["queries"].append(((key * copies + copy) * fewer + place, q))
    rows = lambda heads: (torch.tensor(heads)[:, None] * size + torch.arange(size)).flatten()  # noqa: E731
    return {kind: [rows(heads) for heads in zip(*pairs)] for kind, pairs in places.items()}


@torch.no_grad()
def widen(small, **shape):
    """A Qwen2 -> a larger one with the same function, in the same type and on the same device."""
    old, device = small.config, small.device
    size = getattr(old, "head_dim", None) or old.hidden_size // old.num_attention_heads
    ratio = old.hidden_size / shape["hidden_size"]  # a norm divides by a mean over all channels
    more = dict(head_dim=size, layer_types=None, rms_norm_eps=old.rms_norm_eps * ratio)
    config = type(old)(**old.to_dict() | shape | more)
    with torch.device("meta"):
        wide = type(small)(config)
    wide = wide.to(small.dtype).to_empty(device=device).eval()
    wide.model.rotary_emb = type(small.model.rotary_emb)(config).to(device)  # it has no parameters
    wide.tie_weights()
    wide.generation_config = small.generation_config

    places, weights = head_places(old, config, size), dict(small.named_parameters())
    for name, target in wide.named_parameters():
        part = name.split(".")[-2]
        target.normal_(float(part.endswith("norm")), 0 if part in WRITERS else 0.02)
        if name not in weights:  # of a layer that is added
            continue
        weight = weights[name] * (ratio**0.5 if part.endswith("norm") else 1)
        side, kind = HEADS.get(part, (0, None))
        to, taken = places.get(kind) or [torch.arange(len(weight))] * 2
        for other, length in enumerate(weight.shape):
            target = target if other == side else target.narrow(other, 0, length)
        target.index_copy_(side, to.to(device), weight.index_select(side, taken.to(device)))
    return wide


if __name__ == "__main__":
    source, directory = sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = widen(load_model(source, device, torch.bfloat16), **QWEN3_4B)
    print(f"{model.num_parameters():,} parameters")
    export(model, AutoTokenizer.from_pretrained(source), directory)
