"""What lies under the method: the language model and the run."""

import sys

# Ctrl-C ends a script without a traceback, also in the seconds that its imports take.
sys.excepthook = lambda kind, *more: kind is KeyboardInterrupt or sys.__excepthook__(kind, *more)
