"""The directory of a test run, which its processes share: templates, forked processes, fixtures built once."""

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


def is_run_alive():
    """Return whether the process that reports still lives."""
    try:
        os.kill(int((run_directory() / "controller").read_text()), 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True
