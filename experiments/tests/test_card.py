"""What waits for a GPU, in its smallest shape: the wide model, the runs, the tables and curves."""

import re

import pytest
import torch
from conftest import tiny_model

from engine import load
from engine.export import export
from experiments.card import card, widen
from runtime.files import append_rows, read_rows

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
    export(wide, tokenizer, tmp_path / "wide")
    again = load.load_model(tmp_path / "wide", "cpu", torch.float32)
    assert (again(ids).logits - expected).abs().max() < 1e-4
    assert {name: getattr(again.config, name) for name in MORE} == MORE


def test_what_is_added_trains_too():
    """A layer that is added writes nothing, and has gradients for what it could write."""
    wide = widen.widen(tiny_model(64, "qwen2", head_dim=8, **FEW), **MORE)
    ids = torch.randint(64, (3, 40))
    wide(ids, labels=ids).loss.backward()
    down = wide.model.layers[3].mlp.down_proj.weight
    assert not down.any() and down.grad[:48].all()


def drawn(script, lines):
    code, out, err = script(card, f"draw --lines {lines} --out drawn.svg")
    assert code == 0, err
    return out


def test_a_run_is_gathered_and_drawn(script, toy_model_dir, tmp_path):
    """It has ended, so the same command does not begin it again. One that fails is begun again."""
    where = f"--model {toy_model_dir} --data {tmp_path} --out out"
    for code in ["2"], []:
        again = script(card, f"math {where} --only cer --seeds 0{' --rehearse' * (not code)}")
        assert again[0] == 0 and re.findall(r'"code": (.+)}', again[1]) == (code or ["0"])
    assert script(card, f"math {where} --only cer")[1] == ""
    assert script(card, "gather --out out --lines card.jsonl")[0] == 0
    lines = read_rows("card.jsonl")
    made = [(line["kind"], line.get("step")) for line in lines]
    steps = {("held out", step): made.count(("held out", step)) for step in range(3)}
    assert set(steps.values()) == {3} and ("step", 2) in made
    parts = [line["part"] for line in lines if line["kind"] == "part"]
    assert parts.count("update") == 2 and parts.count("evaluate") == 3
    assert "save_checkpoint" not in parts and not [*tmp_path.glob("out/*/checkpoints/step*")]
    assert "math-cer-0, step 2 minus 0" in drawn(script, "card.jsonl")


def test_the_comparisons(script, tmp_path):
    """Of cer after and before, and of dither and nearest, over the questions."""
    rights = {  # run: pass@1 of four questions, before and after
        "math-cer-0": ([0, 0, 1, 0], [1, 0, 1, 1]),
        "squad-nearest-0": ([0, 0, 0, 0], [0.5, 0, 0, 0]),
        "squad-nearest-1": ([0, 0, 0, 0], [0, 0, 0, 0]),
        "squad-dither-0": ([0, 0, 0, 0], [1, 0.5, 0, 0]),
        "squad-dither-1": ([0, 0, 0, 0], [0.5, 0.5, 0, 0]),
    }
    for run, both in rights.items():
        for step, right in zip((0, 30), both):
            for question, value in enumerate(right):
                line = {"kind": "held out", "run": run, "step": step, "question": question}
                lists = {name: [value] for name in card.TITLES}
                append_rows(tmp_path / "lines.jsonl", [line | lists])
    out = drawn(script, tmp_path / "lines.jsonl")
    assert "math-cer-0, step 30 minus 0: 0.500 ± 0.289, 4 questions" in out
    assert "squad-dither-0 minus nearest: 0.250 ± 0.144, 4 questions" in out
    assert "their mean minus nearest: 0.250 ± 0.144, 4 questions" in out


def test_rounding_to_the_nearest_needs_weights_that_are_bf16(script, toy_model_dir, tmp_path):
    code, _, err = script(card, f"rounding --model {toy_model_dir} --data {tmp_path} --out out")
    assert code == 2 and "is not in bf16" in err
