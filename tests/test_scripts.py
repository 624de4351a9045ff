"""The scripts as a user runs them; in this process, so that torch is imported once."""

import json
import re
import shutil
import sys

import pytest
import torch
from conftest import FAST, written_by
from transformers import AutoModelForCausalLM, AutoTokenizer

import evaluate
import rewards
import train
from engine.files import read_rows
from rewards import REWARDS
from tasks.data import in_epochs


@pytest.mark.parametrize("reward", REWARDS)
def test_two_steps_of_training(script, tmp_path, monkeypatch, toy_model_dir, reward):
    monkeypatch.setattr(rewards, "VERIFIER_TOKENS", 32)
    arguments = f"--model {toy_model_dir} --reward {reward} --out run {FAST}"
    arguments += f" --verifier-model {toy_model_dir}"
    code, out, err = script(train, arguments)
    assert code == 0 and re.search(r"pass_at_1 +first \.?\d+", out), err
    run_dir = tmp_path / "run"
    lines = read_rows(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert "pass_at_1" in lines[0] and "pass_at_1" not in lines[1] and "pass_at_1" in lines[2]
    names = "reward exact_match answered truncated unique_answers solution_tokens grad_norm seconds"
    names += " zero_advantage_groups tokens_per_second lr loss entropy"
    assert set(names.split()) <= set(lines[1])
    assert set(lines[1]["seconds"]) == {"sample", "reward", "update"}
    samples = read_rows(run_dir / "samples.jsonl")
    assert len(samples) == 4 and len(samples[0]["answers"]) == len(samples[0]["R"]) == 4
    trained = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "step-2")
    started = AutoModelForCausalLM.from_pretrained(toy_model_dir)
    if any(len(set(sample["R"])) > 1 for sample in samples):  # else there was nothing to learn
        changed = [(a != b).any() for a, b in zip(trained.parameters(), started.parameters())]
        assert all(changed)
    assert AutoTokenizer.from_pretrained(run_dir / "checkpoints" / "step-2").chat_template


def test_every_flag_is_taken(script, tmp_path, toy_model_dir):
    flags = f"--model {toy_model_dir} --dataset toy --reward cer --questions 2 --samples 3 --m 2"
    flags += f" --verifier-model {toy_model_dir} --max-prompt-tokens 64 --max-new-tokens 20"
    flags += " --lr 1e-3 --lr-end 0.5 --steps 2 --microbatch-tokens 100 --cpu-offload --seed 3"
    flags += " --eval-dataset toy-test --eval-every 1 --eval-limit 3 --eval-runs 2 --keep 1"
    flags += " --eval-temperature 0.5 --eval-top-p 0.9 --eval-top-k 5 --out run --save-every 1"
    code, help_text, _ = script(train, "--help")
    named = set(re.findall(r"^  (--[\w-]+)", help_text, re.MULTILINE))
    given = set(re.findall(r"--[a-z][\w-]*", flags))
    assert code == 0 and named - {"--resume", "--epochs"} == given
    code, _, err = script(train, flags)
    assert code == 0, err
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert names == ["step-2"] and len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 3


FLAGS = {
    "": dict(dataset="toy", samples=8, steps=200, lr=6e-4, m=8),
    "--epochs 2": dict(dataset="toy", epochs=2, steps=None),
    "--epochs 2 --steps 3": dict(steps=3),
    "--model X": dict(dataset="math7.5k", epochs=5, steps=None, m=16, lr=1e-6),
    "--model X --dataset webinstruct": dict(epochs=1),
    "--model X --dataset webinstruct --epochs 3": dict(epochs=3),
    "--model X --dataset toy": dict(lr=1e-6, lr_end=1.0, samples=8, eval_dataset="toy-test"),
    "--model X --dataset toy --lr 1e-5 --samples 4": dict(lr=1e-5, m=4),
}


@pytest.mark.parametrize("flags, expected", FLAGS.items())
def test_given_flags_come_before_the_toys_and_the_papers(monkeypatch, flags, expected):
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    args = vars(train.parse_args())
    assert {name: args[name] for name in expected} == expected


def test_an_epoch_shows_every_problem_once():
    shown = in_epochs(range(6), 15, seed=0)
    assert sorted(shown[:6]) == sorted(shown[6:12]) == list(range(6)) and shown[:6] != shown[6:12]
    assert len(shown) == 15 and shown == in_epochs(range(6), 30, seed=0)[:15]


# ------------------------------------------------------------------------------------------- resume


@pytest.fixture
def stopped_run(script, tmp_path, toy_model_dir):
    """A run of 4 steps, and the same run as a crash after its third step would leave it."""
    flags = f"--model {toy_model_dir} {FAST} --steps 4 --save-every 2"
    assert script(train, f"{flags} --out whole")[0] == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-4")
    (tmp_path / "parts" / "checkpoints" / "step-2-best").mkdir()  # the user's own
    for name in "metrics.jsonl", "samples.jsonl":  # the last line is half written
        path = tmp_path / "parts" / name
        path.write_text(path.read_text()[:-40])


def test_resume(script, tmp_path, stopped_run):
    code, _, err = script(train, "--out parts --resume --reward exact --lr 1")
    assert code == 2 and "reward was cer and is exact, lr was 1e-06 and is 1.0" in err
    code, out, _ = script(train, "--out parts --resume --keep 2")
    assert code == 0 and "step-4" in out
    assert written_by(tmp_path / "parts") == written_by(tmp_path / "whole")
    code, _, err = script(train, "--out whole --resume")
    assert code == 2 and "the run in whole has completed 4 steps: a larger --steps would ext" in err
    code, _, err = script(train, "--out nowhere --resume")
    assert code == 2 and "nowhere: no such directory" in err


def test_a_rate_that_decays_and_the_verifier_stay_as_they_were(script, toy_model_dir):
    flags = f"--model {toy_model_dir} {FAST} --lr-end 0.5 --out run"
    assert script(train, flags)[0] == 0
    for changed in "--steps 4", "--verifier-model other", "--epochs 7":
        code, _, err = script(train, f"--out run --resume {changed}")
        name, value = changed[2:].replace("-", "_").split()
        assert code == 2 and f"{name} was " in err and f"and is {value}" in err


def test_resume_from_broken_files_is_refused(script, tmp_path, stopped_run):
    shard = next((tmp_path / "parts/checkpoints/step-2/training").glob("*.safetensors"))
    cases = {
        shard: (shard.read_bytes()[:5000], "step-2/training: not readable .*remove"),
        tmp_path / "parts" / "metrics.jsonl": (b'{"step": 0\n{"step": 1}\n', "row 1: expected"),
        tmp_path / "parts" / "config.json": (b"{}", "is not the configuration of a run"),
    }
    for path, (content, says) in cases.items():
        whole = path.read_bytes()
        path.write_bytes(content)
        code, _, err = script(train, "--out parts --resume")
        assert code == 2 and re.search(says, err.splitlines()[-1]) and "Traceback" not in err
        assert path.read_bytes() == content  # nothing is lost
        path.write_bytes(whole)


# --------------------------------------------------------------------------------------- evaluation


def test_evaluation(script, tmp_path, toy_model_dir):
    arguments = f"--model {toy_model_dir} --dataset toy-test,toy --limit 5 --runs 3 --out e"
    code, out, err = script(evaluate, f"{arguments} --max-new-tokens 18")  # too few for some
    assert code == 0 and "average" in out, err
    results = json.loads((tmp_path / "e" / "results.json").read_text())["results"]
    samples = read_rows(tmp_path / "e" / "samples.jsonl")
    assert set(results) == {"toy-test", "toy"} and len(samples) == 30
    summary = results["toy-test"]
    correct = [float(s["correct"]) for s in samples if s["dataset"] == "toy-test"]
    right = torch.tensor(correct).view(5, 3).mean(1)  # of each question
    assert summary["pass_at_1"] == pytest.approx(right.mean().item()) and summary["questions"] == 5
    answered = [bool(s["answer"]) for s in samples if s["dataset"] == "toy-test"]
    assert summary["answered"] == pytest.approx(sum(answered) / 15) and 0 < sum(answered) < 15
    assert summary["stderr"] == pytest.approx(right.std().item() / 5**0.5)
    bad = {"": "is not empty: choose a new directory", "--top-p 2": "expected 1e-06 to 1, got 2"}
    for flags, says in (bad | {"--runs 0": "--runs: exp"}).items():
        code, _, err = script(evaluate, f"{arguments} {flags}")
        assert code == 2 and says in err and len(err.splitlines()) == 1


# ---------------------------------------------------------------------------------------- bad input

GOOD = '{"question": "Q?", "answer": "1"}\n'
BAD_FILES = {
    "broken.jsonl": (GOOD + '{"question": \n', r"broken.jsonl, row 2: expected .* named columns"),
    "list.jsonl": ("[1, 2]\n", r"list.jsonl, row 1: expected objects with named columns"),
    "columns.jsonl": ('{"prompt": "Q?"}\n', r"no row has a question .*first row: prompt"),
    "empty.jsonl": ("", r"empty.jsonl: no row has a question"),
    "rows.json": ('[{"question": "Q?"}, 7]', r"rows.json, row 2: expected"),
    "bad.parquet": ("not parquet", r"bad.parquet, row 1: expected objects"),
    "verifier.jsonl": (GOOD.replace("}", ', "verifier": "oracle"}'), ""),
    "table.csv": ("question,answer", ""),
    "long.jsonl": ('{"question": "%s", "answer": "1"}' % ("why " * 9999), r"of long.jsonl is"),
}
BAD_INPUT = {f"--dataset {name}": says for name, (_, says) in BAD_FILES.items() if says} | {
    "--dataset math501": r"math501: neither a file nor one of toy, toy-test, math7.5k, webinstruct",
    "--dataset math500": r"cannot load math-ai/math500 .*a local file works too \(.jsonl",
    "--dataset good.jsonl --reward oracle": r"--reward: invalid choice: 'oracle'.*rule\+cer",
    "--dataset good.jsonl --samples 4 --m 5": r"--m 5 is more than --samples 4",
    "--dataset good.jsonl --samples 1": r"--samples: expected at least 2, got 1",
    "--dataset good.jsonl --lr x": r"argument --lr: invalid float value: 'x'",
    "--dataset good.jsonl --lr nan": r"--lr: expected at least 1e-12, got nan",
    "--dataset good.jsonl --out good.jsonl/x": r"good.jsonl/x",
    "--dataset good.jsonl --out used": r"--out used is not empty",
    "--dataset good.jsonl --resume": r"--resume needs --out",
    "--dataset good.jsonl --max-new-tokens 200": r"the model has 128 positions",
    "--dataset good.jsonl --model bare": r"the model bare: it has no tokenizer.json",
    "--dataset good.jsonl --model old": r"old is a run, .*last checkpoint is old/check",
    "--dataset good.jsonl --model Qwen/Qwen9": r"Qwen/Qwen9 \(no such directory, and .*id of one",
    "--dataset good.jsonl --rewards cer": r"unrecognized arguments: --rewards cer; .* --reward\?",
    "--dataset good.jsonl --sample 4": r"unrecognized arguments: --sample 4; .* --samples\?",
    "--dataset table.csv": r"table.csv: expected a file that ends in .jsonl",
    "--dataset verifier.jsonl": r"first row: question, answer, verifier",
}


@pytest.mark.parametrize("arguments", BAD_INPUT)
def test_bad_input_gets_one_clear_line(script, tmp_path, toy_model_dir, arguments):
    files = {name: content for name, (content, _) in BAD_FILES.items()} | {"good.jsonl": GOOD}
    others = "used/metrics.jsonl bare/config.json old/checkpoints/step-7/model.safetensors"
    for name, content in (files | dict.fromkeys(others.split(), "")).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    model = "--max-new-tokens 64 "
    model += "" if "--model" in arguments else f"--model {toy_model_dir} "
    before = sorted(tmp_path.rglob("*"))
    code, out, err = script(train, model + arguments)
    assert code == 2 and out == ""
    assert len(err.splitlines()) == 1 and err.startswith("train.py: "), err
    assert re.search(BAD_INPUT[arguments], err), err
    assert sorted(tmp_path.rglob("*")) == before  # nothing half written
