"""Before anything imports torch: the instruction set that HONE_CPU_ISA asks for, threads that sleep when they wait.

Then the plugins of all tests: processor time by file, and a limit that catches hangs."""

import importlib.util
import os
import random
import signal
import time

import pytest

from hone import machine
from tests import shared_run

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # tests run side by side: no core is anybody's own
machine.prepare_environment()
start = time.perf_counter()
import torch  # noqa: E402

machine.started_in(time.perf_counter() - start)
if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    # Kernels are interpreted here, not compiled: settled when Triton is imported. Commands of tests do without.
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]
# A script's background job (`make test &`) ignores Ctrl-C, and so would every process that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What tests start ends with them, also when they are killed.
os.environ["HONE_PARENT_PID"] = str(os.getpid())


def pytest_addoption(parser):
    parser.addoption(
        "--tier",
        choices=("all", "main", "rest"),
        default="all",
        help="main: unit tests and integration tests marked main_path (make test); rest: all others (make test-all)",
    )
    parser.addoption(
        "--order-seed", type=int, help="run tests in a random order, the same for each seed"
    )


def is_in_main_tier(item):
    return "integration" not in item.path.parts or item.get_closest_marker("main_path") is not None


def pytest_collection_modifyitems(config, items):
    tier, seed = config.getoption("tier"), config.getoption("order_seed")
    if tier != "all":
        kept = [item for item in items if is_in_main_tier(item) == (tier == "main")]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    if seed is not None:
        random.Random(seed).shuffle(items)


def pytest_configure(config):
    from tests.hangs import HangLimit
    from tests.processor_time import ProcessorTime

    if not hasattr(config, "workerinput"):
        shared_run.begin_run()
    config.pluginmanager.register(ProcessorTime())
    if config.pluginmanager.hasplugin("timeout"):
        config.pluginmanager.register(HangLimit(float(config.getini("timeout"))))


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        from tests.integration.forks import end_templates

        end_templates()
        shared_run.end_run()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each worker one test at a time, but tests that share a server or a fixture of their module to one worker."""
    from tests.scheduling import GroupScheduling

    return GroupScheduling(config, log)
