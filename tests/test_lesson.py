"""docs/lesson.md: its code runs, block after block in one Python, and prints what it shows.

The test trains for ten small steps. For the whole lesson, three minutes on one core:

    python tests/test_lesson.py            # compare with what is shown
    python tests/test_lesson.py --write    # put what is printed into the lesson, and its figure

Numbers in a block "text about" depend on the rounding of the machine, and on the steps of training.
The test compares only the form of such a block, and `python tests/test_lesson.py` all of it.
"""

import contextlib
import io
import re
import shutil
import sys
from pathlib import Path

import torch
from pytest import approx, importorskip

sys.path.append(sys.path[0] + "/..")  # for this file as a script
sys.path.append(sys.path[0] + "/../examples")
import one_file
from test_theory import EGGS, PRIOR, table

from cer import cer, exact_cer
from engine.load import load
from rloo import leave_one_out

ROOT = Path(__file__).parents[1]
LESSON = ROOT / "docs" / "lesson.md"
BLOCK = re.compile(r"^```(python|text|text about)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(change=lambda code: code):
    """Run the code, changed -> its names, where a block does not show what is printed (kind, line,
    shown, printed), and the lesson with what is printed."""
    source, names, printed, different = LESSON.read_text(), {}, "", []

    def replace(block):
        nonlocal printed
        kind, text = block.groups()
        line = source.count("\n", 0, block.start()) + 1
        if kind == "python":
            assert not printed, f"printed before line {line}, but not shown: {printed}"
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                exec(compile("\n" * line + change(text), str(LESSON), "exec"), names)
            printed = stdout.getvalue()
            return block[0]
        if text != printed:
            different.append((kind, line, text, printed))
        text, printed = printed, ""
        return f"```{kind}\n{text}```"

    return names, different, BLOCK.sub(replace, source)


def form(text):
    """Without samples (after a bar) and the steps of training, and with # for numbers."""
    text = re.sub(r"\|.*|^to step .*\n", "", text, flags=re.MULTILINE)
    return re.sub(r" *\d+(\.\d+)?(e-\d+)?", " #", text)


def test_the_code_prints_what_is_shown(toy_model_dir, tmp_path, monkeypatch):
    """And each decimal of the text is in a block, in the worked example or in an exercise."""
    monkeypatch.chdir(tmp_path)
    start, short = "tasks.toy_model.warm_start", "QUESTIONS, STEPS = 2, 10"
    monkeypatch.setattr(start, lambda out, seed: shutil.copytree(toy_model_dir, out))
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    names, different, lesson = run(lambda code: re.sub("QUESTIONS, STEPS = .*", short, code))
    for kind, line, shown, printed in different:
        assert kind == "text about" and form(printed) == form(shown), f"line {line}: {printed}"
    assert Path("runs/lesson/curves.svg").is_file()

    posterior, blocks = names["posterior"], str(BLOCK.findall(LESSON.read_text()))
    worked = names["joint"], posterior, posterior * names["likelihood"][:1]
    known = [x for table in worked for x in table.flatten().tolist()]
    # Sums, A', another machine's slips, a "14" in a slip's place, exercises,
    # other seeds, and Measurements.
    known += [0.25, 0.86, 0.96, 0.39, 0.04, 0.098]
    known += [0.65, 0.69, 0.57, 0.83, 0.87]
    known += [0.788, 0.893, 0.937, 0.955, 0.199, 0.094, 0.05, 0.032]
    known += [0.195]  # in test_theory
    verbatim = names["rewards_of"]("AAAC", ["14", "14 eggs", "14 eggs", "14 eggs"])  # exercise 1
    assert verbatim[0] < verbatim.mean()
    known += [*verbatim.tolist(), verbatim.mean().item()]
    group, log_W, P = (names[name] for name in ("group", "log_W", "P_of_sample"))  # of section 9
    right = [p.item() for i, p in P.items() if group["answers"][i] not in ("a few days", "1.5")]
    assert [min(right), max(right)] == approx([0.0001, 0.387], abs=0.0005)
    row = log_W[group["distinct_answers"].index("3")].softmax(0)
    in_words = [(x, P[i]) for i, x in zip(P, row) if "three" in group["answers"][i]]
    share = sum(x for x, _ in in_words)
    assert share.item() == approx(1 / 3, abs=0.01)
    known += [(sum(x * p for x, p in in_words) / share).item(), max(right)]
    known += [x for row in [*FOURTH, *SEVENTEEN, *COPIES] for x in row]
    known += map(float, re.findall(r"\d*\.\d+", blocks))
    for x in re.findall(r"(?<![\w.])\.\d\d+", BLOCK.sub("", lesson)):
        assert any(f"{y:.{len(x) - 1}f}" == f"0{x}" for y in known), x


def test_naive_rewards_and_cut_are_those_of_one_file(toy_model_dir, tokenizer):
    """Also without a box, with an empty one, with two, and with one that is left open."""
    model, _ = load(toy_model_dir, "cpu")
    names = {"model": model, "tokenizer": tokenizer, "torch": torch}
    for kind, code in BLOCK.findall(LESSON.read_text()):
        if kind == "python" and re.search("^def (cut|log_pi|naive_rewards)", code, re.M):
            exec(re.split(r"\n\n\n(?!def)", code)[0], names)
    texts = [r"\boxed{7} \boxed{14}", "no box", r"so \boxed{}", r"\boxed{14} \boxed{1", r"\boxed{9"]
    texts = [tokenizer.encode(each) for each in texts]
    found = [names["cut"](ids) for ids in texts]
    prompt = tokenizer.encode("How many eggs?\n")
    R = names["naive_rewards"](prompt, texts, "14")
    boxes = [one_file.cut(tokenizer, ids) for ids in texts]
    assert found == boxes and found[2][1] == ""
    expected = one_file.rewards(model, tokenizer, prompt, boxes, ["14"])
    assert R.tolist() == approx(expected.tolist(), rel=1e-5)
    assert (R > 0).tolist() == [True, False, False, True, False]
    assert not names["naive_rewards"](prompt, texts[1:2], "14").any()


def rows_under(head):
    """The numbers of a table in the lesson, row by row."""
    found = LESSON.read_text().split(f"\n| {head} ")[1].split("\n\n")[0].split("\n")[2:]
    return [[float(x) for x in re.findall(r"[+-]?\d*\.\d+|(?<= )0(?= )", row)] for row in found]


FOURTH, SEVENTEEN, COPIES = map(rows_under, ["the fourth sample", "the slip to", "a copy of A"])
EGGS_AND_A_PRIME = torch.cat([EGGS, table([0.04, 0.86, 0.05, 0.05])])


def rewards_and_advantages(s, a, eggs):
    R = cer(eggs[s][:, a].T.log(), eggs[s, 0].log())
    return R, leave_one_out(R)


def test_the_slips_receive_what_the_lesson_says():
    """To "18", and to "17", to which only the own solution, A or A', leads: it receives its P."""
    for (s, a), told in zip([(1, 2), (2, 3), (0, 0)], FOURTH, strict=True):
        R, advantage = rewards_and_advantages([0, 0, 0, s], [0, 1, 2, a], EGGS)
        assert [*R, advantage[2]] == approx(told, abs=0.0005)
    for own, told in zip((0, 3), SEVENTEEN, strict=True):
        eggs = torch.cat([EGGS_AND_A_PRIME, torch.zeros(4, 1)], 1)
        eggs[own] += table(0, -0.01, 0, 0, 0.01)
        R, advantage = rewards_and_advantages([own, 0, 1, 2], [4, 0, 2, 3], eggs)
        assert R[0] == approx(eggs[own, 0])
        assert [eggs[own, 0], R[0], R[1], advantage[0]] == approx(told, abs=0.0005)
        assert (advantage[0] > advantage[1]) == (own == 0)


def test_a_copy_receives_the_p_of_its_solution():
    """More than the reference, if this P is above rho of the reference. A' is all but absent."""
    copies = torch.cat([0.98 * EGGS_AND_A_PRIME, 0.02 * torch.eye(4)], 1)
    rho = exact_cer(torch.cat([PRIOR, table(1e-12)]), copies.double())[:, 0]
    assert rho[[4, 7, 0]].tolist() == approx(COPIES[0], abs=0.0005)
    assert rho[4:].tolist() == approx(copies[:, 0].tolist())


def test_as_a_notebook_it_has_every_block():
    """The command in the lesson makes a cell of each."""
    jupytext = importorskip("jupytext")
    cells = [cell.source for cell in jupytext.read(LESSON).cells if cell.cell_type == "code"]
    blocks = BLOCK.findall(LESSON.read_text())
    assert cells == [code.rstrip("\n") for kind, code in blocks if kind == "python"]


if __name__ == "__main__":
    _, different, lesson = run()
    for _, line, shown, printed in different:
        print(f"lesson.md, line {line}: shown\n{shown}\nprinted\n{printed}")
    if "--write" in sys.argv:
        LESSON.write_text(lesson)
        shutil.copy("runs/lesson/curves.svg", ROOT / "docs/figures/lesson-curves.svg")
    sys.exit(bool(different))
