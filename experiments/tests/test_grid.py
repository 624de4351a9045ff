"""docs/figures/grid.svg, the picture of grid.py: it shows what the method computes."""

import json
import math
import re

import one_file
import pytest
import torch
from conftest import ROOT

import cer
from docs.figures import grid
from engine.load import load

PICTURE = (ROOT / "docs" / "figures" / "grid.svg").read_text()


@pytest.fixture
def group():
    return json.loads(re.search("<metadata>(.*)</metadata>", PICTURE)[1])


def test_the_picture_is_drawn_from_the_numbers_in_it(group):
    assert group | grid.GROUP == group and grid.draw(group) == PICTURE


def test_the_picture_shows_equation_8(group):
    """P above, then each row of the posterior with its R, then the tokens of the opened cell."""
    W, P = torch.tensor(group["W"]), torch.tensor(group["P"])
    row, column = group["opened"]
    R = cer.cer(W.log(), P.log())
    assert R.tolist() == pytest.approx(group["R"], rel=1e-4)
    assert P.tolist() == group["W"][group["answers"].index(group["reference"])]
    tokens = [p for _, p, _ in group["tokens"]]
    assert "".join(token for token, *_ in group["tokens"]) == "{14 eggs}"
    assert math.prod(tokens) == pytest.approx(group["W"][row][column], rel=1e-4)

    posterior = W / W.sum(1, keepdim=True)
    rows = torch.cat([R[:, None], posterior], 1).flatten()
    shown = re.findall(r">(\d?\.\d{3})</text>", PICTURE)
    expected = [*P.tolist(), *rows.tolist(), *tokens]
    assert [float(x) for x in shown] == pytest.approx(expected, abs=0.00051)
    shown = re.findall(r">W (\.\d{3})</text>", PICTURE)
    expected = [*W.flatten().tolist(), W[row, column].item()]
    assert [float(x) for x in shown] == pytest.approx(expected, abs=0.00051)


def test_a_pocket_calculator_agrees(group):
    """The two lines of arithmetic hold, up to one in the last digit, since they are rounded."""
    lines = re.findall(r">(\.\d{3} [/·] [^<=]*) = (\.\d{3})<", PICTURE)
    row, column = group["opened"]
    share = group["W"][row][column] / sum(group["W"][row])
    assert [float(value) for _, value in lines] == pytest.approx([share, group["R"][row]], abs=5e-4)
    for formula, value in lines:
        assert eval(formula.replace("·", "*")) == pytest.approx(float(value), abs=0.0015)


def test_it_measures_what_one_file_computes(toy_model_dir):
    model, tokenizer = load(toy_model_dir, "cpu")
    found = grid.measure(model, tokenizer, grid.GROUP)
    prompt = tokenizer.encode(grid.GROUP["question"] + "\n")
    solutions, answers = grid.GROUP["solutions"], grid.GROUP["answers"]
    contexts = [prompt + tokenizer.encode(solution + "\n\\boxed") for solution in solutions]
    for answer, line in zip(answers, found["W"]):
        scores = one_file.log_pi(model, tokenizer, contexts, answer)
        assert line == pytest.approx(scores.exp().tolist(), rel=1e-3)
    row, column = grid.GROUP["opened"]
    product = math.prod(p for _, p, _ in found["tokens"])
    assert product == pytest.approx(found["W"][row][column], rel=1e-4)
    # So no other way to close the box is left out of the product.
    pieces = one_file.token_bytes(tokenizer).values()
    assert sum(b"}" in piece for piece in pieces) == 1
    texts = [f"{s}\n\\boxed{{{a}}}" for s, a in zip(solutions, answers)]
    completions = [tokenizer.encode(text) for text in texts]
    boxes = [one_file.cut(tokenizer, ids) for ids in completions]
    R = one_file.rewards(model, tokenizer, prompt, boxes, [grid.GROUP["reference"]])
    assert found["R"] == pytest.approx(R.tolist(), rel=1e-4)
