"""The command line: how the scripts take flags, show progress, and say what is wrong."""

import argparse
import errno
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from data import InputError

# -------------------------------------------------------------------------------------------- flags


class HelpWithDefaults(argparse.HelpFormatter):
    def _get_help_string(self, action):
        none = any(action.default is value for value in (None, False, argparse.SUPPRESS))
        return action.help + " (default: %(default)s)" * (not none)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line too, and whose help names the defaults."""

    def __init__(self, **options):
        super().__init__(formatter_class=HelpWithDefaults, **options)

    def error(self, message):
        raise InputError(f"{message} (see --help)")


def number(kind, low, high=float("inf")):
    """A type for flags: an int or a float from low to high."""

    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected {low} to {high}, got {text}")
        return value

    parse.__name__ = kind.__name__  # for argparse's message on what is no number
    return parse


def add_sampling(parser, prefix=""):
    """The settings of sampling in evaluation, the paper's by default."""
    add = parser.add_argument
    add(f"--{prefix}temperature", type=number(float, 0), default=0.6, help="0: greedy")
    add(f"--{prefix}top-p", type=number(float, 1e-6, 1), default=0.95, help="1: all")
    add(f"--{prefix}top-k", type=number(int, 0), default=20, help="0: all")


def sampling_settings(args, prefix=""):
    settings = {name: getattr(args, prefix + name) for name in ("temperature", "top_p", "top_k")}
    return settings | {"max_new_tokens": args.max_new_tokens}


# ----------------------------------------------------------------------------------------- progress


def progress(name, iterable=None, total=None, unit="question"):
    """A bar for one part of a step, on the first rank, shown if the part takes over ten seconds."""
    options = dict(delay=10, leave=False, disable=dist.is_initialized() and dist.get_rank() > 0)
    return tqdm(iterable, desc=name, total=total, unit=unit, **options)


# ------------------------------------------------------------------------------------ what is wrong


def run_script(main):
    """Run a script's main(): what the user gave wrong, a file that cannot be written, a disk or a
    GPU that is full become one line on stderr and exit code 2, without a traceback; Ctrl-C ends it
    without one too."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # not a line for every retry
    try:
        return main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (InputError, OSError) as error:
        is_file = getattr(error, "filename", None) or getattr(error, "errno", None) == errno.ENOSPC
        if isinstance(error, OSError) and not is_file:
            raise
        message = str(error)
    except torch.OutOfMemoryError as error:
        message = f"{error} (--microbatch-tokens, --cpu-offload or more GPUs would help)"
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Mostly all ranks meet the same error, and rank 0 says so; torchrun then ends the others
        # while they wait here. Who is still there after that is the only one to know.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(8)
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
