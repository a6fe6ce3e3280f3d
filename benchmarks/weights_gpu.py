"""New weights from the trainer's GPU to the server's, by files and over NCCL: a shape of model in bf16, on two GPUs.

    python benchmarks/weights_gpu.py [--shape Qwen3-0.6B] [--ways filesystem nccl] [--steps 15] [--level 0]

A run of processes, as a user starts it, for each way: 8 prompts x 16 rollouts of 37 + 128 tokens a step. Groups whose
rewards are alike are trained on too, so that all steps have as many samples. Seconds that publishing a version takes,
fingerprints of all weights included, and that the server takes to have it and prove it by its fingerprints, from when
the orchestrator has seen it; medians of the steps after the third. The first steps are printed, the slowest after the
second as a multiple of the median, and more numbers of those that take half as long again as the median. With level 1
sampling is a step ahead, and the time of a step is the larger of the two sides. `--shape tiny` is for a machine without
GPUs: the tiny model, by Gloo.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from model_shapes import MODELS, TINY, write_shape
from peer import ROOT, finish, median, with_tasks

# Of a step; what is told of slow ones
SLOW, TELLING = (1.5, ("time", "batch", "failures", "tokens", "completion_len"))


def metrics(model: Path, out: Path, steps: int, way: str, level: int) -> list[dict[str, float]]:
    environment = {
        "id": "any-text",
        "args": {"texts": "generated", "min_chars": 30, "max_chars": 30},
    }
    words = [
        "rl",
        "--model.name",
        model,
        "--model.random-init",
        "true",
        "--max-steps",
        steps,
        "--seq-len",
        165,
        "--deployment",
        "processes",
        "--max-async-level",
        level,
        "--weight-broadcast.type",
        way,
        "--output-dir",
        out,
        "--orchestrator.batch-size",
        128,
        "--orchestrator.rollouts-per-example",
        16,
        "--orchestrator.sampling.max-tokens",
        128,
        "--orchestrator.env",
        json.dumps(environment),
        "--orchestrator.no-drop-zero-signal",
        "--trainer.optim.lr",
        1e-5,
        "--log-interval",
        1,
    ]
    subprocess.run(
        [sys.executable, "-m", "hone", *map(str, words)],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
        env=with_tasks(),
    )
    return [json.loads(line) for line in (out / "metrics.jsonl").open()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[*MODELS, "tiny"], default="Qwen3-0.6B")
    parser.add_argument(
        "--ways", nargs="+", choices=["filesystem", "nccl"], default=["filesystem", "nccl"]
    )
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--level", type=int, default=0)
    options = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as home:
        model = TINY
        if options.shape != "tiny":
            write_shape(model := Path(home) / "model", options.shape)
        for way in options.ways:
            every = metrics(model, Path(home) / way, options.steps, way, options.level)
            rows = every[3:]
            for name in ("publish_weights", "update_weights"):
                found[f"ours_{way}_{name}"] = median([row[f"time/{name}"] for row in rows])
            found[f"ours_{way}_step"] = median([row["time/step"] for row in rows])
            first = ", ".join(f"{row['time/step']:.3f}" for row in every[:10])
            slowest = max(row["time/step"] for row in every[2:]) / found[f"ours_{way}_step"]
            found[f"ours_{way}_slowest"] = slowest
            print(
                f"the first steps took {first} s, the slowest after the second {slowest:.2f} times the median"
            )
            for row in every[2:]:
                if row["time/step"] > SLOW * found[f"ours_{way}_step"]:
                    told = {
                        k: round(v, 4) for k, v in row.items() if v and k.split("/")[0] in TELLING
                    }
                    print(f"step {row['step']} took {row['time/step']:.3f} s: {told}", flush=True)
            size, differs = (
                rows[-1]["weights/bytes"],
                max(row["weights/canary_difference"] for row in rows),
            )
            changed = sum(row["loss/mean"] != 0 for row in rows)
            print(
                f"{way:10} published in {found[f'ours_{way}_publish_weights']:.3f} s, taken and proved in "
                f"{found[f'ours_{way}_update_weights']:.3f} s: {size / 2**20:,.0f} MiB, {changed} of {len(rows)} steps "
                f"changed them, canary differs by {differs:.1e}; a step {found[f'ours_{way}_step']:.3f} s",
                flush=True,
            )
    if len(options.ways) > 1:
        both = [
            found[f"ours_{way}_publish_weights"] + found[f"ours_{way}_update_weights"]
            for way in ("filesystem", "nccl")
        ]
        found["ratio"] = both[0] / both[1]
    finish(**found)


if __name__ == "__main__":
    main()
