"""What HTTP costs on one GPU: tokens a second of the engine alone and of the server over it, Qwen3-0.6B's shape.

    python benchmarks/serve_gpu.py [--requests 4096] [--tokens 128] [--at-once 256] [--clients 4] [--rounds 2]

The same chats of about 40 tokens, ends ignored, logprobs on: given to `Engine.generate`, then asked over HTTP by
several client processes, whole (with OpenAI's entries of logprobs, and as plain numbers) and streamed.
Must: 80 % of what the engine does alone.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from generate_gpu import write_model
from peer import ROOT, finish, median
from serve_cpu import Connection, running

WAYS = {"entries": {"logprobs": True}, "numbers": {"return_token_logprobs": True}, "streamed": {"stream": True}}


def engine_alone(directory: Path, requests: int, tokens: int, at_once: int, rounds: int) -> float:
    """Tokens a second, with the requests in flight that the server has."""
    import torch

    from hone.engine.engine import Engine
    from hone.engine.rehearsal import rehearse
    from hone.models.hf import load_model
    from hone.records import GenerateRequest, Prompt, Sampling
    from hone.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(directory)
    model = load_model(directory, dtype=torch.bfloat16, device="cuda")
    engine = Engine(model, max_batch_size=at_once, max_model_len=512, kv_cache_gib=30)
    rehearse(engine, at_once)
    asked = [
        GenerateRequest(
            tokenizer.prompt_ids(Prompt(messages(i))), Sampling(1.0, tokens, i, ignore_eos=True), frozenset()
        )
        for i in range(requests)
    ]
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        engine.generate(asked)
        found.append(requests * tokens / (time.perf_counter() - start))
    return median(found[1:])


def messages(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"text {i * 7919:>20} and so on"}]


async def ask(url: str, model: str, numbers: range, tokens: int, at_once: int, way: str) -> None:
    """Each connection asks again when it has its answer."""
    left = [
        json.dumps(
            {"model": model, "messages": messages(i), "max_tokens": tokens, "seed": i, "ignore_eos": True, **WAYS[way]}
        ).encode()
        for i in reversed(numbers)
    ]
    connections = [await Connection(url).open() for _ in range(at_once)]
    sys.stdin.readline()  # all clients begin together

    async def go_on(connection: Connection) -> None:
        while left:
            await connection.post(left.pop())

    await asyncio.gather(*map(go_on, connections))
    for one in connections:
        one.writer.close()


def served(url: str, model: str, requests: int, tokens: int, at_once: int, clients: int, way: str) -> float:
    each = requests // clients
    words = [sys.executable, __file__, "--ask", url, model, way, str(tokens), str(at_once // clients)]
    started = [
        subprocess.Popen([*words, str(each * k), str(each * (k + 1))], stdin=subprocess.PIPE, text=True)
        for k in range(clients)
    ]
    time.sleep(2.0)  # they import
    start = time.perf_counter()
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    if any(process.wait() for process in started):
        sys.exit("a client failed")
    return each * clients * tokens / (time.perf_counter() - start)


def main() -> None:
    if sys.argv[1:2] == ["--ask"]:
        url, model, way, tokens, at_once, first, behind = sys.argv[2:]
        return asyncio.run(ask(url, model, range(int(first), int(behind)), int(tokens), int(at_once), way))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        rate = engine_alone(Path(args.alone), args.requests, args.tokens, args.at_once, args.rounds)
        print(json.dumps({"rate": rate}))
        return None
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "model"
        directory.mkdir()
        write_model(directory)
        for file in (ROOT / "examples" / "reverse_text_tiny" / "model").glob("*"):
            if file.name != "config.json":
                shutil.copy(file, directory)
        words = [sys.executable, __file__, "--alone", str(directory), "--requests", str(args.requests), "--tokens",
                 str(args.tokens), "--at-once", str(args.at_once), "--rounds", str(args.rounds)]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        alone = json.loads(done.stdout.strip().splitlines()[-1])["rate"]
        print(f"engine alone: {alone:,.0f} tokens/s", flush=True)
        result = {"engine": alone}
        words = [sys.executable, "-m", "hone", "inference", "--model.name", str(directory),
                 "--max-batch-size", str(args.at_once), "--max-model-len", "512", "--kv-cache-gib", "30"]  # fmt: skip
        with running(words, "--port", str(directory), {}) as (url, startup):
            print(f"server: first answer after {startup:.1f} s", flush=True)
            for way in WAYS:
                common = (url, str(directory), args.requests, args.tokens, args.at_once, args.clients, way)
                rates = [served(*common) for _ in range(args.rounds + 1)][1:]
                result[way] = median(rates)
                print(
                    f"over HTTP, {way}: {result[way]:,.0f} tokens/s, {result[way] / alone:.2f} of the engine",
                    flush=True,
                )
    finish(**result, ratio=result["entries"] / alone)
    return None


if __name__ == "__main__":
    main()
