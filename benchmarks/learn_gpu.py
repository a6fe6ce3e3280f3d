"""Does a model of some shape learn on a GPU? `rl` from random weights, whose reward is the share of digits.

    python benchmarks/learn_gpu.py [--shape Qwen3.5-0.8B] [--steps 200] [--seed 0] [--tokens 64]

128 rollouts a step in groups of 16. The vocabulary has 2,048 tokens, each with a text of its own: of the published one
most tokens would never be drawn. Half of the characters are digits at first. Prints the mean reward and the mismatch
KL of each quarter of the run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from model_shapes import MODELS, write_shape
from peer import ROOT, finish, with_tasks
from serve_gpu import with_names

QUARTERS = 4
WORDS = 2048  # tokens of the vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=MODELS, default="Qwen3.5-0.8B")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lr", default="3e-5")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="learn_gpu") as directory:
        home = Path(directory)
        write_shape(home / "model", arguments.shape)
        config = json.loads((home / "model" / "config.json").read_text()) | {"vocab_size": WORDS}
        (home / "model" / "config.json").write_text(json.dumps(config))
        with_names(home / "model", WORDS)
        task = {"texts": "generated", "min_chars": 20, "max_chars": 30}
        words = {
            "model.name": home / "model",
            "output-dir": home / "run",
            "orchestrator.env": json.dumps({"id": "any_digits", "args": task}),
            "orchestrator.batch-size": 128,
            "orchestrator.rollouts-per-example": 16,
            "orchestrator.sampling.max-tokens": arguments.tokens,
            "seq-len": 64 + arguments.tokens,
            "inference.kv-cache-gib": 4,
            "max-steps": arguments.steps,
            "log-interval": 20,
            "seed": arguments.seed,
            "trainer.optim.lr": arguments.lr,
        }
        command = [sys.executable, "-m", "hone", "rl", "--model.random-init"]
        for name, value in words.items():
            command += [f"--{name}", str(value)]
        subprocess.run(command, cwd=ROOT, env=with_tasks(), stdout=sys.stderr, check=True)
        rows = [json.loads(line) for line in (home / "run" / "metrics.jsonl").open()]
    figures: dict[str, float | str] = {}
    size = len(rows) // QUARTERS
    for i in range(QUARTERS):
        part = rows[i * size : (i + 1) * size]
        for key, name in (("reward/mean", "reward"), ("mismatch_kl/mean", "mismatch_kl")):
            figures[f"{name}_{i + 1}"] = statistics.mean(row[key] for row in part)
    figures["step_s"] = statistics.median(row["time/step"] for row in rows)
    finish(model=arguments.shape, seed=arguments.seed, **figures)


if __name__ == "__main__":
    main()
