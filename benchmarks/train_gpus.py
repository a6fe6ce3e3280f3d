"""Training on several GPUs by FSDP2, against one: Qwen3-4B's shape, random weights, 16,384 tokens a GPU and step.

    python benchmarks/train_gpus.py

Runs with 1, 2, 4, … GPUs of this machine, each as `torchrun` does: first steps whose tokens grow with the GPUs (the
share of linear), then steps on the same 16,384 tokens (the loss, which is to be that of one GPU to bf16 noise).
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import training
from peer import finish

QWEN3_4B = training.QWEN3_06B | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
ROW, ROWS = 4096, 4
WARM_UP, STEPS, CURVE = 3, 8, 8


def worker(out: Path) -> None:
    import random

    import torch

    from hone.config.sft_config import SFTConfig
    from hone.models.loading import Loaded
    from hone.trainer.optim import Optimizer
    from hone.trainer.ranks import Ranks
    from hone.trainer.sft.objectives import CrossEntropy
    from hone.trainer.sft.train import Trainer
    from hone.trainer.sharding import shard_model

    ranks = Ranks.join_ranks(300.0)

    def rows(step: int, count: int) -> list:
        """Rows of documents of 512 to 2,048 tokens, the last one cut."""
        draw, found = random.Random(step), []
        for _ in range(count):
            ids = draw.choices(range(1000, 150_000), k=ROW)
            cuts = [0, draw.randint(512, 2048), draw.randint(2560, 4000), ROW]
            parts = [[1000, *ids[a:b]] for a, b in itertools.pairwise(cuts)]
            found.append([(part, [False] + [True] * (len(part) - 1)) for part in parts])
        return found

    def trainer(micro_batch: int, lr: float) -> Trainer:
        data = {"fake": True, "seq_len": ROW, "batch_size": 64, "micro_batch_size": micro_batch}
        config = SFTConfig(model={"name": "random"}, data=data, optim={"lr": lr})
        model = training.our_model(QWEN3_4B)
        shard_model(model, ranks, config.sharding)
        loaded = Loaded(model, None, Path(), torch.bfloat16)
        optimizer = Optimizer(model, config.optim, ranks)
        return Trainer(config, loaded, optimizer, CrossEntropy(), Path("bad_steps"), ranks)

    growing, times = trainer(ROWS, 1e-6), []
    batches = [rows(step, ROWS * ranks.count) for step in range(WARM_UP + STEPS)]
    for step, batch in enumerate(batches, 1):
        start = time.perf_counter()
        growing.train_step(step, 100, iter([batch]))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() / 2**30
    del growing
    torch.cuda.empty_cache()
    fixed = trainer(1, 1e-4)
    losses = [
        fixed.train_step(step, 100, iter([rows(1000 + step % 2, ROWS)]))["loss/mean"]
        for step in range(1, CURVE + 1)
    ]
    if ranks.is_first:
        tokens = ROW * ROWS * ranks.count
        rate = tokens / statistics.median(times[WARM_UP:])
        out.write_text(
            json.dumps({"tokens_per_second": rate, "losses": losses, "memory_gib": memory})
        )
    ranks.leave_ranks()


def main() -> None:
    import torch

    counts = [n for n in (1, 2, 4, 8) if n <= torch.cuda.device_count()]
    found = {}
    for count in counts:
        out = Path(tempfile.mkdtemp()) / "out.json"
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(count),
        ]
        subprocess.run([*torchrun, __file__, str(out)], check=True)
        found[count] = json.loads(out.read_text())
        rate = found[count]["tokens_per_second"]
        share = rate / count / found[1]["tokens_per_second"]
        worst = max(
            abs(a / b - 1) for a, b in zip(found[count]["losses"], found[1]["losses"], strict=True)
        )
        losses = " ".join(f"{x:.4f}" for x in found[count]["losses"])
        print(
            f"{count} GPUs: {rate:,.0f} tokens/s, {share:.1%} of linear, "
            f"{found[count]['memory_gib']:.0f} GiB; loss {losses}, off by {worst:.2g}"
        )
    most = counts[-1]
    finish(
        gpus=most,
        ours=found[most]["tokens_per_second"],
        linear=found[most]["tokens_per_second"] / most / found[1]["tokens_per_second"],
    )


if __name__ == "__main__":
    worker(Path(sys.argv[1])) if "WORLD_SIZE" in os.environ else main()
