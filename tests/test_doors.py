"""What surrounds a script: Ctrl-C, terminals, file systems, other systems and other libraries."""

import errno
import fcntl
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.checkpoint import hf_storage

import evaluate
import judge
import train
import warm_start
from runtime import cli

ROOT = Path(__file__).parents[1]
SCRIPTS = [path.name for path in sorted(ROOT.glob("*.py")) if "cli.run_script(" in path.read_text()]
SCRIPTS += ["plot.py"]


def run(script, *flags, before="", libraries=""):
    """Run a script in a process of its own -> (exit code, stderr). before: code that runs first.
    libraries: a directory with modules that take the place of others."""
    paths = f"{libraries}{os.pathsep}{ROOT}"
    code = f"import runpy, sys\nsys.argv[:] = {[script, *flags]!r}\n{before}\n"
    code += f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True)
    return ended.returncode, ended.stderr.decode()


def test_the_scripts_are_those_that_a_reader_starts():
    assert {"train.py", "judge.py", "evaluate.py", "warm_start.py", "grade.py"} < {*SCRIPTS}


# ------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("name", SCRIPTS)
def test_ctrl_c_while_libraries_are_imported_is_one_line(tmp_path, name):
    for library in "torch", "pandas", "numpy":
        code = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
        (tmp_path / f"{library}.py").write_text(code)
    assert run(name, libraries=tmp_path) == (130, f"{name}: stopped by Ctrl-C\n")


@pytest.mark.parametrize("module", [train, judge, evaluate, warm_start])
def test_ctrl_c_in_a_script_is_one_line(script, monkeypatch, module):
    monkeypatch.setattr(module, "load", mock.Mock(side_effect=KeyboardInterrupt))
    Path("one.jsonl").write_text('{"question": "Q?", "solution": "so \\\\boxed{7}"}\n')
    data = "--data" if module is warm_start else "--verifier text --dataset"
    code, out, err = script(module, f"--model x --out run {data} one.jsonl")
    assert (code, out, err) == (130, "", f"{Path(module.__file__).name}: stopped by Ctrl-C\n")


def test_ctrl_c_while_a_checkpoint_is_loaded_is_one_line(script, monkeypatch, stopped_run):
    stop = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(hf_storage.HuggingFaceStorageReader, "read_data", stop)
    code, _, err = script(train, "--out run --resume")
    assert code == 130 and err.splitlines()[-1] == "train.py: stopped by Ctrl-C", err


# ------------------------------------------------------------------ terminals, files, other systems


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


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_and_the_run_goes_on(
    script, monkeypatch, toy_model_dir, number
):
    refuse = mock.Mock(side_effect=OSError(number, os.strerror(number)))
    monkeypatch.setattr(fcntl, "flock", refuse)
    flags = f"--model {toy_model_dir} --dataset toy --limit 1 --max-new-tokens 8 --out run"
    code, _, err = script(evaluate, flags)
    assert code == 0 and Path("run/results.json").exists(), err
    assert err.startswith(f"run cannot be locked ({os.strerror(number)}): start no other process")


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_fcntl_as_on_windows_a_line_names_the_systems(name):
    code, err = run(name, before="sys.modules['fcntl'] = None")
    assert (code, err) == (2, f"{name}: needs Linux or macOS (on Windows: WSL)\n")


@pytest.mark.parametrize("name", ["train.py", "evaluate.py"])
def test_no_library_computes_with_gmpy2(tmp_path, name):
    """math-verify's time limit cannot interrupt it. torch and transformers import sympy, too."""
    (tmp_path / "gmpy2.py").write_text("raise SystemExit('gmpy2 is imported')")
    assert run(name, "--help", libraries=tmp_path) == (0, "")
