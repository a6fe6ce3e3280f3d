"""Order of the calls to one model.

arrived  1  2  4  5        computed 1, 2; 4 and 5 wait for 3
"""

import asyncio
from collections.abc import Callable

GAP_SECONDS = 60.0  # how long later calls wait for a call that does not arrive


class CallOrder:
    """Calls to one model, started in the order of their sequence numbers, each once.

    All methods run on one event loop. Clients send calls beside each other, so they may arrive in
    another order, and they repeat a call whose answer was lost.
    """

    def __init__(self, first: int = 1, gap_seconds: float = GAP_SECONDS) -> None:
        self._next = first
        self._gap_seconds = gap_seconds
        self._known: dict[int, str] = {}  # request id of each call
        self._held: dict[int, tuple[Callable[[], None], Callable[[str], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def find_request(self, number: int) -> str | None:
        """Return the request id of a call that has arrived before."""
        return self._known.get(number)

    def add_call(
        self, number: int, request_id: str, start: Callable[[], None], fail: Callable[[str], None]
    ) -> None:
        """Start a call once all earlier ones have started.

        Args:
            number: the call's sequence number. One that is older than those started starts at once.
            request_id: what `find_request` returns from now on.
            start: begins to compute it.
            fail: ends it with a message, if an earlier call does not arrive.
        """
        self._known[number] = request_id
        if number < self._next:
            start()
            return
        self._held[number] = (start, fail)
        self._start_ready()

    def _start_ready(self) -> None:
        while self._next in self._held:
            start, _ = self._held.pop(self._next)
            self._next += 1
            start()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._gap_seconds, self._skip_gap)

    def _skip_gap(self) -> None:
        """Fail what waits for calls that did not arrive, so that later calls are computed."""
        self._timer = None
        missing = self._next
        self._next = max(self._held) + 1
        for _, fail in self._held.values():
            fail(f"call {missing} of this model did not arrive within {self._gap_seconds:.0f} s")
        self._held.clear()
