"""`rl` on one GPU by shape of model and of rollouts: a step's time, with memory as `rl` chooses it and with less.

    python benchmarks/rl_gpu.py [--shapes NAME …] [--steps 6] [--limited] [--lora | --offload]

Random weights and a reward made of the text; no completion ends early, and groups whose rewards are alike are trained
on too, so that all steps have as many samples. Two steps warm up; a line of JSON a shape. `--limited` gives keys and
values 8 GiB and 256 sequences instead of what is left; `--lora` trains adapters of rank 16. `--offload` keeps masters
and moments of any model in the machine's memory, and computes activations once more. Without either, 8B keeps moments
in bfloat16 and computes activations once more.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from model_shapes import write_shape
from peer import ROOT, finish, with_tasks

SYSTEM = 7  # tokens of a prompt beside the text
SHAPES = {  # model, rollouts, of a group, prompt, completion
    "135M 128 x (37+128)": ("SmolLM2-135M", 128, 16, 37, 128),
    "135M 16 x (37+128)": ("SmolLM2-135M", 16, 16, 37, 128),
    "0.6B 128 x (37+128)": ("Qwen3-0.6B", 128, 16, 37, 128),
    "Qwen3.5-0.8B 128 x (37+128)": ("Qwen3.5-0.8B", 128, 16, 37, 128),
    "0.6B 128 x (64+128)": ("Qwen3-0.6B", 128, 16, 64, 128),
    "0.6B 1024 x (224+511)": ("Qwen3-0.6B", 1024, 16, 224, 511),
    "4B 128 x (222+498)": ("Qwen3-4B", 128, 16, 222, 498),
    "8B 128 x (37+128)": ("Qwen3-8B", 128, 16, 37, 128),
    "MoE-2.7B 128 x (37+128)": ("MoE-2.7B", 128, 16, 37, 128),
    "30B-A3B 128 x (37+128)": ("Qwen3-30B-A3B", 128, 16, 37, 128),
}
# What 8B takes on one card
LARGE = ("--trainer.optim.state-dtype", "bfloat16", "--trainer.activation-checkpointing")
FULL_CARD = ("--inference.gpu-memory-utilization", "0.98")  # what 30B and its merged copy take
OFFLOAD = ("--trainer.optim.offload", "--trainer.activation-checkpointing")
LORA = ("--trainer.lora.rank", "16")
LIMITED = ("--inference.kv-cache-gib", "8", "--inference.max-batch-size", "256")


def measure(name: str, steps: int, options: tuple[str, ...]) -> dict:
    model, rollouts, group, prompt, completion = SHAPES[name]
    with tempfile.TemporaryDirectory(prefix="rl_gpu") as directory:
        home = Path(directory)
        write_shape(home / "model", model)
        characters = prompt - SYSTEM
        env = {
            "id": "any_text",
            "args": {"texts": "generated", "min_chars": characters, "max_chars": characters},
        }
        words = [
            "rl",
            "--model.name",
            home / "model",
            "--model.random-init",
            "--output-dir",
            home / "run",
            "--orchestrator.env",
            json.dumps(env),
            "--orchestrator.batch-size",
            rollouts,
            "--orchestrator.rollouts-per-example",
            group,
            "--orchestrator.sampling.max-tokens",
            completion,
            "--orchestrator.no-drop-zero-signal",
            "--seq-len",
            prompt + completion,
            "--max-steps",
            steps,
            "--log-interval",
            1,
            *options,
        ]
        command = [sys.executable, "-m", "hone", *map(str, words)]
        if code := subprocess.run(
            command, cwd=ROOT, env=with_tasks(), stdout=sys.stderr
        ).returncode:
            raise SystemExit(f"rl ended with {code}")
        rows = [json.loads(line) for line in (home / "run" / "metrics.jsonl").open()]
    print(
        {k: v for k, v in rows[-1].items() if k.split("/")[0] in ("time", "perf", "progress")},
        file=sys.stderr,
    )
    measured = rows[2:]
    middle = lambda key: statistics.median(row[key] for row in measured)  # noqa: E731
    return {
        "shape": name,
        "options": " ".join(options),
        "step_s": middle("time/step"),
        "generate_s": middle("time/generate"),
        "train_s": middle("time/train"),
        "generated_tokens_per_s": rollouts * completion / middle("time/generate"),
        "first_step_s": rows[0]["time/step"],
        "slowest_later_s": max(row["time/step"] for row in measured),
        "memory_gib": middle("perf/peak_memory"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limited", action="store_true")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--lora", action="store_true")
    ways.add_argument("--offload", action="store_true")
    args = parser.parse_args()
    for name in args.shapes:
        way = (
            LORA
            if args.lora
            else OFFLOAD
            if args.offload
            else LARGE
            if name.startswith("8B")
            else ()
        )
        if name.startswith("30B"):
            way += FULL_CARD
        finish(**measure(name, args.steps, (LIMITED if args.limited else ()) + way))


if __name__ == "__main__":
    main()
