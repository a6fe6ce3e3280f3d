"""The directory of a test run, which its processes share: templates, forked processes, fixtures built once."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "HONE_TEST_RUN"


def begin_run():
    """Make the directory, in the process that reports; workers of pytest-xdist inherit its name."""
    directory = Path(tempfile.mkdtemp(prefix="hone_tests_"))
    (directory / "controller").write_text(str(os.getpid()))
    os.environ[VARIABLE] = str(directory)


def end_run():
    """Remove the directory."""
    shutil.rmtree(os.environ.pop(VARIABLE), ignore_errors=True)


def run_directory():
    """Return the directory; None outside a test run."""
    return Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None


def build_once(name, build):
    """Return a directory that `build(directory)` has filled, in this or another process of the run; only read it."""
    place = run_directory() / "shared" / name
    place.parent.mkdir(exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.with_suffix(".built").exists():
            shutil.rmtree(place, ignore_errors=True)  # of one that failed
            place.mkdir()
            build(place)
            place.with_suffix(".built").touch()
    return place


def is_run_alive():
    """Return whether the process that reports still lives."""
    try:
        os.kill(int((run_directory() / "controller").read_text()), 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True
