"""Groups of earlier steps that stand in for those from which nothing can be learnt."""

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
        """`times`: how often a group may come again."""
        self.times = times
        self._kept: list[_Kept] = []

    def put_back(self, step: int, group: Group, uses: int) -> None:
        self._kept.append(_Kept(step, group, uses))

    def add_groups(self, step: int, groups: list[Group]) -> None:
        """The useful groups of a step."""
        self._kept += [_Kept(step, group) for group in groups] if self.times else []

    def take_groups(self, count: int, oldest: int) -> list[Group]:
        """Up to so many groups, the newest first, whose tokens are of version `oldest` or later."""
        self._kept = [
            one for one in self._kept if one.uses < self.times and one.group.version >= oldest
        ]
        taken = sorted(self._kept, key=lambda one: -one.step)[:count]  # stable: of a step the first
        for one in taken:
            one.uses += 1
        return [one.group for one in taken]

    def progress_state(self) -> dict[str, Any]:
        """Steps, numbers and uses of what is kept."""
        kept = [[one.step, one.group.task.number, one.uses] for one in self._kept]
        return {"replay": kept} if kept else {}
