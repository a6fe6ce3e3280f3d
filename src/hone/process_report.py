"""Report facts to the parent process, as JSON in a file.

The parent names the file in HONE_REPORT_FILE. Keys: `url` of a server that is ready; `error`, the
message of a failure; `preempted`, the message of a run that stopped on request, and `can_resume`.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

REPORT_VARIABLE = "HONE_REPORT_FILE"
REPORT_BYTES = 16384  # reserved before the process starts, so that it can report a full disk
MESSAGE_CHARS = 1000  # of one fact; JSON takes up to 6 bytes of a character
_file = ""
_facts: dict[str, Any] = {}


def claim_report_file() -> None:
    """Write reports to the file named by HONE_REPORT_FILE; hide the variable from children."""
    global _file
    _file = os.environ.pop(REPORT_VARIABLE, "")
    _facts.clear()


def reserve_report(file: Path) -> None:
    """Empty the report file of a process that is about to start; reserve space on the disk."""
    with contextlib.suppress(OSError):
        file.write_bytes(b" " * REPORT_BYTES)


def write_report(**facts: Any) -> None:
    """Add facts to the report, if the parent wants one. Texts are cut to MESSAGE_CHARS."""
    if not _file:
        return
    for name, value in facts.items():
        _facts[name] = value[:MESSAGE_CHARS] if isinstance(value, str) else value
    content = json.dumps(_facts, ensure_ascii=False).encode("utf-8", "replace").ljust(REPORT_BYTES)
    # A directory that is gone, a full disk without a reserved file: the exit code remains.
    with contextlib.suppress(OSError):
        descriptor = os.open(_file, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, content, 0)
        finally:
            os.close(descriptor)


def read_report(file: Path) -> dict[str, Any]:
    """Return what a process has reported so far; empty if nothing."""
    try:
        report: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return report
