"""Callbacks for events of a run, in the same process or read from its files."""

import json
from pathlib import Path
from typing import Any

from hone.monitors.progress_line import Live
from hone.run_directory import RunDirectory
from hone.transport.deadlines import PulseOf


class Watcher:
    """Callbacks for run events. The default methods do nothing."""

    def on_servers(self, addresses: list[str]) -> None:
        """Servers are starting at these HOST:PORT addresses."""

    def on_step(self, row: dict[str, Any]) -> bool:
        """A step is done; `row` is its row of metrics.jsonl. Return False to stop the run."""
        return True

    def on_weights(self, directory: Path) -> None:
        """Weights have been written to the directory."""

    def on_activity(self, what: str) -> None:
        """The run begins to generate or to train."""


class OnTerminal(Watcher):
    """Update the progress line and forward events to another watcher."""

    def __init__(self, live: Live, other: Watcher | None) -> None:
        self.live, self.other = live, other or Watcher()
        self.on_servers, self.on_weights = self.other.on_servers, self.other.on_weights  # type: ignore[method-assign]

    def on_step(self, row: dict[str, Any]) -> bool:
        self.live.show_step(f"reward {row['reward/mean']:.4f}")
        return self.other.on_step(row)

    def on_activity(self, what: str) -> None:
        self.live.show_activity(what)


class Follower:
    """Report what appears in a run's files to a watcher, from the step after `told` on.

    Nothing is reported before the run's trainer has claimed the directory and is alive, so that
    files of an earlier run are ignored.
    """

    def __init__(
        self, watcher: Watcher, run: RunDirectory, weight_steps: list[int], told: int
    ) -> None:
        self.watcher, self.run, self.told = watcher, run, told
        self.weights = [step for step in weight_steps if step > told]
        self.before, self.trainer = run.id_on_disk(), PulseOf(run.pulse_file("trainer"))
        self.is_there, self.read, self.at = False, 0, ""  # bytes of the metrics

    def follow_once(self) -> bool:
        """Report what is new. Return False if the watcher stops the run."""
        if not self.is_there:
            self.is_there = self.run.id_on_disk() != self.before and self.trainer.is_beating()
            if not self.is_there:
                return True
        goes_on = True
        for row in self._new_rows():
            if row["step"] > self.told and "reward/mean" in row:
                self.told = row["step"]
                goes_on &= self.watcher.on_step(row)
        for step in [
            step
            for step in self.weights
            if step <= self.told and self.run.weights_of(step).exists()
        ]:
            self.weights.remove(step)
            self.watcher.on_weights(self.run.weights_of(step))
        has_batch = (self.run.rollouts / f"step_{self.told + 1}").exists()
        if self.at != (at := "training" if has_batch else "generating"):
            self.at = at
            self.watcher.on_activity(at)
        return goes_on

    def _new_rows(self) -> list[dict[str, Any]]:
        """Return the complete lines that were added since the last call."""
        try:
            with self.run.metrics.open("rb") as file:
                file.seek(self.read)
                added = file.read()
        except FileNotFoundError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self.read += len(whole)
        return [json.loads(line) for line in whole.split(b"\n") if line]
