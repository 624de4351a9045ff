"""grade.py: what it asks, what it keeps, and its numbers by hand."""

import io
import re
import statistics
import sys
from pathlib import Path
from unittest import mock

import pytest
from processes import finish, run_in, start_ranks

import evaluate
import grade
import judge
import train
from runtime.files import append_rows, read_rows
from runtime.report import brief
from tasks import general_verifier, toy

A = {"Q0?": ["14.", "fourteen"], "Q1?": ["9", None], "Q2?": ["x", "y"]}
B = {"Q0?": ["14 eggs", "Fourteen"], "Q1?": ["9 ", ""], "Q2?": ["y", "z"], "Q3?": ["w", "w"]}
CLEAR = {f"Clear {k}?": ["5", "5."] for k in range(7)}
REFERENCES = {"Q0?": ["0", "14"], "Q1?": ["9"], "Q2?": ["7"], "Q3?": ["8"]}


def write(name, answers):
    """What evaluate.py writes. The verifier has found nothing right."""
    Path(name).mkdir(exist_ok=True)
    for question, given in answers.items():
        row = {"question": question, "references": REFERENCES.get(question, ["5"])}
        row |= {"answers": given, "right": [False] * len(given)}
        append_rows(Path(name) / "samples.jsonl", [row])


@pytest.fixture
def user(script, monkeypatch):
    """user(flags, right): grade.py, whose user finds these answers right, or those of which
    right(answer, reference) is true. user(flags, replies=...): what comes from a pipe -> (code,
    stdout and stderr)."""

    def start(flags, right=(), replies=None):
        def reply(prompt):
            shown = sys.stdout.getvalue().rpartition("reference:\n  ")[2]
            reference, numbered = shown.split("\n")[0], re.findall(r"\n +(\d+)  (.*)", shown)
            accepts = right if callable(right) else lambda answer, _: answer in right
            return ", ".join(number for number, answer in numbered if accepts(answer, reference))

        with monkeypatch.context() as patch:
            if replies is None:
                patch.setattr("builtins.input", reply)
            patch.setattr(sys, "stdin", io.StringIO(replies))
            code, out, err = script(grade, flags)
        return code, out + err

    return start


def by_hand(shares):
    """pass@1 and its standard error, as they are printed."""
    error = statistics.stdev(shares) / len(shares) ** 0.5
    return f"pass@1 {brief(statistics.mean(shares))} ± {brief(error)}"


def test_it_asks_only_what_is_in_doubt(user):
    """Two evaluations. Their answers are shuffled, and the numbers are those of pen and paper."""
    write("a", A | CLEAR)
    write("b", B | CLEAR)
    code, out = user("a b", right={"Fourteen", "z"})
    assert code == 0 and out.startswith("2 questions have answers in doubt. Type"), out
    shown = re.findall(r"\d of 2:\n(.*)\nreference:\n  .*\n((?: +\d+  .*\n)+)", out)
    shown = {question: re.findall(r"\d  (.*)", lines) for question, lines in shown}
    in_order = {"Q0?": ["14 eggs", "Fourteen"], "Q2?": ["x", "y", "z"]}
    assert {question: sorted(answers) for question, answers in shown.items()} == in_order
    assert shown["Q2?"] != in_order["Q2?"]  # a has x and y, b has y and z
    assert "reference:\n  0 or 14\n" in out
    said = {row["answer"]: row["right"] for row in read_rows("a/grades.jsonl")}
    assert said == {"Fourteen": True, "14 eggs": False, "x": False, "y": False, "z": True}
    a, b = [1, 0.5, 0, *[1] * 7], [0.5, 0.5, 0.5, *[1] * 7]
    assert f"10 questions, what is right by you:\n  a: {by_hand(a)}\n  b: {by_hand(b)}" in out
    error = statistics.stdev([y - x for x, y in zip(a, b)]) / 10**0.5
    assert f"change 0 ± {brief(error)}\n" in out
    assert f"by verifier:\n  a: {by_hand([0] * 10)}" in out
    _, again = user("a b", right={"x"})  # nothing is asked again, nor by the table
    _, table = user("b a --table")
    assert "reference:" not in again + table and again.split("\n\n")[1:] == out.split("\n\n")[-2:]
    assert f"  b: {by_hand(b)}\n  a: {by_hand(a)}" in table


def test_it_goes_on_where_it_stopped(user):
    """What is typed wrong is asked again. Of what comes after the stop nothing counts, not even
    Q1, where nothing is in doubt. With other runs and another K the order is the same."""
    write("a", A)
    write("b", B)
    order = grade.draw(grade.read_samples([Path("a"), Path("b")]), 3, seed=5)
    assert order == ["Q2?", "Q0?", "Q1?"]
    code, out = user("b a --seed 5", replies="q\n")
    assert code == 2 and "grade.py: no question is graded by you" in out
    for replies in "1 9\n\nq\n", "1 9\n\n":  # the end of a pipe
        Path("a/grades.jsonl").unlink(missing_ok=True)
        code, out = user("a b --seed 5", replies=replies)
        assert code == 0 and out.count("expected the numbers") == 1 and "stopped; the same" in out
        assert "1 questions, what is right by you" in out
        assert {row["question"] for row in read_rows("a/grades.jsonl")} == {order[0]}
        with open("a/grades.jsonl", "a") as file:
            file.write('{"question": "Q0?", "ans')  # as a kill may leave it
    code, out = user("b a --seed 5", replies="q\n")  # b has no grades of its own
    assert code == 0 and "1 of 1:\nQ0?" in out and "1 questions, what is right by you" in out
    code, out = user("a --questions 2 --seed 5", replies="?\n")
    rows = read_rows("a/grades.jsonl")
    assert [row["question"] for row in rows if row["right"] is None] == [order[1]]
    assert code == 0 and "1 questions, what is right by you" in out
    code, out = user("a b --seed 5", right={"14 eggs"})  # of that one, what is new
    assert code == 0 and out.count("  14 eggs\n") == 1 and "ourteen\n" not in out
    assert "2 questions, what is right by you" in out  # Q1 too, but not what was left out


def test_a_hostile_answer_cannot_reach_the_terminal(user):
    """Escape sequences, a bell, text from right to left, 10,000 characters."""
    hostile = "\x1b[2J\x07\u202e" + "long " * 2000
    write("a", {"Q0?": [hostile, "x\r1  y"]})
    code, out = user("a", replies="\n")
    assert code == 0 and not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)
    shown = out.split("right: ")[0].split("\n\n")[1].splitlines()
    assert len(shown) < 15 and all(len(line) <= 80 for line in shown)
    [row, _] = sorted(read_rows("a/grades.jsonl"), key=lambda row: -len(row["answer"]))
    assert row["answer"] == hostile  # the file has it as it was


def test_a_run_of_train_and_the_table_of_judge(user, script, finished_run, toy_model_dir):
    """By a user who agrees with the verifier: the numbers are its own."""
    held_out = read_rows(finished_run / "evaluations.jsonl")
    rows = [{"question": row["question"], "answer": row["references"]} for row in held_out[:3]]
    append_rows(Path("q.jsonl"), [row | {"verifier": "toy-truth"} for row in rows])
    flags = f"--model {toy_model_dir} --dataset q.jsonl --samples 8 --max-new-tokens 32"
    code, by_verifier, err = script(judge, f"{flags} --out j")
    assert code == 0, err
    code, out = user(f"j {finished_run}", right=toy.same_number)
    assert code == 0 and out.count("reference:") == 3 and f"{finished_run} step 2" not in out, out
    yours, verifiers = out.split("what is right by verifier")
    for step in 0, 4:
        of_step = [row["right"] for row in held_out if row["step"] == step]
        mean = brief(statistics.mean(sum(right) / len(right) for right in of_step))
        assert f"{finished_run} step {step}: pass@1 {mean} ±" in yours
        assert f"{finished_run} step {step}: pass@1 {mean} ±" in verifiers
    assert by_verifier.split("all samples")[0] in out.split("j, what is right by you:\n")[1]


def test_scripts_name_it_where_the_truth_is_text(script, quick, toy_model_dir):
    Path("q.jsonl").write_text('{"question": "Ana has 3 eggs. How many eggs?", "answer": "3"}')
    flags = f"--model {toy_model_dir} --dataset q.jsonl --max-new-tokens 24"
    for verifier, named in ("text", True), ("toy-truth", False):
        how = f"--verifier {verifier} --out {verifier}"
        runs = [
            (judge, f"{flags} --samples 2 {how}-judge"),
            (evaluate, f"{flags} --runs 2 {how}-eval"),
            (train, f"{quick} --dataset q.jsonl --eval-dataset q.jsonl --steps 1 {how}-run"),
        ]
        for module, command in runs:
            code, out, err = script(module, command)
            assert code == 0 and ("python grade.py" in out) == named, err


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_grades(user, tmp_path, toy_model_dir, monkeypatch, ranks):
    """A tiny one, which decides nothing, in the same order and with the same shortcuts as you."""
    write("a", A | CLEAR)
    write("b", B | CLEAR)
    monkeypatch.setattr(general_verifier, "VERIFIER_TOKENS", 8)
    monkeypatch.setattr(grade, "AT_ONCE", 2)
    flags = f"a b --by {toy_model_dir}"
    if ranks == 1:
        code, out = user(flags)
        assert code == 0 and out.count("2 of 2 replies hold no decision") == 2, out
    else:
        finish(start_ranks(2, run_in, tmp_path, grade.main, flags))
        out = Path("log-0").read_text()
    rows = read_rows("a/grades.jsonl")
    assert {row["answer"] for row in rows} == {"Fourteen", "14 eggs", "x", "y", "z"}
    assert not any(row["right"] for row in rows) and {row["by"] for row in rows} == {
        str(toy_model_dir)
    }
    asked = mock.Mock(side_effect=grade.ask)
    monkeypatch.setattr(grade, "ask", asked)
    assert user(flags)[0] == 0 and not asked.called  # all is in the file


def test_how_often_you_agree_with_a_model(user, monkeypatch):
    """Its own prompt reaches it, and an answer of its reply is a grade."""
    write("a", A | CLEAR)
    Path("p.txt").write_text("{question} {reference} {answer}?", encoding="utf-8")
    monkeypatch.setattr(grade, "load", lambda *_: "model")
    ask = mock.Mock(side_effect=lambda pairs, *_: [answer == "x" for _, answer in pairs])
    monkeypatch.setattr(grade, "ask", ask)
    code, out = user("a --by M --prompt p.txt")
    assert code == 0 and "what is right by M" in out and "agree" not in out
    assert ask.call_args.args[1:] == ("model", "{question} {reference} {answer}?")
    code, out = user("a", right={"y"})
    assert code == 0 and "\nyou and M with p.txt agree on 1 of 3 answers: it accepts\n" in out
    assert "  1 of your 2 wrong ones\n  0 of your 1 right ones\n" in out
    assert "  'x' for '7': you say wrong\n" in out and "  'y' for '7': you say right\n" in out
    Path("p.txt").write_text("{question} {answer}?", encoding="utf-8")
    code, out = user("a --by M --prompt p.txt")
    assert code == 2 and "p.txt needs {question}, {reference} and {answer}" in out


def test_where_nothing_is_in_doubt_all_is_known(user):
    write("a", CLEAR)
    code, out = user("a", replies="")
    assert code == 0 and "0 questions have answers in doubt" in out
    assert "7 questions, what is right by you:\n  a: pass@1 1 ±" in out


def test_directories_that_cannot_be_graded(user):
    write("a", A), write("c", {"Q3?": ["w"]}), write("empty", {})
    Path("empty/samples.jsonl").touch()
    says = {"a c": "no question is in all of these directories"}
    says |= {"empty": "empty has no evaluation", "nowhere": "nowhere/samples.jsonl: no such file"}
    for flags, expected in says.items():
        code, out = user(flags)
        assert code == 2 and f"grade.py: {expected}" in out, out
