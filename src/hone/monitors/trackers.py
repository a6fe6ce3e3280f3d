"""Trackers of metrics and samples: Weights & Biases, TensorBoard.

A tracker receives rows of metrics and, at some steps, rollouts, which it logs as a table and as
histograms. If a tracker fails, the failure is logged once and the run continues without it.
"""

import importlib.util
import logging
import math
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.config.base import Config
from hone.config.key_names import key_name
from hone.config.sections import TensorBoardConfig, WandbConfig
from hone.monitors.provenance import made_by

log = logging.getLogger("hone")
COLUMNS = (
    "step",
    "env",
    "prompt",
    "completion",
    "answer",
    "reward",
    "advantage",
    "tokens",
    "stop",
    "error",
)
DISTRIBUTIONS = ("reward", "advantage", "tokens")
MAX_CHARACTERS = 4000  # characters of a text in a table
Rows = list[dict[str, Any]]  # rollouts, with COLUMNS as keys


class Tracker(ABC):
    """Base class of trackers.

    `log_rollouts` receives all rollouts of a step as `rows`, and in `sample` those to show in full.
    """

    interval = 10  # steps between those with rollouts
    samples = 8

    @abstractmethod
    def log_row(self, step: int, values: dict[str, float]) -> None: ...

    @abstractmethod
    def log_rollouts(self, step: int, rows: Rows, sample: Rows) -> None: ...

    @abstractmethod
    def close(self, well: bool) -> None: ...


class Trackers:
    """The trackers of a run.

    If a tracker fails, the error is logged, the tracker is removed, and the run continues.
    """

    def __init__(self, makers: list[tuple[str, Callable[[], Tracker]]]) -> None:
        self._all: dict[str, Tracker] = {}
        for name, make in makers:
            try:
                self._all[name] = make()
            except ValueError:  # a configuration mistake, before anything has begun
                raise
            except Exception as error:  # whatever the library raises
                self._given_up(name, error)

    def log_row(self, step: int, values: dict[str, float]) -> None:
        self._tell_each(lambda tracker: tracker.log_row(step, values))

    def log_rollouts(self, step: int, max_steps: int, rows: Callable[[], Rows]) -> None:
        """Send a step's rollouts to the trackers that log rollouts at this step.

        `rows` is called only if there is such a tracker.
        """
        due = [
            one
            for one in self._all.values()
            if one.samples and (step % one.interval == 0 or step in (1, max_steps))
        ]
        if due:
            found = rows()
            self._tell_each(
                lambda tracker: (
                    tracker.log_rollouts(step, found, spread_by_reward(found, tracker.samples))
                    if tracker in due
                    else None
                )
            )

    def close(self, well: bool) -> None:
        self._tell_each(lambda tracker: tracker.close(well))

    def _tell_each(self, tell: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._all.items()):
            try:
                tell(tracker)
            except Exception as error:  # whatever the library raises
                del self._all[name]
                self._given_up(name, error)

    def _given_up(self, name: str, error: Exception) -> None:
        log.warning(
            "%s failed (%s: %s): the run continues without it", name, type(error).__name__, error
        )


def spread_by_reward(rows: Rows, count: int) -> Rows:
    """Return `count` rows, evenly from the lowest reward to the highest."""
    ordered = sorted(rows, key=lambda row: row["reward"])
    if len(ordered) <= count:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / max(1, count - 1))] for i in range(count)]


class Wandb(Tracker):
    """Weights & Biases tracker.

    Metrics are plotted over the field `step` of their row, as evaluations may be logged after later
    steps.
    """

    def __init__(
        self, directory: Path, name: str, config: WandbConfig, run_config: Config, goes_on: bool
    ) -> None:
        import wandb

        self.wandb = wandb
        self.interval = config.interval
        self.samples = config.samples
        file = directory / f"wandb_{name}.id"  # a resumed run continues the same run in W&B
        identity = file.read_text().strip() if goes_on and file.exists() else uuid.uuid4().hex[:12]
        file.write_text(identity + "\n")
        # None: WANDB_MODE decides, default online.
        mode: Any = "offline" if config.offline else None
        try:
            self.run = wandb.init(
                project=config.project,
                name=config.name,
                group=config.group,
                id=identity,
                resume="allow",
                mode=mode,
                config=run_config.to_public_dict() | {"made_by": made_by()},
                dir=str(directory.resolve()),
            )
        except wandb.errors.UsageError as error:  # such as a missing API key
            raise ValueError(
                f"wandb: {error}; or write to disk only: {key_name('--wandb.offline')}"
            ) from None
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log_row(self, step: int, values: dict[str, float]) -> None:
        self.run.log({"step": step, **values})

    def log_rollouts(self, step: int, rows: Rows, sample: Rows) -> None:
        table = self.wandb.Table(
            columns=list(COLUMNS), data=[[row[key] for key in COLUMNS] for row in sample]
        )
        found = {
            f"distribution/{key}": self.wandb.Histogram([row[key] for row in rows])
            for key in DISTRIBUTIONS
        }
        self.run.log({"step": step, "samples": table, **found})

    def close(self, well: bool) -> None:
        self.run.finish(exit_code=0 if well else 1)


class TensorBoard(Tracker):
    """Event files for `tensorboard --logdir DIR`, written without TensorFlow."""

    def __init__(self, directory: Path, config: TensorBoardConfig, run_config: Config) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.protos = summary_pb2
        self.event = event_pb2.Event
        self.interval = config.interval
        self.samples = config.samples
        self.writer = EventFileWriter(str(config.dir or directory / "tensorboard"), flush_secs=5)
        self._add_text(
            "config", 0, _fence_text(str(run_config.to_public_dict() | {"made_by": made_by()}))
        )

    def log_row(self, step: int, values: dict[str, float]) -> None:
        made = [
            self.protos.Summary.Value(tag=name, simple_value=float(value))
            for name, value in values.items()
        ]
        self._add_scalars(step, made)

    def log_rollouts(self, step: int, rows: Rows, sample: Rows) -> None:
        self._add_scalars(
            step,
            [
                self._build_histogram(f"distribution/{key}", [row[key] for row in rows])
                for key in DISTRIBUTIONS
            ],
        )
        parts = [
            f"**reward {row['reward']:.4g}**, {row['stop'] or row['error']}\n\n{_fence_text(row['prompt'])}\n\n"
            f"{_fence_text(row['completion'])}"
            for row in sample
        ]
        self._add_text("samples", step, "\n\n---\n\n".join(parts))

    def close(self, well: bool) -> None:
        self.writer.close()

    def _add_scalars(self, step: int, values: list[Any]) -> None:
        self.writer.add_event(
            self.event(wall_time=_wall_time(), step=step, summary=self.protos.Summary(value=values))
        )

    def _add_text(self, tag: str, step: int, text: str) -> None:
        from tensorboard.compat.proto import tensor_pb2, types_pb2

        about = self.protos.SummaryMetadata(
            plugin_data=self.protos.SummaryMetadata.PluginData(plugin_name="text")
        )
        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING, string_val=[text.encode("utf-8", "replace")]
        )
        self._add_scalars(step, [self.protos.Summary.Value(tag=tag, metadata=about, tensor=tensor)])

    def _build_histogram(self, tag: str, values: list[float]) -> Any:
        import numpy as np

        known = np.array([x for x in values if math.isfinite(x)] or [0.0], dtype=np.float64)
        counts, edges = np.histogram(known, bins=30)
        made = self.protos.HistogramProto(
            min=known.min(),
            max=known.max(),
            num=len(known),
            sum=known.sum(),
            sum_squares=(known**2).sum(),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.astype(float).tolist(),
        )
        return self.protos.Summary.Value(tag=tag, histo=made)


def check_trackers(wandb: WandbConfig | None, tensorboard: TensorBoardConfig | None = None) -> None:
    """Raise ValueError for a configured tracker that is not installed, naming the pip extra."""
    for name, config in (("wandb", wandb), ("tensorboard", tensorboard)):
        if config is not None and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"{name} is asked for but not installed; install the extra: pip install 'hone-rl[{name}]'"
            )


def _fence_text(text: str) -> str:
    """Return text as a Markdown code block."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{fence}\n{text[:MAX_CHARACTERS]}\n{fence}"


def _wall_time() -> float:
    """Return the current Unix time in seconds, for TensorBoard's event files."""
    return time.time()  # noqa: TID251
