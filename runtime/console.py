"""What a person sees while a script works: lines and progress bars. Does not import torch."""

import contextlib
import os
import sys

from tqdm import tqdm


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
