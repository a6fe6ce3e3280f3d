"""Whether tasks of one's own learn with the settings of docs/environments.md: three tasks, weak and strong starts.

    python benchmarks/own_tasks_cpu.py [--seeds 3] [--out outputs/own_tasks] [--only add]

SFT of few or many steps, RL with the documented settings; 1,000 held-out examples before and after, paired, sampled at
temperature 1 as in training, and greedily. What is in the folder already is not made again. Must, as sampled: no end
below its start by more than two standard errors, and at least half of what is left gained by starts below 0.9.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from peer import ROOT, with_tasks

sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "reverse_text_tiny")]
BIN = Path(sys.executable).parent
# Steps of SFT: weak, strong
STARTS = {"add": (300, 1000), "count": (300, 800), "letters": (100, 300)}
STEPS = 600
RL = (
    f"--orchestrator.batch-size 256 --orchestrator.rollouts-per-example 8 --orchestrator.sampling.max-tokens 16 "
    f"--seq-len 64 --max-steps {STEPS} --trainer.optim.type muon --trainer.optim.lr 1e-3 "
    "--trainer.scheduler.type linear --trainer.scheduler.warmup-steps 10"
).split()
SFT = (
    "--data.batch-size 4 --data.seq-len 256 --optim.type muon --optim.lr 4e-3 --scheduler.type wsd "
    "--scheduler.warmup-steps 20"
).split()


def run(*words: object) -> None:
    subprocess.run(
        [str(BIN / str(words[0])), *map(str, words[1:])], check=True, stdout=subprocess.DEVNULL
    )


def rewards(weights: Path, task: str, out: Path, temperature: int) -> np.ndarray:
    """Of every held-out example."""
    from demo import server

    kept = weights.parents[1] / f"held_out_{temperature}.json"
    if not kept.is_file():
        with server(str(weights)) as url:
            printed = subprocess.run(
                [
                    BIN / "vf-eval",
                    "own-tasks",
                    "-m",
                    weights,
                    "-b",
                    url,
                    "-n",
                    "1000",
                    "-r",
                    "1",
                    "-c",
                    "64",
                    "-t",
                    "16",
                    "-T",
                    str(temperature),
                    "-s",
                    "-a",
                    json.dumps({"task": task}),
                ],
                check=True,
                capture_output=True,
                text=True,
                cwd=out,
            ).stdout
        saved = out / printed.rpartition("saved in ")[2].split()[0]
        rows = [json.loads(line) for line in (saved / "results.jsonl").open()]
        kept.write_text(
            json.dumps([row["reward"] for row in sorted(rows, key=lambda row: row["example_id"])])
        )
    return np.array(json.loads(kept.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "own_tasks")
    parser.add_argument("--only", choices=STARTS, help="one of the tasks")
    args = parser.parse_args()
    os.environ |= with_tasks()
    out, is_met = args.out.resolve(), True
    print(
        "task     SFT steps  seed  sampled: before  after    gain ± error  of what was left; greedily: the same"
    )
    for task in [args.only] if args.only else STARTS:
        place, shown = out / task, json.dumps({"task": task})
        if not (place / "model").is_dir():
            run(
                "hone",
                "env",
                "data",
                "own-tasks",
                "-o",
                place / "sft.jsonl",
                "-n",
                12000,
                "-a",
                shown,
            )
            run("hone", "env", "model", "own-tasks", "-o", place / "model", "-a", shown)
        for steps in STARTS[task]:
            for seed in range(args.seeds):
                sft, rl = place / f"sft{steps}_{seed}", place / f"rl_{steps}_{seed}_final"
                start, end = sft / "weights" / f"step_{steps}", rl / "weights" / f"step_{STEPS}"
                common = ("--seed", seed, "--clean", "--output-dir")
                if not start.is_dir():
                    run(
                        "sft",
                        "--model.name",
                        place / "model",
                        "--model.random-init",
                        "--data.name",
                        place / "sft.jsonl",
                        "--max-steps",
                        steps,
                        *SFT,
                        *common,
                        sft,
                    )
                if not end.is_dir():
                    env = json.dumps({"id": "own-tasks", "args": {"task": task}})
                    run("rl", "--model.name", start, "--orchestrator.env", env, *RL, *common, rl)
                said = f"{task:8} {steps:9}  {seed:4}"
                for temperature in (1, 0):
                    before, after = (
                        rewards(weights, task, out, temperature) for weights in (start, end)
                    )
                    gains, left = after - before, 1 - before.mean()
                    gain, error = gains.mean(), gains.std() / np.sqrt(len(gains))
                    share = gain / left if left > 0 else 0.0
                    if temperature:
                        is_met &= bool(gain >= -2 * error and (left <= 0.1 or share >= 0.5))
                    said += f"   {before.mean():.3f}  {after.mean():.3f}  {gain:+.3f} ± {error:.3f}  {share:5.0%}"
                print(said, flush=True)
    print("all as they must be" if is_met else "not all as they must be")


if __name__ == "__main__":
    main()
