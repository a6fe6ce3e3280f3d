"""Metrics of a run: one JSON object per step in a file, and the configured trackers."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.config.sections import RunConfig
from hone.monitors.trackers import Rows, TensorBoard, Tracker, Trackers, Wandb


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a metrics.jsonl or rollouts.jsonl; an incomplete last line is ignored."""
    rows = []
    # Not splitlines: text may hold U+2028
    for line in path.read_text().split("\n") if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


class Metrics:
    """Context manager; `log_metrics(step, values)` appends a line."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        goes_on = path.exists() and path.stat().st_size > 0
        self.file = path.open("a")
        makers: list[tuple[str, Callable[[], Tracker]]] = []
        if (wandb := config.wandb) is not None:
            makers.append(("wandb", lambda: Wandb(path.parent, path.stem, wandb, config, goes_on)))
        if (board := config.tensorboard) is not None:
            makers.append(("tensorboard", lambda: TensorBoard(path.parent, board, config)))
        self.trackers = Trackers(makers)

    def log_metrics(self, step: int, values: dict[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        self.trackers.log_row(step, values)

    def log_rollouts(self, step: int, max_steps: int, rows: Callable[[], Rows]) -> None:
        """Send rollouts to the trackers; the run's own files have all of them."""
        self.trackers.log_rollouts(step, max_steps, rows)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.file.close()
        self.trackers.close(kind is None)
