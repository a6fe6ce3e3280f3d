"""Run the `hone` command as `python -m hone COMMAND …`, where entry points are not installed."""

import sys

# `python -m` puts the working directory first, so that its numpy.py would be imported.
if not sys.flags.safe_path:
    del sys.path[0]

from hone.cli import hone

hone()
