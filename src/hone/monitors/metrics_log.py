"""Metrics of a run: one JSON object per step in a file, and the configured trackers."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.config.sections import RunConfig
from hone.monitors.events import Events
from hone.monitors.trackers import Rows, TensorBoard, Tracker, Trackers, Wandb


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a metrics.jsonl or rollouts.jsonl; an incomplete last line is ignored."""
    rows = []
    # Not splitlines: text may contain U+2028.
    for line in path.read_text().split("\n") if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


class Metrics(Events):
    """Write the metrics of a run, one row per step, and pass rows and rollouts to the trackers."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_resumed = path.exists() and path.stat().st_size > 0
        self.file = path.open("a")
        self.max_steps = getattr(config, "max_steps", None) or 0
        makers: list[tuple[str, Callable[[], Tracker]]] = []
        if (wandb := config.wandb) is not None:
            makers.append(
                ("wandb", lambda: Wandb(path.parent, path.stem, wandb, config, is_resumed))
            )
        if (board := config.tensorboard) is not None:
            makers.append(("tensorboard", lambda: TensorBoard(path.parent, board, config)))
        self.trackers = Trackers(makers)

    def write_row(self, step: int, values: dict[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        self.trackers.log_row(step, values)

    def on_rollouts(self, step: int, values: dict[str, float], rows: Callable[[], Rows]) -> None:
        self.trackers.log_rollouts(step, self.max_steps, rows)

    def on_evaluation(self, version: int, values: dict[str, float], is_row: bool) -> None:
        if is_row:
            self.write_row(version, values)

    def on_step(self, step: int, values: dict[str, float]) -> bool:
        self.write_row(step, values)
        return True

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.file.close()
        self.trackers.close(kind is None)
