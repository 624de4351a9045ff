"""A run: its processes, its files, and its words to the user.

The scripts at the top of the repository import from this package before anything else, because what
is set here holds only for what is imported after it.
"""

import os

# Where gmpy2 is installed (conda-forge's sympy brings it), sympy and mpmath would compute with it.
# But math-verify's time limit cannot interrupt it: (2^{31})! never ends, and (10^{10})! asks for so
# much memory that the process is aborted.
os.environ["SYMPY_GROUND_TYPES"] = "python"
os.environ["MPMATH_NOGMPY"] = "1"
