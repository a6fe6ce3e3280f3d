"""Which group comes next. Pure: everything follows from the seed and from which groups are done.

Groups are numbered from 0 on. Number n is example n of the data, gone through in a new order every epoch, and has seeds
of its own for its rollouts; a group that was begun and not trained on comes again under its number.
"""

import heapq
import random
from typing import Any


class Schedule:
    def __init__(self, examples: int, seed: int, progress: dict[str, Any] | None = None) -> None:
        """`progress`: what `progress` gave, where the run goes on."""
        self.examples, self.seed = examples, seed
        self.next: int = progress["next"] if progress else 0
        self.again: list[int] = sorted(progress["untrained"]) if progress else []  # a heap
        self._orders: dict[int, list[int]] = {}

    def take(self) -> int:
        """The number of the next group to begin."""
        if self.again:
            return heapq.heappop(self.again)
        self.next += 1
        return self.next - 1

    def give_back(self, number: int) -> None:
        """A group that is not trained on after all: it comes before new ones."""
        heapq.heappush(self.again, number)

    def example(self, number: int) -> int:
        """Index of a group's example."""
        epoch, position = divmod(number, self.examples)
        if epoch not in self._orders:
            order = list(range(self.examples))
            random.Random(f"{self.seed} {epoch}").shuffle(order)
            self._orders = {k: v for k, v in self._orders.items() if k == epoch - 1} | {epoch: order}
        return self._orders[epoch][position]

    @property
    def epoch(self) -> float:
        """How often the data was gone through."""
        return self.next / self.examples

    def progress(self, begun: list[int]) -> dict[str, Any]:
        """What a run needs to go on: `begun` are the groups that are under way or wait to be trained on."""
        return {"next": self.next, "untrained": sorted([*begun, *self.again])}
