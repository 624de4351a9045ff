"""judge.py against its numbers computed anew, by brute force over pairs, from what it wrote."""

import itertools
import json
import re
from pathlib import Path
from unittest import mock

import numpy
import pytest
from processes import finish, run_in, start_ranks

import cer
import evaluate
import judge
import measure
import plot
import train
from runtime.files import read_rows
from runtime.sampled import sample_table
from tasks.data import load_problems

FLAGS = "--dataset toy-test --max-new-tokens 32 --out j"


def by_brute_force(rows, name):
    """The mean over questions of the share of pairs in which the right sample receives more."""
    aucs = []
    for row in rows:
        R, pairs = row["rewards"][name], []
        for i, right in enumerate(row["right"]):
            for j, other in enumerate(row["right"]):
                if right and not other and row["answers"][j]:
                    pairs.append(1.0 if R[i] > R[j] else 0.5 if R[i] == R[j] else 0.0)
        aucs += [sum(pairs) / len(pairs)] if pairs else []
    return sum(aucs) / len(aucs)


def test_the_interval_is_that_of_the_normal_distribution():
    """For the mean of 400 questions, half of which have 1."""
    coins = numpy.arange(400).reshape(-1, 1) % 2
    of = measure.interval(coins)
    assert [x.item() for x in of] == pytest.approx([0.5, 0.451, 0.549], abs=0.005)


@pytest.mark.filterwarnings("error")
def test_too_few_questions_give_no_interval(capsys):
    """Of twelve questions only k have right and wrong answers, and those of the others are all
    wrong or all right. Nothing warns, and none says nan."""
    for k, others in itertools.product((0, 1, 9, 10), (False, True)):
        lines = []
        for place in range(12):
            line = {"question": f"{place}?", "references": ["a"], "answers": ["a", "b", "c"]}
            line["truncated"] = [False] * 3
            line["right"] = [True, False, False] if place < k else [others] * 3
            lines.append(line | {"rewards": {"cer": [0.4, 0.1 + 0.04 * place, 0.0]}})
        table = measure.say_ratings(sample_table(lines))
        printed = capsys.readouterr()
        assert f"{k} questions have both" in printed.out and printed.err == ""
        assert "nan" not in printed.out and (table["AUC"].isna().all()) == (k == 0)
        assert table["low"].isna().all() == table["high"].isna().all() == (k < 10)


MANY = "many samples are cut off without an answer: read some. If they are on their way to a box, "
MANY += "raise --max-new-tokens; else fine-tune it first (sft.py)"
TINY = "most groups have no reward over 1e-06: shorten or show the references"
STOPS = "almost no answers: the model stops without a box. Fine-tune it first (sft.py)"
WARNINGS = [  # four answers, which are cut off, rewards of those with an answer, what is said
    ([None] * 4, [True] * 4, 0.5, {MANY: "cer, exact"}),
    ([None] * 4, [False] * 4, 0.5, {STOPS: "cer, exact"}),
    (["a", "b", None, None], [False, False, True, True], 0.5, {MANY: "cer, exact"}),
    (["a", "b", "c", None], [True] * 4, 0.5, {}),  # a base model writes on after its box
    (["a", "b", "c", "d"], [False] * 4, 1e-29, {TINY: "cer"}),
    (["a", "b", None, None], [False, False, True, True], 1e-29, {TINY: "cer", MANY: "exact"}),
]


@pytest.mark.parametrize("answers, truncated, reward, says", WARNINGS)
def test_it_warns_as_training_does(capsys, answers, truncated, reward, says):
    """Of each cause once, with the rewards that it concerns. `exact` gives 0 to all answers, which
    is no underflow."""
    line = {"question": "Q?", "references": ["x"], "answers": answers, "truncated": truncated}
    line |= {"right": [False] * 4, "log_W": []}
    line["rewards"] = {"cer": [reward * bool(a) for a in answers], "exact": [0.0] * 4}
    measure.say_ratings(sample_table([line]))
    said = [f"warning ({names}): {problem}\n" for problem, names in says.items()]
    assert capsys.readouterr().err == "".join(said)


@pytest.mark.parametrize("ranks", [1, 2])
def test_its_table_is_what_its_samples_say(script, tmp_path, toy_model_dir, ranks):
    flags = f"--model {toy_model_dir} {FLAGS} --limit 11 --samples 6 --rewards exact,cer,verifree"
    if ranks == 1:
        _, out, _ = script(judge, flags)
    else:
        finish(start_ranks(ranks, run_in, tmp_path, judge.main, flags))
        out = Path("log-0").read_text()
    assert "11 questions, 66 samples: answered" in out
    rows, table = read_rows("j/samples.jsonl"), json.loads((tmp_path / "j/judge.json").read_text())
    questions = [problem.question for problem in load_problems("toy-test", 11)]
    assert [row["question"] for row in rows] == questions
    assert list(table) == ["cer", "exact", "verifree"]
    for name, line in table.items():
        assert line["AUC"] == pytest.approx(by_brute_force(rows, name))
        lists = [(row["answers"], row["right"], row["rewards"][name]) for row in rows]
        samples = [sample for of_question in lists for sample in zip(*of_question)]
        right = [R for _, accepted, R in samples if accepted]
        wrong = [R for answer, accepted, R in samples if answer and not accepted]
        assert line["right"] == pytest.approx(sum(right) / len(right))
        assert line["wrong"] == pytest.approx(sum(wrong) / len(wrong))
    assert all(row["R"] == row["rewards"]["cer"] for row in rows)


def test_what_is_judged_is_on_the_disk_at_once(script, toy_model_dir, monkeypatch):
    """After every AT_ONCE questions; a directory that is not empty is refused. The actor is asked
    once about a group, whatever rewards need it."""
    flags = f"--model {toy_model_dir} {FLAGS} --limit 5 --samples 4"
    flags += " --rewards cer,verifree,exact,rule+cer,overlap+cer"
    monkeypatch.setattr(judge, "AT_ONCE", 2)
    score = mock.Mock(side_effect=cer.answer_logprobs)
    monkeypatch.setattr(cer, "answer_logprobs", score)
    written = mock.Mock(side_effect=judge.append_rows)
    monkeypatch.setattr(judge, "append_rows", written)
    code, _, err = script(judge, flags)
    assert code == 0 and [len(call.args[1]) for call in written.call_args_list] == [2, 2, 1], err
    assert score.call_count == 5
    assert [row["index"] for row in read_rows("j/samples.jsonl")] == [*range(5)]
    code, _, err = script(judge, flags)
    assert code == 2 and "--out j is not empty" in err


def test_a_row_that_does_not_fit_the_models_positions_is_left_out(script, toy_model_dir, tokenizer):
    """Its prompt, a completion and its reference, of questions in training and held out."""
    question = "Ana has 3 eggs. How many eggs?"
    assert len(tokenizer.encode(question)) < 20
    rows = [{"question": question, "answer": answer} for answer in ("3", "it is 3 eggs " * 10)]
    rows += [{"question": question * 30, "answer": "3"}]
    Path("q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = f"--model {toy_model_dir} --dataset q.jsonl"
    says = "2 are too long: a prompt may have 128, with 60 new tokens and its"
    held_out = "--samples 2 --eval-dataset q.jsonl --steps 1 --questions 1"
    for module, more in (judge, "--samples 2"), (evaluate, "--runs 2"), (train, held_out):
        out = module.__name__
        code, _, err = script(module, f"{flags} --max-new-tokens 60 {more} --out {out}")
        assert code == 0 and err.count(says) == 1 + (module is train), err
        assert len(read_rows(f"{out}/samples.jsonl")) == 1
    code, _, err = script(evaluate, f"{flags} --runs 1 --out e")
    assert code == 0 and "with 64 new tokens" in err, err  # half of the positions


def test_it_says_who_can_be_asked_and_that_it_can_be_pleased(script, toy_model_dir, long_model_dir):
    flags = "--dataset toy-test --limit 2 --samples 4 --max-new-tokens 24"
    rewards = "--rewards asked,cer,asked"
    code, out, err = script(judge, f"{flags} --model {toy_model_dir} --out a {rewards}")
    assert code == 0 and "asked is left out, since this model cannot be asked: it has 128" in err
    assert "\nasked" not in out and "\ncer" in out
    flags += f" --model {toy_model_dir} --verifier-model {long_model_dir}"
    code, out, err = script(judge, f"{flags} --out b")
    assert code == 0 and "\nasked " in out and "\nasked can be gamed: read samples" in out, err


def test_the_table_is_written_before_it_is_printed(script, toy_model_dir, monkeypatch):
    """And the command that is printed draws a group that can be drawn."""
    flags = f"--model {toy_model_dir} {FLAGS} --limit 2 --samples 4 --rewards"
    code, out, err = script(judge, f"{flags} exact,any-box")
    assert code == 0 and "plot.py" not in out, err
    code, out, err = script(judge, f"{flags} exact,verifree".replace("--out j", "--out k"))
    [draw] = re.findall(r"python plot.py (.*)", out)
    assert code == 0 and script(plot, draw)[0] == 0, err
    monkeypatch.setattr(measure, "brief", mock.Mock(side_effect=BrokenPipeError))
    assert script(judge, f"{flags} exact".replace("--out j", "--out l"))[0] == 2
    assert list(json.loads(Path("l/judge.json").read_text())) == ["exact"]


def test_lines_with_other_rewards_have_those_of_all(capsys):
    """Two lines of one question, from two calls, are one question."""
    row = {"question": "Q?", "references": ["c", "a"], "answers": ["a", "b"]}
    row |= {"right": [True, False], "truncated": [False, False]}
    row["rewards"] = {"cer": [0.4, 0.1], "asked": [0.9, 0.2]}
    longer = row | {name: row[name] * 2 for name in ("answers", "right", "truncated")}
    longer["rewards"] = {"cer": [0.4, 0.1, 0.4, 0.1]}
    table = measure.say_ratings(sample_table([row, longer]))
    out = capsys.readouterr().out
    assert [*table.index] == ["cer"] and "left out, since some questions lack them: asked" in out
    assert "\n1 questions, 6 samples: answered 1, right .5, verbatim .5, truncated 0\n1 q" in out
    others = [row, row | {"rewards": {"exact": [1.0, 0.0]}}]
    assert measure.say_ratings(sample_table(others)) is None
