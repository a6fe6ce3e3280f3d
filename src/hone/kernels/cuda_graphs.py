"""Capture and replay CUDA graphs by key; the graphs of a collection share a memory pool."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch


class Captured:
    """Collection of CUDA graphs that run one after the other.

    A graph's result is valid until the next graph runs. With `stand_in`, a larger graph runs in
    place of a missing smaller one until a capture of the smaller one would pay off. The last bits
    of a result then depend on which graphs were captured before.
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
        """Return True if a larger graph may run once more in place of missing graph `key`.

        `spare` is the work wasted by this run; the total waste for `key` must be less than `pays`,
        the cost of a capture.
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
        """Replay a graph `times` times and return what `forward` returned."""
        graph, result, _ = self.graphs[key]
        for _ in range(times):
            graph.replay()
        return result

    def clear(self) -> None:
        """Discard all graphs, after tensors that they read were replaced."""
        self.graphs.clear()
        self._spare.clear()
        self._pool = None
