"""A limit per test that only catches hangs: every process of a hanging test writes the stacks of its threads."""

import os
import signal
import threading

import pytest

HANG_SECONDS = 600  # of any single wait of a test: ten times and more what it takes
ABORT_SECONDS = 10  # before pytest-timeout ends the test


def find_descendants(pid, processes):
    """Return all processes below `pid`, the youngest generation last.

    Args:
        processes: (parent, arguments) by pid, as `processes_now` returns them.
    """
    found, last = [], [pid]
    while last:
        last = [
            child
            for child, (parent, _) in processes.items()
            if parent in last and child not in found
        ]
        found += last
    return found


def abort_descendants():
    """End what this process has started by SIGABRT, at which Python's fault handler writes all stacks to stderr."""
    from tests.integration.conftest import processes_now

    for pid in find_descendants(os.getpid(), processes_now()):
        try:
            os.kill(pid, signal.SIGABRT)
        except (ProcessLookupError, PermissionError):
            continue


class HangLimit:
    """Pytest plugin; pytest-timeout itself writes the stacks of the process that runs the test."""

    def __init__(self, seconds):
        self.seconds = seconds
        os.environ["PYTHONFAULTHANDLER"] = "1"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        timer = threading.Timer(self.seconds - ABORT_SECONDS, abort_descendants)
        timer.daemon = True
        timer.start()
        try:
            return (yield)
        finally:
            timer.cancel()
