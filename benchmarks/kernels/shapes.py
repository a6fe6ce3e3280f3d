"""Decoding by shape of model, batch and length on one GPU, each as a share of its limit.

    python benchmarks/kernels/shapes.py [--models NAME …] [--lengths 64+128 512+512 4096+1024] [--batches 1 8 32 128]
        [--vllm PYTHON]

Random weights, bf16, logprobs on. A decode step's limit is the larger of two times: weights and every key and value
read once at the measured bandwidth, products at the measured rate of a large one. Its time is that of all tokens less
that of the first, over the steps between. Batches that the card's memory cannot hold are left out, and the largest that
it holds is measured instead. A process for each model and length, one line of JSON a row. PYTHON has vLLM, which then
does the same work without logprobs, in a process for each model after ours have ended; its steps are timed alike.
"""

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import _path  # noqa: F401
from model_shapes import MODELS, step_limits, write_shape
from peer import finish, median
from training import matrix_rate, our_model

if TYPE_CHECKING:
    pass

Cell = tuple[int, int, int]  # batch, prompt, output
KEPT_FREE = 6e9  # bytes beside weights and cache: activations of a prefill, graphs


def timed(engine, draw: random.Random, batch: int, prompt: int, tokens: int) -> float:
    """Seconds until each of `batch` random prompts has so many tokens."""
    from hone.records import GenerateRequest, Sampling

    vocabulary = range(1000, engine.model.spec.vocab_size)
    requests = [
        GenerateRequest(
            draw.choices(vocabulary, k=prompt), Sampling(1.0, tokens, seed=i), frozenset()
        )
        for i in range(batch)
    ]
    engine.set_version(engine.version + 1)  # nothing is reused from the run before
    start = time.perf_counter()
    engine.generate(requests)
    return time.perf_counter() - start


def peer_timed(worker, batch: int, prompt: int, tokens: int) -> float:
    return worker.ask(workload=f"each_{batch}_{prompt}_{tokens}", logprobs=False)["seconds"]


def first_and_whole(
    seconds: Callable[[int], float], output: int, rounds: int
) -> tuple[float, float]:
    """Medians of the seconds until the first of `output` tokens, and until the last."""
    for tokens in (output, 1):  # what is done for the first time takes longer
        seconds(tokens)
    gc.freeze()  # or now and then the collector spends 0.1 s on all that was imported
    first, whole = (median([seconds(tokens) for _ in range(rounds)]) for tokens in (1, output))
    return first, whole


def measure(
    name: str, prompt: int, output: int, batches: list[int], rounds: int, rate: float
) -> None:
    """Prints a row for each batch."""
    import torch

    from hone.engine.engine import Engine

    model = our_model(MODELS[name])
    spec, flops = model.spec, matrix_rate()
    of_token = spec.cache_numbers * torch.bfloat16.itemsize
    room = torch.cuda.mem_get_info()[0] - KEPT_FREE
    most = int(room / of_token / (prompt + output + 64))
    fitting = [batch for batch in batches if batch <= most]
    if len(fitting) < len(batches):
        fitting.append(most // 8 * 8)
    engine = Engine(
        model, max_batch_size=max(fitting), max_model_len=prompt + output, kv_cache_gib=room / 2**30
    )
    for batch in fitting:
        seconds = partial(timed, engine, random.Random(batch), batch, prompt)
        first, whole = first_and_whole(seconds, output, rounds)
        step = (whole - first) / (output - 1)
        by_bytes, by_flops = step_limits(spec, batch, prompt + output / 2, rate, flops)
        limit = max(by_bytes, by_flops)
        row = {
            "model": name,
            "batch": batch,
            "lengths": f"{prompt}+{output}",
            "tokens_per_s": batch * output / whole,
            "step_ms": step * 1e3,
            "limit_ms": limit * 1e3,
            "of_limit": limit / step,
            "bound": "bytes" if by_bytes > by_flops else "flops",
            "first_token_s": first,
        }
        print(json.dumps(row), flush=True)


def of_peer(python: str, name: str, cells: list[Cell], rounds: int) -> dict[Cell, float]:
    """Seconds of vLLM's decode step at each batch, prompt and output."""
    from generate_gpu import Worker

    with tempfile.TemporaryDirectory(prefix="shapes_gpu") as home:
        write_shape(Path(home) / "model", name)
        worker = Worker(
            python,
            "vllm",
            Path(home) / "model",
            max(prompt + output for _, prompt, output in cells),
        )
        steps = {}
        for batch, prompt, output in cells:
            seconds = partial(peer_timed, worker, batch, prompt)
            first, whole = first_and_whole(seconds, output, rounds)
            steps[batch, prompt, output] = (whole - first) / (output - 1)
        worker.end()
    return steps


def main(words: list[str] | None = None) -> None:
    from model_shapes import measure_bandwidth

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", default=["64+128", "512+512", "4096+1024"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--rate", type=float, help="bytes a second; measured unless given")
    options = parser.parse_args(words)
    if options.rate and len(options.models) == len(options.lengths) == 1:
        prompt, output = map(int, options.lengths[0].split("+"))
        measure(options.models[0], prompt, output, options.batches, options.rounds, options.rate)
        return
    rate, figures = measure_bandwidth(), {}
    print(f"memory: {rate / 1e12:.2f} TB/s", flush=True)
    print(
        "| model | lengths | batch | tokens/s | ms a step | limit | share |",
        "|---" * 7 + "|",
        sep="\n",
        flush=True,
    )
    for name in options.models:
        ours: dict[Cell, float] = {}
        for length in options.lengths:
            words = [
                "--models",
                name,
                "--lengths",
                length,
                "--rate",
                rate,
                "--rounds",
                options.rounds,
            ]
            words = [sys.executable, __file__, *words, "--batches", *options.batches]
            process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True)
            for line in process.stdout:
                row = json.loads(line)
                print(
                    f"| {name} | {length} | {row['batch']} | {row['tokens_per_s']:,.0f} | {row['step_ms']:.2f} | "
                    f"{row['limit_ms']:.2f} ({row['bound']}) | {row['of_limit']:.0%} |",
                    flush=True,
                )
                figures[f"{name}_{length}_{row['batch']}"] = row["of_limit"]
                ours[row["batch"], *map(int, length.split("+"))] = row["step_ms"] / 1e3
            if process.wait():
                print(f"{name} {length}: ended with exit code {process.returncode}", flush=True)
        for cell, seconds in (
            of_peer(options.vllm, name, list(ours), options.rounds) if options.vllm else {}
        ).items():
            batch, prompt, output = cell
            ratio = figures[f"{name}_{prompt}+{output}_{batch}_over_vllm"] = seconds / ours[cell]
            print(
                f"| vLLM, {name} | {prompt}+{output} | {batch} | | {seconds * 1e3:.2f} | | ours {ratio:.2f} times as "
                "fast |",
                flush=True,
            )
    finish(**figures)


if __name__ == "__main__":
    main()
