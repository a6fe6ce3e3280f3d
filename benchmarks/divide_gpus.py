"""Training divided among the GPUs of a machine: tokens of a long sequence, and experts. Random weights, bf16.

    python benchmarks/divide_gpus.py [--cases long_65536 experts_all …]

Each case is run on one GPU where it fits, and on two, whole sequences or experts gathered against divided ones. Prints
tokens/s, the most memory of a GPU and the loss of the first step, which is to be the same within a case.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from model_shapes import MODELS
from peer import finish
from training import our_model

from hone.launch.plan import free_port

WARM_UP, STEPS = 2, 4
LIMIT_SECONDS = 240
TOKENS = "context_parallel"
EXPERTS = "expert_parallel"


def long_case(length: int) -> dict:
    ways = {"1 GPU": (1, {}), "2 GPUs, tokens divided": (2, {TOKENS: 2})}
    return {"model": "Qwen3-0.6B", "rows": 1, "length": length, "ways": ways}


CASES = {
    "long_32768": long_case(32768),
    "long_65536": long_case(65536),
    "hybrid_65536": long_case(65536) | {"model": "Qwen3.5-0.8B"},
    "experts_all": {
        "model": "MoE-2.7B",
        "rows": 8,
        "length": 4096,
        "ways": {
            "1 GPU": (1, {}),
            "2 GPUs, experts gathered": (2, {}),
            "2 GPUs, experts divided": (2, {EXPERTS: True}),
        },
    },
    "experts_lora": {
        "model": "Qwen3-30B-A3B",
        "rows": 8,
        "length": 4096,
        "micro": 1,  # rows: the activations of all do not fit
        "keys": {"lora": {"rank": 16}},
        "ways": {
            "2 GPUs, experts gathered": (2, {}),
            "2 GPUs, experts divided": (2, {EXPERTS: True}),
        },
    },
}


def run_worker(out: Path, case: dict, keys: dict) -> None:
    import random

    import torch

    from hone.config.sft_config import SFTConfig
    from hone.models.loading import Loaded
    from hone.models.lora import add_lora
    from hone.trainer.optim import Optimizer
    from hone.trainer.performance import keep_freed_memory
    from hone.trainer.ranks import Ranks
    from hone.trainer.sft.objectives import CrossEntropy
    from hone.trainer.sft.train import Trainer
    from hone.trainer.sharding import shard_model

    keep_freed_memory()
    ranks = Ranks.join_ranks(300.0)
    data = {"fake": True, "seq_len": case["length"], "batch_size": case["rows"]}
    data["micro_batch_size"] = case.get("micro")
    keys = keys | {"data": data, "optim": {"lr": 1e-5}}
    config = SFTConfig.model_validate({"model": {"name": "random"}, **keys})
    ranks = ranks.with_context(config.context_parallel)
    shape = MODELS[case["model"]]
    longest = max(shape["max_position_embeddings"], case["length"])
    model = our_model(shape | {"max_position_embeddings": longest})
    if config.lora:
        add_lora(model, config.lora, seed=0)
    shard_model(model, ranks, config.sharding, config.expert_parallel)
    optimizer = Optimizer(model, config.optim, ranks)
    loaded = Loaded(model, None, Path(), torch.bfloat16)
    trainer = Trainer(config, loaded, optimizer, CrossEntropy(), Path("bad_steps"), ranks)

    def rows(step: int) -> list:
        draw = random.Random(step)
        ids = [draw.choices(range(1000, 40_000), k=case["length"]) for _ in range(case["rows"])]
        return [[(one, [False] + [True] * (len(one) - 1))] for one in ids]

    times, losses = [], []
    for step in range(1, WARM_UP + STEPS + 1):
        batch = rows(step)
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(trainer.train_step(step, 100, iter([batch]))["loss/mean"])
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    if ranks.is_first:
        rate = case["rows"] * case["length"] / statistics.median(times[WARM_UP:])
        memory = torch.cuda.max_memory_allocated() / 2**30
        out.write_text(json.dumps({"rate": rate, "loss": losses[0], "memory_gib": memory}))
    ranks.leave_ranks()


def measure_case(case: dict, count: int, keys: dict) -> dict | str:
    directory = Path(tempfile.mkdtemp())
    out = directory / "out.json"
    words = [sys.executable, __file__, str(out), json.dumps(case), json.dumps(keys)]
    common = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = []
    for rank in range(count):
        own = common | {"RANK": rank, "LOCAL_RANK": rank}
        environment = os.environ | {name: str(value) for name, value in own.items()}
        with (directory / f"{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
    end = time.perf_counter() + LIMIT_SECONDS
    try:
        while any(process.poll() is None for process in processes):
            if time.perf_counter() > end or any(process.poll() for process in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if out.exists():
        return json.loads(out.read_text())
    logs = "\n".join((directory / f"{rank}.log").read_text() for rank in range(count))
    print(logs[-6000:], file=sys.stderr)
    if time.perf_counter() > end:
        return "took too long"
    return "out of memory" if "OutOfMemoryError" in logs else "failed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    figures = {}
    for name in parser.parse_args().cases:
        case = dict(CASES[name])
        common = case.pop("keys", {})
        for way, (count, keys) in case.pop("ways").items():
            found = measure_case(case, count, common | keys)
            if isinstance(found, dict):
                words = f"{found['rate']:,.0f} tokens/s, {found['memory_gib']:.1f} GiB, loss {found['loss']:.5f}"
                figures |= {f"{name}, {way}": [round(x, 5) for x in found.values()]}
            else:
                words = found
                figures |= {f"{name}, {way}": found}
            print(f"{name:14} {case['model']:14} {way:26} {words}", flush=True)
    finish(**figures)


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        run_worker(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main()
