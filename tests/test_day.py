"""The day of docs/your-own-file.md: its commands run in order as they stand there, on a small model
and a small file, and so do its detours. Other programs (vllm, hf, curl) are not run, but what the
page gives them is checked."""

import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.load import load
from rollout import sample
from runtime.files import append_rows, read_rows
from tasks import toy
from tasks.data import load_examples, to_problem, with_examples
from tasks.prompts import chat_messages

PAGE = (ROOT / "docs" / "your-own-file.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [re.fullmatch(r"python (\w+)\.py (.*)\n", block) for block in BLOCKS]
COMMANDS = [command.groups() for command in COMMANDS if command]
# The flags stay. Their numbers become these, or 2.
SMALL = {"--limit": 40, "--samples": 4, "--max-new-tokens": 24, "--temperature": 1, "--lora": 4}
SMALL |= {"--top-p": 1, "--top-k": 0, "--questions": 2}
EXAMPLES = {"question": "How many are 3 and 4?", "solution": r"3+4=7 \boxed{7}"}


def small(flags, model):
    """The flags of the page with small numbers, for this model, and with a reward in place."""
    flags = re.sub(r"Qwen/\S+", str(model), flags).replace("REWARD", "verifree").replace('"', "")
    flags = re.sub(r"(--[\w-]+) \d+\b", lambda flag: f"{flag[1]} {SMALL.get(flag[1], 2)}", flags)
    return flags.replace("step-100", "step-2")


@pytest.fixture(scope="module")
def model(toy_model_dir, tmp_path_factory):
    """The toy's model, with a chat template that shows all turns."""
    directory = tmp_path_factory.mktemp("day") / "model"
    shutil.copytree(toy_model_dir, directory)
    [file] = directory.glob("chat_template*")
    turns = (
        r"{% for m in messages[1:] %}{{ m.content.split('\nPlease reason')[0] + '\n' }}{% endfor %}"
    )
    file.write_text(turns)
    return directory


@pytest.fixture
def day(script, monkeypatch, model):
    """day(name, flags) runs a script on a table of eight questions about each of five documents,
    whose references are what the model answers now and then."""
    append_rows(Path("examples.jsonl"), [EXAMPLES])
    rows = [row | {"context": "."} for row in toy.rows("toy")[:40]]
    problems = [to_problem(row, "text") for row in rows]
    problems = with_examples(problems, load_examples("examples.jsonl"))
    cells = ["document;clause;question;answer;page"]
    for k, group in enumerate(sample(*load(model, "cpu"), problems, 8, 24)):
        answers = [answer for answer in group.answers if answer and not {*'|;"'} & {*answer}]
        answer = " | ".join([*answers, f"{k} in all"])
        cells.append(f"lease {k % 5};.;{rows[k]['question']};{answer};{k}")
    Path("mine.csv").write_text("\n".join(cells))
    monkeypatch.setattr("builtins.input", lambda prompt: "1")  # the first answer is the right one

    def run(name, flags):
        code, out, err = script(importlib.import_module(name), small(flags, model))
        assert code == 0, f"{name}.py {flags}: {err}"
        return out, err

    return run


def test_its_commands_run_in_order(day):
    for name, flags in COMMANDS:
        out, err = day(name, flags)
        if name == "split":
            assert "not used: page" in err and "train.jsonl: 32 rows, documents: 4\n" in out
        if name == "grade":
            assert " questions about 1 documents, what is right by runs/plain/grades.jsonl" in out
    ran = "split evaluate evaluate grade judge sft sft evaluate evaluate grade".split()
    assert [name for name, _ in COMMANDS] == [*ran, "train", "plot", "grade", "evaluate"]
    assert out.count("pass@1")
    assert Path("runs/mine/curves.svg").is_file() and read_rows("runs/plain/grades.jsonl")
    assert read_rows("runs/kept/selected.jsonl")
    served = Path("runs/mine/checkpoints/step-2")
    assert (served / "training").is_dir()  # which the upload leaves out
    AutoModelForCausalLM.from_pretrained(served)
    AutoTokenizer.from_pretrained(served)
    # The prompted model is asked with the examples, and pairs with the others by its question.
    plain, prompted = (read_rows(f"runs/{name}/samples.jsonl") for name in ("plain", "prompted"))
    assert [line["question"] for line in plain] == [line["question"] for line in prompted]
    flags = json.loads(Path("runs/prompted/results.json").read_text())["flags"]
    assert flags["examples"] == "examples.jsonl"


DETOURS = {  # what the page says -> the command of the page that it changes, and how
    "`--by question`": ("split", lambda flags: f"{flags} --by question"),
    "`--limit 50` and another `--out`": ("judge", lambda flags: flags.replace("judge", "look")),
    "`--select overlap --at-least .5`": (
        "sft",
        lambda flags: flags.replace("--select right", "--select overlap --at-least .5"),
    ),
    "`--lr 1e-4`": ("sft", lambda flags: f"{flags} --lr 1e-4"),
    "`--questions 160` asks": ("grade", lambda flags: f"{flags} --questions 160"),
}


def test_its_detours_run(day):
    """Each after the commands that it needs."""
    commands = dict(reversed(COMMANDS))  # the first of each name
    commands["sft"] = [flags for name, flags in COMMANDS if "--select" in flags][0]
    for said, (name, change) in DETOURS.items():
        assert said in PAGE.replace("\n", " "), said
        flags = change(commands[name])
        if name == "sft":
            flags = flags.replace("runs/kept", f"runs/{said[3:6]}").replace(
                "runs/judge", "runs/look"
            )
        if name == "grade":
            for run, given in COMMANDS[1:3]:
                day(run, given)
        day(name, flags)
    # Another round, from the model that learned from its own samples.
    again = commands["judge"].replace("--examples examples.jsonl ", "").replace("judge", "again")
    day("judge", re.sub(r"Qwen/\S+", "runs/sel", again))
    # A longer run, from its last checkpoint; and its reward, with a judge that is frozen.
    train = commands["train"].replace("runs/kept", "runs/sel")
    day("train", train)
    [resume] = re.findall(r"`python train\.py (--resume --out runs/mine --steps 200)`", PAGE)
    _, err = day("train", resume.replace("200", "2"))
    assert "resuming after step 2" in err


def test_what_is_served_is_greedy_and_what_is_published_is_private():
    [steps] = re.findall(r"train\.py .*--steps (\d+) --keep", PAGE)
    checkpoint = f"runs/mine/checkpoints/step-{steps}"
    assert f"vllm serve {checkpoint} --served-model-name mine\n" in BLOCKS
    assert f'hf upload --private YOU/MODEL {checkpoint} --exclude "training/*"\n' in BLOCKS
    assert any(f"--model {checkpoint} " in flags and " 0 --max" in flags for _, flags in COMMANDS)
    assert '"temperature": 0,' in PAGE


def test_the_served_model_is_asked_as_in_training():
    """With the row that the page shows."""
    header, row = re.findall(r"^    (document;.*|lease 7;.*)$", PAGE, re.M)
    cells = dict(zip(header.split(";"), row.split(";")))
    cells["context"] = cells.pop("clause")
    [request] = re.findall(r"^curl .*? -d '(.*?)'$", PAGE, re.M | re.S)
    assert json.loads(request)["messages"] == chat_messages(to_problem(cells, "text"))


def test_each_command_has_a_block_of_its_own():
    """So that nothing that is pasted becomes a reply to grade.py."""
    assert all(block.count("\npython ") == 0 for block in BLOCKS)
    assert len(PAGE.splitlines()) <= 300
