"""What surrounds a script: Ctrl-C, terminals, file systems, other libraries."""

import errno
import fcntl
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import evaluate
import measure
from runtime import cli

ROOT = Path(__file__).parents[1]


def test_ctrl_c_in_a_script_is_one_line(script, monkeypatch):
    monkeypatch.setattr(measure, "load", mock.Mock(side_effect=KeyboardInterrupt))
    code, out, err = script(evaluate, "--model x --out run --dataset toy")
    assert (code, out, err) == (130, "", "evaluate.py: stopped by Ctrl-C\n")


GROUPS = {"RANK": "0"}, {"RANK": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": ""}


@pytest.mark.parametrize("group", GROUPS)
def test_a_rank_without_its_group_is_one_line(script, monkeypatch, toy_model_dir, group):
    for name in "RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID":
        monkeypatch.delenv(name, raising=False)
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    code, _, err = script(evaluate, f"--model {toy_model_dir} --dataset toy --out run")
    assert (code, err) == (2, "evaluate.py: RANK is set: start with torchrun, or unset it\n")


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_two_tasks_without_torchrun_are_refused(script, monkeypatch, name):
    """Each would be a whole run."""
    monkeypatch.setenv(name, "2")
    code, _, err = script(evaluate, "--model x --dataset toy --out run")
    several = f"{name} is not 1, and each task would be a whole run: start torchrun in one"
    assert (code, err) == (2, f"evaluate.py: {several}\n")


CODES = "\x1b[2J", "\x1b]0;title\x07", "\x9b1A", "\r", "\b\b", "\u202e", "\u2066"


@pytest.mark.parametrize("code", CODES)
def test_no_line_holds_what_could_move_the_cursor_or_hide_text(script, capsys, code):
    cli.say(f"a{code}b\n\tc")
    said = capsys.readouterr().err
    assert cli.printable(said) == said and said.startswith("a\ufffd") and said.endswith("b\n\tc\n")
    ended, _, said = script(evaluate, "--model x --out", f"a{code}b", "--dataset", f"b{code}.csv")
    assert ended == 2 and cli.printable(said) == said


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_that_cannot_print_a_character_prints_its_code(monkeypatch, encoding):
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    def main():
        cli.say("π")
        print("π ± \ud800")

    with pytest.raises(SystemExit) as end:
        cli.run_script(main)
    out.flush(), err.flush()
    expected = "π ± \ud800\n".encode(encoding, "backslashreplace")
    assert not end.value.code and out.buffer.getvalue() == expected
    assert err.buffer.getvalue() == "π\n".encode(encoding, "backslashreplace")


def test_a_file_system_without_locks_is_named_and_the_run_goes_on(
    script, monkeypatch, toy_model_dir
):
    refuse = mock.Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)))
    monkeypatch.setattr(fcntl, "flock", refuse)
    flags = f"--model {toy_model_dir} --dataset toy --limit 1 --max-new-tokens 8 --out run"
    code, _, err = script(evaluate, flags)
    assert code == 0 and Path("run/results.json").exists(), err
    assert err.startswith(f"run cannot be locked ({os.strerror(errno.ENOLCK)}): start no other pro")


def test_no_library_computes_with_gmpy2(tmp_path):
    """math-verify's time limit cannot interrupt it. torch and transformers import sympy, too, so
    what prevents it stands first in every script."""
    (tmp_path / "gmpy2.py").write_text("raise SystemExit('gmpy2 is imported')")
    clean = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    for name in "SYMPY_GROUND_TYPES", "MPMATH_NOGMPY":  # which were set for these tests, too
        clean.pop(name)
    command = [sys.executable, "-c", "import runtime, math_verify"]
    ended = subprocess.run(command, env=clean, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    for path in scripts():
        assert imports(path)[0].startswith("runtime"), path.name


def scripts():
    return [path for path in ROOT.glob("*.py") if "run_script(main)" in path.read_text()]


def imports(path):
    """The modules that a file imports, also within a function."""
    return re.findall(r"^ *(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE)


def test_imports_go_downwards_only():
    """No file imports a script. engine/ and runtime/ know neither the tasks nor the method, tasks/
    not the method, and who samples does not import who trains."""
    top, names = {path.stem for path in ROOT.glob("*.py")}, {path.stem for path in scripts()}
    assert {"train", "evaluate", "judge", "grade", "sft", "split", "plot"} == names
    forbidden = {".": names, "tasks": top, "engine": top | {"tasks"}}
    forbidden["runtime"] = forbidden["engine"] | {"engine"}
    for folder, not_here in forbidden.items():
        for path in (ROOT / folder).glob("*.py"):
            found = {name.split(".")[0] for name in imports(path)}
            assert not found & not_here, path
    todo, reached = {"engine.sampling", "engine.slots"}, set()
    while todo:
        path = ROOT / f"{(name := todo.pop()).replace('.', '/')}.py"
        reached.add(name)
        todo |= {name for name in imports(path) if name.startswith("engine.")} - reached
    assert not reached & {"engine.policy", "engine.lora"}
