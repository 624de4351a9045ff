"""A run: its processes, its files, and its words to the user.

The scripts at the top of the repository import from this package before anything else, because what
is set here holds only for what is imported after it.
"""

import os
import signal
import sys
from pathlib import Path

# Where gmpy2 is installed (conda-forge's sympy brings it), sympy and mpmath would compute with it.
# But math-verify's time limit cannot interrupt it: (2^{31})! never ends, and (10^{10})! asks for so
# much memory that the process is aborted.
os.environ["SYMPY_GROUND_TYPES"] = "python"
os.environ["MPMATH_NOGMPY"] = "1"


def interrupted(signum, frame):
    """Ctrl-C while a script imports libraries, some of which would catch a KeyboardInterrupt."""
    print(f"{Path(sys.argv[0]).name}: stopped by Ctrl-C", file=sys.stderr, flush=True)
    os._exit(130)


# Not in a notebook or in pytest, and not under nohup. cli.run_script takes it back.
ours = Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parents[1]
if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, interrupted)
