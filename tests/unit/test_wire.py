"""What a client hears of every kind of answer, by httpx's own transport and by ours."""

import asyncio
import gzip
import shutil
import ssl
import subprocess
from contextlib import asynccontextmanager

import httpx
import pytest

from hone.clients.http_connection import Wire, is_direct

LONG = b"x" * 300_000
ANSWERS = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + LONG,
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n493e0\r\n"
    + LONG
    + b"\r\n0\r\n\r\n",
    "until the end": b"HTTP/1.0 200 OK\r\n\r\n" + LONG,
    "close": b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 300000\r\n\r\n" + LONG,
    "continue": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n"
    + LONG,
}
packed = gzip.compress(LONG)
ANSWERS["gzip"] = (
    b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    + packed
)
BROKEN = {
    "half": b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + LONG[:1000],
    "nothing": b"",
    "no more than a promise": b"HTTP/1.1 100 Continue\r\n\r\n",
    "not HTTP": b"hello\r\n\r\n",
    "not gzip": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello",
}


class Heard:
    """What a server was sent: requests, connections, and how many of them their client has closed."""

    def __init__(self):
        self.requests, self.connections, self.closed = [], 0, asyncio.Event()


@asynccontextmanager
async def served(answer, silent=False, port=0, **options):
    """A server that gives every request that answer. The end of its connections where the answer does not tell."""
    heard, open_ = Heard(), []
    ends = not silent and (
        answer in BROKEN.values() or answer in (ANSWERS["until the end"], ANSWERS["close"])
    )

    async def serve(reader, writer):
        heard.connections += 1
        open_.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(x[15:])
                        for x in head.lower().split(b"\r\n")
                        if x.startswith(b"content-length:")
                    ),
                    0,
                )
                heard.requests.append(head + await reader.readexactly(length))
                if silent:
                    continue
                writer.write(answer)
                await writer.drain()
                if ends:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            heard.closed.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port, **options)
    async with server:
        yield (
            f"{'https' if options else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/x?y=z",
            heard,
        )
        for writer in open_:
            writer.close()


@pytest.fixture(params=["httpx", "wire"])
def transport(request):
    return httpx.AsyncHTTPTransport if request.param == "httpx" else Wire


@pytest.mark.parametrize("kind", ANSWERS)
def test_answers(transport, kind):
    async def talk():
        async with (
            served(ANSWERS[kind]) as (url, heard),
            httpx.AsyncClient(transport=transport()) as client,
        ):
            for _ in range(3):
                answer = await client.post(
                    url, json={"a": 1}, headers={"Authorization": "Bearer k"}
                )
                assert (answer.status_code, answer.content) == (200, LONG)
            assert heard.connections == (3 if kind in ("close", "until the end") else 1)
            for request in heard.requests:
                assert request.startswith(b"POST /v1/x?y=z HTTP/1.1\r\n")
                assert b"\r\nAuthorization: Bearer k\r\n" in request
                assert request.endswith(b'\r\n\r\n{"a":1}')
            await asyncio.gather(*(client.get(url) for _ in range(5)))
            assert len(heard.requests) == 8

    asyncio.run(talk())


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_answers(transport, kind):
    async def talk():
        async with (
            served(BROKEN[kind]) as (url, heard),
            httpx.AsyncClient(transport=transport()) as client,
        ):
            for _ in range(2):
                with pytest.raises(
                    httpx.DecodingError if kind == "not gzip" else httpx.RemoteProtocolError
                ):
                    await client.post(url, json={})
            assert heard.connections == 2

    asyncio.run(talk())


def test_who_is_silent_is_given_up_and_told(transport):
    async def talk():
        async with (
            served(b"", silent=True) as (url, heard),
            httpx.AsyncClient(transport=transport()) as client,
        ):
            with pytest.raises(httpx.ReadTimeout):
                await client.get(url, timeout=0.1)
            await asyncio.wait_for(heard.closed.wait(), 5)
            heard.closed.clear()
            asked = asyncio.create_task(client.get(url))
            while len(heard.requests) < 2:
                await asyncio.sleep(0.01)
            asked.cancel()
            await asyncio.wait_for(heard.closed.wait(), 5)
            assert heard.connections == 2

    asyncio.run(talk())


def test_nobody_there_and_what_cannot_be_sent(transport):
    async def talk():
        async with served(b"") as (url, _):
            pass
        async with httpx.AsyncClient(transport=transport()) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(url)
        async with (
            served(ANSWERS["length"]) as (url, heard),
            httpx.AsyncClient(transport=transport()) as client,
        ):
            with pytest.raises(httpx.LocalProtocolError):
                await client.get(url, headers={"Authorization": "Bearer k\r\nX-Other: 1"})
            assert heard.requests == []

    asyncio.run(talk())


@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_a_connection_that_ended_meanwhile_is_not_used(transport, pause):
    async def talk():
        async with httpx.AsyncClient(transport=transport()) as client:
            async with served(ANSWERS["length"]) as (url, before):
                await client.get(url)
            await asyncio.sleep(pause)
            async with served(ANSWERS["chunks"], port=httpx.URL(url).port) as (url, after):
                assert (await client.get(url)).content == LONG
            assert (len(before.requests), len(after.requests)) == (1, 1)

    asyncio.run(talk())


@pytest.mark.parametrize(
    "late",
    [
        b"HTTP/1.1 408 Request Timeout\r\nX-Late: 1\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 408 Req",
        b"nothing of HTTP\r\n\r\n",
    ],
)
def test_what_comes_with_an_answer_is_not_taken_for_one(late):
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"

    async def talk():
        async with (
            served(answer + late) as (url, heard),
            httpx.AsyncClient(transport=Wire()) as client,
        ):
            for _ in range(2):
                got = await client.get(url)
                assert (got.status_code, got.content) == (200, b"hello")
                assert got.headers["content-length"] == "5" and "x-late" not in got.headers
            assert heard.connections == 2

    asyncio.run(talk())


@pytest.mark.skipif(
    not shutil.which("openssl"), reason="no openssl here to make a certificate with"
)
def test_certificates_are_checked(transport, tmp_path, monkeypatch):
    certificate, key = tmp_path / "one.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=here",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            key,
            "-out",
            certificate,
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def talk():
        async with served(ANSWERS["length"], ssl=context) as (url, _):
            async with httpx.AsyncClient(transport=transport()) as client:
                with pytest.raises(httpx.ConnectError, match="(?i)certificate"):
                    await client.get(url)
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            async with httpx.AsyncClient(transport=transport()) as client:
                assert (await client.get(url)).content == LONG

    asyncio.run(talk())


def test_where_proxies_are_used(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert is_direct("http://10.0.0.1/v1")
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    assert is_direct("http://localhost:8000/v1")
    assert not is_direct("https://example.org/v1")
    monkeypatch.setenv("no_proxy", "example.org")
    assert is_direct("https://example.org/v1")
