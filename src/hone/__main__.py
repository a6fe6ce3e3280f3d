"""Run the `hone` command as `python -m hone COMMAND …`, where entry points are not installed."""

import sys

if (
    not sys.flags.safe_path
):  # python -m puts the working directory first, whose numpy.py would be imported
    del sys.path[0]

from hone.cli import hone

hone()
