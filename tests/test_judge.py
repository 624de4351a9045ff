"""judge.py against its numbers computed anew, by brute force over pairs, from what it wrote."""

import json

import pytest
from processes import finish, run_in, start_ranks

import judge
from runtime.files import read_rows
from tasks.verifiers import VERIFIERS

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


@pytest.mark.parametrize("ranks", [1, 2])
def test_its_table_is_what_its_samples_say(script, tmp_path, toy_model_dir, ranks):
    flags = f"--model {toy_model_dir} {FLAGS} --limit 11 --samples 6 --rewards exact,cer,verifree"
    if ranks == 1:
        code, out, err = script(judge, flags)
        assert code == 0 and "11 questions x 6 samples: answered" in out, err
    else:
        finish(start_ranks(2, run_in, tmp_path, judge.main, flags))
    rows, table = read_rows("j/samples.jsonl"), json.loads((tmp_path / "j/judge.json").read_text())
    questions = [problem.question for problem in judge.load_problems("toy-test", 11)]
    assert [row["question"] for row in rows] == questions
    assert list(table) == ["cer", "exact", "verifree"]
    for name, line in table.items():
        assert line["AUC"] == pytest.approx(by_brute_force(rows, name))
        lists = [(row["answers"], row["right"], row["rewards"][name]) for row in rows]
        samples = [sample for of_question in lists for sample in zip(*of_question)]
        right = [R for _, accepted, R in samples if accepted]
        wrong = [R for answer, accepted, R in samples if answer and not accepted]
        assert line["mean if right"] == pytest.approx(sum(right) / len(right))
        assert line["if wrong"] == pytest.approx(sum(wrong) / len(wrong))
        assert line["right, nothing"] == pytest.approx(sum(R < 1e-6 for R in right) / len(right))
        assert line["groups, tiny"] == sum(max(row["rewards"][name]) < 1e-4 for row in rows)
        assert line["groups, equal"] == sum(len({*row["rewards"][name]}) == 1 for row in rows)
    assert all(row["R"] == row["rewards"]["cer"] for row in rows)


@pytest.mark.parametrize("verdict", [True, False])
@pytest.mark.parametrize("tokens", [32, 2])  # two tokens are too few for a box
def test_a_table_whatever_the_verifier_accepts(script, toy_model_dir, monkeypatch, verdict, tokens):
    monkeypatch.setitem(VERIFIERS, "toy-truth", lambda answer, reference: verdict)
    flags = f"--model {toy_model_dir} {FLAGS} --limit 1 --samples 4 --max-new-tokens {tokens}"
    code, out, err = script(judge, flags)
    assert code == 0 and "0 questions have both right and wrong" in out and "\ncer " in out, err
    assert ("Few samples are right" in out) == (not verdict or tokens == 2)
