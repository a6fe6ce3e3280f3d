"""Start and end child processes, and describe how they ended.

A child of a Hone command ends with the command. A command that ends normally kills the process
group that the child leads (`end_processes`). If the command is killed, the child notices that the
process whose id is in HONE_PARENT_PID is gone, and ends itself (`end_with_parent`).
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.process_report import REPORT_VARIABLE, reserve_report

HONE = (sys.executable, "-P", "-m", "hone")  # command line of the `hone` command
TERM_SECONDS = 5.0  # seconds from SIGTERM to SIGKILL
KILL_SECONDS = 10.0  # in which a killed process has to be gone
ORPHAN_SECONDS = 10.0  # in which an orphaned process may end what it has started

Process = subprocess.Popen[Any]
log = logging.getLogger("hone")


def start_process(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    report: Path | None = None,
    **options: Any,
) -> Process:
    """Start a child process without standard input, as leader of a process group.

    A child that runs a Hone command ends when this process ends, unless `environment` sets
    HONE_PARENT_PID to 0.

    Args:
        command: program and arguments.
        environment: variables added to those of this process.
        report: file in which the child reports facts (`process_report.py`).
        options: further arguments of `subprocess.Popen`.
    """
    own = {"HONE_PARENT_PID": str(os.getpid())}
    if report is not None:
        reserve_report(report)
        own[REPORT_VARIABLE] = str(report.absolute())
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True} | options
    return subprocess.Popen(command, env={**os.environ, **own, **(environment or {})}, **options)


def end_processes(*processes: Process, term_seconds: float = TERM_SECONDS) -> None:
    """End processes and their groups: SIGTERM, then SIGKILL after at most `term_seconds`."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + term_seconds
    for process in running:
        wait_or_kill(process, deadline - time.monotonic())
    for process in processes:
        # What a child has started would outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_or_kill(process: Process, seconds: float) -> int:
    """Wait for a process to end, kill it after `seconds`, and return its exit code.

    A process that a driver holds may outlive the kill: it is waited for KILL_SECONDS only.
    """
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        return process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        log.warning(
            "Process %d has not ended %.0f s after it was killed", process.pid, KILL_SECONDS
        )
        return -signal.SIGKILL


def end_with_parent() -> None:
    """End this process and its children when the launcher of this process is gone.

    The launcher's process id is in HONE_PARENT_PID; it may be an indirect ancestor. A thread checks
    whether it exists.
    """
    parent = int(os.environ.pop("HONE_PARENT_PID", "0"))
    if not parent:
        return
    is_direct = os.getppid() == parent

    def watch_parent() -> None:
        while os.getppid() == parent if is_direct else process_exists(parent):
            time.sleep(0.5)
        # It has children to end, perhaps one that hangs.
        if callable(signal.getsignal(signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(ORPHAN_SECONDS)
        if os.getpgrp() == os.getpid():  # with all its children
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch_parent, name="parent", daemon=True).start()


def describe_exit(code: int) -> str:
    """Return how a process ended, from its exit code: negative for signals, as Popen reports it."""
    if code < 0:
        return f"was killed ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"


def process_exists(pid: int, counts_others: bool = True) -> bool:
    """Return True if a process with this id exists.

    If `counts_others` is False, processes of other users do not count.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return counts_others
    return True
