"""Events of a run: one interface for console lines, metrics, trackers, the progress line and callbacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.monitors.trackers import Rows


class Events:
    """Callbacks for the events of a run. The default methods do nothing."""

    def on_start(self, max_steps: int, done: int) -> None:
        """The run begins to take steps; `done` of them were taken before it was resumed."""

    def on_last_step(self, step: int) -> None:
        """The run ends with this step, which is about to be reported, before its max_steps."""

    def on_servers(self, addresses: list[str]) -> None:
        """Servers are starting at these HOST:PORT addresses."""

    def on_activity(self, name: str, done: int = 0, total: int = 0) -> None:
        """The run is now loading, generating, training or evaluating; `done` of `total` parts."""

    def on_rollouts(self, step: int, values: dict[str, float], rows: Callable[[], Rows]) -> None:
        """The rollouts of a step are there; `rows` returns them as trackers take them."""

    def on_trained(self, step: int, values: dict[str, float]) -> None:
        """The trainer has taken a step."""

    def on_evaluation(self, version: int, values: dict[str, float], is_row: bool) -> None:
        """A version was evaluated; with `is_row` its metrics are not part of a step's."""

    def on_step(self, step: int, values: dict[str, float]) -> bool:
        """A step is done, with all its metrics. Return False to stop the run."""
        return True

    def on_weights(self, directory: Path) -> None:
        """Weights have been written to the directory, and the run can be resumed from there."""

    @property
    def awaits_weights(self) -> bool:
        """True if `on_weights` does something, for which checkpoints have to be complete."""
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
