"""What fits on a card: `rl` by model, way of training and size of the card, as estimated and as measured.

    python benchmarks/cards_gpu.py [--models Qwen3-0.6B …] [--ways full lora no-merge 8-bit] [--cards 16 24 …]

Each cell is a run of `rl` on random weights, 128 rollouts of 256 + 512 tokens a step in groups of 16, in a process that
may use no more of the GPU than such a card has (HONE_GPU_GIB). A line of JSON a cell: the estimate of `--dry-run`, the
peak, whether the run went through, seconds of a step and tokens/s of decoding and training.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from model_shapes import MODELS, write_shape
from peer import ROOT, finish, median, with_tasks

PROMPT, COMPLETION, ROLLOUTS, GROUP = 256, 512, 128, 16
SYSTEM = 7  # tokens of a prompt beside the text
LORA = ("--trainer.lora.rank", "16")
WAYS = {
    "full": (),
    "full, moments in bf16, offload": (
        "--trainer.optim.state-dtype",
        "bfloat16",
        "--trainer.optim.offload",
    ),
    "lora": LORA,
    "no-merge": (*LORA, "--trainer.lora.no-merge"),
    "8-bit": (*LORA, "--trainer.lora.base-bits", "8"),
}


def run_cell(model: Path, way: str, card: int, steps: int) -> dict:
    from hone.config.base import load_config
    from hone.config.rl_config import RLConfig
    from hone.launch.card_fit import CARD_GIB, need_on
    from hone.models.families import parse_model_config
    from hone.models.spec import read_model_config

    characters = PROMPT - SYSTEM
    args = {"texts": "generated", "min_chars": characters, "max_chars": characters}
    with tempfile.TemporaryDirectory(prefix="cards_gpu") as directory:
        run = Path(directory) / "run"
        words = ["--model.name", str(model), "--model.random-init", "--output-dir", str(run)]
        words += ["--orchestrator.env", json.dumps({"id": "any_text", "args": args})]
        words += ["--orchestrator.batch-size", str(ROLLOUTS)]
        words += ["--orchestrator.rollouts-per-example", str(GROUP)]
        words += ["--orchestrator.sampling.max-tokens", str(COMPLETION)]
        words += ["--orchestrator.no-drop-zero-signal", "--seq-len", str(PROMPT + COMPLETION)]
        words += ["--max-steps", str(steps), "--log-interval", "1", *WAYS[way]]
        need = need_on(
            load_config(RLConfig, words), parse_model_config(read_model_config(model)), 2, card
        )
        assert need is not None
        cell = {
            "card_gb": card,
            "way": way,
            "needs_gib": need.least_bytes / 2**30,
            "expected": need.fits(CARD_GIB[card]),
        }
        env = with_tasks() | {"HONE_GPU_GIB": str(CARD_GIB[card])}
        command = [sys.executable, "-m", "hone", "rl", *words]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True
        )
        cell["fits"] = done.returncode == 0
        if done.returncode:
            return cell | {"error": (done.stderr.strip().splitlines() or [""])[-1][:300]}
        rows = [json.loads(line) for line in (run / "metrics.jsonl").open()][1:]
    middle = {
        key: median([row[key] for row in rows])
        for key in ("time/step", "time/generate", "time/train")
    }
    trained = ROLLOUTS * COMPLETION + ROLLOUTS // GROUP * PROMPT
    return cell | {
        "peak_gib": max(row["perf/peak_memory"] for row in rows),
        "step_s": middle["time/step"],
        "decoded_tokens_per_s": ROLLOUTS * COMPLETION / middle["time/generate"],
        "trained_tokens_per_s": trained / middle["time/train"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Qwen3-0.6B", "Qwen3-4B"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--cards", nargs="+", type=int, default=[16, 24, 32, 48, 80, 141])
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    for name in args.models:
        with tempfile.TemporaryDirectory(prefix="cards_gpu") as directory:
            write_shape(Path(directory) / "model", name)
            for way in args.ways:
                for card in args.cards:
                    finish(model=name, **run_cell(Path(directory) / "model", way, card, args.steps))


if __name__ == "__main__":
    main()
