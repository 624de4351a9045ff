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
import runpy
import shutil
import sys
from pathlib import Path

import matplotlib
from pytest import approx, importorskip

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
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    names, different, lesson = run(lambda code: re.sub("QUESTIONS, STEPS = .*", short, code))
    for kind, line, shown, printed in different:
        assert kind == "text about" and form(printed) == form(shown), f"line {line}: {printed}"
    assert Path("runs/lesson/curves.svg").is_file()

    posterior, blocks = names["posterior"], str(BLOCK.findall(LESSON.read_text()))
    worked = names["joint"], posterior, posterior * names["likelihood"][:, :1]
    known = [x for table in worked for x in table.flatten().tolist()]
    # Other seeds, exercises, and what stands in Measurements and Theory.
    known += [0.39, 0.8, 0.02, 0.25, 0.04, 0.86, 0.098, 0.102, 0.1, 0.15]
    known += [0.65, 0.69, 0.57, 0.83, 0.87]
    known += [0.788, 0.893, 0.937, 0.955, 0.199, 0.094, 0.05, 0.032, 0.977, 0.951, 0.98, 0.95, 0.2]
    known += [0.56, 0.68, 0.021, 0.018, 0.024, 0.023, 0.016, 0.49, 0.455, 0.117]
    known += [0.212, 0.132, 0.039, 0.195]  # slips, in test_theory
    verbatim = names["rewards_of"]([0, 0, 0, 2], [0, 1, 1, 1])  # of exercise 2
    assert verbatim[0] < verbatim.mean()
    known += [*verbatim.tolist(), verbatim.mean().item(), 0.075, 0.478]
    group, row, P = (names[name] for name in ("group", "row", "P"))  # of "3" in section 9
    in_words = [(x, P[i]) for i, x in zip(P, row) if "three" in group["answers"][i]]
    share = sum(x for x, _ in in_words)
    assert share.item() == approx(1 / 3, abs=0.01)
    known.append((sum(x * p for x, p in in_words) / share).item())
    measured = (
        (ROOT / "docs" / "measurements.md").read_text().split("\n## Why not ask the model?")[1]
    )
    known += map(float, re.findall(r"\d*\.\d+", measured.split("\n## ")[0]))
    known += map(float, re.findall(r"\d*\.\d+", blocks))
    for x in re.findall(r"(?<![\w.])\.\d\d+", BLOCK.sub("", lesson)):
        assert any(f"{y:.{len(x) - 1}f}" == f"0{x}" for y in known), x


def test_as_a_notebook_it_has_every_block():
    """The command in the lesson makes a cell of each."""
    jupytext = importorskip("jupytext")
    cells = [cell.source for cell in jupytext.read(LESSON).cells if cell.cell_type == "code"]
    blocks = BLOCK.findall(LESSON.read_text())
    assert cells == [code.rstrip("\n") for kind, code in blocks if kind == "python"]


def test_the_picture_moves_one_amount_of_orange(tmp_path, monkeypatch):
    """And its words, which matplotlib writes as comments, are those of the one in docs/."""
    monkeypatch.setattr(sys, "argv", ["orange.py", str(tmp_path / "orange.svg")])
    with matplotlib.rc_context():
        orange = runpy.run_path(str(ROOT / "benchmarks" / "orange.py"))
    pictures = [(folder / "orange.svg").read_text() for folder in (tmp_path, ROOT / "docs")]
    drawn, kept = (re.findall("<!-- .* -->", picture) for picture in pictures)
    assert drawn == kept and "<!-- .443 -->" in kept
    for square in "exact", "verifree", "cer":
        bars = sum((b for b in orange[square].containers if b.get_label() == "reward"), ())
        assert sum(bar.get_width() * bar.get_height() for bar in bars) == approx(0.271)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    _, different, lesson = run()
    for _, line, shown, printed in different:
        print(f"lesson.md, line {line}: shown\n{shown}\nprinted\n{printed}")
    if "--write" in sys.argv:
        LESSON.write_text(lesson)
        shutil.copy("runs/lesson/curves.svg", ROOT / "docs" / "lesson-curves.svg")
    sys.exit(bool(different))
