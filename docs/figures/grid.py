r"""The picture of one group: P, the posterior and R, and one cell opened into the tokens behind it.

    python docs/figures/grid.py docs/figures/grid.svg     # ten seconds, if runs/lesson is there

The numbers are those of the toy's model after its warm start, in runs/lesson, where section 7 of
docs/lesson.md makes it. If it is not there, this script makes it, which takes a minute or two. The
four samples are written by hand, as the model writes. The picture holds its numbers as JSON.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's modules
from cer import rewards
from engine.load import load
from examples import one_file
from tasks import toy_model

GROUP = {
    "question": "Ana has 3 bags of 4 eggs and 2 more eggs. How many eggs?",
    "reference": "14",
    "kinds": ["A", "A", "B", "C"],  # of the solutions
    "solutions": ["3*4=12; 12+2", "3*4=12 eggs; 12+2", "4+2=6; 3*6", "3+4=7; 7+2"],
    "answers": ["14", "14 eggs", "18", "9"],
    "opened": [1, 0],  # row and column: "14 eggs" after the solution of the first sample
}
HUES = {"A": "#9dbde6", "B": "#98d3b6", "C": "#d0abdc"}  # orange.py's, deeper: cells dilute them
LEFT, TOP, WIDTH, HEIGHT = 196, 182, 146, 56  # of the cells, with the gaps between them


def measure(model, tokenizer, group):
    """-> the group with W, P, R and, for each token of the opened cell, its text, its probability,
    and the likeliest other token, if there is one above .05."""
    prompt = tokenizer.encode(group["question"] + "\n")
    contexts = [tokenizer.encode(s + "\n\\boxed") for s in group["solutions"]]
    boxes = [tokenizer.encode("{" + answer + "}") for answer in group["answers"]]
    samples = [context + box for context, box in zip(contexts, boxes)]
    R, scores = rewards(model, tokenizer, prompt, samples, group["reference"])
    row, column = group["opened"]
    before, box = prompt + contexts[column], boxes[row]
    with torch.no_grad():  # the line of a token is the one before it
        lines = one_file.next_token_log_probs(model, [before], box)[0, :-1].exp()
    tokens = []
    for token, line in zip(box, lines):
        others = [k for k in line.topk(3).indices.tolist() if k != token and line[k] > 0.05]
        tokens.append([tokenizer.decode(token), line[token].item(), tokenizer.decode(others[:1])])
    W, P = scores.log_W.exp().tolist(), scores.log_P.exp().tolist()
    return group | {"W": W, "P": P, "R": R.tolist(), "tokens": tokens}


def number(x):
    return f"{x:.3f}".removeprefix("0")


def text(x, y, words, size=13, more=""):
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x}" y="{y}" font-size="{size}" {more}>{words}</text>'


def box(x, y, width, height, fill, more=""):
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect {place} rx="4" fill="{fill}" {more}/>'


def bar(x, y, share):
    """Orange is reward, as in orange.py."""
    return box(x, y, round(80 * share, 1), 10, "#f0932b")


BOLD, GREY, MIDDLE = 'font-weight="bold"', 'fill="#555"', 'text-anchor="middle"'
CODE, FRAME = 'font-family="monospace"', 'stroke="#222" stroke-width="2"'


def draw(group):
    """The group with its numbers -> the picture, as SVG."""
    W, P, R, (row, column) = (group[name] for name in ["W", "P", "R", "opened"])
    posterior = [[w / sum(line) for w in line] for line in W]
    reference, answer = f"“{group['reference']}”", f"“{group['answers'][row]}”"
    out = [text(20, 28, group["question"], 15, BOLD)]
    out += [text(880, 28, f"reference: {reference}", 15, f'{BOLD} text-anchor="end"')]

    out += [text(20, 68, "four solutions", 13, BOLD), text(20, 122, "P", 17, BOLD)]
    out += [text(42, 118, f"how likely {reference} is"), text(42, 134, "after this solution")]
    for j, (kind, solution) in enumerate(zip(group["kinds"], group["solutions"])):
        x = LEFT + j * WIDTH
        out += [box(x, 46, 140, 44, HUES[kind]), text(x + 70, 64, kind, 14, f"{BOLD} {MIDDLE}")]
        out += [text(x + 70, 82, solution, 12, f"{CODE} {MIDDLE}")]
        out += [text(x + 70, 116, number(P[j]), 16, f"{BOLD} {MIDDLE}")]
        out += [bar(x + 30, 122, P[j] / max(P))]

    out += [text(20, 170, "their answers", 13, BOLD), text(LEFT, 170, "posterior", 13, BOLD)]
    out += [text(LEFT + 82, 170, "how likely it is that this answer came from this solution")]
    out += [text(800, 170, "R", 17, BOLD), text(816, 170, "= row · P")]
    for i, each in enumerate(group["answers"]):
        y = TOP + i * HEIGHT
        out += [text(20, y + 31, f"“{each}”", 15, BOLD), text(800, y + 24, number(R[i]), 16, BOLD)]
        out += [bar(800, y + 30, R[i] / max(P))]
        for j, share in enumerate(posterior[i]):
            x, hue = LEFT + j * WIDTH, HUES[group["kinds"][j]]
            out += [box(x, y, 140, 50, "#f6f6f6")]
            out += [box(x, y, 140, 50, hue, f'fill-opacity="{share:.3f}"')]
            out += [text(x + 70, y + 24, number(share), 16, f"{BOLD} {MIDDLE}")]
            out += [text(x + 70, y + 42, f"W {number(W[i][j])}", 12, f"{GREY} {MIDDLE}")]

    # The opened cell
    x, y = LEFT + column * WIDTH, TOP + row * HEIGHT
    out += [box(x, y, 140, 50, "none", FRAME), box(12, 420, 876, 214, "#fffdf3", FRAME)]
    arrow, lens = (
        f"M{x - 10} 420 V{y + 25} H{x - 2} m-6 -5 l6 5 l-6 5",
        "M40 446 a7 7 0 1 0 -1 1 l8 7",
    )
    out += [f'<path d="{arrow} {lens}" fill="none" {FRAME}/>']
    title = "This cell opened: the text that the model reads, and how likely it is to write "
    out += [text(56, 448, title + answer, 13, BOLD)]
    for k, line in enumerate((group["question"], group["solutions"][column], "\\boxed")):
        out += [text(28, (474, 494, 522)[k], line, 13, f"{CODE} {GREY}")]
    for k, (token, p, other) in enumerate(group["tokens"]):
        x, last = 86 + 84 * k, k + 1 == len(group["tokens"])
        out += [box(x, 504, 62, 26, "#fff", 'stroke="#222"')]
        out += [text(x + 31, 522, token.replace(" ", "␣"), 14, f"{CODE} {MIDDLE}")]
        out += [text(x + 31, 550, number(p), 15, f"{BOLD} {MIDDLE}")]
        out += [text(x + 31, 566, f"or {other}" if other else "", 12, f"{CODE} {GREY} {MIDDLE}")]
        out += [text(x + 73, 550, "=" if last else "×", 15, MIDDLE)]
    w, share, x = number(W[row][column]), number(posterior[row][column]), x + 84
    sums = " + ".join(map(number, W[row]))
    terms = " + ".join(f"{number(each)} · {number(p)}" for each, p in zip(posterior[row], P))
    out += [text(x + 4, 550, f"W {w}", 15, BOLD)]
    out += [text(x + 76, 550, f"how likely {answer} is after this solution", 13, GREY)]
    out += [text(28, 596, "posterior", 13, BOLD), text(104, 596, f"{w} / ({sums}) = {share}")]
    out += [text(x + 76, 596, "W, divided by the sum of its row", 13, GREY)]
    out += [text(28, 620, "R", 13, BOLD), text(104, 620, f"{terms} = {number(R[row])}")]
    out += [text(x + 76, 620, "the mean of P, weighted with the row", 13, GREY)]
    source = "All numbers are those of the toy’s language model before it is trained with CER. "
    out += [text(20, 654, source + "A probability of .000 is below .0005.", 12, GREY)]
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="900" height="668" '
    head += 'viewBox="0 0 900 668" font-family="Arial, sans-serif">'
    head += f"\n<metadata>{json.dumps(group)}</metadata>\n{box(0, 0, 900, 668, '#fff')}\n"
    return head + "\n".join(out) + "\n</svg>\n"


def main(path):
    model = Path("runs/lesson")
    if not model.exists():
        toy_model.warm_start(model, seed=0)
    Path(path).write_text(draw(measure(*load(model, "cpu"), GROUP)))


if __name__ == "__main__":
    main(sys.argv[1])
