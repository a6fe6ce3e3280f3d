"""`python -m hone COMMAND …` is the `hone` command, where entry points are not installed."""

import sys

if (
    not sys.flags.safe_path
):  # python -m puts the working directory first, whose numpy.py would be imported
    del sys.path[0]

from hone.cli import hone

hone()
