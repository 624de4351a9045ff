"""sft.py: the update of train.py on demonstrations, on references and on samples that are kept."""

import itertools
import json
import re
import resource
from pathlib import Path
from unittest import mock

import datasets
import pytest
from processes import finish, run_in, start_ranks
from transformers import AutoModelForCausalLM

import sft
from engine.load import load
from engine.tokens import pad
from runtime.cli import InputError
from runtime.files import append_rows, read_rows

ROW = {"question": "Q?", "solution": r"so \boxed{7}"}


@pytest.fixture(scope="module")
def flags(toy_model_dir):
    """Of eight demonstrations of different lengths, and of a question with two references."""
    file = toy_model_dir.parent / "demonstrations.jsonl"
    rows = [(f"{i} eggs?" * (1 + i % 3), f"{i}=" * i + rf"\boxed{{{i}}}") for i in range(8)]
    append_rows(file, [{"question": q, "solution": s} for q, s in rows])
    append_rows(file, [{"question": "How many?", "answer": ["7", "seven eggs and no more"]}])
    return f"--model {toy_model_dir} --data {file} --batch 4 --lr 1e-3"


LEARNS = ("", 0.5), (" --lora 4 --lr 3e-2", 3)  # from about 10


@pytest.mark.parametrize("lora, most", LEARNS)
def test_it_learns(script, toy_model_dir, tokenizer, lora, most):
    """Of the rows without a control token."""
    longest = len(tokenizer.encode(r"so \boxed{7}")) + 1
    bad = {"question": "<eos>Q?"}, {"solution": r"so<eos> \boxed{7}"}
    append_rows(Path("demos.jsonl"), [*[ROW] * 4, ROW | bad[0], ROW | bad[1]])
    flags = f"--model {toy_model_dir} --data demos.jsonl --epochs 20 --batch 2 --lr 1e-2"
    code, stdout, err = script(sft, f"{flags} --out warm{lora}")
    assert code == 0 and "\n4 rows, " in err, err
    assert "left out: 2 of 6" in err and "judge.py --model warm " in stdout
    assert f"--max-new-tokens: at least {longest}, as many as the longest" in stdout
    assert float(re.search("final loss (.*?);", stdout)[1]) < most
    load("warm", "cpu")
    assert (Path("warm/adapter/adapter_config.json").is_file()) == bool(lora)
    assert not Path("warm/partial").exists()


def test_its_loss_is_the_librarys(script, flags, toy_model_dir, monkeypatch):
    """The mean over all learned tokens of a batch, whatever the lengths and the micro-batches."""
    real, losses = sft.update, []
    updated = mock.Mock(side_effect=lambda *inputs: losses.append(real(*inputs)) or losses[-1])
    monkeypatch.setattr(sft, "update", updated)
    code, _, err = script(sft, f"{flags} --epochs 1 --microbatch-tokens 60 --out warm")
    assert code == 0 and updated.call_count == 2, err
    rows = updated.call_args_list[0].args[2]
    model = AutoModelForCausalLM.from_pretrained(toy_model_dir)
    labels = [[i if w else -100 for i, w in zip(row.ids, row.weights)] for row in rows]
    inputs, labels = pad([row.ids for row in rows]), pad(labels, value=-100)
    assert losses[0][0] == pytest.approx(model(input_ids=inputs, labels=labels).loss.item())
    assert all(row.ids[-1] == 1 and row.weights[-1] for row in rows)  # the stop token


def test_the_rate_rises_and_falls(script, flags, monkeypatch):
    """It rises for a twentieth of the steps, here two, and would be 0 after the last."""
    updated = mock.Mock(return_value=(1.0, 1.0))
    monkeypatch.setattr(sft, "update", updated)
    code, _, err = script(sft, f"{flags} --epochs 18 --out warm")
    assert code == 0 and updated.call_count == 40, err
    rates = [each.args[3] for each in updated.call_args_list]
    shares = [1 / 3, 2 / 3, *(left / 40 for left in range(38, 0, -1))]
    assert rates == pytest.approx([1e-3 * share for share in shares])


def test_all_references_are_learned(script, toy_model_dir, tokenizer, monkeypatch):
    """One of them each time, so that over the epochs each is, also of a single row."""
    append_rows(Path("rows.jsonl"), [{"question": "Q?", "answer": ["7", "seven"]}])
    updated = mock.Mock(return_value=(1.0, 1.0))
    monkeypatch.setattr(sft, "update", updated)
    flags = f"--model {toy_model_dir} --data rows.jsonl --batch 1 --epochs 8 --out warm"
    code, _, err = script(sft, flags)
    assert code == 0 and updated.call_count == 8, err
    texts = [tokenizer.decode(each.args[2][0].ids) for each in updated.call_args_list]
    learned = [text.removeprefix("Q?\n") for text in texts]
    assert {*learned} == {r"\boxed{7}<eos>", r"\boxed{seven}<eos>"}


# --------------------------------------------------------------------------------- what is kept


def write_samples(directory, answers="abcd", truncated=(False,) * 4, more=(), **rewards):
    """Groups of four samples with these rewards, [groups, 4] of each."""
    lines = []
    for k, of_groups in enumerate(zip(*rewards.values())):
        line = {"question": f"{k} eggs?", "references": ["a"], "verifier": "text"}
        line |= {"texts": [rf"{k}, so \boxed{{{a}}}" for a in answers], "answers": [*answers]}
        line |= {"truncated": [*truncated], "tokens": [9] * 4, "right": [a == "a" for a in answers]}
        lines.append(line | {"rewards": dict(zip(rewards, of_groups))} | dict(more))
    Path(directory).mkdir()
    append_rows(Path(directory) / "samples.jsonl", lines)


@pytest.fixture
def kept(script, toy_model_dir, monkeypatch):
    """kept(flags) -> {text: the weight of the row} of selected.jsonl, which are those of training,
    and what is said."""
    numbers = itertools.count()

    def run(flags):
        updated = mock.Mock(return_value=(1.0, 1.0))
        monkeypatch.setattr(sft, "update", updated)
        out = f"out-{next(numbers)}"
        flags = f"--model {toy_model_dir} --data judged --epochs 1 --batch 99 --out {out} {flags}"
        code, _, err = script(sft, flags)
        if code:
            assert not updated.called and not Path(out, "selected.jsonl").exists()
            return code, err.splitlines()[-1]
        [batch] = [each.args[2] for each in updated.call_args_list]
        rows = read_rows(Path(out, "selected.jsonl"))
        mean = sum(sum(w > 0 for w in row.weights) for row in batch) / len(batch)  # tokens
        trained = {round(max(row.weights) * mean, 6) for row in batch}  # few rows, so repeated
        assert trained == {round(row["weight"], 6) for row in rows}
        return {row["completion"]: row["weight"] for row in rows}, err

    return run


NOTHING = [0.0] * 4


def test_a_sample_weighs_its_advantage_and_nothing_without_a_reward(kept):
    """By hand: .9 - (.3 + 0 + 0) / 3 = .8; the others are below the mean of the others."""
    write_samples("judged", cer=[[0.9, 0.3, 0.0, 0.0], NOTHING, [0.5] * 4], verifree=[NOTHING] * 3)
    weights, err = kept("--select cer")
    assert weights == {r"0, so \boxed{a}": pytest.approx(0.8)}
    assert "12 samples, 12 finished, 12 distinct, 1 kept; 2 of 3 questions have none" in err
    assert r"kept (cer .9): 0, so \boxed{a}" in err and r"left out (cer .3): 0, so" in err
    weights, err = kept("--select cer --at-least .3")
    assert [*weights.values()] == [1.0] * 6 and "6 kept; 1 of 3 questions have none" in err
    weights, err = kept("--select cer --at-least .3 --per-question 1")
    assert sorted(text[0] for text in weights) == ["0", "2"]
    for flags in "--select verifree", "--select verifree --at-least .1":
        code, err = kept(flags)
        assert code == 2 and err.endswith("0 kept; 3 of 3 questions have none that is kept")


def test_a_sample_of_another_model_may_be_too_long(kept):
    write_samples("judged", ["7" * 120, "a", "b", "c"], cer=[[1.0, 0.0, 0.0, 0.0]])
    code, err = kept("--select cer")
    assert code == 2 and re.search(r"judged: a row has \d+ tokens, of at most 128$", err)


def test_finished_texts_are_kept_once(kept):
    write_samples("judged", "abac", [False, False, False, True], cer=[[1.0, 1.0, 1.0, 1.0]])
    weights, err = kept("--select cer --at-least 1")
    assert {*weights} == {r"0, so \boxed{a}", r"0, so \boxed{b}"}
    assert "4 samples, 3 finished, 2 distinct, 2 kept" in err


def test_what_is_right_is_said_by_grades_or_by_the_verifier(kept):
    write_samples("judged", cer=[NOTHING])
    assert [*kept("--select right")[0]] == [r"0, so \boxed{a}"]
    case = {"question": "0 eggs?", "references": ["a"]}
    grades = [case | {"answer": answer, "right": answer == "c"} for answer in "bcd"]
    append_rows(Path("judged/grades.jsonl"), grades)
    assert {*kept("--select right")[0]} == {r"0, so \boxed{a}", r"0, so \boxed{c}"}


def test_a_training_run_has_one_reward(kept):
    write_samples("judged", more={"R": [1, 0, 0, 0], "step": 1}, right=[[True] * 4])
    Path("judged/config.json").write_text(json.dumps({"flags": {"reward": "verifree"}}))
    assert kept("--select verifree")[0] == {r"0, so \boxed{a}": 1.0}
    code, err = kept("--select cer")
    assert code == 2 and err == (
        "sft.py: judged: not all samples have 'cer' (they have right, verifree)"
    )


def test_selected_rows_are_read_by_trl(script, toy_model_dir, monkeypatch):
    """As the rows that are learned here: the same tokens, of which the completion's are learned."""
    trl = pytest.importorskip("trl")
    write_samples("judged", cer=[[0.9, 0.9, 0.0, 0.0]])
    updated = mock.Mock(return_value=(1.0, 1.0))
    monkeypatch.setattr(sft, "update", updated)
    flags = f"--model {toy_model_dir} --data judged --select cer --epochs 1 --batch 2 --out warm"
    code, _, err = script(sft, flags)
    assert code == 0, err
    rows = datasets.load_dataset("json", data_files="warm/selected.jsonl", split="train")
    config = trl.SFTConfig("trl", report_to="none", use_cpu=True, bf16=False, max_steps=1)
    trainer = trl.SFTTrainer("warm", config, train_dataset=rows)
    read = [(row["input_ids"], [i != -100 for i in row["labels"]]) for row in trainer.train_dataset]
    ours = [(row.ids, [w > 0 for w in row.weights]) for row in updated.call_args.args[2]]
    assert sorted(read) == sorted(ours) and len(ours) == 2
    trainer.train()


@pytest.mark.parametrize("lora", ["", " --lora 4 --select cer --data judged"])
def test_two_ranks_take_the_steps_of_one(script, flags, tmp_path, lora):
    """On demonstrations, and with --lora on samples that are kept."""
    write_samples("judged", cer=[[0.1 * k * k for k in range(4)], [0.5, 0.25, 0, 0]])
    finish(start_ranks(2, run_in, tmp_path, sft.main, f"{flags}{lora} --epochs 2 --out two"))
    code, stdout, err = script(sft, f"{flags}{lora} --epochs 2 --out one")
    assert code == 0, err
    one, two = (AutoModelForCausalLM.from_pretrained(name).state_dict() for name in ("one", "two"))
    start = AutoModelForCausalLM.from_pretrained(flags.split()[1]).state_dict()
    moved = 0
    for name, weight in one.items():
        assert (two[name] - weight).abs().max() < 1e-4, name
        moved = max(moved, (start[name] - weight).abs().max())
    assert moved > 1e-3
    assert {p.name for p in Path("two").iterdir()} == {p.name for p in Path("one").iterdir()}
    said = [(tmp_path / f"log-{rank}").read_text() for rank in (0, 1)]
    assert stdout.replace("one", "two") in said[0] and "final loss" not in said[1]


def test_a_directory_is_a_model_when_it_is_complete(script, flags, monkeypatch):
    """Not after a kill between any two of its files, nor on a disk that is full."""
    rename, whole = Path.rename, []

    def check(path, target):
        whole.append(Path("warm/config.json").exists())
        with pytest.raises(InputError, match="cannot load the model warm"):
            load("warm", "cpu")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", check)
        assert script(sft, f"{flags} --epochs 1 --out warm")[0] == 0
    assert len(whole) > 4 and not any(whole)
    size = Path("warm/model.safetensors").stat().st_size
    load("warm", "cpu")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size * 9 // 10, unlimited[1]))
    try:
        code, _, err = script(sft, f"{flags} --epochs 1 --out full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert code == 2 and err.splitlines()[-1].startswith("sft.py: cannot save full ("), err
    assert {path.name for path in Path("full").iterdir()} == {"lock", "partial"}


def test_a_loss_that_is_not_finite_saves_nothing(script, flags, monkeypatch):
    monkeypatch.setattr(sft, "update", lambda *_: (float("nan"), float("nan")))
    code, _, err = script(sft, f"{flags} --epochs 1 --out warm")
    assert code == 2 and err.endswith("the loss is nan: use a lower --lr\n")
    assert {path.name for path in Path("warm").iterdir()} == {"lock"}
