"""What passes between a script and its user: errors and flags, lines and progress bars. Does not
import torch."""

import argparse
import contextlib
import logging
import os
import re
import shlex
import sys
from pathlib import Path

from tqdm import tqdm

# ------------------------------------------------------------------------------------ what is wrong


class InputError(Exception):
    """The user's input is wrong. The message is one line that says what is wrong, where, and what
    would be right. run_script prints it and exits with code 2."""


def require(condition, message):
    if not condition:
        raise InputError(message)


@contextlib.contextmanager
def as_input_error(problem):
    """Make an InputError of whatever is raised in this block, since libraries raise errors of many
    types: one line with the problem, and in brackets what the error says. A GPU that is out of
    memory stays what it is."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        raise InputError(f"{problem} ({message_of(error)})") from error


def out_of_memory(error):
    return type(error).__name__ == "OutOfMemoryError"  # torch's, which this file does not import


def message_of(error):
    """The first two lines of what an error says, as one; its type if it says nothing."""
    return " ".join(str(error).strip().splitlines()[:2]) or type(error).__name__


def run_script(main):
    """Run a script's main() and exit with the code that it returns. Wrong input, a file that cannot
    be used and a GPU out of memory become one line on stderr and exit code 2. So does Ctrl-C, with
    130, unless main() handles it."""
    for stream in sys.stdin, sys.stdout, sys.stderr:
        if hasattr(stream, "reconfigure"):  # a terminal may not be UTF-8
            stream.reconfigure(errors="backslashreplace")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # no line for every retry
    if not is_rank_0():
        logging.disable(logging.WARNING)
    code = 2
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        code, message = 130, "stopped by Ctrl-C"
    except (InputError, OSError) as error:
        message = str(error)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        smaller = "a smaller --max-new-tokens, --microbatch-tokens or model"
        message = f"{error}: use {smaller}; to train also --lora or --cpu-offload"
    print(f"{Path(sys.argv[0]).name}: {printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)


# -------------------------------------------------------------------------------------------- flags


class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        has_default = action.default is not None and action.default is not False
        return super()._get_help_string(action) if has_default else action.help


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, with defaults in the help, and with ~ in paths."""

    def __init__(self, **options):
        super().__init__(formatter_class=HelpWithDefaults, allow_abbrev=False, **options)
        # The type of all flags that name none. A shell leaves the ~ of `--flag=~/file` as it is.
        self.register("type", None, os.path.expanduser)

    def error(self, message):
        raise InputError(f"{message} (see --help)")


def number(kind, low, high=float("inf")):
    """The argparse type of an int or a float from low to high."""

    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected {low} to {high}, got {text}")
        return value

    parse.__name__ = kind.__name__  # for argparse's message when the text is not a number
    return parse


# ------------------------------------------------------------------------------ lines and bars


def is_rank_0():
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ


def say(text):
    """Print a line on stderr, above the progress bar if there is one. Only rank 0 prints."""
    # Nothing is lost if the log's reader is gone, or if a signal's line interrupts another line.
    with contextlib.suppress(OSError, RuntimeError):
        if is_rank_0():
            tqdm.write(printable(text), file=sys.stderr)


def for_shell(*words):
    """The words of a command as they can be pasted: a path may hold spaces or brackets."""
    return shlex.join(map(str, words))


def shorten(text, most):
    """A text without its middle, if it has more than `most` characters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} [...] {text[-half:]}"


# Control characters except tabs and line ends, those that turn the direction of text, surrogates.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(text):
    """A text without what could move a terminal's cursor, hide text, or make an SVG invalid."""
    return UNPRINTABLE.sub("\ufffd", text)


class Lines:
    """A file for tqdm that is no terminal: every state of the bar becomes a line of the log."""

    def write(self, text):
        if text.strip():
            say(text.strip())


def progress(name, iterable=None, **options):
    """tqdm's bar for one part of a step, on rank 0. On a terminal it appears after ten seconds.
    Elsewhere it prints a line a minute."""
    pace = {"delay": 10}
    if not sys.stderr.isatty():
        pace = {"file": Lines(), "delay": 60, "mininterval": 60, "miniters": 1, "position": 0}
    return tqdm(iterable, name, leave=False, disable=not is_rank_0(), **pace, **options)
