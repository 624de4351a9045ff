"""The scripts as a user runs them; in this process, so that torch is imported once."""

import functools
import json
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import steps_of, summary_of, written_by
from transformers import AutoModelForCausalLM, AutoTokenizer

import evaluate
import measure
import plot
import sft
import train
from engine.tokens import split_answer
from reward_functions import REWARDS
from runtime.cli import InputError
from runtime.files import LOGS, append_rows, lock, read_config, read_rows
from tasks import data, general_verifier
from tasks.data import in_epochs, load_problems
from tasks.verifiers import verify


def test_what_a_run_writes(finished_run, toy_model_dir):
    lines, samples, held_out = (read_rows(finished_run / name) for name in LOGS)
    assert [line["step"] for line in lines if "pass_at_1" in line] == [0, 2, 4]
    assert [line["step"] for line in lines if "reward" in line] == [1, 2, 3, 4]
    assert [row["step"] for row in samples] == [1, 1, 2, 2, 3, 3, 4, 4]
    for line in (line for line in lines if "reward" in line):
        assert line["seconds"].keys() == {"sample", "reward", "update"}
        tokens = 16 * line["completion_tokens"]
        assert line["tokens_per_second"] == pytest.approx(tokens / sum(line["seconds"].values()))
    for line in (line for line in lines if "pass_at_1" in line):
        summary = summary_of([row for row in held_out if row["step"] == line["step"]])
        logged = line["pass_at_1"], line["pass_at_1_stderr"], line["eval_exact_match"]
        assert logged == pytest.approx([*summary.values()][:3])
    models = toy_model_dir, finished_run / "checkpoints/step-2", finished_run / "checkpoints/step-4"
    weights = [AutoModelForCausalLM.from_pretrained(model).parameters() for model in models]
    for started, halfway, trained in zip(*weights):
        assert (started != halfway).any() and (halfway != trained).any()
    assert AutoTokenizer.from_pretrained(models[2]).chat_template


@pytest.mark.parametrize("reward", sorted(REWARDS.keys() - {"cer"}))
def test_a_step_of_training(script, monkeypatch, quick, long_model_dir, reward):
    """Each row has the advantage of its sample over the others of its question."""
    monkeypatch.setattr(general_verifier, "VERIFIER_TOKENS", 16)
    monkeypatch.setattr(train, "update", updated := mock.Mock(side_effect=train.update))
    flags = f"{quick} --reward {reward} --verifier-model {long_model_dir} --steps 1 --out run"
    code, _, err = script(train, f"{flags} --eval-dataset=")  # none
    assert code == 0 and re.search(f"^{re.escape(reward)} on ", err, re.M), err
    [line] = steps_of(Path("run"))
    assert (line["grad_norm"] > 0) == (line["zero_advantage_groups"] < 1)
    R = torch.tensor([row["R"] for row in read_rows("run/samples.jsonl")])  # two of four questions
    A, rows = R - (R.sum(1, keepdim=True) - R) / 3, updated.call_args.args[2]
    assert len(rows) == 16
    for row, A_i in zip(rows, A.flatten()):
        assert min(abs(weight - A_i) for weight in row.weights) < 1e-6


def test_every_flag_is_taken(script, monkeypatch, toy_model_dir):
    flags = f"--model {toy_model_dir} --dataset toy --reward cer --questions 2 --samples 8 --m 2"
    flags += f" --verifier math --verifier-model {toy_model_dir} --max-prompt-tokens 64 --keep 1"
    flags += " --max-new-tokens 24 --lr 1e-3 --lr-end 0.5 --steps 2 --microbatch-tokens 100"
    flags += " --cpu-offload --seed 3 --eval-dataset toy-test --eval-every 1 --eval-limit 3"
    flags += " --eval-runs 2 --rounding nearest"
    flags += " --out run --save-every 1 --dtype fp32 --sampler auto"
    _, help_text, _ = script(train, "--help")
    named = set(re.findall(r"^  (--[\w-]+)", help_text, re.MULTILINE))
    others = {"--resume", "--epochs", "--lora", "--examples"}  # the toy has no template for these
    assert named - others == set(re.findall(r"--[a-z][\w-]*", flags))
    monkeypatch.setattr(measure, "sample", sampled := mock.Mock(side_effect=measure.sample))
    code, _, err = script(train, flags)
    assert code == 0, err
    _, _, problems, runs, tokens = sampled.call_args.args
    assert (len(problems), runs, tokens, sampled.call_count) == (3, 2, 24, 3)
    for group in read_rows("run/samples.jsonl"):
        of_answer = [sum(x is not None for x in row) for row in group["log_W"]]
        assert of_answer == [min(2, len(group["columns"]))] * len(of_answer)
    assert [line["lr"] for line in steps_of(Path("run"))] == [1e-3, 5e-4]
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-2"]


def test_samples_differ_by_seed_and_step(script, quick):
    """Of one question, again and again, by weights that hardly change."""
    Path("one.jsonl").write_text('{"question": "Ana has 3 eggs. How many eggs?", "answer": "1"}\n')
    flags = f"{quick} --dataset one.jsonl --questions 1 --lr 1e-12 --verifier text"
    samples, held_out = [], []
    for seed in 0, 1:
        assert script(train, f"{flags} --seed {seed} --out {seed}")[0] == 0
        samples += [str(row["texts"]) for row in read_rows(f"{seed}/samples.jsonl")]
        held_out += [[row["texts"] for row in read_rows(f"{seed}/evaluations.jsonl")]]
    assert len(set(samples)) == 4 and held_out[0] != held_out[1]


FLAGS = {
    "": dict(dataset="toy", samples=8, steps=200, lr=6e-4, m=8),
    "--epochs 2": dict(dataset="toy", epochs=2, steps=None),
    "--model X": dict(dataset="math7.5k", epochs=5, m=16, lr=1e-6, eval_every=50),
    "--model X --dataset toy": dict(lr=1e-6, lr_end=1.0, samples=8, eval_dataset="toy-test"),
    "--lora 8": dict(lora=8, lr=2e-3, lr_end=0.1),
    "--model X --lora 1": dict(lora=1, lr=1e-4),
    "--model X --lora 1 --lr 2e-6": dict(lora=1, lr=2e-6),
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
    """From what a crash left, in a save and in an evaluation; and when there is nothing to do."""
    (stopped_run / "checkpoints" / "step-2-best").mkdir()  # the user's own
    partial = stopped_run / "checkpoints" / "partial-step-3"
    for flags in "--keep 2", "--eval-every 3":
        partial.mkdir()
        code, out, err = script(train, f"--out run --resume {flags}")
        assert code == 0 and "step-4" in out and "after step 4  pass@1" in err, err
        assert written_by(stopped_run) == written_by(finished_run) and not partial.exists()


ALL = "(?s).+"
BROKEN = [  # file, what of it is replaced, by what, and what the last line says
    ("config.json", ALL, "{}", "run/config.json: expected an object with flags"),
    ("config.json", '"cer"', '"mine"', "no reward 'mine', only cer, exact"),
    ("checkpoints/step-2/training/*.distcp", ALL, "half", "training: .*; restore .* or remove"),
    ("checkpoints/step-2/training/logged.json", ALL, "{", "training: .*; restore its .* or remove"),
    ("checkpoints/step-2/training/.metadata", ALL, "", "training: .*; restore its .* or remove"),
    *(
        # As git or an editor of Windows writes them, and a digit that is another.
        (log, part, by, rf"step-2/training: run/{log} is shorter than it was then, or was changed")
        for log in LOGS
        for part, by in (("\n", "\r\n"), (r"\d", "7"))
    ),
    *(
        (
            log,
            ALL,
            "",
            rf"step-2/training: run/{log} is shorter than it was then, or was changed; rest",
        )
        for log in LOGS
    ),
]


@pytest.mark.parametrize("name, part, by, says", BROKEN)
def test_resume_from_broken_files_is_refused(script, stopped_run, name, part, by, says):
    """And nothing is deleted."""
    [path] = stopped_run.glob(name)
    path.write_text(re.sub(part, by, path.read_text("latin-1")), "latin-1")
    before = {path: path.read_bytes() for path in stopped_run.rglob("*") if path.is_file()}
    code, _, err = script(train, "--out run --resume --keep 2")
    assert code == 2 and re.search(says, err.splitlines()[-1]) and "Traceback" not in err, err
    assert before == {path: path.read_bytes() for path in before}


def test_what_began_a_run_is_kept_and_what_differs_is_said(script, stopped_run, monkeypatch):
    """The result may differ then."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for flags in "--sampler generate", "":  # which goes on with generate
        code, _, err = script(train, f"--out run --resume {flags}")
        assert code == 0 and "threads was 1 and is 3: the result may differ" in err, err
        assert "sampler was auto and is generate: the result may differ" in err, err
        began = read_config("run")
        assert (began["sampler"], began["threads"], began["device"]) == ("auto", 1, "cpu")


IDLE = {  # flags that do nothing: what is said
    "--reward exact --m 2": "--m does nothing with --reward exact",
    "--reward verifree --m 2": "--m does nothing with --reward verifree",
    "--reward cer --verifier-model X": "--verifier-model does nothing with --reward cer",
    "--reward cer --m 2": "",
    "--reward asked --verifier-model X": "",
}


@pytest.mark.parametrize("flags, said", IDLE.items())
def test_a_flag_that_does_nothing_is_named(monkeypatch, capsys, flags, said):
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    train.parse_args()
    assert capsys.readouterr().err.strip() == said


def test_a_run_resumes_only_with_its_data_and_if_steps_are_left(script, stopped_run, monkeypatch):
    code, _, err = script(train, "--out run --resume --steps 1")
    assert code == 2 and "has 2 steps, more than 1" in err
    load_problems, load = train.load_problems, train.load

    def other_order(held_out, name, limit=None, verifier=None):
        problems = load_problems(name, limit, verifier)
        return problems[::-1] if bool(limit) == held_out else problems

    def other_template(*inputs, **options):
        model, tokenizer = load(*inputs, **options)
        tokenizer.chat_template += " "
        return model, tokenizer

    turned = [("load_problems", functools.partial(other_order, of)) for of in (True, False)]
    for name, other in [*turned, ("load", other_template)]:
        with monkeypatch.context() as patch:
            patch.setattr(train, name, other)
            code, _, err = script(train, "--out run --resume")
        assert code == 2 and "since data was 8 questions and 3 held out, sha256 " in err, err


def test_a_run_resumes_only_with_its_judge(script, quick, long_model_dir, tmp_path):
    judge = shutil.copytree(long_model_dir, tmp_path / "judge")
    flags = f"{quick} --reward asked --verifier-model judge --steps 1 --out run"
    for command in flags, "--resume --out run --steps 2":
        code, _, err = script(train, command)
        assert code == 0, err
    model = AutoModelForCausalLM.from_pretrained(judge)
    model.lm_head.weight.data[0, 0] += 1
    model.save_pretrained(judge)
    code, _, err = script(train, "--resume --out run --steps 3")
    assert code == 2 and "cannot go on, since data was" in err.splitlines()[-1], err


def test_a_run_resumes_after_its_files_have_moved(
    script, quick, toy_model_dir, finished_run, tmp_path
):
    """And with another torch, which is not what config.json then names."""
    folder = shutil.copytree(toy_model_dir.parent, tmp_path / "old")
    flags = quick.replace(str(toy_model_dir.parent), "old")
    assert script(train, f"{flags} --steps 1 --out run")[0] == 0
    folder.rename("new")
    config = Path("run/config.json")
    config.write_text(config.read_text().replace(f'"torch": "{torch.__version__}', '"torch": "2.4'))
    moved = "--dataset new/questions.jsonl --eval-dataset new/held-out.jsonl --model new/model"
    code, _, err = script(train, f"--out run --resume --steps 2 {moved}")
    assert code == 0 and f"torch was 2.4 and is {torch.__version__}: the result may" in err, err
    config = read_config("run")
    assert config["torch"] == "2.4" and config["flags"]["dataset"] == "new/questions.jsonl"
    weights = finished_run / "checkpoints/step-2/model.safetensors"
    assert written_by(Path("run"))[2] == weights.read_bytes()


@pytest.mark.parametrize("function", ["train.load", "train.make_policy", "rloo.microbatches"])
def test_out_of_memory_names_what_may_be_smaller(script, quick, monkeypatch, function):
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(function, full)
    code, _, err = script(train, f"{quick} --eval-dataset= --out run")
    smaller = "a smaller --max-new-tokens, --microbatch-tokens or model"
    last = f"train.py: CUDA out of memory: use {smaller}; to train also --lora or --cpu-offload"
    assert code == 2 and err.splitlines()[-1] == last, err


def test_a_gpu_needs_a_torch_that_can_start_on_it(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.9.1"))
    code, _, err = script(evaluate, "--model nowhere --dataset toy")
    assert code == 2 and "torch 2.9.1 is too old for a GPU: install 2.10 or later" in err, err


def test_a_second_process_on_a_run_is_refused(script, tmp_path):
    """Before it loads a model."""
    with lock(tmp_path / "held"):
        code, _, err = script(evaluate, "--model nowhere --out held --dataset toy")
    assert code == 2 and "held: another process is writing to it" in err, err


# --------------------------------------------------------------------------------------- evaluation


def test_an_evaluation(script, monkeypatch, toy_model_dir, quick, tmp_path):
    """Of two data sets; the flags reach the sampler. No shell replaces the ~ in these paths."""
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("model").symlink_to(toy_model_dir)
    held_out = re.search("--eval-dataset (.*?) ", quick)[1]
    Path("mine.jsonl").write_text('{"question": "Q?", "answer": "1"}\n')
    flags = "--model=~/model --limit 3 --runs 4 --max-new-tokens 21 --verifier math"
    flags += f" --temperature 0.3 --top-p 0.9 --top-k 9 --dataset={held_out},~/mine.jsonl"
    monkeypatch.setattr(measure, "sample", sampled := mock.Mock(side_effect=measure.sample))
    texts = []
    for seed in 0, 1:
        code, out, err = script(evaluate, f"{flags} --seed {seed} --out=~/{seed}")
        assert code == 0 and "average pass@1: " in out, err
        texts.append([row["texts"] for row in read_rows(f"{seed}/samples.jsonl")])
    assert texts[0] != texts[1]
    settings = dict(temperature=0.3, top_p=0.9, top_k=9)
    assert sampled.call_args.kwargs.items() >= settings.items()
    results, rows = json.loads(Path("0/results.json").read_text()), read_rows("0/samples.jsonl")
    assert [row["dataset"] for row in rows] == [held_out] * 3 + [f"{tmp_path}/mine.jsonl"]
    summary, problems = results["results"][held_out], load_problems(held_out)
    assert summary == pytest.approx(summary_of(rows[:3]))
    assert 0 < summary["exact_match"] < summary["pass_at_1"] < 1 and 0 < summary["truncated"] < 1
    for i, row in enumerate(rows[:3]):
        assert (row["index"], row["question"]) == (i, problems[i].question)
        assert tuple(row["references"]) == problems[i].references
        boxes = [split_answer(text) for text in row["texts"]]
        assert row["answers"] == [box and box[1] for box in boxes] and len(boxes) == 4
        assert verify([(problems[i], answer) for answer in row["answers"]]) == row["right"]
        assert all(n == 21 for n, cut_off in zip(row["tokens"], row["truncated"]) if cut_off)


def test_an_evaluation_is_written_as_it_goes_on(script, monkeypatch, toy_model_dir):
    """After every so many samples, of at least one question. An interruption loses only the last
    ones."""
    flags = f"--model {toy_model_dir} --dataset toy-test --limit 5 --runs 3 --max-new-tokens 21"
    written, append = [], evaluate.append_rows

    def at_most_two(path, rows):
        append(path, rows)
        written.append([row["index"] for row in rows])
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "append_rows", at_most_two)
    monkeypatch.setattr(evaluate, "SAMPLES_AT_ONCE", 7)
    code, _, err = script(evaluate, f"{flags} --out a")
    assert code == 130 and written == [[0, 1], [2, 3]], err
    rows = read_rows("a/samples.jsonl")
    assert [row["index"] for row in rows] == [0, 1, 2, 3] and rows[0]["dataset"] == "toy-test"
    monkeypatch.setattr(evaluate, "SAMPLES_AT_ONCE", 1)
    assert script(evaluate, f"{flags} --out b")[0] == 0
    assert written[2:] == [[0], [1], [2], [3], [4]]


def test_demonstrations_are_read_as_other_rows(tmp_path, capsys):
    """A reference alone is its box, with the digits of the file. What cannot be used is left out
    and counted, and a column of another name is named."""
    rows = r"""
        {"question": "Q?", "answer": [" 7 ", "seven"]}
        {"question": "R?", "answer": 4.50, "solution": NaN}
        {"question": "S?", "solution": "x \\boxed{8}"}
        {"question": "T?", "Solution": "x \\boxed{9}", "answer": "9"}
        {"question": "U?", "solution": "x \\boxed{}", "answer": "9"}
        {"question": "V?", "solution": "x 9", "answer": "9"}
        """
    (tmp_path / "rows.jsonl").write_text(rows)
    found = data.load_problems(tmp_path / "rows.jsonl", convert=data.to_demonstration)
    solutions = [each.references for each in found]
    both = r"\boxed{7}", r"\boxed{seven}"
    assert solutions == [both, (r"\boxed{4.50}",), (r"x \boxed{8}",), (r"\boxed{9}",)]
    said = capsys.readouterr().err
    for line in "box) (1 of 6: rows [5])", "} (1 of 6: rows [6])", "(expected 'solution')":
        assert line in said, said
    (tmp_path / "two.csv").write_text("question,answer\nQ?,7\nquestion,answer\nR?,8\n")
    with pytest.raises(InputError, match="row 2 is a header again"):
        data.load_problems(tmp_path / "two.csv", convert=data.to_demonstration)


# ---------------------------------------------------------------------------------------- bad input

GOOD = '{"question": "Q?", "answer": "1"}\n'
FILES = {
    "good.jsonl": GOOD,
    "open.jsonl": '{"question": "Q?", "solution": "so 7", "answer": "7"}\n',
    "broken.jsonl": GOOD + '{"question": \n',
    "columns.jsonl": '{"prompt": "Q?"}\n',
    "old/config.json": '{"flags": {"reward": "cer", "steps": 4}}',
    "old/samples.jsonl": '{"R": [1.0]}\n{"log_W": [], "columns": []}\n',
    "surrogate.jsonl": '{"question": "Q?", "solution": "\\ud800 \\\\boxed{7}"}',
    "adapter/adapter_config.json": '{"peft_type": "LORA"}',
}
FLAGS_OF = {
    train: "--model {model} --dataset good.jsonl --verifier text --samples 4 --max-new-tokens 64",
    evaluate: "--model {model} --dataset toy",
    sft: "--model {model} --out warm",
    plot: "",
}
REFUSED = [  # script, more flags, what the one line says; {run}: a finished run
    (train, "--dataset broken.jsonl", r"broken.jsonl, row 2: expected objects with named columns"),
    (train, "--dataset columns.jsonl", r"no usable row; no question .*; columns: prompt"),
    (train, "--dataset math501", r"math501: neither a file nor one of toy, toy-test, math7.5k"),
    (train, "--dataset math500", r"cannot load math-ai/math500 from the Hugging Face hub"),
    (train, "--max-prompt-tokens 1", r"good.jsonl: no question .* a prompt may have 1, with"),
    (train, "--out good.jsonl/x", r"Not a directory: 'good.jsonl/x'"),
    (
        train,
        "--model {run}",
        r"cannot load the model .*run, expected .*/checkpoints/step-4 ",
    ),
    (train, "--model adapter", r"cannot load the model adapter, .*it is an adapter .LoRA.: merge"),
    (train, "--resume --out {run} --eval-runs 3", r"cannot go on, since .*eval_runs was 2 and"),
    (train, "--reward asked", r"this model cannot be asked: it has 128 positions, too few"),
    (evaluate, "--out {run}", r"run is not empty: use another or .train.py. --resume"),
    (sft, "--data open.jsonl", r"open.jsonl: no usable row; expected a .* with a closed"),
    (sft, "--data good.jsonl --at-least .3", r"--data: expected a directory with --select, or a f"),
    (sft, "--data {run}", r"--data: expected a directory with --select, or a file without"),
    (sft, "--data surrogate.jsonl", r"surrogate.jsonl, row 1: .*surrogates not allowed"),
    (plot, "old --question 1", r"no sample of this group has an answer"),
    (plot, "old --out old/curves", r"--out old/curves: expected .svg, .png or .pdf"),
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
    written = {str(path) for path in Path().rglob("*") if path.is_file() and path.name != "lock"}
    assert written == FILES.keys()  # nothing half written


def test_held_out_questions_that_are_trained_are_counted(script, quick, tmp_path):
    rows = [{"question": f"{i} eggs?", "answer": f"{i}"} for i in range(6)]
    append_rows(tmp_path / "a.jsonl", rows[:4])
    append_rows(tmp_path / "b.jsonl", [row | {"answer": "x"} for row in rows[3:]])
    for held_out, says in ("b", "b.jsonl: 1 of its 3 questions are also in a.jsonl, so"), ("c", ""):
        append_rows(tmp_path / "c.jsonl", rows[4:])
        flags = (
            f"{quick} --dataset a.jsonl --eval-dataset {held_out}.jsonl --steps 1 --out {held_out}"
        )
        code, _, err = script(train, flags)
        assert code == 0 and says in err and err.count("are also in") == bool(says), err
