import json

import pyarrow.parquet
import pytest

from engine.tokens import split_answer
from tasks import toy
from tasks.data import Problem, load_problems

BOXES = {
    r"so \boxed{\frac{1}{2}}.": r"\frac{1}{2}",
    r"\boxed{1} and then \boxed{2}": "2",
    r"\boxed{1} and then \boxed{2": "1",  # the last one never closes
    r"\boxed{\left\{ x \right.}": r"\left\{ x \right.",  # escaped braces are symbols
    r"\boxed{a \\}": r"a \\",  # an escaped backslash does not escape the brace
    r"\boxed{a\}": None,
    r"\boxed{a \boxed{3} b}": "3",
    "\\boxed{ 14 }": " 14 ",  # never stripped
    r"\boxed{}": "",
    "\\boxed{two\nlines}": "two\nlines",
    r"}} { \boxed{5}": "5",
    r"\\boxed{5}": "5",
    r"boxed{5}": None,
    r"\boxed 5": None,
    "\\": None,
}


@pytest.mark.parametrize("text, answer", BOXES.items())
def test_split_answer(text, answer):
    found = split_answer(text)
    assert (found and found[1]) == answer
    if found:
        before, after = text[: found[0]], text[found[0] :]
        assert before.endswith(r"\boxed") and after.startswith("{" + answer + "}")


@pytest.fixture
def load_rows(tmp_path):
    """load_rows(rows, limit, verifier): the problems of a file with these rows."""

    def load(rows, *options, **more):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_problems(path, *options, **more)

    return load


def test_the_columns_of_the_hub(load_rows, capsys):
    rows = [  # (reference, row)
        (r"\frac12", {"problem": "a", "solution": r"so \boxed{\frac12}"}),
        ("x", {"problem": "d", "answer": "x", "solution": r"\boxed{y}"}),
        ("7", {"question": "h", "answer": "", "solution": r"\boxed{7}"}),
        (" 14 ", {"question": "b", "answer": " 14 "}),  # never rewritten
        (r"\{1\}", {"question": "b", "answer": r"\{1\}"}),
        ("3", {"question": "b", "answer": r"\boxed{3}"}),  # but for a box around all of it
        ("0", {"question": "c", "answer": 0}),
        ("27.5", {"question": "c", "answer": 27.5}),
        ("27", {"question": "g", "answer": 27.0}),  # a column of integers with a gap
        ("B", {"question": "f", "options": ["p", "q"], "answer": "q", "answer_letter": "B"}),
        ("J", {"question": "i", "options": [str(i) for i in range(12)], "answer": "J"}),
    ]
    problems = load_rows([row for _, row in rows])
    assert [problem.reference for problem in problems] == [reference for reference, _ in rows]
    assert [problem.verifier for problem in problems] == ["text"] * 9 + ["letter"] * 2
    assert problems[9].question == "f\nA: p\nB: q"
    assert problems[10].question.endswith("\nI: 8\nJ: 9")  # at most ten options
    said = "references with whitespace at an end, which is part of a*: 1"
    assert said in capsys.readouterr().err


def test_rows_without_a_reference_are_left_out_and_counted(load_rows, capsys):
    good = {"question": "q", "answer": "14"}
    bad = [good | {"answer": a} for a in ("cold}", "", " ", [1], True, float("nan"), None)]
    bad += [good | {"answer": r"\boxed{3} or \boxed{5}"}]
    bad += [good | {"question": q} for q in ("", 3, None, "\ud800")]
    bad += [{"question": "q", "solution": s} for s in (r"\boxed{}", r"\boxed 2")]
    bad += [good | {"options": o, "answer": "B"} for o in (["x"], "xy", 4, {"A": "x"})]
    bad += [good | {"options": ["x", "y"], "answer": "AB"}]
    bad += [good | {"verifier": v} for v in ("oracle", ["math"])]
    problems = load_rows([*bad, good, good, good], limit=2)  # the limit counts usable rows
    assert problems == [Problem("q", "14", "text")] * 2
    said = capsys.readouterr().err
    assert "left out 21 of 24 rows (row 1: the reference 'cold}' cannot be boxed" in said
    assert "row 2: no reference (`answer`, or `solution` with a box)" in said


def test_the_verifier_of_a_row_comes_first(load_rows, capsys):
    row = {"question": "q", "answer": "14"}
    rows = [row, row | {"verifier": "math"}]
    assert [problem.verifier for problem in load_rows(rows)] == ["text", "math"]
    assert "verified as text; --verifier math reads formulas" in capsys.readouterr().err
    problems = load_rows(rows, verifier="letter")
    assert [problem.verifier for problem in problems] == ["letter", "math"]
    assert capsys.readouterr().err == ""


def test_json_and_parquet_hold_the_same(tmp_path, load_rows):
    rows = [{"question": "q", "answer": "014"}, {"question": "r", "answer": "2"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    marked = "\ufeff" + json.dumps({"split": "train", "data": rows})
    (tmp_path / "MARKED.JSON").write_text(marked)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    expected = load_rows(rows)
    assert expected[0].reference == "014"  # readers that guess types make it 14
    for name in "rows.json", "MARKED.JSON", "rows.parquet":
        assert load_problems(tmp_path / name) == expected


def test_webinstruct_is_cut_as_in_the_paper(monkeypatch):
    rows = [("Mathematics", "University"), ("Physics", "University"), ("Physics", "Senior High")]
    rows = [dict(question=c + d, answer="1", category=c, difficulty=d) for c, d in rows]
    monkeypatch.setattr("datasets.load_dataset", lambda path, split: rows)
    assert [p.question for p in load_problems("webinstruct")] == ["PhysicsUniversity"]


def test_the_real_rows(shared_data):
    counts = {"math_train": 7496, "math500": 500, "amc23": 40, "aime24": 30}
    counts |= {"mmlu_pro_test": 700, "supergpqa_sample": 300, "webinstruct_nover_sample": 800}
    for name, count in counts.items():
        assert len(load_problems(shared_data / f"{name}.jsonl")) == count


# ------------------------------------------------------------------------------------------ the toy


def test_the_toys_problems():
    train, test = load_problems("toy"), load_problems("toy-test")
    assert len(train) == 2000 and len(test) == 200 and train == load_problems("toy")
    assert not {p.question for p in train} & {p.question for p in test}
    for form in "it is", "in total", "eggs", "14", "fourteen":  # references come in all forms
        assert any(form in problem.reference for problem in train)


def test_the_toys_ground_truth_reads_every_form():
    story = toy.Story(method=0, name="Ana", unit="eggs", n=3, a=4, b=2)
    assert [story.work(m)[3] for m in range(3)] == [14, 18, 9]
    for value in 9, 14, 20, 42:
        forms = {story.answer(form, value) for form in toy.FORMS}
        assert len(forms) == 8 and {toy.value_of(form) for form in forms} == {value}
    assert not any(map(toy.value_of, ["", "eggs", "it is", "14 14", "3*4+2", "014"]))
