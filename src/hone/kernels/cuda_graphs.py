"""Capture and replay CUDA graphs by key; the graphs of a collection share a memory pool."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch


class Captured:
    """CUDA graphs by key, such as a batch shape; only one may run at a time.

    The result tensors of a graph are valid until another graph is replayed. With `stand_in`, the
    caller may replay a captured graph of a larger shape instead of capturing one of the requested
    shape, until the wasted work exceeds the cost of a capture (`may_stand_in`). The last bits of a
    result then depend on which graphs have been captured.
    """

    def __init__(self, stand_in: bool = False) -> None:
        self.stand_in = stand_in
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any, Callable[[], Any]]] = {}
        # That was done for nothing, instead of these
        self._spare: dict[Hashable, float] = defaultdict(float)
        self._pool: Any = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self.graphs

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.graphs)

    def may_stand_in(self, key: Hashable, spare: float, pays: float) -> bool:
        """Return True if a graph of a larger shape should run instead of capturing graph `key`.

        Adds `spare`, the work that this run wastes, to the total for `key`. The total must be less
        than `pays`, the cost of a capture in the same unit.
        """
        if self.stand_in:
            self._spare[key] += spare
        return self.stand_in and self._spare[key] < pays

    def capture(self, key: Hashable, forward: Callable[[], Any]) -> None:
        """Call `forward` twice, to compile and to capture, and keep the graph and its tensors."""
        forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: checkpoints are written and weights taken in theirs.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = forward()
        self._pool = self._pool or graph.pool()
        self.graphs[key] = graph, result, forward

    def replay(self, key: Hashable, times: int = 1) -> Any:
        """Replay graph `key` `times` times; return what its function returned at capture."""
        graph, result, _ = self.graphs[key]
        for _ in range(times):
            graph.replay()
        return result

    def clear(self) -> None:
        """Discard all graphs, after tensors that they read were replaced."""
        self.graphs.clear()
        self._spare.clear()
        self._pool = None
