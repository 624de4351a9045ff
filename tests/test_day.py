"""The day of docs/running.md: its commands run in order as they stand there, on a small model and a
small file. Other programs (vllm, hf, curl) are not run, but what the page gives them is checked."""

import importlib
import json
import re
from pathlib import Path

import pytest
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.files import append_rows, read_rows
from tasks import toy
from tasks.data import to_problem
from tasks.prompts import chat_messages

PAGE = (ROOT / "docs" / "running.md").read_text()
DAY = PAGE.split("\n## A day with your own file\n")[1].split("\n## ")[0]
[BLOCK] = re.findall(r"^```bash\n(.*?)^```$", DAY, re.M | re.S)
# A Python program between two lines END, or a line with one of our scripts.
COMMAND = re.compile(r"^python - <<'END'\n((?:.*\n)*?)END$|^python (\w+)\.py (.*)$", re.M)
# The flags stay. Their numbers become these, or 2.
SMALL = {"--limit": 4, "--samples": 4, "--max-new-tokens": 24}


def small(flags, model):
    """The flags of the page with small numbers, for this model, and with a reward in place."""
    flags = re.sub(r"(?<=--model )\S+", str(model), flags).replace("REWARD", "verifree")
    return re.sub(r"(--[\w-]+) \d+", lambda flag: f"{flag[1]} {SMALL.get(flag[1], 2)}", flags)


def write_rows(path):
    """Eight questions about each of five documents, of the kind that the page shows."""
    for number, row in enumerate(toy.rows("toy")[:40]):
        answers = [row["answer"], "as many as there are in all"]
        row = {"document": f"lease {number % 5}", "question": row["question"], "answer": answers}
        append_rows(path, [row])


def test_its_commands_run_in_order(script, monkeypatch, toy_model_dir):
    write_rows(Path("mine.jsonl"))
    monkeypatch.setattr("builtins.input", lambda prompt: "1")  # the first answer is the right one
    ran = []
    for program, name, flags in COMMAND.findall(BLOCK):
        ran.append(name)
        if program:
            exec(program, {})
            continue
        code, _, err = script(importlib.import_module(name), small(flags, toy_model_dir))
        assert code == 0, f"{name}.py {flags}: {err}"
    assert ran == ["", "judge", "grade", "train", "plot", "grade"]
    assert Path("runs/mine/curves.svg").is_file()
    for graded in "judge", "mine":
        assert read_rows(f"runs/{graded}/grades.jsonl")
    served = Path("runs/mine/checkpoints/step-2")
    assert (served / "training").is_dir()  # which the upload leaves out
    AutoModelForCausalLM.from_pretrained(served)
    AutoTokenizer.from_pretrained(served)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_no_document_is_on_both_sides(script, kind):
    """Every row is on one, in another order. A column of text from a spreadsheet is split alike."""
    write_rows(Path("mine.jsonl"))
    rows = read_rows("mine.jsonl")
    if kind == "csv":
        rows = [row | {"answer": "4,50"} for row in rows]
        cells = [[*rows[0]], *(row.values() for row in rows)]
        Path("mine.csv").write_text("\n".join(map(";".join, cells)), encoding="utf-16")
    [program] = [program for program, *_ in COMMAND.findall(BLOCK) if program]
    exec(program.replace("mine.jsonl", f"mine.{kind}"), {})
    train, held_out = read_rows("train.jsonl"), read_rows("held-out.jsonl")
    assert not {row["document"] for row in train} & {row["document"] for row in held_out}
    both = [json.dumps(row) for row in [*train, *held_out]]
    in_order = [json.dumps(row) for row in rows]
    assert sorted(both) == sorted(in_order) and len(held_out) == 8
    assert [row for row in in_order if row in both[:32]] != both[:32]


def test_what_is_served_is_the_last_step_and_what_is_published_is_private():
    [steps] = re.findall(r"train\.py .*--steps (\d+)", BLOCK)
    checkpoint = f"runs/mine/checkpoints/step-{steps}"
    assert f"\nvllm serve {checkpoint} --served-model-name mine\n" in BLOCK
    assert f'\nhf upload --private YOU/MODEL {checkpoint} --exclude "training/*"\n' in BLOCK
    [created] = re.findall(r"create_repo\((.*?)\)", PAGE)
    assert created == '"YOU/MODEL", private=True'


def test_the_served_model_is_asked_as_in_training():
    """With the row that the page shows."""
    [shown] = re.findall(r'^    (\{"document".*\})$', DAY, re.M)
    [request] = re.findall(r"^curl .*? -d '(.*?)'$", PAGE, re.M | re.S)
    assert json.loads(request)["messages"] == chat_messages(to_problem(json.loads(shown), "text"))
