"""What waits for a GPU, in its smallest shape: the wide model, the runs, the tables and curves."""

import pytest
import torch
import widen
from conftest import tiny_model

from engine import load

FEW = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2)
MORE = dict(hidden_size=80, num_hidden_layers=4, intermediate_size=112)
MORE |= dict(num_attention_heads=12, num_key_value_heads=6)


@pytest.mark.parametrize("tied", [True, False])
def test_a_wide_model_says_what_the_small_one_says(tied, tmp_path, tokenizer):
    """Also when it has been saved and read again."""
    small = tiny_model(len(tokenizer), "qwen2", tied, head_dim=8, **FEW)
    for weight in small.parameters():
        torch.nn.init.normal_(weight, std=0.3)  # also the biases and the norms
    wide = widen.widen(small, **MORE)
    ids = torch.randint(len(tokenizer), (3, 40))
    expected = small(ids).logits
    assert expected.std() > 0.5
    assert (wide(ids).logits - expected).abs().max() < 1e-4
    load.export(wide, tokenizer, tmp_path / "wide")
    again = load.load_model(tmp_path / "wide", "cpu", torch.float32)
    assert (again(ids).logits - expected).abs().max() < 1e-4
    assert {name: getattr(again.config, name) for name in MORE} == MORE


def test_what_is_added_trains_too():
    """A layer that is added writes nothing, and has gradients for what it writes to old channels."""
    wide = widen.widen(tiny_model(64, "qwen2", head_dim=8, **FEW), **MORE)
    ids = torch.randint(64, (3, 40))
    wide(ids, labels=ids).loss.backward()
    down = wide.model.layers[3].mlp.down_proj.weight
    assert not down.any() and down.grad[:48].all()
