"""Show a run's progress in one line below the log lines, if stdout is a terminal."""

from types import TracebackType
from typing import Any

from hone.monitors.events import Events


class ProgressLine(Events):
    """Context manager that shows the progress line while it is open."""

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

    def __enter__(self) -> "ProgressLine":
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

    def on_start(self, max_steps: int, done: int) -> None:
        if self.is_on:
            self._bar.update(self._task, total=max_steps, completed=done)

    def on_activity(self, name: str, done: int = 0, total: int = 0) -> None:
        if self.is_on:
            self._bar.update(self._task, doing=f"{name} {done}/{total}" if total else name)

    def on_step(self, step: int, values: dict[str, float]) -> bool:
        if self.is_on:
            said = (
                f"reward {values['reward/mean']:.4f}"
                if "reward/mean" in values
                else f"loss {values['loss/mean']:.4f}, {values['perf/throughput']:.0f} tokens/s"
            )
            self._bar.update(self._task, advance=1, said=said)
        return True
