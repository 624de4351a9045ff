import json

import pyarrow.parquet
import pytest

from engine.tokens import split_answer
from tasks import data, toy
from tasks.data import Problem, load_problems

BOXES = {
    r"so \boxed{14}.": "14",
    r"\boxed{\frac{1}{2}}": r"\frac{1}{2}",
    r"\boxed{1} and then \boxed{2}": "2",
    r"\boxed{1} and then \boxed{2": "1",  # the last one never closes
    r"\boxed{\{1, 2\}}": r"\{1, 2\}",  # escaped braces are symbols
    r"\boxed{\left\{ x \right.}": r"\left\{ x \right.",
    r"\boxed{a \\}": r"a \\",  # an escaped backslash does not escape the brace
    r"\boxed{a\}": None,
    r"\boxed{\boxed{3}}": "3",
    r"\boxed{a \boxed{3} b}": "3",
    "\\boxed{ 14 }": " 14 ",  # never stripped
    r"\boxed{}": "",
    "\\boxed{two\nlines}": "two\nlines",
    r"}} { \boxed{5}": "5",
    r"\\boxed{5}": "5",
    r"boxed{5}": None,
    r"\boxed 5": None,
    r"\fbox{5}": None,
    "\\": None,
    "": None,
}


@pytest.mark.parametrize("text, answer", BOXES.items())
def test_split_answer(text, answer):
    found = split_answer(text)
    assert (found and found[1]) == answer
    if found:
        before, after = text[: found[0]], text[found[0] :]
        assert before.endswith(r"\boxed") and after.startswith("{" + answer + "}")


def test_split_answer_takes_linear_time():
    assert split_answer("\\boxed{" * 100_000) is None


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_columns_of_the_hub(tmp_path):
    rows = [  # (reference, row)
        (r"\frac12", {"problem": "a", "solution": r"so \boxed{\frac12}"}),
        (" 14 ", {"question": "b", "answer": " 14 "}),  # never rewritten
        ("27", {"question": "c", "answer": 27}),
        ("27.5", {"question": "c", "answer": 27.5}),
        ("0", {"question": "c", "answer": 0}),
        ("x", {"problem": "d", "answer": "x", "solution": r"\boxed{y}"}),
        ("B", {"question": "e", "options": ["p", "q"], "answer": "B"}),
        ("B", {"question": "f", "options": ["p", "q"], "answer": "q", "answer_letter": "B"}),
        ("27", {"question": "g", "answer": 27.0}),  # a column of integers with a gap
        ("7", {"question": "h", "answer": "", "solution": r"\boxed{7}"}),
        ("J", {"question": "i", "options": [str(i) for i in range(12)], "answer": "J"}),
        ("1" + 16 * "0", {"question": "j", "answer": 1e16}),
    ]
    problems = load_problems(write(tmp_path / "rows.jsonl", [row for _, row in rows]))
    assert [problem.reference for problem in problems] == [reference for reference, _ in rows]
    for (_, row), problem in zip(rows, problems):
        assert problem.verifier == ("letter" if "options" in row else "math")
    assert problems[6].question == "e\nA: p\nB: q"
    assert problems[10].question.endswith("\nI: 8\nJ: 9")  # at most ten options


def test_rows_without_a_reference_are_left_out_and_counted(tmp_path, capsys):
    good = {"question": "q", "answer": "14"}
    bad = [{"question": "q", "answer": a} for a in (None, "", " ", [1], True, False)]
    bad += [{"question": "", "answer": "1"}, {"question": 3, "answer": "1"}, {"answer": "1"}]
    bad += [{"question": "q", "solution": r"\boxed{}"}, {"question": "q", "solution": r"\boxed 2"}]
    bad += [{"question": "q", "answer": float("nan")}, {"question": "\ud800", "answer": "1"}]
    bad += [{"question": "q", "options": o, "answer": "B"} for o in (["x"], "xy", 4, {"A": "x"})]
    problems = load_problems(write(tmp_path / "rows.jsonl", [*bad, good]))
    assert problems == [Problem("q", "14")]
    bad_letters = [{"question": "q", "options": ["x", "y"], "answer": a} for a in ("AB", "C")]
    assert load_problems(write(tmp_path / "rows.jsonl", [*bad_letters, good])) == problems
    more = write(tmp_path / "rows.jsonl", [*bad_letters, good, good, good])
    assert load_problems(more, limit=2) == problems * 2  # the limit counts usable ones
    said = capsys.readouterr().err
    assert "left out 17 of 18 rows (row 1: no reference answer; row 2: no" in said
    assert "left out 2 of 3 rows (row 1: the answer is not the letter of an option" in said


FORMULAS = ["14", r"\frac{1}{2}", "x+1", r"14 \text{ cm}", r"\begin{pmatrix} 1 \end{pmatrix}"]
WORDS = ["Paris", "NH_3", "1000 km", "20 July 1969"]


@pytest.mark.parametrize(
    "references, verifier", [(FORMULAS, "math"), (WORDS, "text"), (["1789-1799", "cold"], "text")]
)
def test_a_file_of_formulas_is_verified_as_mathematics(tmp_path, references, verifier):
    rows = [{"question": "q", "answer": answer} for answer in references]
    problems = load_problems(write(tmp_path / "rows.jsonl", rows))
    assert {problem.verifier for problem in problems} == {verifier}
    rows[0]["verifier"], rows[1]["verifier"] = "math", "letter"  # a row that says so keeps it
    problems = load_problems(write(tmp_path / "rows.jsonl", rows))
    assert [problem.verifier for problem in problems][:2] == ["math", "letter"]


def test_json_and_parquet_hold_the_same(tmp_path):
    rows = [{"question": "q", "answer": "014"}, {"question": "r", "answer": "2"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    expected = load_problems(write(tmp_path / "rows.jsonl", rows))
    assert expected[0].reference == "014"  # readers that guess types make it 14
    for name in "rows.json", "rows.parquet":
        assert load_problems(tmp_path / name) == expected


def test_webinstruct_is_cut_as_in_the_paper(monkeypatch):
    rows = [("Mathematics", "University"), ("Physics", "University"), ("Physics", "Senior High")]
    rows = [dict(question=c + d, answer="1", category=c, difficulty=d) for c, d in rows]
    monkeypatch.setattr("datasets.load_dataset", lambda path, split: rows)
    assert [p.question for p in load_problems("webinstruct")] == ["PhysicsUniversity"]


def test_the_papers_data_sets_have_names():
    names = "toy toy-test math7.5k webinstruct math500 amc23 aime24 aime25 mmlu-pro supergpqa"
    assert [*data.TOY, *data.HUB] == names.split()


def test_the_real_rows(shared_data):
    counts = {"math_train": 7496, "math500": 500, "amc23": 40, "aime24": 30}
    counts |= {"mmlu_pro_test": 700, "supergpqa_sample": 300, "webinstruct_nover_sample": 800}
    for name, count in counts.items():
        problems = load_problems(shared_data / f"{name}.jsonl")
        assert len(problems) == count
        free_form = name.startswith("webinstruct")
        assert ("text" in {problem.verifier for problem in problems}) == free_form


# ------------------------------------------------------------------------------------------ the toy


def test_the_toys_problems():
    train, test = load_problems("toy"), load_problems("toy-test")
    assert len(train) == 2000 and len(test) == 200
    assert not {p.question for p in train} & {p.question for p in test}
    assert train == load_problems("toy")
    for form in "it is", "in total", "eggs", "14", "fourteen":  # references come in all forms
        assert any(form in problem.reference for problem in train)


def test_the_toys_ground_truth_reads_every_form():
    story = toy.Story(method=0, name="Ana", unit="eggs", n=3, a=4, b=2)
    assert story.question().startswith("Ana has 3 bags of 4 eggs and 2 more")
    assert [story.work(m)[3] for m in range(3)] == [14, 18, 9]
    for value in 9, 14, 20, 42:
        forms = [story.answer(form, value) for form in toy.FORMS]
        assert len(set(forms)) == 8 and {toy.value_of(form) for form in forms} == {value}
    for nonsense in "", "eggs", "it is", "14 14", "3*4+2", "014":
        assert toy.value_of(nonsense) is None


def test_the_toys_rule_knows_digits_only():
    assert toy.same_digits("14 eggs", "it is 14") and toy.same_digits("fourteen", "fourteen")
    assert not toy.same_digits("fourteen", "14") and not toy.same_digits("15", "14")
    assert not toy.same_digits("twelve", "fourteen") and not toy.same_digits("1 4", "14")
