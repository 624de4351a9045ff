"""Standard errors where questions are not independent: those about one document, and lines that
repeat a question. evaluate.py, train.py and grade.py have one number."""

import itertools
import json
import statistics
from pathlib import Path

import pandas
import pytest

import evaluate
import train
from runtime.files import append_rows, read_rows
from runtime.sampled import (
    mean_of_questions,
    of_questions,
    read_lines,
    sample_table,
    say_pass_at_1,
    with_error,
)


def line(question, right, **more):
    answers = ["14"] * len(right)
    return {"question": question, "references": ["14"], "answers": answers, "right": right} | more


def test_one_question_a_cluster_is_the_usual_error():
    values = [0.25, 0.5, 1.0, 0.0, 0.75]
    mean, error = mean_of_questions(pandas.Series(values), pandas.Series([*"abcde"]))
    assert mean == pytest.approx(statistics.mean(values))
    assert error == pytest.approx(statistics.stdev(values) / 5**0.5)
    assert mean_of_questions(pandas.Series(values), pandas.Series([*"aaaaa"])) == (mean, None)


def test_the_error_of_whole_documents_is_that_of_their_means():
    """Twelve questions in four documents of equal size, whose questions are all alike."""
    means = [0.1, 0.4, 0.4, 0.9]
    values = [mean for mean in means for _ in range(3)]
    clusters = [document for document in "abcd" for _ in range(3)]
    _, error = mean_of_questions(pandas.Series(values), pandas.Series(clusters))
    assert error == pytest.approx(statistics.stdev(means) / 2)


def test_the_error_of_unequal_documents_is_that_of_all_samples_of_them():
    """The naive way: every sample of four documents out of these four, with replacement, and the
    share of right ones in it. For so few it is about sqrt(3/4) of the estimate."""
    of_documents = {"a": [1.0], "b": [0.0, 0.5], "c": [0.5, 0.25, 0.25], "d": [0.75, 1.0]}
    clusters, values = zip(*((d, x) for d, own in of_documents.items() for x in own))
    _, error = mean_of_questions(pandas.Series(values), pandas.Series(clusters))
    means = []
    for drawn in itertools.product(of_documents, repeat=4):
        means.append(statistics.mean(x for d in drawn for x in of_documents[d]))
    assert statistics.pstdev(means) == pytest.approx(error * (3 / 4) ** 0.5, rel=0.1)


def test_a_question_that_stands_three_times_is_one():
    """With its references; another one's lines stay apart, but vary together with it."""
    three = [line("Q0?", [True, False]), line("Q0?", [True, True]), line("Q0?", [False, False])]
    mean, error = of_questions(sample_table([*three, line("Q1?", [False, False])]))
    assert (mean, error) == (pytest.approx(0.25), pytest.approx(0.25))
    others = line("Q1?", [True, True]) | {"references": ["15"]}
    mean, error = of_questions(sample_table([*three, line("Q1?", [False, False]), others]))
    assert (mean, error) == (pytest.approx(0.5), pytest.approx(0))


def test_a_document_comes_before_its_questions():
    lines = [line(f"Q{k}?", [k % 3 == 0], document=f"lease {k % 3}") for k in range(9)]
    mean, error = of_questions(sample_table(lines))
    assert (mean, error) == (
        pytest.approx(1 / 3),
        pytest.approx(statistics.stdev([0, 0, 1]) / 3**0.5),
    )


@pytest.mark.parametrize("with_documents", [True, False])
def test_three_scripts_have_one_number(script, quick, toy_model_dir, with_documents, capsys):
    held = Path(quick.split("--eval-dataset ")[1].split()[0])
    rows = read_rows(held)
    rows = [*rows, rows[0], rows[0]]
    if with_documents:
        rows = [row | {"document": "lease"[: 3 + k % 2]} for k, row in enumerate(rows[:4])]
    append_rows(Path("held.jsonl"), rows)
    flags = quick.replace(str(held), "held.jsonl")
    flags = flags.replace("--eval-limit 3", "").replace("--eval-runs 2", "--eval-runs 8")
    code, _, err = script(train, f"{flags} --out run")
    assert code == 0, err
    logged = [line for line in read_rows("run/metrics.jsonl") if "pass_at_1" in line][0]
    lines = [line for line in read_rows("run/evaluations.jsonl") if line["step"] == 0]
    assert {line.get("document") for line in lines} == (
        {"lea", "leas"} if with_documents else {None}
    )
    expected = of_questions(sample_table(lines))
    logged_error = logged["pass_at_1"], logged["pass_at_1_stderr"]
    assert logged_error == pytest.approx(expected)
    sampling = "--temperature 1 --top-p 1 --top-k 0 --runs 8 --max-new-tokens 24"
    script(evaluate, f"--model {toy_model_dir} --dataset held.jsonl {sampling} --out e")
    [result] = json.loads(Path("e/results.json").read_text())["results"].values()
    expected = of_questions(sample_table(read_rows("e/samples.jsonl")))
    assert (result["pass_at_1"], result["stderr"]) == pytest.approx(expected)
    assert result["questions"] == 4
    for directory, numbers in ("e", expected), ("run", logged_error):
        say_pass_at_1(sample_table(read_lines(Path(directory))), "grade.py")
        assert f": pass@1 {with_error(*numbers)}\n" in capsys.readouterr().out
