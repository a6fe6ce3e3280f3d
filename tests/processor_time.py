"""Report the processor time of each test file, including the processes that its tests start."""

import os
import resource
from collections import defaultdict

import pytest

PROPERTY = "processor_seconds"
forked_seconds = 0.0  # of commands that tests/integration/forks.py ran; they are not children of this process


def add_forked(seconds):
    """Count a command that was forked by another process."""
    global forked_seconds
    forked_seconds += seconds


def read_processor_seconds():
    """Return seconds of processor time used so far by this process, its finished children and forked commands."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return forked_seconds + sum(usage.ru_utime + usage.ru_stime for usage in usages)


class ProcessorTime:
    """Pytest plugin: measures in the process that runs tests, sums up by file in the one that reports."""

    def __init__(self):
        self.last = read_processor_seconds()
        self.by_file = defaultdict(lambda: [0.0, 0.0, 0])  # processor seconds, wall seconds, tests

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        now = read_processor_seconds()
        report.user_properties = [*report.user_properties, (PROPERTY, now - self.last)]
        self.last = now
        return report

    def pytest_runtest_logreport(self, report):
        row = self.by_file[report.nodeid.split("::")[0]]
        row[0] += dict(report.user_properties).get(PROPERTY, 0.0)
        row[1] += report.duration
        row[2] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter):
        if os.environ.get("PYTEST_XDIST_WORKER") or not self.by_file:
            return
        terminalreporter.section("processor time by file")
        rows = sorted(self.by_file.items(), key=lambda row: -row[1][0])
        for name, (processor, wall, tests) in rows:
            terminalreporter.write_line(f"{processor:8.1f} s  {wall:8.1f} s wall  {tests:4} tests  {name}")
        total = sum(row[0] for _, row in rows)
        terminalreporter.write_line(f"{total:8.1f} s of processor time in all")
