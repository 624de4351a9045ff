"""What surrounds a script: Ctrl-C, terminals, file systems, other libraries."""

import errno
import fcntl
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import evaluate
from runtime import cli

ROOT = Path(__file__).parents[1]


def test_ctrl_c_in_a_script_is_one_line(script, monkeypatch):
    monkeypatch.setattr(evaluate, "load", mock.Mock(side_effect=KeyboardInterrupt))
    code, out, err = script(evaluate, "--model x --out run --dataset toy")
    assert (code, out, err) == (130, "", "evaluate.py: stopped by Ctrl-C\n")


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


@pytest.mark.parametrize("name", ["train.py", "evaluate.py"])
def test_no_library_computes_with_gmpy2(tmp_path, name):
    """math-verify's time limit cannot interrupt it. torch and transformers import sympy, too."""
    (tmp_path / "gmpy2.py").write_text("raise SystemExit('gmpy2 is imported')")
    paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, ROOT / name, "--help"]
    ended = subprocess.run(command, env=os.environ | paths, capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")
