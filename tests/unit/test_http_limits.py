"""What strangers send before they have shown a key costs a server little, and /health answers meanwhile."""

import asyncio
import contextlib
import resource
import time
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from hone import http_limits
from hone.http_limits import HEAD_BYTES, bounded_http, most_connections, raise_open_files


class Server(uvicorn.Server):
    def capture_signals(self):
        return contextlib.nullcontext()


@contextlib.asynccontextmanager
async def serving(most=64):
    async def answer(request):
        return PlainTextResponse(str(len(request.headers)))

    app = Starlette(
        routes=[Route("/health", answer), Route("/work", answer, methods=["GET", "POST"])]
    )
    settings = uvicorn.Config(
        app, http=bounded_http(most), log_level="critical", lifespan="off", port=0
    )
    server = Server(settings)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def ask(port, data, close=True):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(4096), 10)
    except ConnectionError:
        return b""
    finally:
        if close:
            writer.close()


async def health(port):
    start = time.monotonic()
    answer = await ask(port, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return time.monotonic() - start


def memory():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


@pytest.mark.parametrize(
    "shape", ["one long header", "many headers", "a long address", "no end of one name"]
)
def test_headers_are_bounded_in_size(shape):
    async def work():
        async with serving() as port:
            before = memory()
            for size, is_served in (
                (1000, True),
                (HEAD_BYTES - 2000, True),
                (2 * HEAD_BYTES, False),
                (6_000_000, False),
            ):
                if shape == "one long header":
                    head = b"GET /work HTTP/1.1\r\nx: " + b"a" * size + b"\r\n\r\n"
                elif shape == "many headers":
                    head = (
                        b"GET /work HTTP/1.1\r\n"
                        + b"x: aaaaaaaaaaaaaaa\r\n" * (size // 20)
                        + b"\r\n"
                    )
                elif shape == "a long address":
                    head = b"GET /work?" + b"a" * size + b" HTTP/1.1\r\nhost: x\r\n\r\n"
                else:
                    head = b"GET /work HTTP/1.1\r\n" + b"a" * size
                    if is_served:
                        continue
                answers = await asyncio.gather(
                    *(ask(port, head) for _ in range(1 if is_served else 5))
                )
                for answer in answers:
                    assert answer.startswith(b"HTTP/1.1 200") == is_served, (size, answer[:80])
                    assert is_served or answer[:12] in (b"", b"HTTP/1.1 431", b"HTTP/1.1 400"), (
                        answer[:80]
                    )
                assert await health(port) < 1.0
            assert memory() - before < 100

    asyncio.run(work())


def test_connections_that_ask_nothing_make_room_and_end(monkeypatch):
    monkeypatch.setattr(http_limits, "HEAD_SECONDS", 1.0)

    async def work():
        async with serving(most=40) as port:
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(150)]
            for _, writer in opened[::2]:
                writer.write(b"GET /work HTTP/1.1\r\nx: ")  # half of a request
            for _ in range(10):
                assert await health(port) < 1.0
            assert (await ask(port, b"GET /work HTTP/1.1\r\nhost: x\r\n\r\n")).startswith(
                b"HTTP/1.1 200"
            )
            start = time.monotonic()
            ends = [asyncio.wait_for(reader.read(), 10) for reader, _ in opened]
            answers = await asyncio.gather(*ends, return_exceptions=True)
            assert time.monotonic() - start < 5 and not any(
                isinstance(one, TimeoutError) for one in answers
            )
            for _, writer in opened:
                writer.close()

    asyncio.run(work())


def test_a_kept_connection_serves_many_requests_and_a_body_of_any_size():
    async def work():
        async with serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for size in (0, 10, 300_000, 5):
                body = b"b" * size
                writer.write(
                    b"POST /work HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + body
                )
                assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(1)
            writer.close()

    asyncio.run(work())


def test_the_limit_of_descriptors_is_raised_and_leaves_some():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        assert (
            raise_open_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(hard, 8192)
        )
        assert most_connections() <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 128
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def send_until_closed(port, start, part, most):
    """Send `part` until the server closes; return the number of bytes sent, at most `most`."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    try:
        writer.write(start)
        while sent < most:
            writer.write(part)
            await asyncio.wait_for(writer.drain(), 5)
            sent += len(part)
            await asyncio.sleep(0)
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return sent


@pytest.mark.parametrize(
    "part", [b"x: " + b"v" * 1000 + b"\r\n", b"v" * 1000], ids=["many trailers", "an endless one"]
)
def test_trailers_are_bounded_as_headers_are(part):
    head = b"POST /work HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\ny: "

    async def work():
        async with serving() as port:
            sent = await send_until_closed(port, head, part, 64 * 2**20)
            await health(port)
            return sent

    assert asyncio.run(work()) < 32 * 2**20


def test_a_body_of_small_chunks_is_read():
    head = b"POST /work HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"

    async def work():
        async with serving() as port:
            return await ask(port, head + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n")

    assert asyncio.run(work()).startswith(b"HTTP/1.1 200")


def test_few_requests_wait_on_one_connection():
    async def work():
        async with serving() as port:
            before = memory()
            sent = await send_until_closed(
                port, b"", b"GET /work HTTP/1.1\r\n\r\n" * 10_000, 2 * 2**20
            )
            await health(port)
            return sent, memory() - before

    sent, grown = asyncio.run(work())
    assert sent < 2 * 2**20 and grown < 64
