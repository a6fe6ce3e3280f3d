"""Progress of a run in one line below the log lines of a terminal; nothing elsewhere."""

from types import TracebackType
from typing import Any


class Live:
    """Context manager of the progress line."""

    def __init__(self, name: str, is_on: bool = True) -> None:
        from rich.console import Console

        console = Console()
        self.is_on = is_on and console.is_terminal
        self._bar: Any = None
        if self.is_on:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[said]}"),
                TextColumn("{task.fields[doing]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(name, total=None, said="", doing="")

    def __enter__(self) -> "Live":
        if self.is_on:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.is_on:
            self._bar.stop()

    def start_run(self, total: int, done: int = 0) -> None:
        """Set the number of steps in total and done."""
        if self.is_on:
            self._bar.update(self._task, total=total, completed=done)

    def show_activity(self, what: str, done: int | None = None, total: int | None = None) -> None:
        """Show the current activity, as in `generating 5/16`."""
        if self.is_on:
            self._bar.update(self._task, doing=what if done is None else f"{what} {done}/{total}")

    def show_step(self, said: str) -> None:
        """Count a finished step; `said` summarizes it."""
        if self.is_on:
            self._bar.update(self._task, advance=1, said=said)
