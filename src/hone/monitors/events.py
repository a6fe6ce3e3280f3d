"""Interface of listeners to a run's events, such as log lines, metrics and the progress line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.monitors.trackers import Rows


class Events:
    """Callbacks for the events of a run. The default methods do nothing."""

    def on_start(self, max_steps: int, done: int) -> None:
        """Called when the run begins to take steps.

        `done` steps were taken before it was resumed.
        """

    def on_last_step(self, step: int) -> None:
        """Called before the run's last step is reported; `step` may be below max_steps."""

    def on_servers(self, addresses: list[str]) -> None:
        """Called when servers are starting at these HOST:PORT addresses."""

    def on_activity(self, name: str, done: int = 0, total: int = 0) -> None:
        """Called when the run's activity or the progress of the activity changes.

        `name` is the activity, such as loading, generating, training or evaluating. `done` of
        `total` units of work are complete; `total` is 0 if unknown.
        """

    def on_rollouts(self, step: int, values: dict[str, float], rows: Callable[[], Rows]) -> None:
        """Called when the rollouts of a step are complete.

        `rows()` returns them as rows with the columns of `trackers.COLUMNS`.
        """

    def on_trained(self, step: int, values: dict[str, float]) -> None:
        """Called when the trainer has taken a step."""

    def on_evaluation(self, version: int, values: dict[str, float], is_row: bool) -> None:
        """Called when a policy version has been evaluated.

        With `is_row`, the evaluation's metrics are a metrics row of their own; otherwise they are
        part of a step's row.
        """

    def on_step(self, step: int, values: dict[str, float]) -> bool:
        """Called when a step is complete, with all its metrics. Return False to stop the run."""
        return True

    def on_weights(self, directory: Path) -> None:
        """Called when a step's weights are in `directory` and the run can resume from the step."""

    @property
    def awaits_weights(self) -> bool:
        """Return True if `on_weights` is overridden.

        The run then waits until a checkpoint is written completely before it calls `on_weights`.
        """
        return type(self).on_weights is not Events.on_weights


class EventList(Events):
    """Pass each event to several listeners, in order."""

    def __init__(self, *listeners: Events | None) -> None:
        self.listeners = [listener for listener in listeners if listener is not None]

    def _call_each(self, name: str, *arguments: Any) -> list[Any]:
        return [getattr(listener, name)(*arguments) for listener in self.listeners]

    def on_start(self, max_steps: int, done: int) -> None:
        self._call_each("on_start", max_steps, done)

    def on_last_step(self, step: int) -> None:
        self._call_each("on_last_step", step)

    def on_servers(self, addresses: list[str]) -> None:
        self._call_each("on_servers", addresses)

    def on_activity(self, name: str, done: int = 0, total: int = 0) -> None:
        self._call_each("on_activity", name, done, total)

    def on_rollouts(self, step: int, values: dict[str, float], rows: Callable[[], Rows]) -> None:
        self._call_each("on_rollouts", step, values, rows)

    def on_trained(self, step: int, values: dict[str, float]) -> None:
        self._call_each("on_trained", step, values)

    def on_evaluation(self, version: int, values: dict[str, float], is_row: bool) -> None:
        self._call_each("on_evaluation", version, values, is_row)

    def on_step(self, step: int, values: dict[str, float]) -> bool:
        return all(self._call_each("on_step", step, values))

    def on_weights(self, directory: Path) -> None:
        self._call_each("on_weights", directory)

    @property
    def awaits_weights(self) -> bool:
        return any(listener.awaits_weights for listener in self.listeners)
