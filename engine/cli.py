"""The command line: flags, progress and error messages of the scripts. Does not import torch."""

import argparse
import contextlib
import difflib
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from tqdm import tqdm

# ------------------------------------------------------------------------------------ what is wrong


class InputError(Exception):
    """The user's input is wrong. The message is one line that says what is wrong, where, and what
    would be right. run_script prints it and exits with code 2."""


MADE = []  # the run's directory and its parents, if this attempt made them, until it is sure to run


def require(condition, message):
    if not condition:
        raise InputError(message)


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def run_script(main):
    """Run a script's main() and exit with the code that it returns. Wrong input, a file that cannot
    be used and a GPU out of memory become one line on stderr and exit code 2. The directories in
    MADE are then removed, so that a refused attempt leaves nothing."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # no line for every retry
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (InputError, OSError) as error:
        message = str(error)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which this file does not import
            raise
        hint = "try --microbatch-tokens or --cpu-offload (train.py), or --batch (warm_start.py)"
        message = f"{error}: {hint}"
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # If all ranks meet the same error, rank 0 prints it, and torchrun ends the others while
        # they sleep. A rank that is still alive after 8 s failed alone and prints the error itself.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(8)
    for directory in MADE[:1]:
        shutil.rmtree(directory, ignore_errors=True)
    for parent in MADE[1:]:
        with contextlib.suppress(OSError):  # another run may have begun in it
            parent.rmdir()
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


# -------------------------------------------------------------------------------------------- flags


class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        has_default = action.default is not None and action.default is not False
        return super()._get_help_string(action) if has_default else action.help


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, a suggestion for a mistyped flag, and defaults in the help."""

    def __init__(self, **options):
        super().__init__(formatter_class=HelpWithDefaults, allow_abbrev=False, **options)

    def error(self, message):
        if message.startswith("unrecognized arguments: "):
            unknown = message.split()[2].split("=")[0]
            close = difflib.get_close_matches(unknown, self._option_string_actions, n=1)
            message += f"; did you mean {close[0]}?" if close else ""
        raise InputError(f"{message} (see --help)")


def number(kind, low, high=float("inf")):
    """The argparse type of an int or a float from low to high."""

    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            allowed = f"at least {low}" if high == float("inf") else f"{low} to {high}"
            raise argparse.ArgumentTypeError(f"expected {allowed}, got {text}")
        return value

    parse.__name__ = kind.__name__  # for argparse's message when the text is not a number
    return parse


# ----------------------------------------------------------------------------- lines and progress


def is_rank_0():
    return os.environ.get("RANK", "0") == "0"


def say(text):
    """Print a line on stderr, above the progress bar if there is one. Only rank 0 prints."""
    # Nothing is lost if the log's reader is gone, or if a signal's line interrupts another line.
    with contextlib.suppress(OSError, RuntimeError):
        if is_rank_0():
            tqdm.write(text, file=sys.stderr)


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
        pace = {"file": Lines(), "delay": 60, "mininterval": 60, "miniters": 1}
    return tqdm(iterable, name, leave=False, disable=not is_rank_0(), **pace, **options)
