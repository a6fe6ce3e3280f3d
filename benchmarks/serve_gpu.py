"""What HTTP costs on one GPU: tokens a second of the engine alone and of the server over it, Qwen3-0.6B's shape.

    python benchmarks/serve_gpu.py [--peer DIRECTORY] [--requests 4096] [--tokens 128] [--at-once 256] [--rounds 2]

The same chats of about 40 tokens, ends ignored, logprobs on: given to `Engine.generate`, then asked over HTTP by
several client processes, whole (with OpenAI's entries of logprobs, and as plain numbers) and streamed.
Must: 80 % of what the engine does alone, and ahead of vLLM, whose packages are in DIRECTORY (for PYTHONPATH): alone,
and its server asked by the same clients.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from generate_gpu import STORED, write_model
from peer import ROOT, finish, median
from serve_cpu import Connection, running

WAYS = {
    "entries": {"logprobs": True},
    "numbers": {"return_token_logprobs": True},
    "streamed": {"stream": True},
}


def engine_alone(directory: Path, requests: int, tokens: int, at_once: int, rounds: int) -> float:
    """Tokens a second, with the requests in flight that the server has."""
    import torch

    from hone.engine.engine import Engine
    from hone.engine.warm_up import compile_kernels
    from hone.models.hf import load_model
    from hone.records import GenerateRequest, Prompt, Sampling
    from hone.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(directory)
    model = load_model(directory, dtype=torch.bfloat16, device="cuda")
    engine = Engine(model, max_batch_size=at_once, max_model_len=512, kv_cache_gib=30)
    compile_kernels(engine, at_once)
    asked = [
        GenerateRequest(
            tokenizer.prompt_ids(Prompt(messages(i))),
            Sampling(1.0, tokens, i, ignore_eos=True),
            frozenset(),
        )
        for i in range(requests)
    ]
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        engine.generate(asked)
        found.append(requests * tokens / (time.perf_counter() - start))
    return median(found[1:])


def peer_alone(directory: Path, requests: int, tokens: int, at_once: int, rounds: int) -> float:
    from vllm import LLM, SamplingParams

    from hone.records import Prompt
    from hone.text.tokenizer import Tokenizer

    llm = LLM(
        model=str(directory),
        max_model_len=512,
        gpu_memory_utilization=0.6,
        max_num_seqs=at_once,
        disable_log_stats=True,
    )
    tokenizer = Tokenizer(directory)
    asked = [
        {"prompt_token_ids": tokenizer.prompt_ids(Prompt(messages(i)))} for i in range(requests)
    ]
    # Without seeds: with one of each request vLLM draws them one by one.
    how = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        llm.generate(asked, how, use_tqdm=False)
        found.append(requests * tokens / (time.perf_counter() - start))
    return median(found[1:])


def with_names(directory: Path, count: int) -> None:
    """Gives every token id that the model can draw a text: the tiny model's tokenizer has a few hundred."""
    file = directory / "tokenizer.json"
    whole = json.loads(file.read_text())
    vocabulary = whole["model"]["vocab"]
    taken = {*vocabulary.values(), *(one["id"] for one in whole["added_tokens"])}
    vocabulary |= {f"w{i:x}": i for i in range(count) if i not in taken}
    file.write_text(json.dumps(whole))


def messages(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"text {i * 7919:>20} and so on"}]


async def ask(url: str, model: str, numbers: range, tokens: int, at_once: int, way: str) -> None:
    """Each connection asks again when it has its answer."""
    left = [
        json.dumps(
            {
                "model": model,
                "messages": messages(i),
                "max_tokens": tokens,
                "ignore_eos": True,
                **WAYS[way],
            }
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


def served(
    url: str, model: str, requests: int, tokens: int, at_once: int, clients: int, way: str
) -> float:
    each = requests // clients
    words = [
        sys.executable,
        __file__,
        "--ask",
        url,
        model,
        way,
        str(tokens),
        str(at_once // clients),
    ]
    started = [
        subprocess.Popen(
            [*words, str(each * k), str(each * (k + 1))], stdin=subprocess.PIPE, text=True
        )
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


def measure(
    result: dict[str, float],
    prefix: str,
    server: list[str],
    environment: dict[str, str],
    directory: Path,
    args: argparse.Namespace,
) -> None:
    """The engine alone, and its server, asked in each way that it knows."""
    words = [
        sys.executable,
        __file__,
        "--peer-alone" if prefix else "--alone",
        str(directory),
        "--requests",
        str(args.requests),
        "--tokens",
        str(args.tokens),
        "--at-once",
        str(args.at_once),
        "--rounds",
        str(args.rounds),
    ]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    alone = result[f"{prefix}engine"] = json.loads(done.stdout.strip().splitlines()[-1])["rate"]
    who = "vLLM" if prefix else "hone"
    print(f"{who} alone: {alone:,.0f} tokens/s", flush=True)
    with running(server, "--port", str(directory), environment) as (url, startup):
        print(f"{who}: first answer after {startup:.1f} s", flush=True)
        for way in WAYS if not prefix else ("entries", "streamed"):
            common = (
                url,
                str(directory),
                args.requests,
                args.tokens,
                args.at_once,
                args.clients,
                way,
            )
            rates = [served(*common) for _ in range(args.rounds + 1)][1:]
            rate = result[prefix + way] = median(rates)
            print(
                f"{who} over HTTP, {way}: {rate:,.0f} tokens/s, {rate / alone:.2f} of alone",
                flush=True,
            )


def main() -> None:
    if sys.argv[1:2] == ["--ask"]:
        url, model, way, tokens, at_once, first, behind = sys.argv[2:]
        return asyncio.run(
            ask(url, model, range(int(first), int(behind)), int(tokens), int(at_once), way)
        )
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peer", type=Path, help="directory with vLLM and what it needs")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--peer-alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone or args.peer_alone:
        measured = peer_alone if args.peer_alone else engine_alone
        rate = measured(
            Path(args.alone or args.peer_alone),
            args.requests,
            args.tokens,
            args.at_once,
            args.rounds,
        )
        print(json.dumps({"rate": rate}))
        return None
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "model"
        directory.mkdir()
        write_model(directory, STORED)
        for file in (ROOT / "examples" / "reverse_text_tiny" / "model").glob("*"):
            if file.name != "config.json":
                shutil.copy(file, directory)
        with_names(directory, json.loads((directory / "config.json").read_text())["vocab_size"])
        result: dict[str, float] = {}
        ours = [
            sys.executable,
            "-m",
            "hone",
            "inference",
            "--model.name",
            str(directory),
            "--max-batch-size",
            str(args.at_once),
            "--max-model-len",
            "512",
            "--kv-cache-gib",
            "30",
        ]
        measure(result, "", ours, {}, directory, args)
        if args.peer:
            path = os.pathsep.join([str(args.peer), os.environ.get("PYTHONPATH", "")])
            environment = {
                "PYTHONPATH": path,
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
                "HF_HUB_OFFLINE": "1",
            }
            words = [
                sys.executable,
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                str(directory),
                "--max-num-seqs",
                str(args.at_once),
                "--max-model-len",
                "512",
                "--gpu-memory-utilization",
                "0.6",
                "--disable-uvicorn-access-log",
            ]
            measure(result, "peer_", words, environment, directory, args)
            result["ratio_to_peer"] = result["entries"] / result["peer_entries"]
    finish(**result, ratio=result["entries"] / result["engine"])
    return None


if __name__ == "__main__":
    main()
