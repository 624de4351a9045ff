"""The command line of the scripts: errors and flags. Does not import torch."""

import argparse
import logging
import os
import sys
from pathlib import Path

# ------------------------------------------------------------------------------------ what is wrong


class InputError(Exception):
    """The user's input is wrong. The message is one line that says what is wrong, where, and what
    would be right. run_script prints it and exits with code 2."""


def require(condition, message):
    if not condition:
        raise InputError(message)


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def run_script(main):
    """Run a script's main() and exit with the code that it returns. Wrong input, a file that cannot
    be used and a GPU out of memory become one line on stderr and exit code 2."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # no line for every retry
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader of our output is gone, as under `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (InputError, OSError) as error:
        message = str(error)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which this file does not import
            raise
        message = f"{error}: use fewer tokens at a time (in train.py --microbatch-tokens)"
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


# -------------------------------------------------------------------------------------------- flags


class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        has_default = action.default is not None and action.default is not False
        return super()._get_help_string(action) if has_default else action.help


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, and with defaults in the help."""

    def __init__(self, **options):
        super().__init__(formatter_class=HelpWithDefaults, allow_abbrev=False, **options)

    def error(self, message):
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
