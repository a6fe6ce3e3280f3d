"""`python -m hone COMMAND …` is the `hone` command, where entry points are not installed."""

from hone.cli import hone

hone()
