"""When several processes of a run have failed, the launcher names the one that failed first."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hone.launch.processes import Child, Restarts, find_first_failure


def start_child(name, code):
    child = Child.__new__(Child)
    child.name = child.title = name
    child.is_elsewhere, child.log, child.report = False, None, Path("no-report.json")
    child.output_ended_at = float("inf")
    child.process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    child.reader = threading.Thread(target=child._read_output, daemon=True)
    child.reader.start()
    return child


def test_a_server_that_does_not_stay_up_is_not_restarted_for_ever(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    restarts = Restarts()
    may = []
    for step in (0, 0, 1, 1, 1, 1, 1):  # the fifth time after the same step
        now += 100.0
        may.append(restarts.may_restart("one", step))
        assert restarts.may_restart("two", int(step + now))
    assert may == [True] * 6 + [False]
    often = Restarts()
    assert [often.may_restart(str(i), i) for i in range(5)] == [True] * 4 + [False]


def raise_error(after):
    return f"import time; time.sleep({after}); raise SystemExit(1)"


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize(
    ("first", "how"),
    [
        (raise_error(0), "ended with exit code 1"),
        ("import os; os.kill(os.getpid(), 9)", "was killed (SIGKILL)"),
    ],
)
def test_the_first_of_several_failures_is_named(first, how, order):
    started = [start_child("rank 1", first)]
    started[0].process.wait()
    time.sleep(0.05)
    started += [
        start_child("rank 0", raise_error(0)),
        start_child("server", "import time; time.sleep(60)"),
    ]
    started[1].process.wait()
    children = [started[place] for place in order]
    try:
        assert (
            find_first_failure(children, started[1]).describe_failure().startswith(f"rank 1 {how}")
        )
    finally:
        started[2].process.send_signal(signal.SIGKILL)
        started[2].process.wait()
