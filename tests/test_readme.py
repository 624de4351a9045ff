"""What the README and docs/ say of files, flags, lines and imports is so. .ci/run runs the ```sh
blocks."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
COMMAND = re.compile(r"^(?:python|torchrun)\b[^\n]*?([\w/]+)\.py([^\n]*)$", re.MULTILINE)


def blocks(page, language):
    """The code blocks of a page in this language, joined."""
    found = re.findall(rf"^```(?:{language})\n(.*?)^```", page.read_text(), re.M | re.S)
    return "\n".join(found)


def commands():
    """(script, flags) of every command in a block or between backquotes."""
    found = set()
    for page in PAGES:
        quoted = re.findall(r"`([^`\n]*)`", page.read_text())
        found.update(COMMAND.findall("\n".join([blocks(page, "sh|bash"), *quoted])))
    assert {"train", "evaluate", "plot", "judge"} <= {name for name, _ in found}
    return sorted(found)


@pytest.mark.parametrize("name, flags", commands())
def test_every_command_names_real_scripts_and_flags(name, flags):
    defined = re.findall(r'"(--[a-z][\w-]*)"', (ROOT / f"{name}.py").read_text())
    assert set(re.findall(r"--[a-z][\w-]*", flags)) <= set(defined)


def test_every_file_and_heading_that_is_linked_is_there():
    for page in PAGES:
        for path, anchor in re.findall(r"\]\(((?!http)[^)#]*)#?([^)]*)", page.read_text()):
            linked = page.parent / path if path else page
            assert linked.exists(), (page.name, path)
            headings = re.findall("^#+ (.*)", linked.read_text(), re.M) if anchor else []
            slugs = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in headings]
            assert anchor in ["", *slugs], (page.name, path, anchor)


def test_every_line_of_the_reward_in_the_readme_is_in_cer_in_this_order():
    lines = iter((ROOT / "cer.py").read_text().splitlines())
    for line in blocks(PAGES[0], "python").splitlines():
        assert line in lines, line  # `in` goes on where the line before was found


def imports(path):
    pattern = r"^(?:from|import) ([\w.]+)(?: import .*)?$"
    return set(re.findall(pattern, (ROOT / path).read_text(), re.MULTILINE))


def test_cer_needs_torch_transformers_and_one_file():
    assert imports("cer.py") == {"dataclasses", "os", "typing", "torch", "engine.tokens"}
    needed = {name.split(".")[0] for name in imports("engine/tokens.py")}
    assert needed - sys.stdlib_module_names == {"torch", "transformers"}
