"""Replay buffer: groups of earlier steps, reused in place of groups that yield no samples."""

from dataclasses import dataclass
from typing import Any

from hone.orchestrator.group import Group


@dataclass
class _Kept:
    step: int
    group: Group
    uses: int = 0


class Replay:
    def __init__(self, times: int) -> None:
        """Set up an empty buffer. `times`: how often a group may be reused."""
        self.times = times
        self._kept: list[_Kept] = []

    def put_back(self, step: int, group: Group, uses: int) -> None:
        self._kept.append(_Kept(step, group, uses))

    def add_groups(self, step: int, groups: list[Group]) -> None:
        """Keep a step's groups that were trained on, if groups may be reused."""
        self._kept += [_Kept(step, group) for group in groups] if self.times else []

    def take_groups(self, count: int, oldest: int) -> list[Group]:
        """Return up to `count` groups, newest first, with no token older than version `oldest`."""
        self._kept = [
            one for one in self._kept if one.uses < self.times and one.group.version >= oldest
        ]
        # Stable: the first of a step come first.
        taken = sorted(self._kept, key=lambda one: -one.step)[:count]
        for one in taken:
            one.uses += 1
        return [one.group for one in taken]

    def progress_state(self) -> dict[str, Any]:
        """Return the step, number and uses of each kept group, for a resumed run."""
        kept = [[one.step, one.group.task.number, one.uses] for one in self._kept]
        return {"replay": kept} if kept else {}
