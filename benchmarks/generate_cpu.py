"""Output tokens a second on the CPU, in process: ours against transformers' generate, tiny model, 128 requests x 64.

Random weights of the tiny recipe's model, prompts of 30 tokens, ends of sequences ignored, temperature 1. Ours gives
logprobs, transformers' generate does not. Both stay up in processes of their own and take turns.

`--loops N`: beside that many busy loops of another program.
"""

import sys
import tempfile
from pathlib import Path

from generate_gpu import Worker
from peer import ROOT, asked_loops, beside, finish, median

from hone.models.hf import load_model, save_model

ROUNDS = 5
MODEL = ROOT / "examples" / "reverse_text_tiny" / "model"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tiny") as directory:
        model = Path(directory) / "model"
        save_model(load_model(MODEL, random_init=True, seed=0), MODEL, model)
        workers = {
            engine: Worker(sys.executable, engine, model) for engine in ("ours", "transformers")
        }
        speeds: dict[str, list[float]] = {engine: [] for engine in workers}
        for number in range(ROUNDS + 1):
            for engine, worker in workers.items():
                speed = worker.run(workload="tiny_128", seed=number)
                if number:  # the first is for warming up
                    speeds[engine].append(speed)
        for worker in workers.values():
            worker.end()
        for engine, values in speeds.items():
            print(f"{engine:>12}: {median(values):>9,.0f} tokens/s  {[round(v) for v in values]}")
    mine, theirs = median(speeds["ours"]), median(speeds["transformers"])
    finish(ours_tokens_per_s=mine, transformers_tokens_per_s=theirs, ratio=mine / theirs)


if __name__ == "__main__":
    with beside(asked_loops()):
        main()
