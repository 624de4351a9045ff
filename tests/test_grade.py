"""grade.py: what it asks, what it keeps, and its numbers by hand."""

import io
import json
import re
import statistics
import sys
from pathlib import Path
from unittest import mock

import pytest

import evaluate
import grade
import judge
import train
from runtime.cli import InputError
from runtime.files import append_rows, read_rows
from runtime.sampled import brief
from tasks import general_verifier, grades, toy

# In this order they are graded.
A = {"Q2?": ["x", "y"], "Q0?": ["14.", "fourteen"], "Q3?": ["9", None]}
B = {"Q2?": ["y", "z"], "Q0?": ["14 eggs", "Fourteen"], "Q3?": ["9 ", ""], "Q1?": ["w", "w"]}
CLEAR = {f"Clear {k}?": ["5", "5."] for k in range(7)}
REFERENCES = {"Q3?": ["9"], "Q0?": ["0", "14"], "Q2?": ["7"], "Q1?": ["8"]}
BY_YOU = "questions, what is right by a/grades.jsonl"


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
    return f"pass@1 {brief(statistics.mean(shares))} ± {brief(error, 2)}"


def test_it_asks_only_what_is_in_doubt(user):
    """Two evaluations. Their answers are shuffled, and the numbers are those of pen and paper."""
    write("a", A | CLEAR)
    write("b", B | CLEAR)
    code, out = user("a b", right={"Fourteen", "x", "z"})
    assert code == 0 and out.startswith("2 questions have answers in doubt. Type"), out
    shown = re.findall(r"\d of 2:\n(.*)\nreference:\n  .*\n((?: +\d+  .*\n)+)", out)
    shown = {question: re.findall(r"\d  (.*)", lines) for question, lines in shown}
    in_order = {"Q0?": ["14 eggs", "Fourteen"], "Q2?": ["x", "y", "z"]}
    assert {question: sorted(answers) for question, answers in shown.items()} == in_order
    assert shown["Q2?"] != in_order["Q2?"]  # a has x and y, b has y and z
    assert "reference:\n  0 or 14\n" in out
    said = {row["answer"]: row["right"] for row in read_rows("a/grades.jsonl")}
    assert said == {"Fourteen": True, "14 eggs": False, "x": True, "y": False, "z": True}
    a, b = [1, 0.5, 0.5, *[1] * 7], [0.5, 0.5, 0.5, *[1] * 7]
    assert f"10 {BY_YOU}:\n  a: {by_hand(a)}\n  b: {by_hand(b)}" in out
    error = statistics.stdev([y - x for x, y in zip(a, b)]) / 10**0.5
    assert f"change -.05 ± {brief(error, 2)}\n" in out
    assert f"by the run's own verifier:\n  a: {by_hand([0] * 10)}" in out
    _, again = user("a b", right={"y"})  # nothing is asked again
    assert "reference:" not in again and again.split("\n\n")[1:] == out.split("\n\n")[-2:]
    _, turned = user("b a --grades a/grades.jsonl")
    assert f"  b: {by_hand(b)}\n  a: {by_hand(a)}" in turned and "reference:" not in turned


@pytest.mark.parametrize("by", ["you", "M"])
@pytest.mark.parametrize("answers, mean", [([None, ""], "0"), (["14", "0."], "1")])
def test_where_nothing_is_in_doubt_it_says_so_and_prints_the_numbers(
    user, model_says, answers, mean, by
):
    """Nothing is boxed, or every answer is a reference."""
    asked = model_says(0)
    write("a", {"Q0?": answers})
    code, out = user(f"a --by {by}")
    assert code == 0 and out.startswith("nothing is asked: no sample has an answer that"), out
    assert f"\n  a: pass@1 {mean}\n" in out and not asked.called and "in doubt" not in out


def test_it_says_how_many_questions_it_leaves_out(user):
    write("a", A | CLEAR)
    write("b", B)
    says = "{} of {} questions are left out (--questions {}, of those in all directories)\n".format
    for flags, left_out, of, count in ("a", 8, 10, 2), ("a b", 8, 11, 50), ("a b", 9, 11, 2):
        code, out = user(f"{flags} --questions {count}", replies="q\n")
        assert code == 0 and says(left_out, of, count) in out, out
    assert "are left out (--questions" not in user("b", replies="q\n")[1]


def test_an_answer_about_which_a_model_does_not_decide_is_not_wrong(user, model_says):
    """Its question is left out of the numbers, and counted. The model is not asked again."""
    write("a", {"Q0?": ["mother", "x"], "Q2?": ["y", "z"], "Q3?": ["9", "9"]})
    decided, asked = {"y": True, "z": False}, model_says(0)
    asked.side_effect = lambda pairs, *_: ([decided.get(a) for _, a in pairs], ["?"] * len(pairs))
    for calls in 1, 1:
        code, out = user("a --by M")
        assert code == 0 and asked.call_count == calls, out
        assert re.search(r"-M-.*jsonl: 1 questions are left out, since an answer to each", out)
        assert re.search(r"\n2 questions, what is right by a/grades-M.*\n  a: pass@1 .75 ±", out)
    [path] = Path("a").glob("grades-M-*.jsonl")
    assert {row["answer"]: row["right"] for row in read_rows(path)} == {
        "mother": None,
        "x": None,
        "y": True,
        "z": False,
    }


def test_it_goes_on_where_it_stopped(user):
    """What is typed wrong is asked again. Of what comes after the stop nothing counts, not even
    Q3, where nothing is in doubt. With other runs and another K the order is the same."""
    write("a", A)
    write("b", B)
    code, out = user("b a", replies="q\n")
    assert not code and "b/grades.jsonl has no grades of these questions" in out
    for replies in "1 9\n\nq\n", "1 9\n\n":  # the end of a pipe
        Path("a/grades.jsonl").unlink(missing_ok=True)
        code, out = user("a b", replies=replies)
        assert code == 0 and out.count("expected the numbers") == 1 and "stopped; the same" in out
        assert f"1 {BY_YOU}" in out and {r["question"] for r in read_rows("a/grades.jsonl")} == {
            "Q2?"
        }
    assert "2 of 3 questions are left out, from one with ungraded answers on: 'Q0?'" in out
    code, out = user("b a --grades a/grades.jsonl", replies="q\n")
    assert code == 0 and "1 of 1:\nQ0?" in out and f"1 {BY_YOU}" in out
    code, out = user("a --questions 2", replies="?\n")
    rows = read_rows("a/grades.jsonl")
    assert [row["question"] for row in rows if row["right"] is None] == ["Q0?"]
    assert code == 0 and f"1 {BY_YOU}" in out
    code, out = user("a b", right={"14 eggs"})  # of that one, what is new
    assert code == 0 and out.count("  14 eggs\n") == 1 and "ourteen\n" not in out
    assert f"2 {BY_YOU}" in out  # Q3 too, but not what was left out


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
    assert code == 0 and out.count("reference:") == 3 and f"{finished_run} step 2" in out, out
    yours, verifiers = out.split("what is right by the run's own verifier")
    for step in 0, 4:
        of_step = [row["right"] for row in held_out if row["step"] == step]
        mean = brief(statistics.mean(sum(right) / len(right) for right in of_step))
        assert f"{finished_run} step {step}: pass@1 {mean} ±" in yours
        assert f"{finished_run} step {step}: pass@1 {mean} ±" in verifiers
    table = out.split("j, what is right by j/grades.jsonl:\n")[1]
    assert by_verifier.split("all samples")[0] in table


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


def test_a_model_grades(user, long_model_dir, monkeypatch):
    """A tiny one, which decides nothing, in the same order and with the same shortcuts as you."""
    write("a", A | CLEAR)
    write("b", B | CLEAR)
    monkeypatch.setattr(general_verifier, "VERIFIER_TOKENS", 8)
    monkeypatch.setattr(grade, "AT_ONCE", 2)
    code, out = user(f"a b --by {long_model_dir}")
    assert code == 0 and out.count("2 of 2 replies hold no decision") == 2, out
    [path] = Path("a").glob("grades-model-??????.jsonl")
    rows = read_rows(path)
    assert {row["answer"] for row in rows} == {"Fourteen", "14 eggs", "x", "y", "z"}
    assert not any(row["right"] for row in rows) and all(row["reply"] for row in rows)
    asked = mock.Mock(side_effect=grade.ask)
    monkeypatch.setattr(grade, "ask", asked)
    assert user(f"a b --by {long_model_dir}")[0] == 0 and not asked.called  # all is in the file


@pytest.fixture
def model_says(monkeypatch):
    """model_says(seed, accepts): a model that accepts these answers, and what it was asked."""

    def install(seed, *accepts):
        Path("M").mkdir(exist_ok=True)
        Path("M/model.safetensors").write_bytes(bytes([seed]))  # by which its mark is made
        monkeypatch.setattr(grade, "load", lambda *_, **__: (None, None))

        def answers(pairs, *_):
            return [answer in accepts for _, answer in pairs], ["..."] * len(pairs)

        monkeypatch.setattr(grade, "ask", asked := mock.Mock(side_effect=answers))
        return asked

    return install


def test_how_often_you_agree_with_a_model(user, model_says):
    write("a", A | CLEAR)
    Path("p.txt").write_text("{question} {reference} {answer}?", encoding="utf-8")
    asked = model_says(0, "x")
    code, out = user("a --by M --prompt p.txt")
    assert code == 0 and "what is right by a/grades-M-" in out and "agree" not in out
    assert asked.call_args.args[2] == "{question} {reference} {answer}?"
    accepts = r"  a/grades-M-\w+.jsonl accepts {} of the {} that a/grades.jsonl calls {}\n".format
    for flags in "a", "a --by M --prompt p.txt":  # whoever graded last
        code, out = user(flags, right={"y"})
        assert code == 0 and re.search(r"\na/grades.jsonl and a/grades-M-.* agree on 1 of 3", out)
        assert re.search(accepts(0, 1, "right") + accepts(1, 2, "wrong"), out), out
        assert "  'x' for '7': a/grades.jsonl says wrong\n" in out
        assert "  'y' for '7': a/grades.jsonl says right\n" in out


def test_a_models_grades_belong_to_its_weights_and_the_prompt(user, model_says):
    write("a", A)
    prompts = "Is {answer} {reference}? {question}", "{question}: {answer} for {reference}?"
    for seed, prompt, calls in (0, 0, 1), (0, 0, 0), (1, 0, 1), (1, 1, 1):
        Path("p.txt").write_text(prompts[prompt])
        asked = model_says(seed, "x")
        assert user("a --by M --prompt p.txt")[0] == 0 and asked.call_count == calls
    assert len([*Path("a").glob("grades-M-*.jsonl")]) == 3


def test_it_runs_in_one_process(user, monkeypatch):
    """Each would ask for every grade."""
    write("a", A)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["grade.py", "a"])
    with pytest.raises(InputError, match="grade.py runs without torchrun"):
        grade.main()


def test_the_last_grade_counts_and_a_second_person_has_a_second_file(user):
    write("a", {"Q0?": ["mother", "x"]})
    assert "a: pass@1 0" in user("a", right=())[1]  # a mistake
    rows = read_rows("a/grades.jsonl")
    append_rows(Path("a/grades.jsonl"), [rows[0] | {"right": True, "note": "ask Ann"}])
    assert "a: pass@1 .5" in user("a")[1]
    write("c", {"Q1?": ["mother"]})
    assert "1 of 1 questions are left out" in user("c --grades a/grades.jsonl", replies="q\n")[1]
    code, out = user("a --grades a/grades-ann.jsonl", right={"x", "mother"})
    assert code == 0 and "a/grades.jsonl and a/grades-ann.jsonl agree on 1 of 2 answers" in out


def test_the_verifier_is_read_on_the_rows_that_are_graded(user):
    """Not on others with the same question."""
    write("a", {"Q0?": ["v", "w"], "Q1?": ["v", "w"]})
    rows = [row | {"right": [True, False]} for row in read_rows("a/samples.jsonl")]
    rows.append(rows[0] | {"references": ["other"], "right": [False, False]})
    Path("a/samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = grades.choose_questions([row | {"run": "a"} for row in rows], 9)
    order = grades.in_doubt(samples).case.unique()
    code, out = user("a", replies="".join("?\n" if "other" in case else "\n" for case in order))
    assert code == 0 and f"2 {BY_YOU}:\n  a: pass@1 0 ± 0\n" in out
    assert "2 questions, what is right by the run's own verifier:\n  a: pass@1 .5 ± 0\n" in out


GRADE = {"question": "Q3?", "references": ["9"], "answer": "v"}
REFUSED = [  # flags, what the line says
    ("a c", "grade.py: no question is in all of these directories with the same references"),
    ("empty", "empty has no evaluation"),
    ("r/checkpoints/step-4", "r/checkpoints/step-4 is a checkpoint: name its run, r"),
    ("a --grades g.parquet", "--grades g.parquet: expected a file .jsonl"),
    ("a --grades b/c/g.jsonl", "in a directory that is there"),
    ("a --by M --prompt few.txt", "few.txt needs {question}, {reference}"),
    ("a --by M --prompt odd.txt", "cannot read the prompt odd.txt"),
    ("b", "b/samples.jsonl, row 1: expected the columns question, references, answers, right"),
    ("a --grades lacks.jsonl", "lacks.jsonl, row 1: expected a grade of grade.py ('right')"),
    ("a --grades no.jsonl", "no.jsonl, row 1: expected a grade of grade.py (right is 'no')"),
    ("a --grades older.jsonl", "older.jsonl, row 1: expected a grade of grade.py (each grader has"),
]


@pytest.mark.parametrize("flags, says", REFUSED)
def test_what_cannot_be_read_is_one_line(user, flags, says):
    write("a", {"Q0?": ["v"]})
    write("c", {"Q3?": ["w"]})
    for name, rows in ("b", [{"question": "Q?"}]), ("empty", []):
        Path(name).mkdir()
        append_rows(Path(name) / "samples.jsonl", rows)
    for name, more in (
        ("lacks", {}),
        ("no", {"right": "no"}),
        ("older", {"right": True, "by": "M 123456"}),
    ):
        append_rows(Path(f"{name}.jsonl"), [GRADE | more])
    Path("few.txt").write_text("{question} {answer}")
    Path("odd.txt").write_bytes(b"\xff")
    code, out = user(flags)
    assert code == 2 and says in out, out


def test_a_byte_that_is_not_utf_8_is_asked_again(script, monkeypatch):
    write("a", {"Q0?": ["v"], "Q1?": ["w"]})
    typed = io.TextIOWrapper(io.BytesIO(b"1\n\xff\n1\n"), "utf-8", "strict")
    monkeypatch.setattr(sys, "stdin", typed)
    code, out, _ = script(grade, "a")
    assert code == 0 and out.count("expected the numbers") == 1 and "a: pass@1 1 ±" in out
