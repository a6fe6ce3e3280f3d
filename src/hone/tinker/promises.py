"""Results that clients ask for later.

POST forward_backward ─► request id          POST retrieve_future, held open until there is a result
"""

import asyncio
import itertools
import json
import secrets
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

KEPT_SECONDS = 300.0  # a result after it was sent, since the answer may be lost
UNCLAIMED_SECONDS = 6 * 3600.0  # a result that nobody asks for
JSON_TYPE, PROTOBUF_TYPE = "application/json", "application/x-protobuf"


class Gone(Exception):
    """Raised for a request id of an earlier server process."""


@dataclass(frozen=True)
class Result:
    """The body of an answer, and its content type."""

    body: bytes
    content_type: str = PROTOBUF_TYPE

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Result":
        return cls(json.dumps(value).encode(), JSON_TYPE)

    @classmethod
    def from_error(cls, message: str, category: str) -> "Result":
        """Return a failure. `category`: "user", "server" or "unknown"."""
        return cls.from_json({"error": message, "category": category})


class Promises:
    """Promised results by request id. All methods run on one event loop."""

    def __init__(self) -> None:
        # Ids of another process are told from unknown ones.
        self._mark = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._promises: dict[str, asyncio.Future[Result]] = {}
        # When results are forgotten: those that were sent, and the others.
        self._sent: deque[tuple[float, str]] = deque()
        self._unclaimed: deque[tuple[float, str]] = deque()
        self.pending_count = 0  # promises without a result; asked for at every call
        self._tasks: set[asyncio.Task[None]] = set()

    def open_promise(self) -> str:
        """Return the id of a new promise."""
        self._forget_old()
        request_id = f"{self._mark}-{next(self._numbers)}"
        self._promises[request_id] = asyncio.get_running_loop().create_future()
        self.pending_count += 1
        return request_id

    def keep_promise(self, request_id: str, work: Coroutine[Any, Any, Result]) -> None:
        """Run `work`; what it returns is the result. Its ValueError is the user's error."""

        async def run_work() -> None:
            try:
                self.resolve(request_id, await work)
            except (ValueError, KeyError) as error:
                self.resolve(request_id, Result.from_error(str(error.args[0]), "user"))
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                self.resolve(request_id, Result.from_error(message, "server"))

        task = asyncio.ensure_future(run_work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def resolve(self, request_id: str, result: Result) -> None:
        promise = self._promises.get(request_id)
        if promise is not None and not promise.done():
            promise.set_result(result)
            self.pending_count -= 1
            self._unclaimed.append((time.monotonic() + UNCLAIMED_SECONDS, request_id))

    async def wait_for(self, request_id: str, seconds: float) -> Result | None:
        """Return the result; None if there is none after some seconds.

        Raises Gone for an id of an earlier process, KeyError for an unknown one.
        """
        promise = self._promises.get(request_id)
        if promise is None:
            if not request_id.startswith(f"{self._mark}-"):
                raise Gone(f"{request_id}: the server was restarted")
            raise KeyError(f"{request_id}: no such request")
        done, _ = await asyncio.wait([promise], timeout=seconds)
        if not done:
            return None
        self._sent.append((time.monotonic() + KEPT_SECONDS, request_id))
        return promise.result()

    def _forget_old(self) -> None:
        for queue in (self._sent, self._unclaimed):
            while queue and queue[0][0] < time.monotonic():
                self._promises.pop(queue.popleft()[1], None)
