"""grade.py: what it asks, what it keeps, and its numbers by hand."""

import io
import re
import statistics
import sys
from pathlib import Path

import pytest

import grade
import judge
from runtime.files import append_rows, read_rows
from tasks import toy

A = {"Q0?": ["14.", "fourteen"], "Q1?": ["9", None], "Q2?": ["x", "y"]}
B = {"Q0?": ["14 eggs", "Fourteen"], "Q1?": ["9 ", ""], "Q2?": ["y", "z"], "Q3?": ["w", "w"]}
CLEAR = {f"Clear {k}?": ["5"] for k in range(7)}
REFERENCES = {"Q0?": ["0", "14"], "Q1?": ["9"], "Q2?": ["7"], "Q3?": ["8"], **CLEAR}


def write(name, answers, file="samples.jsonl", **more):
    """The lines of an evaluation, in which the verifier has found nothing right."""
    for question, given in answers.items():
        row = {"question": question, "reference": REFERENCES[question][0], "correct": False}
        row |= {"references": REFERENCES[question], **more}
        Path(name).mkdir(exist_ok=True)
        append_rows(Path(name) / file, [row | {"answer": answer} for answer in given])


@pytest.fixture
def user(script, monkeypatch):
    """user(flags, right): grade.py, whose user finds these answers right, or those of which
    right(answer, reference) is true -> (code, stdout and stderr)."""

    def start(flags, right=(), replies=None):
        def reply(prompt):
            shown = sys.stdout.getvalue().rpartition("reference: ")[2]
            reference, numbered = shown.split("\n")[0], re.findall(r"\n +(\d+)  (.*)", shown)
            of_one = right if callable(right) else lambda answer, _: answer in right
            return ", ".join(number for number, answer in numbered if of_one(answer, reference))

        with monkeypatch.context() as patch:
            if replies is None:
                patch.setattr("builtins.input", reply)
            patch.setattr(sys, "stdin", io.StringIO(replies))
            code, out, err = script(grade, flags)
        return code, out + err

    return start


def test_it_asks_only_what_is_in_doubt(user):
    write("a", A | CLEAR)
    write("b", B | CLEAR)
    code, out = user("a b", right={"Fourteen", "z"})
    assert code == 0 and out.startswith("10 questions. Type"), out
    shown = dict(re.findall(r"\d of 10: (.*)\nreference: .*\n((?: +\d+  .*\n)+)", out))
    shown = {question: re.findall(r"\d  (.*)", lines) for question, lines in shown.items()}
    in_order = {"Q0?": ["14 eggs", "Fourteen"], "Q2?": ["x", "y", "z"]}
    assert {question: sorted(answers) for question, answers in shown.items()} == in_order
    assert shown["Q2?"] != in_order["Q2?"]  # shuffled: a has x and y, b has y and z
    assert "reference: 0 or 14\n" in out
    said = {row["answer"]: row["right"] for row in read_rows("a/grades.jsonl")}
    assert said == {"Fourteen": True, "14 eggs": False, "x": False, "y": False, "z": True}
    pass_at_1 = [[1, 0.5, 0, *[1] * 7], [0.5, 0.5, 0.5, *[1] * 7]]  # of a, b
    change = [y - x for x, y in zip(*pass_at_1)]
    for run, shares in zip("ab", pass_at_1):
        mean, error = statistics.mean(shares), statistics.stdev(shares) / 10**0.5
        assert re.search(rf"^{run} +{mean:.3g} +{error:.3g} +0 +0\.15$", out, re.MULTILINE), out
    half = 1.96 * statistics.stdev(change) / 10**0.5
    assert f"b minus a: 0 (95%: {-half:.3g} to {half:.3g})" in out
    _, again = user("a b", right={"x"})
    assert " of 10: " not in again and again.split("\n\n")[1:] == out.split("\n\n")[-1:]


def test_it_goes_on_where_it_stopped(user):
    """What is typed wrong is asked again. Of what comes after the stop nothing counts, not even
    Q1, where nothing is in doubt. With other runs and another K the order is the same."""
    write("a", A)
    write("b", B)
    order = ["Q2?", "Q0?", "Q1?"]  # with seed 5
    code, out = user("b a --seed 5", replies="q\n")
    assert code == 2 and "grade.py: no question is graded" in out
    for replies in "1 9\n\nq\n", "1 9\n\n":  # the end of a pipe
        Path("a/grades.jsonl").unlink(missing_ok=True)
        code, out = user("a b --seed 5", replies=replies)
        assert code == 0 and out.count("expected the numbers") == 1 and "stopped; start" in out
        assert "1 questions by your grades" in out and "for an interval" in out
        assert {row["question"] for row in read_rows("a/grades.jsonl")} == {order[0]}
    code, out = user("b a --seed 5", replies="q\n")  # b has no grades of its own
    assert code == 0 and "2 of 3: Q0?" in out and "1 questions by your grades" in out
    code, out = user("a --questions 2 --seed 5", replies="?\n")
    rows = read_rows("a/grades.jsonl")
    assert [row["question"] for row in rows if row["right"] is None] == [order[1]]
    assert code == 0 and "2 of 2: Q0?" in out and "1 questions by your grades" in out
    code, out = user("a b --seed 5", right={"14 eggs"})  # of the one that was left out, what is new
    assert code == 0 and out.count("  14 eggs\n") == 1 and "ourteen\n" not in out
    assert "2 questions by your grades" in out


def test_a_run_of_train_and_the_table_of_judge(user, script, finished_run, toy_model_dir):
    """By a user who agrees with the verifier: the numbers are its own."""
    held_out = read_rows(finished_run / "evaluations.jsonl")
    rows = [{"question": row["question"], "answer": row["reference"]} for row in held_out[::2][:3]]
    append_rows(Path("q.jsonl"), [row | {"verifier": "toy-truth"} for row in rows])
    flags = f"--model {toy_model_dir} --dataset q.jsonl --samples 8 --max-new-tokens 32"
    code, by_verifier, err = script(judge, f"{flags} --out j")
    assert code == 0, err
    code, out = user(f"j {finished_run}", right=toy.same_number)
    assert code == 0 and out.count("reference: ") == 3, out
    assert re.search(rf"{finished_run}, step 4 minus j: \S+ \(grade 10", out)
    assert f"{finished_run}, step 2" not in out
    for step in 0, 4:
        share = statistics.mean(row["correct"] for row in held_out if row["step"] == step)
        line = re.search(rf"^{finished_run}, step {step} +(.*)$", out, re.MULTILINE)
        yours, _, verifiers, agreement = map(float, line[1].split())
        assert [yours, verifiers, agreement] == pytest.approx([share, share, 1], abs=1e-3)
    assert by_verifier.split("all samples")[0] in out.split("j by your grades\n")[1]


def test_directories_that_cannot_be_graded(user, finished_run):
    write("a", A), write("c", {"Q3?": ["w"]}), write("empty", {"Q3?": []}, "evaluations.jsonl")
    says = {"a c": "no question is in all of these runs", "empty": "evaluations.jsonl is empty: tr"}
    for flags, expected in says.items() | {("nowhere", "nowhere/samples.jsonl: no such file")}:
        code, out = user(flags)
        assert code == 2 and f"grade.py: {expected}" in out.replace("empty/", ""), out
