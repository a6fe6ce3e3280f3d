"""The tutorial on a CPU: does `vf-rl` with LoRA learn the tiny recipe, and how long does it take?

A folder of `hone lab setup`, `vf-rl @ configs/vf-rl/reverse-text-tiny.toml` for each seed, and 256 held-out texts
scored with the model before and with each run's last checkpoint.

usage: uv run python benchmarks/tutorial_cpu.py [SEED …]
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peer import finish

from hone.launch.lab import list_templates, prepare, write_templates
from hone.monitors.metrics_log import read_rows

FILE, MODEL = "configs/vf-rl/reverse-text-tiny.toml", "models/reverse-text-tiny-sft"
SHOWN = (1, 25, 50, 75, 100)
ENV = '{"texts": "generated", "min_chars": 4, "max_chars": 10}'


def run(name: str, *words: object) -> str:
    done = subprocess.run(
        [Path(sys.executable).parent / name, *map(str, words)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def held_out(model: str) -> tuple[float, float]:
    """Reward and share of exact answers."""
    said = run("vf-eval", "reverse-text", "-m", model, "-n", 256, "-r", 1, "-t", 20, "-a", ENV)
    return tuple(
        float(re.search(rf"^{name}: avg - ([\d.]+)", said, re.M)[1])
        for name in ("reward", "exact_match")
    )


def main(seeds: list[int]) -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        prepare()
        write_templates(dict(list_templates(["configs/vf-rl"])), Path(place))
        before = held_out(MODEL)
        print(
            f"{'':<8}"
            + "".join(f"{f'step {step}':>10}" for step in SHOWN)
            + f"{'held out':>10}{'exact':>8}{'s':>8}"
        )
        print(
            f"{'before':<8}" + " " * 10 * len(SHOWN) + f"{before[0]:>10.3f}{before[1]:>8.3f}",
            flush=True,
        )
        gains, seconds = [], []
        for seed in seeds:
            start = time.perf_counter()
            run(
                "vf-rl",
                "@",
                FILE,
                "--trainer.args.seed",
                seed,
                "--trainer.args.run-name",
                f"seed_{seed}",
            )
            seconds.append(time.perf_counter() - start)
            rewards = {
                row["step"]: row["reward/mean"]
                for row in read_rows(Path(f"outputs/seed_{seed}/metrics.jsonl"))
            }
            after = held_out(f"outputs/seed_{seed}/checkpoint-100")
            gains.append(after[0] - before[0])
            row = "".join(f"{rewards[step]:>10.3f}" for step in SHOWN)
            print(
                f"{f'seed {seed}':<8}{row}{after[0]:>10.3f}{after[1]:>8.3f}{seconds[-1]:>8.1f}",
                flush=True,
            )
        os.chdir("/")
    finish(least_gain=min(gains), most_seconds=max(seconds))


if __name__ == "__main__":
    main(list(map(int, sys.argv[1:])) or [0, 1, 2])
