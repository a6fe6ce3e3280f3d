"""Limit what a connection can cost before authentication: header size, header time, connections.

uvicorn and httptools have no such limits: they keep headers of any length in memory, and copy all
of the header received so far whenever more of it arrives.
"""

import asyncio
import os
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 * 1024  # of a request line and its headers
# From the connection or the first byte of a request until its headers are complete.
HEAD_SECONDS = 15.0
MOST_CONNECTIONS = 8192
FILES_APART = 128  # descriptors reserved for files, devices and other sockets
MOST_PIPELINED = 16  # requests of a connection that wait for an earlier answer
HEALTH_RESERVE = 16  # further connections that are only answered on /health
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def raise_open_files() -> int:
    """Raise the soft limit of open descriptors as far as allowed; return it."""
    try:
        import resource
    except ImportError:  # not on Windows
        return MOST_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + FILES_APART
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else soft


def most_connections() -> int:
    """Return how many connections a server may have open under its descriptor limit."""
    free = (
        raise_open_files()
        - FILES_APART
        - len(os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else [])
    )
    return max(HEALTH_RESERVE, min(MOST_CONNECTIONS, free - HEALTH_RESERVE))


class Waiting:
    """A server's open connections, and those whose next request has incomplete headers.

    `waiting` is ordered by waiting time, longest first. `most` is the largest number of open
    connections.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.open: set[BoundedHttp] = set()
        self.waiting: OrderedDict[BoundedHttp, None] = OrderedDict()


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on headers and connections, a subclass per server."""

    shared: Waiting

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._head_bytes = 0
        self._bytes_since_body = 0  # chunk sizes and trailers, which are parsed as headers
        self._is_refused = False
        self._is_surplus = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        shared = self.shared
        if len(shared.open) >= shared.most and shared.waiting:
            oldest = next(iter(shared.waiting))
            oldest._close_with(b"")
        self._is_surplus = len(shared.open) >= shared.most
        if len(shared.open) >= shared.most + HEALTH_RESERVE:
            return self._close_with(b"")
        shared.open.add(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_connection()
        super().connection_lost(exc)

    def _forget_connection(self) -> None:
        self.shared.open.discard(self)
        self.shared.waiting.pop(self, None)
        self._stop_timer()

    def _await_head(self) -> None:
        self._is_in_head = True
        self._head_bytes = 0
        self.shared.waiting[self] = None
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_with, TOO_LATE)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_with(self, answer: bytes) -> None:
        self._is_refused = True
        self._forget_connection()
        if not self.transport.is_closing():
            if answer and self._head_bytes:
                self.transport.write(answer)
            self.transport.close() if answer else self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        was_in_head = self._is_in_head
        if was_in_head:
            self._head_bytes += len(data)
            if self._head_bytes == len(data) and self._timer is None:
                self._await_head()
                self._head_bytes = len(data)
        else:
            self._bytes_since_body += len(data)
        super().data_received(data)
        if not self._is_in_head and self._bytes_since_body > HEAD_BYTES + len(data):
            self._close_with(TOO_LARGE)
        if self._is_in_head and was_in_head and self._head_bytes > HEAD_BYTES:
            self._close_with(TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        if not self._is_refused:
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self.shared.waiting.pop(self, None)
        self._stop_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > HEAD_BYTES:
            self._close_with(TOO_LARGE)
            raise ValueError("headers are too large")  # the rest is not read
        if self._is_surplus and self.url != b"/health":
            self._close_with(b"")
            raise ValueError("there are too many connections")
        super().on_headers_complete()
        if len(self.pipeline) > MOST_PIPELINED:
            self._close_with(b"")
            raise ValueError("too many requests wait on one connection")

    def on_body(self, body: bytes) -> None:
        self._bytes_since_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._bytes_since_body = 0
        self._is_in_head = True
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self.shared.waiting[self] = (
                None  # replaceable by new connections: uvicorn closes it after some seconds anyway
            )


def bounded_http(most: int | None = None) -> type[BoundedHttp]:
    """Return a protocol class for one server with at most `most` connections."""
    shared = Waiting(most_connections() if most is None else most)
    return type("BoundedHttp", (BoundedHttp,), {"shared": shared})


def bounded_config(app: Any, **options: Any) -> uvicorn.Config:
    """Return a uvicorn configuration with limits on headers and connections, that logs warnings only.

    `options` are passed to `uvicorn.Config`.
    """
    return uvicorn.Config(
        app,
        http=bounded_http(),
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        **options,
    )
