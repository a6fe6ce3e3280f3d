"""Report facts to the process that started this one, as JSON in a file that it names.

Keys: `url` of a server that is ready; `error`, the message of a failure; `preempted`, the message of
a run that stopped on request, and `can_resume`.
"""

import json
import os
from pathlib import Path
from typing import Any

REPORT_VARIABLE = "HONE_REPORT_FILE"
_file = ""
_facts: dict[str, Any] = {}


def claim_report_file() -> None:
    """Report to the file that the environment names; processes started from here do not."""
    global _file
    _file = os.environ.pop(REPORT_VARIABLE, "")
    _facts.clear()


def write_report(**facts: Any) -> None:
    """Add facts to the report, if one is wanted."""
    if not _file:
        return
    _facts.update(facts)
    partial = Path(f"{_file}.partial")
    try:
        partial.write_text(json.dumps(_facts))
        partial.replace(_file)
    except OSError:  # a full disk, a directory that is gone: the exit code remains
        partial.unlink(missing_ok=True)


def read_report(file: Path) -> dict[str, Any]:
    """Return what a process has reported so far; empty if nothing."""
    try:
        report: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return report
