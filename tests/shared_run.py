"""The directory of a test run, which its processes share: templates, forked processes, fixtures built once."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "HONE_TEST_RUN"
_lock = None


def begin_run():
    """Make the directory, in the process that reports; workers of pytest-xdist inherit its name."""
    global _lock
    directory = Path(tempfile.mkdtemp(prefix="hone_tests_"))
    _lock = (directory / "alive").open("w")
    fcntl.flock(_lock, fcntl.LOCK_EX)
    os.environ[VARIABLE] = str(directory)
    # Else below the home directory
    for name in ("WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        os.environ[name] = str(directory)


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
    """Return whether the process that reports still lives: it holds a lock, which ends with it however that goes."""
    try:
        with (run_directory() / "alive").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
