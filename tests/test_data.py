import csv
import io
import json
import os
import re
import zipfile
from decimal import Decimal
from unittest import mock

import numpy
import pyarrow.parquet
import pytest
from datasets import Dataset

import measure
from engine.tokens import split_answer
from runtime.cli import InputError
from runtime.files import read_rows
from tasks import toy
from tasks.data import Problem, load_problems, to_demonstration
from tasks.tables import table_rows
from tasks.verifiers import VERIFIERS, verify

BOXES = {
    r"so \boxed{\frac{1}{2}}.": r"\frac{1}{2}",
    r"\boxed{1} and then \boxed{2}": "2",
    r"\boxed{1} and then \boxed{2": "1",  # the last one never closes
    r"\boxed{\left\{ x \right.}": r"\left\{ x \right.",  # escaped braces are symbols
    "\\boxed{a \\\n}": "a \\\n",
    r"\boxed{a \\}": r"a \\",  # an escaped backslash does not escape the brace
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
        ("B", {"question": "f", "options": ["B", "q"], "answer": "q", "answer_letter": "B"}),
        ("J", {"question": "i", "options": [str(i) for i in range(12)], "answer": "J"}),
    ]
    problems = load_rows([row for _, row in rows])
    assert [problem.reference for problem in problems] == [reference for reference, _ in rows]
    assert [problem.verifier for problem in problems] == ["text"] * 8 + ["letter"] * 2
    assert problems[8].question == "f\nA: B\nB: q"
    assert problems[9].question.endswith("\nK: 10\nL: 11")


def references(load_rows, answers):
    return [p.reference for p in load_rows([{"question": "q", "answer": a} for a in answers])]


NUMBERS = {
    "0.00001": 1e-05,
    "100000000000000000000000": 1e23,  # the integer is 99999999999999991611392
    "0": -0.0,
    "1234567": 1234567,
    "-3": -3.0,  # as a column of integers with a gap is stored
}


def test_numbers_are_written_out(load_rows):
    assert references(load_rows, NUMBERS.values()) == [*NUMBERS]


def test_numbers_of_parquet_are_as_printed(tmp_path):
    """A float of 32 bits would be 0.10000000149011612, one of 16 bits 0.0999755859375."""
    exact = pyarrow.array([Decimal("1.50"), Decimal("2.00"), None])
    printed = pyarrow.array([0.1, 1e-5, 7], pyarrow.float32())
    half = pyarrow.array(numpy.array([0.1, 0.25, 7], numpy.float16))
    lists = pyarrow.array([[[0.1]], [[0.2]], None], pyarrow.list_(pyarrow.list_(pyarrow.float32())))
    inside = pyarrow.StructArray.from_arrays([half, lists], ["x", "y"])
    assert table_rows(pyarrow.table({"a": inside}))[0] == {"a": {"x": 0.1, "y": [[0.1]]}}
    maps = pyarrow.array([[("k", 0.5)]], pyarrow.map_(pyarrow.string(), pyarrow.float32()))
    assert table_rows(pyarrow.table({"a": maps})) == [{"a": [("k", 0.5)]}]
    references = ["1.50", "2.00"], ["0.1", "0.00001", "7"], ["0.1", "0.25", "7"]
    for answer, expected in zip((exact, printed, half), references):
        options = pyarrow.array([[0.5, 0.1]] * 3, pyarrow.list_(pyarrow.float32()))
        table = pyarrow.table({"question": ["q"] * 3, "answer": answer})
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
        assert [p.reference for p in load_problems(tmp_path / "rows.parquet")] == expected
        table = pyarrow.table({"question": ["q"] * 3, "answer": ["B"] * 3, "options": options})
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
        assert load_problems(tmp_path / "rows.parquet")[2].question == "q\nA: 0.5\nB: 0.1"


WRITTEN = {  # a number in a file of JSON: as text
    "1.50": "1.50",
    "-0.10": "-0.10",
    "98765432109876543210.123456789012345678901": "98765432109876543210.123456789012345678901",
    "12345678901234567890123": "12345678901234567890123",
    "2.0": "2",  # a column of integers with a gap
    "-0.0": "0",
    "1.20E+3": "1200",  # as a Decimal prints it
    "1e400": None,
    "1e-999999999": None,
}


def test_numbers_of_json_keep_their_digits(tmp_path):
    rows = [f'{{"question": "q", "answer": [{number}, "x"]}}' for number in WRITTEN]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "rows.json").write_text(f"[{','.join(rows)}]")
    expected = [(text, "x") if text else ("x",) for text in WRITTEN.values()]
    for name in "rows.jsonl", "rows.json":
        assert [p.references for p in load_problems(tmp_path / name)] == expected
    assert read_rows(tmp_path / "rows.jsonl")[0]["answer"] == [1.5, "x"]  # in logs they are floats


def test_csv_is_read_as_it_stands(tmp_path, capsys):
    text = """answer,question,options,verifier
014,"Which, of
two?",,
2.50,q,,math
"[""Bo"", ""B. O.""]",r,,nan
b,s,,

,t
[x,u
""".replace("\n", "\r\n")
    (tmp_path / "rows.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    problems = load_problems(tmp_path / "rows.csv")
    assert [p.references for p in problems] == [
        ("014",),
        ("2.50",),
        ("b",),
        ("[x",),
    ]
    assert [p.verifier for p in problems] == ["text", "math", "text", "text"]
    assert problems[0].question == "Which, of\r\ntwo?"
    err = capsys.readouterr().err
    assert "with a box) (1 of 6: rows [5])" in err
    assert "give a list, in .jsonl (1 of 6: rows [3])" in err


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_a_byte_that_is_not_utf_8_is_named_with_its_row(tmp_path, name):
    rows = [{"question": "q", "answer": "ö" if i == 2 else "1"} for i in range(4)]
    text = {
        "rows.jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
        "rows.json": json.dumps(rows, ensure_ascii=False, indent=1),
        "rows.csv": "question,answer\n" + "\n".join(f"q,{row['answer']}" for row in rows),
    }[name]
    for encoding in "utf-8-sig", "utf-16", "utf-16-le":
        (tmp_path / name).write_text(text, encoding=encoding)
        assert [p.reference for p in load_problems(tmp_path / name)] == ["1", "1", "ö", "1"]
    for encoding in "latin-1", "cp437":
        (tmp_path / name).write_text(text, encoding=encoding)
        with pytest.raises(InputError, match=f"{name}, row 3: .* as UTF-8"):
            load_problems(tmp_path / name)


def test_a_column_that_is_not_used_is_not_converted(tmp_path, monkeypatch, capsys):
    late = pyarrow.array([2**62, None], pyarrow.timestamp("ms"))
    zone = pyarrow.array([0, 1], pyarrow.timestamp("s", "Mars/Base"))
    nested = pyarrow.array([[2**31 - 1], []], pyarrow.list_(pyarrow.date32()))
    for of in late, zone, nested:
        table = pyarrow.table({"seen": of, "question": ["q", "r"], "answer": ["1", "2"]})
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
        hub = mock.Mock(return_value=mock.Mock(with_format=lambda kind, table=table: table))
        monkeypatch.setattr("datasets.load_dataset", hub)
        for name in tmp_path / "rows.parquet", "a/b":
            assert [p.reference for p in load_problems(name)] == ["1", "2"]
            assert f"{name}: these columns are not used: seen\n" in capsys.readouterr().err
        table = table.rename_columns(["context", "question", "answer"])
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
        with pytest.raises(InputError, match="rows.parquet"):
            load_problems(tmp_path / "rows.parquet")


def refused(path, content):
    """What is said of a file that cannot be used, without its path."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError) as error:
        load_problems(path)
    return str(error.value).removeprefix(str(path))


SPREADSHEETS = {  # what they write in different countries
    "semicolons": "\ufeffquestion;answer\r\nTwo, or three?;2,5\r\n",
    "tabs": "question\tanswer\nTwo, or three?\t2,5\n".encode("utf-16"),
    "a line for Excel": "\ufeffsep=;\r\nquestion;answer\r\nTwo, or three?;2,5\r\n",
    "its line with tabs": "sep=\t\nquestion\tanswer\nTwo, or three?\t2,5\n",
    "CR, blank lines": '\r\rquestion,answer\r"Two, or three?","2,5"\r\r',
    "no names": 'question,answer,,\n"Two, or three?","2,5",,\n',
    "an index": ',question,answer\n0,"Two, or three?","2,5"\n',
    "semicolons in a name": '"a; b; c; d",question,answer\nx,"Two, or three?","2,5"\n',
}


@pytest.mark.parametrize("name", SPREADSHEETS)
def test_what_a_spreadsheet_wrote_is_read(tmp_path, name):
    content = SPREADSHEETS[name]
    path = tmp_path / "rows.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert load_problems(path) == [Problem("Two, or three?", "2,5", "text")]


def test_spaces_before_a_cell_are_left_out(tmp_path):
    """Not within quotes. Before a quote a space would make the quotes a part of the cell."""
    (tmp_path / "rows.csv").write_text('question, answer\nq,  "a, ""b"""\n  r s,1\n')
    assert load_problems(tmp_path / "rows.csv") == [
        Problem("q", 'a, "b"', "text"),
        Problem("r s", "1", "text"),
    ]
    cells = ["q  ", ' "q" is', 'a 5" disk'], ["14", " 15", ' "ann"']
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([["question", "answer"], *zip(*cells)])
    problems = load_problems(tmp_path / "rows.csv")
    assert [p.question for p in problems] == cells[0]
    assert [p.reference for p in problems] == ["14", "15", '"ann"']


WIDE = "more cells than columns ['question', 'answer']: put quotes around a cell with"
TABLES = {  # what is said of a table
    ", row 1: two columns for 'answer': rename or remove one": "question,answer,answer\nq,1,2\n",
    f", row 2: {WIDE} ','": "question,answer\nq,1\nr,1,250\n",
    f", row 1: {WIDE} ';'": "question;answer\nq;r;1\n",
    ", row 1: more cells than columns ['Cities']: put ": "Cities\nquestion,answer\n",  # a title
    """, row 1: expected objects with named columns (',' exp""": 'question,answer\n"a \\"b",1\n',
    ", row 2: expected objects with named columns (unexp": 'question,answer\nq,1\nr,"2\n',
    "columns: 'Question' (expected 'question'), 'Answer' (exp": "Question,Answer\nq,1\n",
    ": no usable row; two columns for 'question': rename or remove one (1 of 1: rows [1]); "
    "columns: problem, question, answer": "problem,question,answer\np,q,1\n",
}


@pytest.mark.parametrize("said", TABLES)
def test_a_table_that_is_not_clear_is_refused_with_the_cause(tmp_path, said):
    assert said in refused(tmp_path / "rows.csv", TABLES[said])


def test_a_file_that_is_no_table_is_named(tmp_path):
    said = refused(tmp_path / "rows.csv", "question,answer\nq,§ 4\n".encode("cp1252"))
    assert said.startswith(", row 1: a character is not UTF-8: save the file as UTF-8 (")
    workbook = io.BytesIO()
    with zipfile.ZipFile(workbook, "w") as file:
        file.writestr("xl/worksheets/sheet1.xml", "<worksheet/>")
    for name in "rows.csv", "rows.jsonl":
        said = refused(tmp_path / name, workbook.getvalue())
        assert said == ", row 1: the file is not text: save a workbook as .csv, in UTF-8"
    for name in "rows.xlsx", "rows.tsv":
        said = refused(tmp_path / name, "question\tanswer\nq\t1\n")
        assert said == ": expected a file that ends in .jsonl, .json, .parquet, .csv"
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InputError, match=r"folder.csv: a directory$"):
        load_problems(tmp_path / "folder.csv")


@pytest.mark.parametrize(
    "header",
    ["question,answer", "answer,question", '\ufeff"answer","question"', "Question, Answer"],
)
def test_a_header_that_comes_again_is_refused(tmp_path, header):
    said = refused(tmp_path / "rows.csv", f"question,answer\nq,1\n{header}\nr,2\n")
    assert said == ", row 2 is a header again: expected one table"
    lines = '{"question": "q", "answer": 1}\n{"question": "problem", "answer": "answer"}'
    said = refused(tmp_path / "rows.jsonl", lines)
    assert said == ", row 2 is a header again: expected one table"
    words = "question,answer\nhot,cold\nproblem,solution\nanswer,5\n"  # these are no names here
    (tmp_path / "rows.csv").write_text(words)
    assert [p.reference for p in load_problems(tmp_path / "rows.csv")] == ["cold", "solution", "5"]


def test_a_name_that_stands_twice_in_json_is_refused(tmp_path):
    row = '{"question": "q", "answer": "1", "answer": "2"}'
    for name, content in ("rows.jsonl", row), ("rows.json", f"[{row}]"):
        said = refused(tmp_path / name, content)
        assert said == ", row 1: two columns for 'answer': rename or remove one"


TWICE = {  # two names for one thing, of which one would be lost or both shown
    "question": {"problem": "Ann has 12 apples."},
    "options": {"options": ["x", "y"], "choices": ["y", "x"]},
    "context": {"context": "c", "article": "d"},
}


@pytest.mark.parametrize("name", TWICE)
def test_two_names_for_one_thing_are_left_out_and_counted(load_rows, capsys, name):
    row = {"question": "q", "answer": "A", "solution": r"\boxed{B}"}  # a solution has its answer
    assert load_rows([row, row | TWICE[name]]) == [Problem("q", "A", "text")]
    said = f"left out: two columns for '{name}': rename or remove one (1 of 2: rows [2])"
    assert said in capsys.readouterr().err
    empty = {each: None for each in TWICE[name]}  # as files that were put together have them
    assert load_rows([empty | row, row | {"problem": "", "choices": []}])[1].question == "q"


def test_data_sets_may_be_separated_by_a_comma_and_a_space(monkeypatch):
    args = mock.Mock(dataset="toy, ~/rows.csv,toy-test", examples=None)
    read = mock.Mock(return_value=[])
    monkeypatch.setattr(measure, "load_problems", read)
    monkeypatch.setattr(measure, "init_ranks", mock.Mock())
    monkeypatch.setattr(measure, "open_run_directory", mock.Mock(side_effect=InputError))
    with pytest.raises(InputError):
        measure.load_model_and_data(args, 8, "eval")
    names = [call.args[0] for call in read.call_args_list]
    assert names == ["toy", os.path.expanduser("~/rows.csv"), "toy-test"]


def test_names_with_spaces_or_capitals_are_named(load_rows, capsys):
    load_rows([{"question": "q", "answer": "1", " Context": "c", "level": 1, "": 2}])
    said = "these columns are not used: ' Context' (expected 'context'), level, ''\n"
    assert said in capsys.readouterr().err


MISSING = float("nan"), "nan", " NaN", "<NA>", "NaT", "#N/A", "#VALUE!", "#NAME?", "#NUM!"


@pytest.mark.parametrize("missing", MISSING)
def test_what_pandas_and_spreadsheets_write_for_a_missing_value_is_missing(load_rows, missing):
    row = dict.fromkeys(["context", "options", "answer_letter", "solution", "verifier"], missing)
    row |= {"question": "q", "answer": "1"}
    boxed = {"problem": "q", "answer": missing, "solution": r"\boxed{1}"}
    several, none = (
        {"question": "q", "answer": [missing, "1"]},
        {"question": "q", "answer": missing},
    )
    expected = [Problem("q", "1", "text")] * 3
    assert load_rows([row, boxed, several, none, {"question": missing, "answer": "1"}]) == expected


CODE = "{'a': [1]}", '{"en": "x"}', "array([1, 2])", "np.array(['a'], dtype=object)", "[['a'], []]"
CODE += "('Ann', 'Bo')", "{'Ann'}", "['a'\n 'b']", "[{'text': 'x'}]"


def test_containers_written_as_text_are_left_out(load_rows, capsys):
    right = (
        "[1, 2)",
        "{1, 2}",
        r"\{1, 2\}",
        "(1, 2)",
        'the "Ark"',
        "None",
        "NA",
        "null",
        "Nan",
        "#1!",
    )
    right += "f([1, 2])", "an array (of 3)", "f'(x)", "['tis]x", "#3"
    assert references(load_rows, [*right, *CODE]) == [*right]
    assert f"written as text: give a list, in .jsonl ({len(CODE)} of" in capsys.readouterr().err


GSM8K = {  # the working before the mark is left out
    "#### 12": "12",
    "work\n####12": "12",
    "work #### 12": "12",
    "work\r\n#### 1,200\n": "1,200",
    "work\n#### $12": "12",
    "The answer is: 12": "The answer is: 12",
    "#### Causes\nRain.": "#### Causes\nRain.",  # a heading
}


def test_every_form_of_the_mark_of_gsm8k(load_rows, capsys):
    assert references(load_rows, GSM8K) == [*GSM8K.values()]
    assert references(load_rows, ["work\n####", "12"]) == ["12"]
    assert "1 of 2: rows [1]" in capsys.readouterr().err


def test_choices_are_options(load_rows, capsys):
    """The answer is the letter, the text or the index of one."""
    metals = ["helium", "iron", "neon"]
    rows = [{"question": "q", "choices": metals, "answer": a} for a in (1, "B", " iron", [1, "C"])]
    rows += [{"question": "q", "options": [3, 1], "answer": 1}]
    rows += [{"question": "q", "options": ["no", "Ce\u0301line"], "answer": "Ce\u0301line"}]
    problems = load_rows(rows)
    assert {p.question for p in problems[:4]} == {"q\nA: helium\nB: iron\nC: neon"}
    assert [p.references for p in problems[:4]] == [("B",)] * 3 + [("B", "C")]
    assert [p.reference for p in problems[4:]] == ["B"] * 2
    assert {p.verifier for p in problems} == {"letter"}
    assert "3 rows repeat the question of another one" in capsys.readouterr().err
    # Out of range; no text; the text of two; the number as index is another than as text.
    bad = (metals, 3), (metals, -1), (metals, 0.5), (metals, "1"), (metals, "ir"), (["x", "x"], "x")
    bad += ([2, 0, 1], 2), (["O", "A"], "A")  # the letter of one and the text of another
    rows += [{"question": "q", "choices": o, "answer": a} for o, a in bad]
    assert load_rows(rows) == problems
    assert "index from 0 of one option (8 of 14: rows [7, 8, 9])" in capsys.readouterr().err
    rows = [{"question": "q", "options": ["x"], "answer_letter": a} for a in ("A", "B", ["A"])]
    assert load_rows(rows) == [Problem("q\nA: x", "A", "letter")]


NUMBERED = {  # what an answer that is a number names: options, answer
    None: [
        (["1", "2", "3", "4"], 2),  # the index of "3", but "2" is an option
        (["1", "2", 3, 4], 2),
        (["$1$", "(2.0)", "x"], 2),
        (["1) iron", "2) neon"], 1),
        (["1 m", "2 m", "3 m"], 1.0),
        (["0.5", "0.50"], 0.5),
    ],
    "B": [
        (["0", "1", "2", "3"], 1),
        (["0.5", "1.5"], 1.5),
        (["2", "7"], 7),
        (["3/2", "1,000"], 1),
        (["-1", "x2"], 1),
    ],
}


@pytest.mark.parametrize("letter", NUMBERED)
def test_an_index_that_is_also_another_option_is_left_out(load_rows, capsys, letter):
    rows = [{"question": "q", "options": o, "answer": a} for o, a in NUMBERED[letter]]
    usable = load_rows([*rows, {"question": "q", "options": ["x"], "answer": 0}])[:-1]
    assert [p.reference for p in usable] == [letter] * len(rows) * bool(letter)
    assert letter or f"of one option ({len(rows)} of" in capsys.readouterr().err


def test_options_with_letters_of_their_own(load_rows, capsys):
    """In the order of ours they do no harm. In another, "B" would be two of them."""
    for style in "({}) {}", "{}. {}", "{}: {}":
        own = [style.format(*pair) for pair in ("B Paris".split(), "A Rome".split())]
        row = {"question": "q", "answer": "B", "options": own}
        assert [p.reference for p in load_rows([row, row | {"options": own[::-1]}])] == ["B"]
        assert "letters of their own, in another order" in capsys.readouterr().err
    names = {"question": "q", "answer": "B", "options": ["J. Smith", "B. Jones"]}
    assert load_rows([names])[0].reference == "B"


LATEX = r"""{"question": "What is $\\frac{1}{2}+1$?", "answer": "\\frac{3}{2}", "note": "\f"}
{"question": "Its value?", "answer": "\frac{3}{2}"}
{"question": "What is \beta?", "answer": "40"}
{"question": "r", "context": "we add. \boxed{2}", "answer": "4"}
{"question": "s", "options": ["\\\forall", "x"], "answer": 1}
{"question": "t", "answer": ["1", "\bar x"]}
{"question": "2 \times 3?", "answer": "6"}
{"question": "u", "answer": "\neq"}
{"question": "\tan apple:\nu = 1 and\n\nup to \\theta, \\\\neq, \\\\frac", "answer": "\\nu"}
{"question": "\u0007lpha?", "answer": "\u000bec{v}"}
"""


def test_backslashes_that_json_ate(tmp_path, capsys):
    """A form feed or a backspace in a column that is used leaves out its row. A tab or a line end
    that completes a command of LaTeX is said."""
    (tmp_path / "rows.jsonl").write_text(LATEX)
    columns = dict.fromkeys(["context", "options", "note"])
    rows = [columns | json.loads(line) for line in LATEX.splitlines()]
    rows[5]["answer"] = rows[5]["answer"][1]  # a column of parquet has one type
    rows[4] |= {"answer": "x"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in "rows.jsonl", "rows.parquet":
        problems = load_problems(tmp_path / name)
        references = [problem.reference for problem in problems]
        assert references == [r"\frac{3}{2}", "6", "eq", r"\nu", "ec{v}"]
        said = capsys.readouterr().err
        assert r"JSON reads \f and \b: write \\frac, \\boxed (5 of 10: rows [2, 3, 4])" in said
        assert "rows.jsonl: 4 of 10 rows may" in said or name == "rows.parquet"
        assert r"line end in place of a backslash, as JSON reads \t and \n" in said
        assert r"write \\text (row 7: \times)" in said


def test_several_boxes_in_a_solution_are_counted(load_rows, capsys):
    """Where the last one is the reference. One that comes again is one."""
    two = {"question": "q", "solution": r"\boxed{-2} and \boxed{\boxed{2}}."}
    same = {"question": "r", "solution": r"\boxed{2}, so \boxed{ 2 }"}
    first, *_ = load_rows([same, two, two | {"answer": "2"}, two | {"question": "s"}])
    assert first.reference == "2"
    said = (
        "2 of 4 rows have several boxes in `solution`: the last is the reference (row 2: -2, 2)\n"
    )
    assert said in capsys.readouterr().err
    load_rows([same])
    assert capsys.readouterr().err == ""


AGREE = ("14", "14"), ("14 eggs", "14"), (r"\frac12", r"\frac{1}{2}"), ("1,200", "1200")
AGREE += ("Bats", "vampire bats"), ("x", ["y", "X"])
DIFFER = ("18", "14"), ("18 eggs", "14 eggs"), ("Rome", "Paris"), ("1.5", "15"), ("x", ["y", "z"])


def test_a_demonstration_that_contradicts_its_answer_is_left_out(load_rows, capsys):
    pairs = [*AGREE, *DIFFER]
    rows = [{"question": "q", "solution": rf"so \boxed{{{x}}}", "answer": a} for x, a in pairs]
    choice = {"question": "q", "options": ["iron", "neon"], "solution": r"\boxed{B}"}
    rows += [choice | {"answer": "neon"}, choice | {"answer_letter": "B"}, choice]
    rows += [choice | {"answer": 0}, choice | {"answer_letter": "A"}]
    learned = [p.reference for p in load_rows(rows, convert=to_demonstration)]
    assert learned == [rf"so \boxed{{{x}}}" for x, _ in AGREE] + [r"\boxed{B}"] * 3
    assert "has in its box: mend one of them (7 of 16: rows [7, 8, 9])" in capsys.readouterr().err


def test_a_context_comes_before_the_question(load_rows, capsys):
    row = {"question": "Who?", "answer": "Ana"}
    rows = [row | {name: "Ana came."} for name in ("context", "passage", "article")]
    rows += [row | {"context": "", "options": ["Ana", "Ben"]}]
    *asked, blank = [problem.question for problem in load_rows(rows)]
    assert asked == ["Ana came.\n\nWho?"] * 3 and blank == "Who?\nA: Ana\nB: Ben"
    assert load_rows([*rows, row | {"context": ["a"]}])[-1].question == blank
    assert "`context` is no text (1 of 5: rows [5])" in capsys.readouterr().err


def test_columns_that_are_not_used_are_named_once(load_rows, capsys):
    row = {"question": "q", "answer": "1", "input": "x", "verifier": "text"}
    load_rows([row] * 3 + [row | {"level": 1, "solution": "s"}])
    said = "rows.jsonl: these columns are not used: input, level\n"
    assert said in capsys.readouterr().err


def test_rows_without_a_reference_are_left_out_and_counted(load_rows, capsys):
    good = {"question": "q", "answer": "14"}
    bad = [good | {"answer": a} for a in ("cold}", "", " ", [[1]], True, float("nan"), None, 1e999)]
    bad += [good | {"answer": r"\boxed{3} or \boxed{5}"}]
    bad += [good | {"question": q} for q in ("", 3, None)]
    bad += [{"question": "q", "solution": s} for s in (r"\boxed{}", r"\boxed 2")]
    options = ["x"], "xy", {"A": "x"}, ["x"] * 27, ["x", None], ["x", 1e999]
    bad += [good | {"options": o, "answer": "B"} for o in options]
    bad += [good | {"options": ["x", "y"], "answer": "AB"}, good | {"verifier": "maths"}]
    # The limit counts usable rows.
    assert load_rows([*bad, good, good, good], limit=2) == [Problem("q", "14", "text")] * 2
    said = capsys.readouterr().err
    rows = {"braces": "1, 9", "box": "2, 3, 4", "problem": "10, 11, 12"}
    rows |= {"option": "15, 21", "options": "16, 17, 18", "number": "19, 20", "truth": "22"}
    said = re.findall(r"(\w+)\W* \((\d+) of 25: rows \[(.*)\]", said)
    assert {what: first for what, _, first in said} == rows
    assert sum(int(count) for _, count, _ in said) == len(bad)


def test_an_answer_may_be_a_list(load_rows, capsys):
    """Each wording that can be used is right. One that cannot is left out, and not its row."""
    lists = [["14", r"\boxed{ 14 } ", 14.0, "fourteen"], ["14"], ["14", "", None], [], [True, "14"]]
    rows = [{"question": "q", "answer": answers} for answers in (*lists, ["14", "}"])]
    rows += [{"question": "q", "options": ["x", "y", "z"], "answer": ["B", "C"]}]
    rows += [{"question": "q", "options": ["x"], "answer": ["A", "B"]}]
    several, one, *cleaned, letters, letter = load_rows(rows)
    assert (several.reference, several.references) == ("14", ("14", "fourteen"))
    assert cleaned == [one] * 3 == [Problem("q", "14", "text")] * 3
    assert letters.references == ("B", "C") and letter.references == ("A",)
    said = capsys.readouterr().err
    assert "rows.jsonl: left out: no reference (`answer` as text or number, or" in said
    assert "(1 of 8: rows [4])" in said


def test_what_cannot_be_seen_is_no_part_of_a_reference(load_rows, capsys):
    """A zero-width space, a byte order mark; accents are composed, as models write them."""
    rows = [
        {"question": f"{k}", "answer": a} for k, a in enumerate(("\u200b Paris\ufeff", "e\u0301"))
    ]
    rows += [{"question": "2", "answer": a} for a in ("\u200b", '["Ann", "Bo"]', "['Ann']")]
    rows += [{"question": "3", "answer": a} for a in ("[1, 2]", "a\u200cb")]
    assert [p.reference for p in load_rows(rows)] == ["Paris", "é", "[1, 2]", "a\u200cb"]
    said = capsys.readouterr().err
    assert "written as text: give a list, in .jsonl (2 of 7: rows [4, 5])" in said


def test_the_verifier_of_a_row_comes_first(load_rows, capsys, monkeypatch):
    row, options = {"question": "q", "answer": "A"}, {"options": ["x"]}
    rows = [row, row | {"verifier": "math"}]
    assert [problem.verifier for problem in load_rows(rows)] == ["text", "math"]
    assert len(load_rows([row, row | {"verifier": ["math"]}])) == 1
    assert "no verifier ['math'], only math" in capsys.readouterr().err
    assert [p.verifier for p in load_rows(rows, verifier="letter")] == ["letter", "math"]
    assert [p.verifier for p in load_rows([row | options], verifier="text")] == ["letter"]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, split: Dataset.from_list([row]))
    assert load_problems("a/b")[0].verifier == "math"
    capsys.readouterr()
    load_problems("toy"), load_problems("toy-test")
    assert capsys.readouterr().err == ""


def test_json_and_parquet_hold_the_same(tmp_path, load_rows):
    rows = [{"question": "q", "answer": "014"}, {"question": "r", "answer": "2"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "MARKED.JSON").write_text("\ufeff" + json.dumps(rows))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert load_rows(rows)[0].reference == "014"  # readers that guess types make it 14
    for name in "rows.json", "MARKED.JSON", "lines.json", "rows.parquet":
        assert load_problems(tmp_path / name) == load_rows(rows)


def test_webinstruct_is_cut_as_in_the_paper(monkeypatch):
    rows = [("Mathematics", "University"), ("Physics", "University"), ("Physics", "Senior High")]
    rows = [dict(question=c + d, answer="1", category=c, difficulty=d) for c, d in rows]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, split: Dataset.from_list(rows))
    assert [p.question for p in load_problems("webinstruct")] == ["PhysicsUniversity"]


def test_any_data_set_of_the_hub(tmp_path, monkeypatch):
    row = {"question": "q", "answer": 0.1}
    hub = mock.Mock(return_value=Dataset.from_list([row]))
    monkeypatch.setattr("datasets.load_dataset", hub)
    for name, *asked in ("a/b", "a/b", None, "train"), ("a/b/c:d", "a/b", "c", "d"):
        assert load_problems(name) == [Problem("q", "0.1")]
        hub.assert_called_with(*asked[:2], split=asked[2])
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"answer": "2"}))
    monkeypatch.chdir(tmp_path.parent)  # local files come first
    assert load_problems(f"{tmp_path.name}/rows.jsonl")[0].reference == "2"
    hub.side_effect = ValueError("Config name is missing.\nPick one of ['main']\nExample")
    for name, says in ("a/b", r"\['main'\]\)"), ("a/b.json", "no such file"):
        with pytest.raises(InputError, match=says):
            load_problems(name)


def test_a_verifier_of_ones_own(monkeypatch, capsys):
    """What fails is wrong, and said once; another reference may do. It must return a bool."""
    problem = Problem("Why?", "x", "mine", ("14",))
    monkeypatch.setitem(VERIFIERS, "mine", lambda answer, reference: int(answer) == int(reference))
    assert verify([(problem, answer) for answer in ("14", "15", "b")]) == [True, False, False]
    said = "the verifier 'mine' fails on the answer '14': invalid literal for int() with base 10"
    assert capsys.readouterr().err == f"{said}: 'x'\n"
    monkeypatch.setitem(VERIFIERS, "mine", lambda answer, reference: True)
    assert verify([(problem, answer) for answer in ("c", "", None)]) == [True, False, False]
    for wrong in (False, "because"), None, 1, (x for x in "ab"):
        monkeypatch.setitem(VERIFIERS, "mine", lambda answer, reference, wrong=wrong: wrong)
        with pytest.raises(InputError, match="'mine' must return a bool, not"):
            verify([(problem, "c")])


# ------------------------------------------------------------------------------------------ the toy


def test_the_toys_ground_truth_reads_every_form():
    story = toy.Story(method=0, name="Ana", unit="eggs", n=3, a=4, b=2)
    assert [story.work(m)[3] for m in range(3)] == [14, 18, 9]
    for value in 9, 14, 20, 42:
        forms = {story.answer(form, value) for form in toy.FORMS}
        assert len(forms) == 8 and {toy.value_of(form) for form in forms} == {value}
    assert not any(map(toy.value_of, ["", "eggs", "it is", "14 14", "3*4+2", "014"]))
