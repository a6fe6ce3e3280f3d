"""Report the processor time of each test file, including the processes that its tests start."""

import json
import os
import resource
import struct
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.shared_run import run_directory

PROPERTY = "processor_seconds"
REPORT_VARIABLE = "HONE_TEST_REPORT"  # a file for tests/suites.py
SHOWN_TESTS = 30
HELP_PROCESSOR_SECONDS = 2.0  # that `--help` may take, ten times what it takes


def _forked_path(environment):
    return run_directory() / f"processor_time_{environment.get('PYTEST_XDIST_WORKER', 'main')}"


def add_forked(environment, seconds):
    """Count a command that tests/integration/forks.py ran: it is no child of the process that runs the test."""
    with _forked_path(environment).open("ab", buffering=0) as file:
        file.write(struct.pack("d", seconds))


def read_processor_seconds():
    """Return seconds of processor time used so far by this process, its finished children and forked commands."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    path = _forked_path(os.environ)
    forked = struct.iter_unpack("d", path.read_bytes()) if path.exists() else []
    return sum(seconds for (seconds,) in forked) + sum(
        usage.ru_utime + usage.ru_stime for usage in usages
    )


def read_children_seconds():
    """Return seconds of user time of this process's finished children."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


class ProcessorTime:
    """Pytest plugin: measures in the process that runs tests, sums up by file in the one that reports."""

    def __init__(self):
        self.last = read_processor_seconds()
        self.by_file = defaultdict(lambda: [0.0, 0.0, 0])  # processor seconds, wall seconds, tests
        self.by_test = defaultdict(float)

    def write_report(self, path, stats):
        """Write counts of tests by result, reasons of skipped tests, and processor seconds as JSON."""
        results = ("passed", "failed", "error", "skipped")
        skips = Counter(
            str(report.longrepr[-1]).removeprefix("Skipped: ")
            for report in stats.get("skipped", [])
        )
        report = {
            "tests": {result: len(stats[result]) for result in results if stats.get(result)},
            "skips": dict(skips),
            "processor_seconds": sum(row[0] for row in self.by_file.values()),
        }
        path.write_text(json.dumps(report))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        now = read_processor_seconds()
        report.user_properties = [*report.user_properties, (PROPERTY, now - self.last)]
        self.last = now
        return report

    def pytest_runtest_logreport(self, report):
        row = self.by_file[report.nodeid.split("::")[0]]
        processor = dict(report.user_properties).get(PROPERTY, 0.0)
        self.by_test[report.nodeid] += processor
        row[0] += processor
        row[1] += report.duration
        row[2] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter):
        if os.environ.get("PYTEST_XDIST_WORKER") or not self.by_file:
            return
        if path := os.environ.get(REPORT_VARIABLE):
            self.write_report(Path(path), terminalreporter.stats)
        terminalreporter.section("tests with most processor time")
        for name, processor in sorted(self.by_test.items(), key=lambda row: -row[1])[:SHOWN_TESTS]:
            terminalreporter.write_line(f"{processor:8.1f} s  {name}")
        terminalreporter.section("processor time by file")
        rows = sorted(self.by_file.items(), key=lambda row: -row[1][0])
        for name, (processor, wall, tests) in rows:
            terminalreporter.write_line(
                f"{processor:8.1f} s  {wall:8.1f} s wall  {tests:4} tests  {name}"
            )
        total = sum(row[0] for _, row in rows)
        terminalreporter.write_line(f"{total:8.1f} s of processor time in all")
