"""Tokens/s of SFT on the tiny recipe, against TRL's SFTTrainer: same model, conversations, order and batch, fp32.

A step is one batch of 36 conversations for both (ours stacked one a row; nobody counts padding as tokens). TRL runs
with padding and without (its flattened batch); the better one counts.

`--loops N`: beside that many busy loops of another program.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from peer import PEER, ROOT, asked_loops, beside, finish, median, peer_python, run_json
from rl_step_cpu import MODEL, RUNTIME

from hone.models.hf import load_model, save_model

ROUNDS, STEPS, BATCH, WARMUP = 3, 33, 36, 3


def ours(model: Path, data: Path) -> float:
    with tempfile.TemporaryDirectory() as out:
        words = [
            Path(sys.executable).parent / "sft",
            "@",
            "examples/reverse_text_tiny/sft.toml",
            "--model.name",
            model,
            "--model.no-random-init",
            "--data.name",
            data,
            "--data.pack",
            "stack",
            "--data.batch-size",
            str(BATCH),
            "--data.no-shuffle",
            "--optim.type",
            "adamw",
            "--max-steps",
            str(STEPS),
            "--output-dir",
            out,
        ]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        rows = [json.loads(line) for line in (Path(out) / "metrics_sft.jsonl").open()][WARMUP:]
    return median([row["progress/tokens"] / row["time/step"] for row in rows])


def theirs(python: Path, model: Path, data: Path, variant: str) -> float:
    result = run_json(python, PEER, "sft", model, data, BATCH, STEPS, variant)
    return median(
        [t / s for t, s in zip(result["tokens"], result["seconds"], strict=True)][WARMUP:]
    )


def main() -> None:
    python = peer_python("trl", *RUNTIME)
    with tempfile.TemporaryDirectory() as directory:
        model, data = Path(directory) / "model", Path(directory) / "sft.jsonl"
        save_model(load_model(MODEL, random_init=True, seed=0), MODEL, model)
        make = [sys.executable, "-m", "reverse_text", "--out", data, "-n", str(BATCH * STEPS)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        rates: dict[str, list[float]] = {"ours": [], "padded": [], "free": []}
        print(f"{'round':>5} {'ours':>10} {'TRL padded':>12} {'TRL free':>12}   tokens/s")
        for number in range(ROUNDS):
            rates["ours"].append(ours(model, data))
            for variant in ("padded", "free"):
                rates[variant].append(theirs(python, model, data, variant))
            print(
                f"{number + 1:>5} {rates['ours'][-1]:>10.0f} {rates['padded'][-1]:>12.0f} {rates['free'][-1]:>12.0f}",
                flush=True,
            )
    mine, peer = median(rates["ours"]), max(median(rates["padded"]), median(rates["free"]))
    print(f"median {mine:.0f} against {peer:.0f} tokens/s: {mine / peer:.2f} times")
    finish(ours_tokens_per_s=mine, peer_tokens_per_s=peer, ratio=mine / peer)


if __name__ == "__main__":
    with beside(asked_loops()):
        main()
