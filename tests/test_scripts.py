"""The scripts as a user runs them; in this process, so that torch is imported once."""

import argparse
import json
import re
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import data
import evaluate
import policy
import train
from rewards import REWARDS


@pytest.fixture
def script(monkeypatch, capsys, tmp_path):
    """script(module, "--flag value ...") -> (exit code, stdout, stderr), run in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(module, arguments):
        monkeypatch.setattr(sys, "argv", [module.__file__, *arguments.split()])
        policy.init_ranks()
        code = 0
        try:
            data.run_script(module.main)
        except SystemExit as stop:
            code = stop.code
        if not dist.is_initialized():
            policy.init_ranks()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


FAST = "--dataset toy --steps 2 --questions 4 --samples 4"
FAST += " --eval-limit 8 --eval-runs 2 --eval-every 2"


@pytest.mark.parametrize("reward", REWARDS)
def test_two_steps_of_training(script, tmp_path, toy_model_dir, reward):
    arguments = f"--model {toy_model_dir} --reward {reward} --out run {FAST}"
    arguments += f" --verifier-model {toy_model_dir}"
    code, out, err = script(train, arguments)
    assert code == 0 and out.splitlines()[-1].startswith("  pass@1  0.")
    run = tmp_path / "run"
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert "pass_at_1" in lines[0] and "pass_at_1" not in lines[1] and "pass_at_1" in lines[2]
    names = "reward exact_match answered truncated unique_answers solution_tokens grad_norm seconds"
    names += " zero_advantage_groups tokens_per_second lr loss"
    assert set(names.split()) <= set(lines[1])
    assert set(lines[1]["seconds"]) == {"sample", "reward", "update"}
    flags = json.loads((run / "config.json").read_text())["flags"]
    assert flags["reward"] == reward and flags["samples"] == 4 and flags["lr"] == 6e-4
    samples = read_lines(run / "samples.jsonl")
    assert len(samples) == 4 and len(samples[0]["answers"]) == len(samples[0]["R"]) == 4
    if "cer" in reward:
        for sample in samples:
            U, columns = len(sample["distinct_answers"]), len(sample["columns"])
            assert [len(row) for row in sample["W"]] == [columns] * U
            assert len(sample["P"]) == columns
    trained = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step-2")
    started = AutoModelForCausalLM.from_pretrained(toy_model_dir)
    if any(len(set(sample["R"])) > 1 for sample in samples):  # else there was nothing to learn
        for a, b in zip(trained.parameters(), started.parameters()):
            assert not torch.equal(a, b)
    assert AutoTokenizer.from_pretrained(run / "checkpoints" / "step-2").chat_template


def test_every_flag_is_taken(script, tmp_path, toy_model_dir):
    flags = f"--model {toy_model_dir} --dataset toy --reward cer --questions 2 --samples 3 --m 2"
    flags += f" --verifier-model {toy_model_dir} --max-prompt-tokens 64 --max-new-tokens 20"
    flags += " --lr 1e-3 --lr-end 0.5 --steps 2 --microbatch-tokens 100 --cpu-offload --seed 3"
    flags += " --eval-dataset toy-test --eval-every 1 --eval-limit 3 --eval-runs 2 --keep 1"
    flags += " --eval-temperature 0.5 --eval-top-p 0.9 --eval-top-k 5 --out run --save-every 1"
    code, help_text, _ = script(train, "--help")
    named = set(re.findall(r"^  (--[\w-]+)", help_text, re.MULTILINE))
    assert code == 0 and named - {"--resume", "--epochs"} == set(
        re.findall(r"--[a-z][\w-]*", flags)
    )
    code, _, err = script(train, flags)
    assert code == 0, err
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert names == ["step-2"] and len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3


@pytest.fixture
def stopped_run(script, tmp_path, toy_model_dir):
    """A run of 4 steps, and the same run as a crash after its third step would leave it."""
    flags = f"--model {toy_model_dir} {FAST} --steps 4 --save-every 2"
    assert script(train, f"{flags} --out whole")[0] == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-4")
    for name in "metrics.jsonl", "samples.jsonl":  # the last line is half written
        path = tmp_path / "parts" / name
        path.write_text(path.read_text()[:-40])


def test_a_resumed_run_equals_one_that_never_stopped(script, tmp_path, stopped_run):
    code, out, _ = script(train, "--out parts --resume")  # its flags are in config.json
    assert code == 0 and "step-4" in out
    for name in "metrics.jsonl", "samples.jsonl":
        whole, parts = (read_lines(tmp_path / run / name) for run in ("whole", "parts"))
        for line in whole + parts:
            line.pop("seconds", None), line.pop("tokens_per_second", None)
        assert whole == parts
    weights = "checkpoints/step-4/model.safetensors"
    parts = (tmp_path / "parts" / weights).read_bytes()
    assert parts == (tmp_path / "whole" / weights).read_bytes()


def test_a_resume_with_other_flags_is_refused(script, stopped_run):
    code, _, err = script(train, "--out parts --resume --reward exact --lr 1")
    assert code == 2 and "reward was cer and is exact, lr was 0.0006 and is 1.0" in err


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("config.json", '{"flags": ', "config.json: not valid JSON"),
        ("config.json", "{}", "config.json: not the configuration of a run"),
        ("checkpoints/step-2/training.pt", None, "step-2/training.pt: not readable .*remove"),
        ("metrics.jsonl", '{"step": 0\n{"step": 1}\n', "metrics.jsonl: not valid JSON"),
    ],
)
def test_a_resume_from_broken_files_is_refused(script, tmp_path, stopped_run, name, content, says):
    path = tmp_path / "parts" / name
    path.write_bytes(content.encode() if content else path.read_bytes()[:5000])
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    code, _, err = script(train, "--out parts --resume")
    assert code == 2 and re.search(says, err.splitlines()[-1]) and "Traceback" not in err
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_a_finished_run_cannot_be_resumed(script, stopped_run):
    code, _, err = script(train, "--out whole --resume")
    assert code == 2 and "the run in whole is complete" in err


def test_epochs_count_on_the_toy_too(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "2"])
    args = train.parse_args()
    assert args.steps is None and args.epochs == 2 and args.dataset == "toy" and args.samples == 8
    monkeypatch.setattr(sys, "argv", ["train.py", "--model", "toy"])
    args = train.parse_args()
    assert args.dataset == "math7.5k" and args.epochs == 5 and args.steps is None and args.m == 16


def test_an_epoch_shows_every_problem_once():
    args = argparse.Namespace(questions=3, seed=0)
    shown = [p for step in range(1, 5) for p in train.questions_of(step, list(range(6)), args)]
    assert sorted(shown[:6]) == sorted(shown[6:]) == list(range(6)) and shown[:6] != shown[6:]


def test_evaluation(script, tmp_path, toy_model_dir):
    rows = [{"problem": "1+1?", "answer": "2"}, {"problem": "2+2?", "answer": "4"}]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = f"--model {toy_model_dir} --dataset toy-test,sums.jsonl --limit 5 --runs 3 --out e"
    arguments += " --max-new-tokens 24 --temperature 0.9 --top-p 0.95 --top-k 50 --seed 1"
    code, out, err = script(evaluate, arguments)
    assert code == 0 and "toy-test" in out and "sums.jsonl" in out and "average" in out
    results = json.loads((tmp_path / "e" / "results.json").read_text())["results"]
    samples = read_lines(tmp_path / "e" / "samples.jsonl")
    assert len(samples) == 5 * 3 + 2 * 3
    toy = [sample for sample in samples if sample["dataset"] == "toy-test"]
    summary = results["toy-test"]
    assert summary["questions"] == 5 and summary["runs"] == 3
    assert summary["pass_at_1"] == pytest.approx(sum(s["correct"] for s in toy) / 15)
    by_question = torch.tensor([float(s["correct"]) for s in toy]).view(5, 3).mean(1)
    assert summary["stderr"] == pytest.approx((by_question.std() / 5**0.5).item())


BAD_INPUT = {
    "--dataset math501": r"unknown data set 'math501'.*math7.5k, webinstruct, math500",
    "--dataset no/such.jsonl": r"no such file: no/such.jsonl",
    "--dataset broken.jsonl": r"broken.jsonl, line 2: not valid JSON",
    "--dataset list.jsonl": r"list.jsonl, line 1: expected an object",
    "--dataset columns.jsonl": r"no question column \(question or problem\); .*: answer, prompt",
    "--dataset no_answer.jsonl": r"no answer column \(answer or solution\); columns present: q",
    "--dataset empty.jsonl": r"the data set is empty",
    "--dataset useless.jsonl": r"none of the 3 rows has a question and a usable reference",
    "--dataset long_line.jsonl": r"long_line.jsonl, line 1: not valid JSON",
    "--dataset long_question.jsonl": r"--max-prompt-tokens 2048: all of long_question.jsonl",
    "--dataset latin.jsonl": r"latin.jsonl: not UTF-8 text",
    "--dataset rows.json": r"rows.json, row 2: expected an object with named columns, found 7",
    "--dataset directory.jsonl": r"no such file: directory.jsonl",
    "--dataset text.txt": r"expected a file that ends in .jsonl, .json, .parquet",
    "--dataset bad.parquet": r"bad.parquet: not a readable parquet file",
    "--dataset math500": r"cannot load math-ai/math500 .*local .jsonl",
    "--dataset good.jsonl --reward oracle": r"--reward: invalid choice: 'oracle'.*rule\+cer",
    "--dataset good.jsonl --samples 1": r"--samples must be at least 2",
    "--dataset good.jsonl --m 0": r"--m must be from 1 to --samples \(16\), got 0",
    "--dataset good.jsonl --samples 4 --m 5": r"--m must be from 1 to --samples \(4\), got 5",
    "--dataset good.jsonl --steps 0": r"--steps must be at least 1",
    "--dataset good.jsonl --epochs 0": r"--epochs must be at least 1, got 0",
    "--dataset good.jsonl --keep 0": r"--keep must be at least 1, got 0",
    "--dataset good.jsonl --lr -1": r"--lr must be positive, got -1.0",
    "--dataset good.jsonl --lr nan": r"--lr must be positive, got nan",
    "--dataset good.jsonl --questions 0": r"--questions must be at least 1",
    "--dataset good.jsonl --out /proc/run": r"--out /proc/run: /proc is not a directory",
    "--dataset good.jsonl --model pickled": r"pickled: not a Hugging Face model directory",
    "--dataset good.jsonl --model custom_code": r"custom_code: .* contains custom code",
    "--dataset good.jsonl --lr x": r"argument --lr: invalid float value: 'x'",
    "--dataset good.jsonl --max-prompt-tokens 1": r"--max-prompt-tokens 1: all of good.jsonl",
    "--dataset good.jsonl --model empty_dir": r"empty_dir: not a Hugging Face model directory",
    "--dataset good.jsonl --model weightless": r"weightless: not a Hugging Face model directory",
    "--dataset good.jsonl --model Qwen/Qwen9": r"cannot load the model Qwen/Qwen9.*a local dir",
    "--dataset good.jsonl --reward general-verifier": r"cannot load the model TIGER-Lab/gen",
    "--dataset good.jsonl --out used": r"--out used holds another run",
    "--dataset good.jsonl --out new --resume": r"--resume: no run in new",
    "--dataset good.jsonl --out good.jsonl/x": r"--out good.jsonl/x: good.jsonl is not a directory",
    "--dataset good.jsonl --model truncated": r"truncated: not a Hugging Face model directory",
    "--dataset good.jsonl --eval-top-p 2": r"--eval-top-p must be in",
    "--dataset good.jsonl --resume": r"--resume needs --out",
    "--dataset good.jsonl --no-such-flag": r"unrecognized arguments: --no-such-flag",
}


@pytest.fixture
def bad_files(tmp_path, toy_model_dir):
    good = '{"question": "Q?", "answer": "1"}\n'
    files = {
        "good.jsonl": good,
        "broken.jsonl": good + '{"question": \n',
        "list.jsonl": "[1, 2]\n",
        "columns.jsonl": '{"prompt": "Q?", "answer": "1"}\n',
        "no_answer.jsonl": '{"question": "Q?"}\n',
        "empty.jsonl": "",
        "useless.jsonl": '{"question": "Q?", "answer": null}\n{"question": "", "answer": "1"}\n'
        '{"question": ["Q?"], "answer": {"a": 1}}\n',
        "long_line.jsonl": "x" * 10_000_000,
        "long_question.jsonl": json.dumps({"question": "why " * 250_000, "answer": "1"}),
        "rows.json": '[{"question": "Q?", "answer": "1"}, 7]',
        "directory.jsonl/x": "",
        "text.txt": "Q?",
        "bad.parquet": "not parquet",
        "used/metrics.jsonl": "",
        "empty_dir/README": "",
        "weightless/config.json": (toy_model_dir / "config.json").read_text(),
        "weightless/tokenizer.json": (toy_model_dir / "tokenizer.json").read_text(),
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "latin.jsonl").write_bytes('{"question": "größer?"}'.encode("latin-1"))
    for name in "truncated", "pickled", "custom_code":
        shutil.copytree(toy_model_dir, tmp_path / name)
    state = AutoModelForCausalLM.from_pretrained(toy_model_dir).state_dict()
    torch.save(state, tmp_path / "pickled" / "pytorch_model.bin")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    config = json.loads((toy_model_dir / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "code.Model"}}
    config["auto_map"]["AutoConfig"] = "code.Config"
    (tmp_path / "custom_code" / "config.json").write_text(json.dumps(config))
    weights = tmp_path / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


@pytest.mark.parametrize("arguments", BAD_INPUT)
def test_bad_input_gets_one_clear_line(script, bad_files, tmp_path, toy_model_dir, arguments):
    model = "" if "--model" in arguments else f"--model {toy_model_dir} "
    before = sorted(tmp_path.rglob("*"))
    code, out, err = script(train, model + arguments)
    assert code == 2 and out == ""
    assert len(err.splitlines()) == 1 and err.startswith("train.py: "), err
    assert re.search(BAD_INPUT[arguments], err), err
    assert sorted(tmp_path.rglob("*")) == before  # nothing half written


def test_a_data_set_that_is_not_the_toy_needs_a_model(script, bad_files):
    code, _, err = script(train, "--dataset good.jsonl")
    assert code == 2 and "--dataset good.jsonl needs --model" in err


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--top-k -1", "--top-k must be 0"),
        ("--top-p 2", "--top-p must be in"),
        ("--temperature -1", "--temperature must be 0 or more"),
        ("--runs 0", "--runs must be at least 1"),
        ("--out file/x", "file is not a directory"),
        ("--dataset nowhere", "unknown data set 'nowhere'"),
    ],
)
def test_bad_input_to_evaluation(script, tmp_path, toy_model_dir, flags, says):
    (tmp_path / "file").touch()
    code, _, err = script(evaluate, f"--model {toy_model_dir} --dataset toy-test {flags}")
    assert code == 2 and says in err and len(err.splitlines()) == 1


def test_evaluation_refuses_to_overwrite(script, tmp_path, toy_model_dir):
    (tmp_path / "results.json").write_text("{}")
    code, _, err = script(evaluate, f"--model {toy_model_dir} --dataset toy-test --out .")
    assert code == 2 and "holds the results of another evaluation" in err
