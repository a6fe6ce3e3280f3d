"""Preemption: SIGUSR1 or Ctrl-C asks a run to checkpoint at its next step and exit, to be resumed.

A scheduler sends SIGUSR1 before it takes the machine away; the exit code says that the run can be
resumed. Ctrl-C does the same once steps have begun; a second one ends the run at once.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

EXIT_PREEMPTED = 85  # exit code of a preempted run
EXIT_INTERRUPTED = 130  # … because of Ctrl-C
_asked = False
_interrupts = 0
_takes_steps = False


class Preempted(Exception):
    """The run stopped on request; `can_resume`: it has a checkpoint."""

    def __init__(self, message: str, can_resume: bool = True) -> None:
        super().__init__(message)
        self.can_resume = can_resume


def listen_for_signals() -> None:
    """Record SIGUSR1, which would otherwise end the process. Call on the main thread."""
    signal.signal(signal.SIGUSR1, _request_leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def listen_to_ctrl_c() -> None:
    """Let the first Ctrl-C stop a run after its step. Call on the main thread."""
    # Not in a job that ignores it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def steps_begin() -> None:
    """Record that training steps begin: from now on the first Ctrl-C waits for a checkpoint.

    Before this call Ctrl-C ends a command at once.
    """
    global _takes_steps
    _takes_steps = True


def ignore_from_now_on() -> None:
    """Ignore SIGUSR1, so that it cannot kill a finished run while Python shuts down."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Context manager: block SIGUSR1 while child processes are started.

    The children inherit the block, so SIGUSR1 cannot kill them during start-up. A signal that
    arrives before they call `listen_for_signals` is delivered then.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def was_interrupted() -> bool:
    """Return True once somebody has pressed Ctrl-C."""
    return _interrupts > 0


def is_asked() -> bool:
    return _asked


def _request_leave(*_: Any) -> None:
    global _asked
    _asked = True


def _on_interrupt(*_: Any) -> None:
    global _asked, _interrupts
    _interrupts += 1
    if _interrupts > 1 or not _takes_steps:
        raise KeyboardInterrupt
    _asked = True
    with contextlib.suppress(OSError, RuntimeError):
        sys.stderr.write(
            "\nending after this step, with a checkpoint (Ctrl-C again ends at once)\n"
        )
        sys.stderr.flush()
