"""New weights from the trainer's GPU to the server's, by files and over NCCL: Qwen3-0.6B's shape in bf16, on two GPUs.

    python benchmarks/weights_gpu.py [--steps 15] [--tiny]

An on-policy run of processes, as a user starts it, for each way. Seconds that publishing a version takes, fingerprints
of all weights included, and that the server takes to have and prove it; medians of the steps after the third. `--tiny`
is for a machine without GPUs: the tiny model, by Gloo.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from peer import ROOT, finish, median
from training import QWEN3_06B

TINY = ROOT / "examples" / "reverse_text_tiny"


def metrics(model: Path, out: Path, steps: int, way: str) -> list[dict[str, float]]:
    environment = {"id": "any-text", "args": {"texts": "generated", "min_chars": 4, "max_chars": 10}}
    words = [
        "rl", "@", TINY / "rl.toml", "--model.name", model, "--model.random-init", "true", "--max-steps", steps,
        "--deployment", "processes", "--max-async-level", 0, "--weight-broadcast.type", way, "--output-dir", out,
        "--orchestrator.batch-size", 64, "--orchestrator.env", json.dumps(environment), "--trainer.optim.lr", 1e-5,
    ]  # fmt: skip
    paths = [str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    subprocess.run(
        [sys.executable, "-m", "hone", *map(str, words)], check=True, stdout=subprocess.DEVNULL, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    return [json.loads(line) for line in (out / "metrics.jsonl").open()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as home:
        model = Path(home) / "model"
        shutil.copytree(TINY / "model", model)
        if not options.tiny:
            config = json.loads((model / "config.json").read_text())
            (model / "config.json").write_text(json.dumps(config | QWEN3_06B))
        for way in ("filesystem", "nccl"):
            rows = metrics(model, Path(home) / way, options.steps, way)[3:]
            for name in ("publish_weights", "update_weights"):
                found[f"ours_{way}_{name}"] = median([row[f"time/{name}"] for row in rows])
            size, differs = rows[-1]["weights/bytes"], max(row["weights/canary_difference"] for row in rows)
            changed = sum(row["loss/mean"] != 0 for row in rows)
            print(
                f"{way:10} published in {found[f'ours_{way}_publish_weights']:.3f} s, taken and proved in "
                f"{found[f'ours_{way}_update_weights']:.3f} s: {size / 2**20:,.0f} MiB, {changed} of {len(rows)} steps "
                f"changed them, canary differs by {differs:.1e}",
                flush=True,
            )
    both = [sum(value for name, value in found.items() if way in name) for way in ("filesystem", "nccl")]
    finish(**found, ratio=both[0] / both[1])


if __name__ == "__main__":
    main()
