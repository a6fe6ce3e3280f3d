"""Client connection of one request: detect a disconnect, and stream server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")
DONE = "data: [DONE]\n\n"
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class HungUp(Exception):
    """Raised when the client has disconnected."""


class Listening:
    """Context manager that raises HungUp in the current task when the client disconnects.

    Enter it after the request body has been read: the next message that arrives is then the
    disconnect. It cancels the task, and on exit turns the cancellation into HungUp.
    """

    def __init__(self, connection: Request) -> None:
        self.connection = connection

    def __enter__(self) -> "Listening":
        self.task = asyncio.current_task()
        self.was_cut = False
        self.hung_up = asyncio.ensure_future(self.connection.receive())
        self.hung_up.add_done_callback(self._cancel_reading)
        return self

    def _cancel_reading(self, hung_up: "asyncio.Future[Any]") -> None:
        if not hung_up.cancelled() and self.task is not None:
            self.was_cut = True
            self.task.cancel()

    def close(self) -> None:
        self.hung_up.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()
        if (
            kind is asyncio.CancelledError
            and self.was_cut
            and self.task is not None
            and not self.task.uncancel()
        ):
            raise HungUp from None


async def unless_gone(connection: Request, *work: Coroutine[Any, Any, T]) -> list[T]:
    """Await all `work` and return the results in order.

    If the client hangs up first, cancel the work and raise HungUp.
    """
    with Listening(connection):
        if len(work) == 1:
            return [await work[0]]
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after a refusal nobody awaits the others
                task.cancel()


class EventStream(Response):
    """Response that streams server-sent events: first the text `head`, then `events`.

    The last event ends with DONE. `events` is closed at once when the client disconnects.
    """

    def __init__(self, head: str, events: AsyncGenerator[str, None], listening: Listening) -> None:
        super().__init__(media_type="text/event-stream")
        self.head = head
        self.events = events
        self.listening = listening

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self.events):
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                await send(self._build_part(self.head))
                async for event in self.events:
                    await send(self._build_part(event))
        except BaseException as error:
            try:
                self.listening.__exit__(type(error), error, None)
            except HungUp:
                return
            raise

    def _build_part(self, event: str) -> Message:
        is_last = event.endswith(DONE)
        if is_last:
            self.listening.close()  # otherwise the end of the answer looks like a disconnect
        return {"type": "http.response.body", "body": event.encode(), "more_body": not is_last}
