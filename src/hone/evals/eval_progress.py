"""Progress of an evaluation with the mean so far: a bar on a terminal, occasional lines elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hone.evals.results import Folder
from hone.records import Rollout

LINE_SECONDS = 30.0  # seconds between lines


class Progress:
    """Context manager that shows progress and saves rollouts as they finish.

    Without a `folder` they are not saved.
    """

    def __init__(self, name: str, count: int, folder: Folder | None) -> None:
        self.count = count
        self.folder = folder
        self.name = name
        self.done = self.failed = 0
        self.total = 0.0
        self._said = time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Bar(
            *columns,
            TextColumn("{task.fields[mean]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(name, total=count, mean="")

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def add_rollout(self, number: int, rollout: Rollout, is_new: bool = True) -> None:
        self.done += 1
        self.failed += bool(rollout.error)
        self.total += 0.0 if rollout.error else rollout.reward
        if self.folder is not None and is_new:
            self.folder.append_rollout(number, rollout)
        if sys.stderr.isatty():
            self._bar.update(self._task, completed=self.done, mean=self.mean_reward)
        elif time.monotonic() - self._said > LINE_SECONDS:
            self._said = time.monotonic()
            print(
                f"{self.name}: {self.done} of {self.count}, {self.mean_reward}",
                file=sys.stderr,
                flush=True,
            )

    @property
    def mean_reward(self) -> str:
        scored = self.done - self.failed
        failed = f", {self.failed} failed" if self.failed else ""
        return f"reward {self.total / scored:.3f}{failed}" if scored else f"{self.failed} failed"
