"""Reports of a step, for every trainer: console and log lines, and a row of metrics.jsonl.

sampled ─► orchestrator's line ──┐
trained ─► trainer's line        ├─► merged ─► row (file, trackers), summary line
evaluated ─► line per environment ─► row
"""

import logging
from collections.abc import Callable
from typing import Any

from hone.monitors.logging_setup import SUCCESS
from hone.monitors.metrics_log import Metrics
from hone.monitors.step_lines import (
    evaluation_line,
    orchestrator_line,
    sample_lines,
    sft_line,
    summary_line,
    trainer_line,
    why_no_signal,
)
from hone.monitors.trackers import Rows, spread_by_reward


class StepReport:
    """Report steps to a component's log. Lines outside `log_interval` go to its file only."""

    def __init__(
        self, log: logging.Logger, max_steps: int, log_interval: int, metrics: Metrics | None = None
    ) -> None:
        self.log, self.max_steps, self.log_interval, self.metrics = (
            log,
            max_steps,
            log_interval,
            metrics,
        )

    def console_fields(self, step: int) -> dict[str, Any]:
        """Return the `extra` of a log line, which says if it is printed."""
        is_shown = self.log_interval and (step == self.max_steps or step % self.log_interval == 0)
        return {"console": bool(is_shown)}

    def report_rollouts(self, step: int, values: dict[str, float]) -> None:
        """Log the orchestrator's line, and add perf/throughput from time/step to `values`."""
        values["perf/throughput"] = values["progress/tokens"] / values["time/step"]
        if not values["batch/effective_batch_size"]:
            self.log.warning("%s", why_no_signal(step, values), extra=self.console_fields(step))
        self.log.log(SUCCESS, orchestrator_line(step, values), extra=self.console_fields(step))

    def report_sft_step(self, step: int, values: dict[str, float]) -> None:
        """Write the row of an SFT step and log its line."""
        self.write_row(step, values)
        self.log.log(SUCCESS, sft_line(step, values), extra=self.console_fields(step))

    def report_training(self, step: int, values: dict[str, float]) -> None:
        """Log the trainer's line."""
        self.log.log(SUCCESS, trainer_line(step, values), extra=self.console_fields(step))

    def report_step(self, step: int, values: dict[str, float]) -> None:
        """Write the row of a step with the values of both sides, and log the summary line."""
        self.write_row(step, values)
        self.log.info("%s", summary_line(step, values), extra=self.console_fields(step))

    def report_evaluation(self, version: int, values: dict[str, float]) -> None:
        """Log the line of an evaluation."""
        self.log.info("%s", evaluation_line(version, values))

    def report_samples(self, step: int, rows: Callable[[], Rows], log_samples: int = 0) -> None:
        """Send a step's rollouts to trackers, and log one every `log_samples` steps.

        `rows` is called only if they are needed.
        """
        if log_samples and step % log_samples == 0 and (found := rows()):
            self.log.info("%s", sample_lines(step, spread_by_reward(found, 3)[len(found) > 2]))
        if self.metrics is not None:
            self.metrics.log_rollouts(step, self.max_steps, rows)

    def write_row(self, step: int, values: dict[str, float]) -> None:
        """Write a row of metrics."""
        if self.metrics is not None:
            self.metrics.log_metrics(step, values)
