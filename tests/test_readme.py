"""What the README says of files, flags and lines is so. Its ```sh blocks are run by .ci/run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMAND = re.compile(r"^(python|torchrun)\b[^\n]*?([\w/]+\.py)([^\n]*)$", re.MULTILINE)


def commands():
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    tables = re.findall(r"`((?:python|torchrun) [^`]*)`", README)
    return COMMAND.findall("\n".join([*blocks, *tables]))


def test_there_are_commands():
    scripts = {script for _, script, _ in commands()}
    assert {"train.py", "evaluate.py", "plot.py", "cer.py"} < scripts


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_names_real_scripts_and_flags(command):
    _, script, arguments = command
    source = (ROOT / script).read_text() + (ROOT / "benchmarks" / "measure.py").read_text()
    for flag in re.findall(r"--[\w-]+", arguments):
        assert f'"{flag}"' in source, flag


def test_every_file_it_links_to_or_lists_is_there():
    for path in re.findall(r"\]\(((?!http)[^)]*)\)", README):
        assert (ROOT / path).exists(), path
    listed = README.split("## Reading order")[1].split("The method (")[0]
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", listed):
        assert (ROOT / name).exists(), name
    for script in ROOT.glob("*.py"):
        assert f"`{script.name}`" in listed, script


def test_the_lines_of_the_method():
    count = 0
    for name in "cer", "rloo", "policy", "rewards", "train":
        lines = [line.strip() for line in (ROOT / f"{name}.py").read_text().splitlines()]
        count += sum(bool(line) and not line.startswith("#") for line in lines)
    assert f"is {count} lines without blank lines and comments" in README, count
