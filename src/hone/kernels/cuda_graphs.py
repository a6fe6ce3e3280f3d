"""CUDA graphs by what they were captured for; those that are kept together share one pool of memory."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch


class Captured:
    """One runs after the other, so that they may use the same memory; a graph's result stands until it runs again.

    `stand_in`: whether graphs of larger work do smaller work that has none yet, until one of its own would pay. The
    last bits of a result then depend on what was captured before.
    """

    def __init__(self, stand_in: bool = False) -> None:
        self.stand_in = stand_in
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any, Callable[[], Any]]] = {}
        self._spare: dict[Hashable, float] = defaultdict(
            float
        )  # that was done for nothing, instead of these
        self._pool: Any = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self.graphs

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.graphs)

    def may_stand_in(self, key: Hashable, spare: float, pays: float) -> bool:
        """Whether a graph of larger work, `spare` of which would be for nothing, may do the work of `key` once more: as
        long as all of that together is less than what a graph of its own costs."""
        if self.stand_in:
            self._spare[key] += spare
        return self.stand_in and self._spare[key] < pays

    def capture(self, key: Hashable, forward: Callable[[], Any]) -> None:
        """`forward` is called twice: once so that everything is compiled and set up, then for the graph. It is kept,
        and so are the tensors that it holds: the graph reads them."""
        forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: checkpoints are written and weights taken in theirs.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = forward()
        self._pool = self._pool or graph.pool()
        self.graphs[key] = graph, result, forward

    def replay(self, key: Hashable, times: int = 1) -> Any:
        """What `forward` returned, as it is after that many replays."""
        graph, result, _ = self.graphs[key]
        for _ in range(times):
            graph.replay()
        return result

    def clear(self) -> None:
        """After tensors that graphs read were replaced."""
        self.graphs.clear()
        self._spare.clear()
        self._pool = None
