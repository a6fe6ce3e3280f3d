"""Leaving early: SIGUSR1 asks a run to end at its next step, with a checkpoint that `--resume` goes on from.

A scheduler sends it before it takes the machine away. The exit code says that the run is to be gone on with.
"""

import signal
from typing import Any

AGAIN = 85  # exit code of a run that has left
_asked = False


class Left(Exception):
    """The run has ended since it was asked to, in words."""


def listen() -> None:
    """From now on the signal is taken note of, which would otherwise end the process. Call on the main thread."""
    signal.signal(signal.SIGUSR1, _ask)


def is_asked() -> bool:
    return _asked


def _ask(*_: Any) -> None:
    global _asked
    _asked = True
