"""Seconds of an RL step on the CPU, against TRL's GRPOTrainer on the same model directory.

The work of both: 8 prompts of 14 characters x 16 rollouts, up to 24 new tokens each, one optimiser step. Random
weights, so that hardly any rollout stops early. Ours is the `rl` command, its step time from metrics.jsonl: sampling,
rewards, training and writing the rollouts.

`--loops N`: beside that many busy loops of another program.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from peer import PEER, ROOT, asked_loops, beside, finish, median, peer_python, run_json

from hone.models.hf import load_model, save_model

ROUNDS, STEPS = 3, 12
MODEL = ROOT / "examples" / "reverse_text_tiny" / "model"
RUNTIME = ("torch==2.13.0", "trl==1.16.0", "transformers>=5,<6")


def ours(model: Path) -> list[float]:
    with tempfile.TemporaryDirectory() as out:
        environment = {
            "id": "reverse-text",
            "args": {"texts": "generated", "min_chars": 14, "max_chars": 14},
        }
        words = [
            Path(sys.executable).parent / "rl",
            "--model.name",
            model,
            "--max-steps",
            str(STEPS),
            "--seq-len",
            "64",
            "--orchestrator.batch-size",
            "128",
            "--orchestrator.rollouts-per-example",
            "16",
            "--orchestrator.sampling.max-tokens",
            "24",
            "--orchestrator.env",
            json.dumps(environment),
            "--orchestrator.no-drop-zero-signal",
            "--trainer.optim.lr",
            "1e-6",
            "--output-dir",
            out,
        ]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").open()]
    assert min(row["completion_len/mean"] for row in rows) > 20, (
        "the rollouts stopped early: not the work that is meant"
    )
    return [row["time/step"] for row in rows[2:]]


def main() -> None:
    python = peer_python("trl", *RUNTIME)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        save_model(load_model(MODEL, random_init=True, seed=0), MODEL, model)
        our_seconds, their_seconds = [], []
        print(f"{'round':>5} {'ours, s a step':>15} {'TRL, s a step':>15}")
        for number in range(ROUNDS):
            one, two = ours(model), run_json(python, PEER, "grpo", model, STEPS)["seconds"][2:]
            our_seconds += one
            their_seconds += two
            print(f"{number + 1:>5} {median(one):>15.3f} {median(two):>15.3f}", flush=True)
    mine, theirs = median(our_seconds), median(their_seconds)
    print(f"median {mine:.3f} s against {theirs:.3f} s: {theirs / mine:.1f} times faster")
    finish(ours_step_seconds=mine, peer_step_seconds=theirs, ratio=theirs / mine)


if __name__ == "__main__":
    with beside(asked_loops()):
        main()
