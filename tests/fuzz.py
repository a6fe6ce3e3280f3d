"""Random requests, good and bad, at a server under load: nothing may answer 5xx, hang, or keep what it was given.

    python -m tests.fuzz [--requests 10000] [--streams 512] [--seed 0] [--schemathesis SECONDS]
    python -m tests.fuzz --hostile [--requests 10000] [--connections 2000] [--seed 0]

Requests are drawn from keys and values that clients send, right, wrong and absurd. Then that many streams at a time, of
which clients cut half: the others must be whole, with the tokens that they have alone, and all of the cache free after
it. Memory is measured on the way. With --schemathesis that program (fetched by uv) reads the server's description and
tries every route for so long. Ends with one line of JSON; exits with 1 where something is not so. With --hostile the
requests are those of tests/hostile_clients.py.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import httpx

from hone.child_process import end_with_parent
from tests import hostile_clients
from tests.integration.conftest import BIN, ROOT, TINY, Server

AT_ONCE, PATIENCE = 64, 120.0  # requests in flight; seconds that an answer may take
ODD = [
    None,
    True,
    -1,
    0,
    1,
    10**12,
    -0.5,
    1e308,
    float("nan"),
    "",
    "a",
    "\ud83d",
    [],
    [1],
    {},
    {"a": 1},
    [[]],
    "0",
]
KEYS = {  # what a request may have, with values that are mostly good
    "max_tokens": [1, 4, 16],
    "temperature": [0, 0.5, 1.0, 2],
    "top_p": [0.1, 0.9, 1],
    "top_k": [-1, 0, 5],
    "min_p": [0, 0.1],
    "repetition_penalty": [1, 1.3],
    "presence_penalty": [-1, 2],
    "frequency_penalty": [0.5],
    "logit_bias": [{"5": 3.0}, {"7": -100}],
    "stop": ["a", ["b", "cc"]],
    "stop_token_ids": [[3], [5, 6]],
    "n": [1, 2, 3],
    "seed": [0, 7, 2**62],
    "logprobs": [True, False, 2],
    "top_logprobs": [0, 3],
    "echo": [True, False],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}],
    "ignore_eos": [True],
    "min_tokens": [0, 3],
    "return_token_ids": [True],
    "return_token_logprobs": [True],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "timeout": [0.001, 5.0],
    "user": ["me"],
    "raw_logprobs": [True],
    "response_format": [{"type": "text"}, {"type": "json_object"}],
    "guided_choice": [["x", "yy"]],
    "structured_outputs": [{"regex": "[ab]{1,3}"}],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["auto", "none", "required"],
    "max_total_tokens": [64],
    "nobody_knows_it": [1],
}
TEXTS = [
    "hello",
    "",
    "a" * 300,
    "\u00e9\u4e2d\U0001f600",
    "\x00\x01",
    "<|end|>",
    " " * 50,
    "a" * 40000,
]


def drawn(draw: random.Random, model: str) -> tuple[str, str, object]:
    """A method, a path and a body: good, nearly good, or nothing of the kind."""
    path = draw.choice(
        ["chat/completions"] * 4
        + ["completions"] * 3
        + ["responses", "chat/completions/tokens", "score"]
    )
    text = draw.choice(TEXTS)
    body: dict[str, object] = {"model": model}
    if path.startswith("chat"):
        roles = draw.choices(["user", "assistant", "system"], [6, 2, 1], k=draw.randint(1, 3))
        body["messages"] = [
            {"role": role, "content": draw.choice([text, text, "a", None])} for role in roles
        ]
        if path.endswith("tokens"):
            body["tokens"] = [draw.randrange(263) for _ in range(draw.randint(1, 20))]
    elif path == "completions":
        body["prompt"] = draw.choice([text, [1, 2, 3], ["a", "b"], [[4, 5], [6]]])
    elif path == "responses":
        body["input"] = text
    else:
        body = {"ids": [draw.randrange(300) for _ in range(draw.randint(1, 40))]}
    for key in draw.sample(list(KEYS), draw.randint(0, 4)):
        body[key] = draw.choice(KEYS[key])
    body.setdefault("max_tokens", 8)
    if draw.random() < 0.3:  # something wrong
        body[draw.choice([*body, *KEYS])] = draw.choice(ODD)
    if draw.random() < 0.03:
        return (
            "POST",
            path,
            draw.choice([b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": 1', b"[" * 5000]),
        )
    if draw.random() < 0.03:
        return (
            draw.choice(["GET", "PUT", "DELETE"]),
            draw.choice([path, "nowhere", "models/x"]),
            body,
        )
    return "POST", path, body


def url_of(server: Server, path: str) -> str:
    return f"{server.url.removesuffix('/v1')}/score" if path == "score" else f"{server.url}/{path}"


async def fire(server: Server, model: str, count: int, seed: int) -> tuple[Counter[int], list[str]]:
    draw, statuses, wrong = random.Random(seed), Counter[int](), []
    slots = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(
        timeout=PATIENCE, limits=httpx.Limits(max_connections=None)
    ) as client:

        async def one(method: str, path: str, body: object) -> None:
            said = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            async with slots:
                try:
                    ask = partial(
                        client.request, method, url_of(server, path), content=said, headers=headers
                    )
                    try:
                        answer = await ask()
                    except (
                        httpx.ReadError
                    ):  # the server closed an idle connection just as this request was sent
                        answer = await ask()
                except httpx.HTTPError as error:
                    wrong.append(f"{type(error).__name__}: {method} {path} {str(body)[:300]}")
                    return
            statuses[answer.status_code] += 1
            if answer.status_code >= 500 or '"server_error"' in answer.text:
                wrong.append(
                    f"{answer.status_code} {answer.text[:200]}: {method} {path} {str(body)[:300]}"
                )

        for start in range(0, count, 1000):
            await asyncio.gather(
                *(one(*drawn(draw, model)) for _ in range(min(1000, count - start)))
            )
    return statuses, wrong


async def streams(server: Server, model: str, count: int) -> list[str]:
    """What is wrong with streams beside others that are cut."""
    limits, wrong = httpx.Limits(max_connections=None), []
    body = {
        "model": model,
        "prompt": [5, 6, 7],
        "max_tokens": 40,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    body |= {"return_token_ids": True}
    async with httpx.AsyncClient(timeout=PATIENCE, limits=limits) as client:

        async def one(i: int, cut: bool) -> list[int]:
            ids: list[int] = []
            asked = body | {"seed": i, "stream": True}
            async with client.stream("POST", f"{server.url}/completions", json=asked) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        ids += json.loads(line[6:])["choices"][0].get("token_ids") or []
                    if cut and len(ids) > 3:
                        break
            return ids

        alone = [await one(i, False) for i in (0, 2, 4)]
        found = await asyncio.gather(
            *(one(i, bool(i % 2)) for i in range(count)), return_exceptions=True
        )
        for i, ids in enumerate(found):
            if isinstance(ids, BaseException):
                wrong.append(f"stream {i}: {type(ids).__name__}: {ids}")
            elif i % 2 == 0 and len(ids) != 40:
                wrong.append(f"stream {i} has {len(ids)} tokens of 40")
        wrong += [
            f"stream {2 * i} differs from itself alone"
            for i in range(3)
            if found[2 * i] != alone[i]
        ]
        deadline = time.monotonic() + 10
        while (
            used := gauge((await client.get(f"{server.url.removesuffix('/v1')}/metrics")).text)
        ) != (0.0, 0.0):
            if time.monotonic() > deadline:
                wrong.append(
                    f"{used[0]:.0f} requests still run, and {used[1]:.2f} of the cache is held"
                )
                break
            await asyncio.sleep(0.1)
    return wrong


def gauge(text: str) -> tuple[float, float]:
    found = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
    return float(found["hone_requests_running"]), float(found["hone_cache_used_ratio"])


def resident(server: Server) -> float:
    """MiB of memory."""
    said = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(server.process.pid)], capture_output=True, text=True
    ).stdout
    return int(said) / 1024


def schemathesis(server: Server, seconds: int) -> str:
    """Its last words."""
    uv = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
    words = [
        uv,
        "tool",
        "run",
        "schemathesis",
        "run",
        f"{server.url.removesuffix('/v1')}/openapi.json",
        "--exclude-path",
        "/pause",
        "--checks",
        "not_a_server_error,response_schema_conformance,content_type_conformance",
        "-n",
        "100",
        "--request-timeout",
        "60",
        "--max-time",
        str(seconds),
        "--no-color",
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    lines = [
        line.strip()
        for line in done.stdout.splitlines()
        if "generated" in line or line.strip().startswith("❌ ST")
    ]
    return f"exit {done.returncode}: {'; '.join(lines)}"


def start_server(place: Path) -> Server:
    model = str(ROOT / TINY / "model")
    words = (
        "--model.name",
        model,
        "--model.random-init",
        "--max-model-len",
        512,
        "--kv-cache-gib",
        0.25,
    )
    return Server(*words, log=place / "log", program=(BIN / "inference",))


def attack(requests: int, connections: int, seed: int) -> int:
    """Attack a server that has keys; return the exit code."""
    hostile_clients.raise_descriptor_limit(connections + 256)
    os.environ |= {"HONE_API_KEY": hostile_clients.OWNER, "HONE_CLIENT_KEY": hostile_clients.CLIENT}
    start, model = time.perf_counter(), str(ROOT / TINY / "model")
    body = {"model": model, "prompt": "abc", "max_tokens": 16, "temperature": 0}
    with tempfile.TemporaryDirectory(prefix="hostile_") as place:
        server = start_server(Path(place))
        try:
            with httpx.Client(
                headers={"authorization": f"Bearer {hostile_clients.CLIENT}"}, timeout=PATIENCE
            ) as client:

                def complete() -> str:
                    return str(
                        client.post(f"{server.url}/completions", json=body).json()["choices"][0][
                            "text"
                        ]
                    )

                # What is loaded at a first request
                asyncio.run(hostile_clients.attack(server.url, 200, 10, seed + 1))
                text, before = complete(), resident(server)
                statuses, wrong, longest = asyncio.run(
                    hostile_clients.attack(server.url, requests, connections, seed)
                )
                wrong += [] if complete() == text else ["the same request has another answer"]
                grown = resident(server) - before
            if grown > hostile_clients.MEMORY_MIB:
                wrong.append(f"memory grew by {grown:.0f} MiB")
            log = server.log.read_text()
            wrong += (
                [f"in the log: {log[log.index('Traceback') :][:9000][-2500:]}"]
                if "Traceback" in log
                else []
            )
            wrong += ["a control character in the log"] if "\x1b" in log else []
        finally:
            server.stop()
    print(*wrong[:20], sep="\n")
    figures = {
        "health_s": round(longest, 2),
        "grown_mib": round(grown),
        "seconds": round(time.perf_counter() - start),
    }
    print(json.dumps({"statuses": dict(sorted(statuses.items())), "wrong": len(wrong)} | figures))
    return int(bool(wrong))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schemathesis", type=int, default=0, metavar="SECONDS")
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--connections", type=int, default=2000)
    options = parser.parse_args()
    end_with_parent()
    os.environ["HONE_PARENT_PID"] = str(os.getpid())
    if options.hostile:
        sys.exit(attack(options.requests, options.connections, options.seed))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fuzz_") as place:
        server = start_server(Path(place))
        try:
            model = str(ROOT / TINY / "model")
            statuses, wrong, memory = Counter[int](), [], []
            part = max(1, options.requests // 5)
            for i in range(0, options.requests, part):
                found, bad = asyncio.run(
                    fire(server, model, min(part, options.requests - i), options.seed + i)
                )
                statuses, wrong = statuses + found, wrong + bad
                memory.append(round(resident(server)))
            if options.streams:
                wrong += asyncio.run(streams(server, model, options.streams))
                memory.append(round(resident(server)))
            said = schemathesis(server, options.schemathesis) if options.schemathesis else ""
            wrong += [f"schemathesis: {said}"] if said and not said.startswith("exit 0") else []
            wrong += ["a traceback in the log"] if "Traceback" in server.log.read_text() else []
        finally:
            server.stop()
    print(*wrong[:20], sep="\n")
    found = {"statuses": dict(sorted(statuses.items())), "wrong": len(wrong), "memory_mib": memory}
    print(
        json.dumps(
            found
            | ({"schemathesis": said} if said else {})
            | {"seconds": round(time.perf_counter() - start)}
        )
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
