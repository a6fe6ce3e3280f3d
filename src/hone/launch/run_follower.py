"""Report the events of a run that other processes execute, by reading the run's files."""

import json
from typing import Any

from hone.monitors.events import Events
from hone.run_directory import RunDirectory
from hone.transport.deadlines import PulseOf


class Follower:
    """Report new content of a run's files as events, from the step after `done` on.

    Nothing is reported before the run's trainer has claimed the directory and is alive, so that
    files of an earlier run are ignored.
    """

    def __init__(
        self, events: Events, run: RunDirectory, weight_steps: list[int], done: int
    ) -> None:
        self.events = events
        self.run = run
        self.done = done
        self.weights = [step for step in weight_steps if step > done]
        self.before = run.id_on_disk()
        self.trainer = PulseOf(run.pulse_file("trainer"))
        self.is_there = False
        self.activity = ""
        self.read = 0  # bytes of the metrics

    def follow_once(self, has_ended: bool = False) -> bool:
        """Report new events. Return False if a listener stops the run.

        `has_ended` says that the run's processes have succeeded; a new run id on disk then belongs
        to them even if the trainer's heartbeat has stopped.
        """
        if not self.is_there:
            self.is_there = self.run.id_on_disk() != self.before and (
                has_ended or self.trainer.is_beating()
            )
            if not self.is_there:
                return True
        goes_on = True
        for row in self._new_rows():
            if row["step"] > self.done and "reward/mean" in row:
                self.done = row.pop("step")
                goes_on &= self.events.on_step(self.done, row)
        for step in [
            step
            for step in self.weights
            if step <= self.done and self.run.weights_of(step).exists()
        ]:
            self.weights.remove(step)
            self.events.on_weights(self.run.weights_of(step))
        has_batch = (self.run.rollouts / f"step_{self.done + 1}").exists()
        activity = "training" if has_batch else "generating"
        if self.activity != activity:
            self.activity = activity
            self.events.on_activity(activity)
        return goes_on

    def _new_rows(self) -> list[dict[str, Any]]:
        """Return the rows added to metrics.jsonl since the last call, complete lines only."""
        try:
            with self.run.metrics.open("rb") as file:
                file.seek(self.read)
                added = file.read()
        except FileNotFoundError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self.read += len(whole)
        return [json.loads(line) for line in whole.split(b"\n") if line]
