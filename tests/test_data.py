import json
import re
from unittest import mock

import pyarrow.parquet
import pytest
from datasets import Dataset

from engine.tokens import split_answer
from runtime.cli import InputError
from tasks import toy, toy_model
from tasks.data import Problem, load_problems
from tasks.verifiers import MODELS, PROGRAMS, verify
from train import longest_reference

BOXES = {
    r"so \boxed{\frac{1}{2}}.": r"\frac{1}{2}",
    r"\boxed{1} and then \boxed{2}": "2",
    r"\boxed{1} and then \boxed{2": "1",  # the last one never closes
    r"\boxed{\left\{ x \right.}": r"\left\{ x \right.",  # escaped braces are symbols
    "\\boxed{a \\\n}": "a \\\n",
    r"\boxed{a \\}": r"a \\",  # an escaped backslash does not escape the brace
    "\\boxed{ 14 }": " 14 ",  # never stripped
    r"\boxed{}": "",
    **dict.fromkeys([r"\boxed{a\}", r"boxed{5}", r"\boxed 5", "\\"]),  # None: no closed box
}


@pytest.mark.parametrize("text, answer", BOXES.items())
def test_split_answer(text, answer):
    found = split_answer(text)
    assert (found and found[1]) == answer
    if found:
        assert text[found[0] - len(r"\boxed") :].startswith(rf"\boxed{{{answer}}}")


@pytest.fixture
def load_rows(tmp_path):
    """load_rows(rows, limit, verifier): the problems of a file with these rows."""

    def load(rows, *options, **more):
        (path := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return load_problems(path, *options, **more)

    return load


def test_the_columns_of_the_hub(load_rows):
    rows = [  # (reference, row)
        (r"\frac12", {"problem": "a", "solution": r"so \boxed{\frac12}"}),
        ("x", {"problem": "d", "answer": "x", "solution": r"\boxed{y}"}),
        ("7", {"question": "h", "answer": "", "solution": r"\boxed{7}"}),
        ("1 4", {"question": "b", "answer": " 1 4\n"}),  # only white space at its ends goes,
        (r"\{1\}", {"question": "b", "answer": r"\{1\}"}),
        ("3", {"question": "b", "answer": r"\boxed{3}"}),  # and a box around all of it
        ("72", {"question": "c", "answer": "48/2 = 24\n#### 72"}),  # GSM8K
        ("0", {"question": "c", "answer": 0}),
        ("27", {"question": "g", "answer": 27.0}),  # a column of integers with a gap
        ("1e+23", {"question": "g", "answer": 1e23}),  # the integer is 99999999999999991611392
        ("B", {"question": "f", "options": ["p", "q"], "answer": "q", "answer_letter": "B"}),
        ("J", {"question": "i", "options": [str(i) for i in range(12)], "answer": "J"}),
    ]
    problems = load_rows([row for _, row in rows])
    assert [problem.reference for problem in problems] == [reference for reference, _ in rows]
    assert [problem.verifier for problem in problems] == ["text"] * 10 + ["letter"] * 2
    assert problems[10].question == "f\nA: p\nB: q"
    assert problems[11].question.endswith("\nK: 10\nL: 11")


def test_rows_without_a_reference_are_left_out_and_counted(load_rows, capsys):
    good = {"question": "q", "answer": "14"}
    bad = [good | {"answer": a} for a in ("cold}", "", " ", [[1]], True, float("nan"), None, 1e999)]
    bad += [good | {"answer": r"\boxed{3} or \boxed{5}"}]
    bad += [good | {"question": q} for q in ("", 3, None, "\ud800")]
    bad += [{"question": "q", "solution": s} for s in (r"\boxed{}", r"\boxed 2")]
    options = ["x"], "xy", {"A": "x"}, ["x"] * 27, ["x", "\ud800"], ["x", None], ["x", 1e999]
    bad += [good | {"options": o, "answer": "B"} for o in options]
    bad += [good | {"options": ["x", "y"], "answer": "AB"}, good | {"verifier": "maths"}]
    # The limit counts usable rows.
    assert load_rows([*bad, good, good, good], limit=2) == [Problem("q", "14", "text")] * 2
    said = capsys.readouterr().err
    rows = {"braces": "1, 9", "box": "2, 3, 4", "text": "13, 20"}
    rows |= {"problem": "10, 11, 12", "option": "16, 23", "options": "17, 18, 19"}
    said = re.findall(r"(\w+)\W* \((\d+) of 27: rows \[(.*)\]", said)
    assert {what: first for what, _, first in said} == rows | {"number": "21, 22", "truth": "24"}
    assert sum(int(count) for _, count, _ in said) == len(bad)


def test_an_answer_may_be_a_list(load_rows, capsys):
    lists = [["14", r"\boxed{ 14 } ", 14.0, "fourteen"], ["14"], [], ["14", ""], ["14", True]]
    rows = [{"question": "q", "answer": answers} for answers in lists]
    rows += [{"question": "q", "options": ["x", "y", "z"], "answer": ["B", "C"]}]
    rows += [{"question": "q", "options": ["x"], "answer": ["A", "B"]}]
    several, one, letters = load_rows(rows)
    assert (several.reference, several.references) == ("14", ("14", "fourteen"))
    assert one == Problem("q", "14", "text") and letters.references == ("B", "C")
    problems = [letters, Problem("q", "B", others=("14",))]
    assert longest_reference(toy_model.build_tokenizer(), problems) == 4  # { 1 4 }
    said = capsys.readouterr().err
    assert "(3 of 7: rows [3, 4, 5])" in said and "letter of an option (1 of 7: rows [7])" in said
    assert "2 of 7 answers are lists: one of the list is enough" in said


def test_the_verifier_of_a_row_comes_first(load_rows, capsys):
    rows = [row := {"question": "q", "answer": "14"}, row | {"verifier": "math"}]
    assert [problem.verifier for problem in load_rows(rows)] == ["text", "math"]
    assert "verified as text; --verifier math reads formulas" in capsys.readouterr().err
    assert [p.verifier for p in load_rows(rows, verifier="letter")] == ["letter", "math"]
    assert capsys.readouterr().err == ""


def test_json_and_parquet_hold_the_same(tmp_path, load_rows):
    rows = [{"question": "q", "answer": "014"}, {"question": "r", "answer": "2"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "MARKED.JSON").write_text("\ufeff" + json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert load_rows(rows)[0].reference == "014"  # readers that guess types make it 14
    for name in "rows.json", "MARKED.JSON", "rows.parquet":
        assert load_problems(tmp_path / name) == load_rows(rows)


def test_webinstruct_is_cut_as_in_the_paper(monkeypatch):
    rows = [("Mathematics", "University"), ("Physics", "University"), ("Physics", "Senior High")]
    rows = [dict(question=c + d, answer="1", category=c, difficulty=d) for c, d in rows]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, split: Dataset.from_list(rows))
    assert [p.question for p in load_problems("webinstruct")] == ["PhysicsUniversity"]


def test_any_data_set_of_the_hub(tmp_path, monkeypatch):
    """And floats of 32 bits, where .1 is 0.10000000149011612."""
    table = pyarrow.table({"question": ["q"], "answer": pyarrow.array([0.1], "float")})
    options = pyarrow.array([[0.5, 0.1]], pyarrow.list_(pyarrow.float32()))
    choice = pyarrow.table({"question": ["q"], "answer": ["B"], "options": options})
    monkeypatch.setattr("datasets.load_dataset", hub := mock.Mock(return_value=Dataset(table)))
    for name, *asked in ("a/b", "a/b", None, "train"), ("a/b/c:d", "a/b", "c", "d"):
        assert load_problems(name) == [Problem("q", "0.1")]
        hub.assert_called_with(*asked[:2], split=asked[2])
    pyarrow.parquet.write_table(choice, tmp_path / "rows.parquet")
    monkeypatch.chdir(tmp_path.parent)  # local files come first
    assert load_problems(f"{tmp_path.name}/rows.parquet")[0].question == "q\nA: 0.5\nB: 0.1"
    hub.side_effect = ValueError("Config name is missing.\nPick one of ['main']\nExample")
    for name, says in ("a/b", r"\['main'\]\)"), ("a/b.json", "no such file"):
        with pytest.raises(InputError, match=says):
            load_problems(name)


def test_a_verifier_of_ones_own(monkeypatch, capsys):
    """What fails is wrong, and said once; another reference may do. What it returns must be a
    bool. One that is listed in MODELS sees the question."""
    problem = Problem("Why?", "x", "mine", ("14",))
    monkeypatch.setitem(PROGRAMS, "mine", lambda answer, reference: int(answer) == int(reference))
    assert verify([(problem, answer) for answer in ("14", "15", "b")]) == [True, False, False]
    where = "the answer '14' to the question 'Why?'"
    said = f"the verifier 'mine' fails on {where}: invalid literal for int() with base 10: 'x'\n"
    assert capsys.readouterr().err == said
    monkeypatch.setitem(PROGRAMS, "mine", lambda answer, reference: (False, "because"))
    with pytest.raises(InputError, match=r"'mine' must return a bool, not \(False, 'bec"):
        verify([(problem, "c")])
    monkeypatch.delitem(PROGRAMS, "mine")
    echo = mock.Mock(side_effect=lambda pairs: [a == p.question for p, a in pairs])
    monkeypatch.setitem(MODELS, "mine", echo)
    assert verify([(problem, "Why?"), (problem, None), (problem, "x")]) == [True, False, False]
    echo.assert_called_once_with([(problem, "Why?"), (problem, "x")])
    monkeypatch.setitem(MODELS, "mine", lambda pairs: [True])
    with pytest.raises(InputError, match=r"'mine' must return a bool per answer, not \[True\]"):
        verify([(problem, "a"), (problem, "b")])


# ------------------------------------------------------------------------------------------ the toy


def test_the_toys_ground_truth_reads_every_form():
    story = toy.Story(method=0, name="Ana", unit="eggs", n=3, a=4, b=2)
    assert [story.work(m)[3] for m in range(3)] == [14, 18, 9]
    for value in 9, 14, 20, 42:
        forms = {story.answer(form, value) for form in toy.FORMS}
        assert len(forms) == 8 and {toy.value_of(form) for form in forms} == {value}
    assert not any(map(toy.value_of, ["", "eggs", "it is", "14 14", "3*4+2", "014"]))
