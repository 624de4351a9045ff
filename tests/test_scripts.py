"""The scripts as a user runs them; in this process, so that torch is imported once."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import written_by
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

import evaluate
import plot
import train
import warm_start
from reward_functions import REWARDS
from runtime import files
from runtime.files import read_rows, to_jsonl
from tasks import general_verifier
from tasks.data import in_epochs


def test_what_a_run_writes(finished_run, toy_model_dir):
    lines, samples = (read_rows(finished_run / f"{name}.jsonl") for name in ("metrics", "samples"))
    assert [line["step"] for line in lines if "pass_at_1" in line] == [0, 2, 4]
    assert [line["step"] for line in lines if "reward" in line] == [1, 2, 3, 4]
    assert {"exact_match", "grad_norm", "entropy", "tokens_per_second"} <= lines[1].keys()
    assert lines[1]["seconds"].keys() == {"sample", "reward", "update"}
    assert [row["step"] for row in samples] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert all(len(row["answers"]) == len(row["R"]) == 4 for row in samples)
    models = toy_model_dir, finished_run / "checkpoints/step-2", finished_run / "checkpoints/step-4"
    weights = [AutoModelForCausalLM.from_pretrained(model).parameters() for model in models]
    for started, halfway, trained in zip(*weights):
        assert (started != halfway).any() and (halfway != trained).any()
    assert AutoTokenizer.from_pretrained(models[2]).chat_template


@pytest.mark.parametrize("reward", sorted(REWARDS.keys() - {"cer"}))
def test_a_step_of_training(script, monkeypatch, quick, toy_model_dir, reward):
    monkeypatch.setattr(general_verifier, "VERIFIER_TOKENS", 16)
    flags = f"{quick} --reward {reward} --verifier-model {toy_model_dir} --steps 1 --out run"
    code, _, err = script(train, flags)
    assert code == 0 and err.startswith(f"{reward} on "), err
    line = read_rows("run/metrics.jsonl")[1]
    assert (line["grad_norm"] > 0) == (line["zero_advantage_groups"] < 1)


def test_every_flag_is_taken(script, toy_model_dir):
    flags = f"--model {toy_model_dir} --dataset toy --reward cer --questions 2 --samples 3 --m 2"
    flags += f" --verifier math --verifier-model {toy_model_dir} --max-prompt-tokens 64 --keep 1"
    flags += " --max-new-tokens 20 --lr 1e-3 --lr-end 0.5 --steps 2 --microbatch-tokens 100"
    flags += " --cpu-offload --seed 3 --eval-dataset toy-test --eval-every 1 --eval-limit 3"
    flags += " --eval-runs 2 --eval-temperature 0.5 --eval-top-p 0.9 --eval-top-k 5"
    flags += " --out run --save-every 1"
    _, help_text, _ = script(train, "--help")
    named = set(re.findall(r"^  (--[\w-]+)", help_text, re.MULTILINE))
    assert named - {"--resume", "--epochs"} == set(re.findall(r"--[a-z][\w-]*", flags))
    code, _, err = script(train, flags)
    assert code == 0, err
    lines = read_rows("run/metrics.jsonl")
    assert [line.get("lr") for line in lines] == [None, 1e-3, 5e-4]
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-2"]


FLAGS = {
    "": dict(dataset="toy", samples=8, steps=200, lr=6e-4, m=8),
    "--epochs 2": dict(dataset="toy", epochs=2, steps=None),
    "--model X": dict(dataset="math7.5k", epochs=5, steps=None, m=16, lr=1e-6),
    "--model X --dataset toy": dict(lr=1e-6, lr_end=1.0, samples=8, eval_dataset="toy-test"),
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


def test_resume(script, finished_run, stopped_run):
    """Also where the evaluation after the last checkpoint is missing."""
    (stopped_run / "checkpoints" / "step-2-best").mkdir()  # the user's own
    lines = read_rows(stopped_run / "metrics.jsonl", log=True)
    del lines[2]["pass_at_1"]
    (stopped_run / "metrics.jsonl").write_text(to_jsonl(lines) + '{"step": 4, "rew')
    code, out, err = script(train, "--out run --resume --keep 2")
    assert code == 0 and "step-4" in out and "after step 2  pass@1" in err, err
    assert written_by(stopped_run) == written_by(finished_run)


BROKEN = {  # what is left of a file
    "config.json": ("{}", "run/config.json: expected an object with flags"),
    "metrics.jsonl": ('{"step": 0\n{"step": 1}\n', "row 1: expected"),
    "checkpoints/step-2/training/*.safetensors": (
        "half",
        "training: .*; restore its files .*or remove",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_resume_from_broken_files_is_refused(script, stopped_run, name):
    path, (content, says) = min(stopped_run.glob(name)), BROKEN[name]
    path.write_text(content)
    code, _, err = script(train, "--out run --resume")
    assert code == 2 and re.search(says, err.splitlines()[-1]) and "Traceback" not in err
    assert path.read_text() == content  # nothing is lost


def test_a_run_resumes_only_with_its_data_and_if_steps_are_left(script, stopped_run, monkeypatch):
    monkeypatch.setattr(train, "load", None)  # all of this is known before a model loads
    code, _, err = script(train, "--out run --resume --steps 1")
    assert code == 2 and "has 2 steps, more than 1" in err
    code, _, err = script(train, "--out run --resume --verifier text")
    assert code == 2 and "verifier was None and is text" in err
    config = stopped_run / "config.json"
    config.write_text(config.read_text().replace("8 questions", "7 questions"))
    code, _, err = script(train, "--out run --resume")
    assert code == 2 and "data was 7 questions" in err and "is 8 questions" in err


def test_a_second_process_on_a_run_is_refused(script, tmp_path):
    """Before it loads anything."""
    held = files.lock(tmp_path / "held")
    for module in train, evaluate:
        code, _, err = script(module, "--model nowhere --out held --dataset toy")
        assert code == 2 and "held: another process is writing to it" in err, err
    held.close()


# --------------------------------------------------------------------------------------- evaluation


def test_an_evaluation(script, toy_model_dir):
    """Of two data sets; its numbers are computed again from its rows, one after the other."""
    flags = f"--model {toy_model_dir} --limit 5 --runs 3 --out e --max-new-tokens 18"
    code, out, err = script(evaluate, f"{flags} --dataset toy-test,toy,")
    assert code == 0 and "average pass@1: " in out, err
    results, rows = json.loads(Path("e/results.json").read_text()), read_rows("e/samples.jsonl")
    assert [row["dataset"] for row in rows] == ["toy-test"] * 15 + ["toy"] * 15
    summary, rows = results["results"]["toy-test"], rows[:15]
    right = torch.tensor([float(row["correct"]) for row in rows]).view(5, 3).mean(1)  # by question
    assert summary["pass_at_1"] == pytest.approx(right.mean().item())
    assert summary["stderr"] == pytest.approx(right.std().item() / 5**0.5)
    answered = sum(bool(row["answer"]) for row in rows)
    assert summary["answered"] == pytest.approx(answered / 15) and 0 < answered < 15


def test_a_model_is_asked_one_question(script, toy_model_dir):
    asked = ["--ask", "Ana has 3 bags of 4 eggs and 2 more eggs. How many eggs?"]
    flags = f"--model {toy_model_dir} --max-new-tokens 32 --runs 3"
    code, out, err = script(evaluate, flags, *asked)
    assert code == 0 and out.count("\n-> ") == 3 and "boxed" in out, err
    assert not list(Path().iterdir())


def test_a_supervised_start_on_a_full_disk_leaves_nothing(script, toy_model_dir, monkeypatch):
    Path("demos.jsonl").write_text('{"question": "Q?", "solution": "so \\\\boxed{7}"}\n' * 4)

    def full(self, path, **options):
        Path(path).mkdir()
        (Path(path) / "half").write_text("")
        raise RuntimeError("SafetensorError: No space left on device")

    flags = f"--model {toy_model_dir} --data demos.jsonl --out warm --epochs 2"
    with monkeypatch.context() as patch:
        patch.setattr(Qwen3ForCausalLM, "save_pretrained", full)
        code, _, err = script(warm_start, flags)
    assert code == 2 and "cannot save warm (SafetensorError: No space left" in err, err
    assert [path.name for path in Path("warm").iterdir()] == ["lock"]
    assert "judge.py --model warm" in script(warm_start, flags)[1]


# ---------------------------------------------------------------------------------------- bad input

GOOD = '{"question": "Q?", "answer": "1"}\n'
FILES = {
    "good.jsonl": GOOD,
    "broken.jsonl": GOOD + '{"question": \n',
    "columns.jsonl": '{"prompt": "Q?"}\n',
    "table.csv": "question,answer",
    "old/config.json": '{"flags": {"reward": "cer", "steps": 4, "lr_end": 0.5}}',
    "old/metrics.jsonl": "",
    "old/samples.jsonl": '{"R": [1.0]}\n{"log_W": [], "columns": []}\n',
    "surrogate.jsonl": '{"question": "Q?", "solution": "\\ud800 \\\\boxed{7}"}',
    "control.jsonl": '{"question": "How many<eos>?", "answer": "7"}',
}
FLAGS_OF = {
    train: "--model {model} --dataset good.jsonl --verifier text --samples 4 --max-new-tokens 64",
    evaluate: "--model {model} --dataset toy",
    warm_start: "--model {model} --out warm",
    plot: "",
}
REFUSED = [  # script, more flags, what the one line says; {run}: a finished run
    (train, "--dataset broken.jsonl", r"broken.jsonl, row 2: expected objects with named columns"),
    (
        train,
        "--dataset columns.jsonl",
        r"columns.jsonl: no row can be used; no question .* rows \[1\]\); .* are prompt",
    ),
    (train, "--dataset table.csv", r"table.csv: expected a file that ends in .jsonl"),
    (train, "--dataset math501", r"math501: neither a file nor one of toy, toy-test, math7.5k"),
    (train, "--dataset math500", r"cannot load math-ai/math500 from the Hugging Face hub"),
    (
        train,
        "--max-prompt-tokens 1",
        r"good.jsonl: no question is left; .* 1 prompts more than 1 tokens",
    ),
    (train, "--max-new-tokens 200", r"the model has 128 positions"),
    (train, "--out good.jsonl/x", r"--out good.jsonl/x: .*good.jsonl is not a directory"),
    (train, "--model .", r"the model \. .*a directory with safetensors and tokenizer.json"),
    (evaluate, "--model runs/x/step-4", r"runs/x/step-4: no such directory"),
    (train, "--model {run}", r"run is a run, .*last checkpoint is .*step-4"),
    (train, "--resume --out {run} --eval-runs 3", r"eval_runs was 2 and is 3"),
    (train, "--resume --out {run} --lr 1", r"cannot go on, since .*lr was 0.0006 and is 1.0"),
    (train, "--resume --out old --steps 5", r"steps was 4 and is 5"),  # the decay depends on it
    (evaluate, "--out {run}", r"run is not empty: use another or .train.py. --resume"),
    (train, "--dataset control.jsonl", r"no question is left; 1 of 1 questions have a control"),
    (warm_start, "--data good.jsonl", r"good.jsonl, row 1: expected a `solution` with a closed"),
    (warm_start, "--data surrogate.jsonl", r"surrogate.jsonl, row 1: .* surrogates not allowed"),
    (plot, "old", r"old/metrics.jsonl is empty: the run has no step yet"),
    (plot, "old --out picture.xyz", r"expected a name that ends in .svg or .png"),
    (plot, "old --question 1", r"no sample of this group has an answer"),
]


@pytest.mark.parametrize("module, flags, says", REFUSED)
def test_bad_input_gets_one_clear_line(script, toy_model_dir, finished_run, module, flags, says):
    for name, content in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    flags = f"{FLAGS_OF[module]} {flags}".format(model=toy_model_dir, run=finished_run)
    code, out, err = script(module, flags)
    assert code == 2 and out == "" and len(err.splitlines()) == 1, err
    assert re.search(f"^{Path(module.__file__).name}: .*{says}", err), err
    written = {str(path) for path in Path().rglob("*") if path.is_file()}
    assert written == FILES.keys()  # nothing half written
