"""Leaving early: SIGUSR1 asks a run to end at its next step, with a checkpoint that `--resume` goes on from.

A scheduler sends it before it takes the machine away. The exit code says that the run is to be gone on with.
"""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

AGAIN = 85  # exit code of a run that has left
_asked = False


class Left(Exception):
    """The run has ended since it was asked to, in words."""


def listen() -> None:
    """From now on the signal is taken note of, which would otherwise end the process. Call on the main thread."""
    signal.signal(signal.SIGUSR1, _ask)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Processes that are started in this block get the signal once they listen, also where it comes before."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def is_asked() -> bool:
    return _asked


def _ask(*_: Any) -> None:
    global _asked
    _asked = True
