"""Before anything imports torch: the instruction set that HONE_CPU_ISA asks for, threads that sleep when they wait.

Then how patient tests are: deadlines are for machines of usual speed, and longer where importing torch takes longer."""

import os
import signal
import time

from hone import machine
from tests import shared_run

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # tests run side by side: no core is anybody's own
machine.prepare()
start = time.perf_counter()
import torch  # noqa: E402, F401

machine.started_in(time.perf_counter() - start)
# A script's background job (`make test &`) ignores Ctrl-C, and so would every process that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What tests start ends with them, also when they are killed.
os.environ["HONE_PARENT_PID"] = str(os.getpid())


def patience(seconds):
    """A deadline on this machine, in seconds: twice as long beside other tests."""
    return seconds * 2 * machine.silence() / machine.SILENCE


def pytest_configure(config):
    from tests.processor_time import ProcessorTime

    if not hasattr(config, "workerinput"):
        shared_run.begin_run()
    config.pluginmanager.register(ProcessorTime())


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        from tests.integration.forks import end_templates

        end_templates()
        shared_run.end_run()
