"""Log lines: `12:00:00 INFO Step 3 | Time: …` on the console and in the run's logs/."""

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path

from hone.text.printable import indent_lines

FORMAT = "%(asctime)s %(levelname)7s %(message)s"


def start_logging(level: str = "info", form: str = "text") -> logging.Logger:
    """Write logs of `hone` to stdout, as text or as JSON objects."""
    handler = _Stdout()
    handler.setFormatter(_Json() if form == "json" else Line(FORMAT, "%H:%M:%S"))
    handler.addFilter(lambda record: getattr(record, "console", True))
    root = logging.getLogger("hone")
    root.handlers = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    logging.raiseExceptions = False  # a full disk costs log lines only
    return root


class Line(logging.Formatter):
    """Format a record with control characters escaped and all lines but the first indented."""

    def format(self, record: logging.LogRecord) -> str:
        return indent_lines(super().format(record))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        found = {
            "time": when,
            "level": record.levelname.lower(),
            "component": record.name.removeprefix("hone."),
        }
        return json.dumps(found | {"message": record.getMessage()}, ensure_ascii=False)


class _Stdout(logging.StreamHandler):  # type: ignore[type-arg]
    """Log handler for the current sys.stdout, which a progress bar may replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        return sys.stdout


def component_log(name: str, directory: Path | None = None) -> logging.Logger:
    """Return the logger of a component (trainer, orchestrator, sft).

    With `directory` it also writes to NAME.log there. Logs of environments go to the orchestrator's
    log.
    """
    logger = logging.getLogger(f"hone.{name}")
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(directory / f"{name}.log")
        handler.setFormatter(Line(FORMAT, "%Y-%m-%d %H:%M:%S"))
        for one in [
            logger,
            *([logging.getLogger("hone.environments")] if name == "orchestrator" else []),
        ]:
            for old in one.handlers:
                old.close()
            one.handlers = [handler]
    return logger
