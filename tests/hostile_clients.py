"""Attack a server as strangers and as clients without control would, and watch what it costs the others.

    python -m tests.fuzz --hostile [--requests 10000] [--connections 2000] [--seed 0]

The server has two keys. Requests with no key, a wrong one, or the client's key are malformed, oversized, smuggled,
pipelined or slow. Connections are held open idle, in the middle of their headers or in a body without an end. /health
must answer within a second all the while, no answer may be a 5xx, and memory must be near that of before.
"""

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit

HEALTH_SECONDS, MEMORY_MIB = 1.0, 100.0  # most that /health may take; most that memory may grow
AT_ONCE = 48  # requests in flight
OWNER, CLIENT = "owner-key-of-the-test", "client-key-of-the-test"
PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/inference/v1/generate",
    "/tokenize",
    "/detokenize",
    "/score",
    "/v1/models",
    "/metrics",
    "/version",
    "/pause",
    "/resume",
    "/update_weights",
    "/progress",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/chat/completions/tokens",
    "/openapi.json",
    "/health",
    "/nowhere",
    "/",
    "/%00",
    "/..%2f..%2fetc/passwd",
    "//v1//models",
    "/v1/models/" + "a" * 3000,
    "/v1/models/%ff%fe",
    "*",
    "http://evil.example/version",
    "/v1/models/../../pause",
    "/pause;x",
    "/pause%2f",
    "/PAUSE",
]


def encode_request(
    method: str,
    path: str,
    headers: dict[str, str] | list[tuple[str, str]],
    body: bytes = b"",
    version: str = "HTTP/1.1",
) -> bytes:
    pairs = list(headers.items()) if isinstance(headers, dict) else headers
    lines = "".join(f"{name}: {value}\r\n" for name, value in pairs)
    return f"{method} {path} {version}\r\n{lines}\r\n".encode("latin-1", "replace") + body


def draw_key(draw: random.Random) -> dict[str, str]:
    key = draw.choice(
        [None, "", "wrong", CLIENT, CLIENT, CLIENT, OWNER[:-1], OWNER + " ", "Ã©" * 10, "x" * 5000]
    )
    return (
        {}
        if key is None
        else {"authorization": draw.choice(["Bearer ", "Bearer ", "bearer ", ""]) + key}
    )


def draw_body(draw: random.Random) -> bytes:
    text = draw.choice(
        [
            "a",
            " " * 20000,
            "<tool_call>" + " " * 4000,
            "\x00\x1b]52;c;eA==\x07",
            "é" * 5000,
            "a" * 300000,
        ]
    )
    return draw.choice(
        [
            b"",
            b"{",
            b"null",
            b"\xff\xfe\x00",
            b"[" * 20000,
            b'{"a":' * 5000,
            b'{"prompt": 1e999}',
            b"9" * 5000,
            json.dumps({"prompt": text, "max_tokens": 2}).encode(),
            json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 2}).encode(),
            json.dumps({"messages": [{"role": text, "content": [{"type": text}]}] * 50}).encode(),
            json.dumps({"prompt": ["a"] * 5000, "n": 128, "max_tokens": 1}).encode(),
            json.dumps({"tokens": list(range(5000))}).encode(),
            json.dumps({"ids": [1] * 5000}).encode(),
            json.dumps({"prompt": "a", "stop": ["a" * 9999] * 4}).encode(),
            json.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(300)}}).encode(),
            json.dumps(
                {"prompt": "a", "structured_outputs": {"regex": "(a{1,500}){1,500}"}}
            ).encode(),
            json.dumps(
                {"weight_dir": "/etc", "version": 10**9, "model_name": "x\n2026 INFO forged"}
            ).encode(),
            json.dumps({"lora_name": "../x", "lora_path": "/proc/self/root"}).encode(),
        ]
    )


def draw_request(draw: random.Random) -> bytes:
    """Return the bytes of one request, or of what pretends to be one."""
    path, key, body = draw.choice(PATHS), draw_key(draw), draw_body(draw)
    method = draw.choice(
        ["POST"] * 6
        + ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT", "X" * 300, "G\0T"]
    )
    plain = {
        "host": draw.choice(["localhost", "evil.example", "", "a\tb"]),
        "content-type": "application/json",
    } | key
    sized = plain | {"content-length": str(len(body))}
    chunked = plain | {"transfer-encoding": draw.choice(["chunked", "xchunked", "gzip"])}
    twice = [*plain.items(), ("host", "other"), ("content-length", "5"), ("content-length", "6")]
    kinds: list[Callable[[], bytes]] = [
        *[lambda: encode_request("POST", path, sized, body)] * 3,
        lambda: encode_request(method, path, sized, body),
        lambda: encode_request(
            "POST", path, sized | {"content-type": draw.choice(["text/plain", "", "x" * 999])}, body
        ),
        lambda: encode_request("POST", path, sized | {"origin": "http://evil.example"}, body),
        lambda: encode_request(
            "POST", path, plain | {"content-length": draw.choice(["-1", "1e9", "9" * 11])}, body
        ),
        lambda: encode_request(
            "POST", path, sized | {"transfer-encoding": "chunked"}, b"0\r\n\r\n" + body
        ),
        lambda: encode_request(
            "POST", path, chunked, draw.choice([b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"-5\r\n"])
        ),
        lambda: encode_request(
            "GET", path, plain | {f"x-{i}": "v" * 100 for i in range(draw.choice([10, 2000]))}
        ),
        lambda: encode_request(
            "GET", path, plain | {"x": "v" * draw.choice([60_000, 70_000, 1_000_000])}
        ),
        lambda: encode_request("GET", path + "?" + "q=1&" * draw.choice([10, 20_000]), plain),
        lambda: encode_request("GET", path, twice),
        lambda: encode_request("GET", path, plain) * draw.choice([2, 100]),
        lambda: encode_request(
            "GET", path, plain | {"upgrade": "websocket", "connection": "upgrade"}
        ),
        lambda: encode_request(
            "GET", path, plain, version=draw.choice(["HTTP/0.9", "HTTP/1.0", "HTTP/3.0", "X"])
        ),
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(500),
        lambda: draw.randbytes(draw.choice([1, 100, 10_000])),
    ]
    return draw.choice(kinds)()


async def send_request(port: int, data: bytes, patience: float) -> list[int]:
    """Send bytes on a connection of their own; return the statuses of the answers. They may be none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = b""
    try:
        async with asyncio.timeout(patience):
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
            while new := await reader.read(1 << 16):
                found += new
                # The server keeps the connection
                if b"\r\n\r\n" in found and data.count(b" HTTP/1.1\r\n") == 1:
                    break
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    lines = [line for line in found.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    return [int(line[9:12]) for line in lines]


async def hold_connection(port: int, draw: random.Random, until: asyncio.Event) -> None:
    """Keep a connection open, idle or sending a byte at times, until told or the server ends it."""
    head = encode_request(
        "POST",
        "/v1/completions",
        {"host": "localhost", "content-length": "1000000", "authorization": f"Bearer {CLIENT}"},
    )
    start = draw.choice([b"", head[: draw.randrange(1, 60)], head[:-2], head, head + b"{"])
    with contextlib.suppress(OSError, TimeoutError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(start)
            while not until.is_set() and not writer.transport.is_closing():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(until.wait(), draw.uniform(1, 8))
                if draw.random() < 0.5:
                    writer.write(b"x")
        finally:
            writer.transport.abort()


class HealthWatch(threading.Thread):
    """Ask /health all the time, each time on a new connection; keep the longest time that an answer took."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.longest, self.count, self.failures = port, 0.0, 0, list[str]()
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.05):
            start = time.monotonic()
            try:
                with socket.create_connection(("127.0.0.1", self.port), 30) as connection:
                    connection.sendall(
                        b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
                    )
                    if not connection.recv(4096).startswith(b"HTTP/1.1 200"):
                        self.failures.append("/health did not answer with 200")
            except OSError as error:
                self.failures.append(f"/health: {type(error).__name__}: {error}")
            self.longest, self.count = max(self.longest, time.monotonic() - start), self.count + 1

    def stop(self) -> None:
        self.is_over.set()
        self.join()


async def attack(
    url: str, requests: int, connections: int, seed: int
) -> tuple[Counter[int], list[str], float]:
    """Send all of it; return the statuses of the answers, what went wrong, and the longest wait for /health."""
    port, draw = urlsplit(url).port or 80, random.Random(seed)
    statuses, wrong, over, slots = (
        Counter[int](),
        list[str](),
        asyncio.Event(),
        asyncio.Semaphore(AT_ONCE),
    )
    watch = HealthWatch(port)
    watch.start()
    held = [
        asyncio.create_task(hold_connection(port, random.Random(seed + i), over))
        for i in range(connections)
    ]

    async def send(data: bytes) -> None:
        async with slots:
            answers = await send_request(port, data, 3.0)
        statuses.update(answers)
        wrong.extend(f"{status}: {data[:200]!r}" for status in answers if status >= 500)

    for start in range(0, requests, 500):
        batch = [draw_request(draw) for _ in range(min(500, requests - start))]
        await asyncio.gather(*map(send, batch))
    over.set()
    await asyncio.gather(*held)
    await asyncio.to_thread(watch.stop)
    wrong += watch.failures[:5]
    if watch.longest > HEALTH_SECONDS:
        wrong.append(f"/health took {watch.longest:.2f} s, most is {HEALTH_SECONDS} s")
    return statuses, wrong, watch.longest


def raise_descriptor_limit(needed: int) -> None:
    """Let this process open as many connections."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
