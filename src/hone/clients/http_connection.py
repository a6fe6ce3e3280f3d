"""HTTP/1.1 transport for httpx with keep-alive connections, at a quarter of httpx's own cost.

    httpx.AsyncClient(transport=Wire())      headers, JSON and errors stay those of httpx

httptools parses the responses, and each response is read whole before it is returned. The read
timeout covers the whole response. Proxies are not supported: use this transport only for a URL for
which `is_direct` returns True. HEAD requests raise UnsupportedProtocol.
"""

import asyncio
import select
import time
import urllib.request
from collections import defaultdict
from functools import cached_property
from ssl import SSLContext
from typing import Any, cast

import httpx
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from hone.config.sections import LOOPBACK

NEXT_ADDRESS = 0.25  # seconds until the next address of a host is tried
# Seconds that an idle connection is kept, as in httpx; servers close theirs sooner or later.
IDLE_SECONDS = 5.0
Place = tuple[str, str, int]  # scheme, host, port
Answer = tuple[int, list[tuple[bytes, bytes]], bytes]  # status, headers, body


def is_direct(url: str) -> bool:
    """Return True if requests reach the server without a proxy; local servers never use one."""
    parts = httpx.URL(url)
    proxies = set(urllib.request.getproxies()) - {"no"}
    return parts.host in LOOPBACK or not proxies or bool(urllib.request.proxy_bypass(parts.host))


class Wire(httpx.AsyncBaseTransport):
    """An httpx transport that keeps connections open for further requests.

    Raises ConnectError, ConnectTimeout, ReadTimeout and RemoteProtocolError as httpx does.
    Cancelling a request closes its connection, so that the server notices.
    """

    def __init__(self) -> None:
        self._kept: dict[Place, list[tuple[float, _Connection]]] = defaultdict(list)
        self._is_over = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        if request.method == "HEAD":
            raise httpx.UnsupportedProtocol("HEAD requests are not made over these connections")
        place = url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80)
        data = _encode_request(request, await request.aread())
        timeout = request.extensions["timeout"]
        connection = self._take_connection(place) or await self._open_connection(
            place, timeout["connect"]
        )
        try:
            async with asyncio.timeout(timeout["read"]):
                status, headers, body = await connection.ask(data)
        except TimeoutError:
            raise httpx.ReadTimeout(f"no answer within {timeout['read']} s") from None
        finally:
            if connection.is_open and not self._is_over:
                self._kept[place].append((time.monotonic(), connection))
            else:
                connection.close()
        return httpx.Response(status, headers=headers, stream=httpx.ByteStream(body))

    async def aclose(self) -> None:
        self._is_over = True
        for connections in self._kept.values():
            for _, connection in connections:
                connection.close()
        self._kept.clear()

    def _take_connection(self, place: Place) -> "_Connection | None":
        """Return the most recently used idle connection, or None.

        Closes connections that were idle for more than IDLE_SECONDS.
        """
        kept = self._kept[place]
        while kept and kept[0][0] < time.monotonic() - IDLE_SECONDS:
            kept.pop(0)[1].close()
        while kept:
            _, connection = kept.pop()
            if not connection.has_ended():
                return connection
            connection.close()
        return None

    async def _open_connection(self, place: Place, timeout: float | None) -> "_Connection":
        scheme, host, port = place
        loop = asyncio.get_running_loop()
        options = dict[str, Any]()
        # uvloop does not try several addresses concurrently.
        if isinstance(loop, asyncio.BaseEventLoop):
            options["happy_eyeballs_delay"] = NEXT_ADDRESS
        if scheme == "https":
            options["ssl"] = self._ssl_context
        try:
            async with asyncio.timeout(timeout):
                _, connection = await loop.create_connection(_Connection, host, port, **options)
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection within {timeout} s") from None
        except OSError as error:
            raise httpx.ConnectError(str(error)) from None
        return connection

    @cached_property
    def _ssl_context(self) -> SSLContext:
        return httpx.create_ssl_context()


def _encode_request(request: httpx.Request, body: bytes) -> bytes:
    lines = [f"{request.method} ".encode() + request.url.raw_path + b" HTTP/1.1"]
    for name, value in request.headers.raw:
        if b"\r" in value or b"\n" in value:
            raise httpx.LocalProtocolError(
                f"the value of header {name.decode()} has more than one line"
            )
        lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", body])


class _Connection(asyncio.Protocol):
    """Connection with at most one request in flight.

    `is_open` is True if the next request can be sent.
    """

    is_open = _has_head = False
    _answer: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Uvloop's transport is not a subclass.
        self._transport = cast(asyncio.WriteTransport, transport)

    def ask(self, data: bytes) -> asyncio.Future[Answer]:
        self._parser = HttpResponseParser(self)
        self._headers = list[tuple[bytes, bytes]]()
        self._body = list[bytes]()
        self._answer = asyncio.get_running_loop().create_future()
        self.is_open = False
        self._has_head = False
        self._transport.write(data)
        return self._answer

    @property
    def _pending_answer(self) -> asyncio.Future[Answer] | None:
        """Return the future of the response that is awaited, or None."""
        return None if self._answer is None or self._answer.done() else self._answer

    def has_ended(self) -> bool:
        """Return True if the connection is closed or received unexpected data."""
        if not self.is_open or self._transport.is_closing():
            return True
        news = select.poll()
        news.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(news.poll(0))

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    # ------------------------------------------------------------------------------------ called by the event loop

    def data_received(self, data: bytes) -> None:
        if self._pending_answer is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._fail_pending(f"not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._pending_answer is None:
            return
        named = {name.lower() for name, _ in self._headers}
        if (
            self._has_head
            and error is None
            and not named & {b"content-length", b"transfer-encoding"}
        ):
            self.on_message_complete()  # the body ends with the connection
        else:
            self._fail_pending("the server closed the connection before its answer was whole")

    def _fail_pending(self, words: str) -> None:
        if self._pending_answer is not None:
            self._pending_answer.set_exception(httpx.RemoteProtocolError(words))
        self.close()

    # ------------------------------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        self._headers = []
        self._body = []
        if self._pending_answer is None:  # an unexpected second answer
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # data after the body is ignored
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        # Otherwise the real answer follows an informational one.
        self._has_head = self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if not self._has_head or self._pending_answer is None:
            return
        self.is_open = self._parser.should_keep_alive() and not self._transport.is_closing()
        self._pending_answer.set_result(
            (self._parser.get_status_code(), self._headers, b"".join(self._body))
        )
        self._answer = None
        self._headers = []
        self._body = []
