"""The tiny recipe as three processes against one process, on the CPU: the same learning, and what the processes cost.

    python benchmarks/services_cpu.py [--seeds 0 1 2]

For each seed: SFT, then RL in one process, by processes at async level 0 and by processes at level 1. Final reward:
the mean over the last ten steps. At level 0 rewards and weights must be the same to the bit. Overhead of a step is its
time less sampling and training, at 128 rollouts; start-up is from `rl` to the first request for rollouts.
"""

import argparse
import filecmp
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peer import ROOT, finish, last_weights, median

BIN = Path(sys.executable).parent
TINY = "examples/reverse_text_tiny"
TRAINER, ORCHESTRATOR = (
    ("--trainer", "@", f"{TINY}/rl/train.toml"),
    ("--orchestrator", "@", f"{TINY}/rl/orch.toml"),
)
INFERENCE = ("--inference", "@", f"{TINY}/rl/infer.toml", "--inference.server.port", "0")


def run(*words: object) -> None:
    subprocess.run(
        [BIN / str(words[0]), *map(str, words[1:])], check=True, stdout=subprocess.DEVNULL, cwd=ROOT
    )


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").open()]


def final_reward(out: Path) -> float:
    last = [row["reward/mean"] for row in rows(out)[-10:]]
    return sum(last) / len(last)


def start_up(words: list[object], out: Path) -> float:
    """Seconds from the command to the first request for rollouts."""
    start = time.perf_counter()
    with subprocess.Popen(list(map(str, words)), stdout=subprocess.DEVNULL, cwd=ROOT) as process:
        while not (out / "rollouts" / "step_1").exists():
            assert process.poll() is None
            time.sleep(0.005)
        until_rollouts = time.perf_counter() - start
    return until_rollouts - rows(out)[0]["time/step"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        gaps, same = [], []
        print(
            f"{'seed':>4} {'one process':>12} {'level 0':>9} {'level 1':>9}   final reward; seconds of RL"
        )
        for seed in args.seeds:
            data, sft = home / f"sft_{seed}.jsonl", home / f"sft_{seed}"
            run(
                "python",
                "-m",
                "reverse_text",
                "--out",
                data,
                "-n",
                16000,
                "--min-chars",
                12,
                "--max-chars",
                20,
                "--seed",
                seed,
            )
            run(
                "sft",
                "@",
                f"{TINY}/sft.toml",
                "--data.name",
                data,
                "--seed",
                seed,
                "--output-dir",
                sft,
            )
            shared = ("--model.name", last_weights(sft), "--seed", seed)
            outs, seconds = {}, {}
            for name, options in {
                "one": ("@", f"{TINY}/rl.toml"),
                "level 0": (*TRAINER, *ORCHESTRATOR, *INFERENCE, "--max-async-level", 0),
                "level 1": (*TRAINER, *ORCHESTRATOR, *INFERENCE, "--max-async-level", 1),
            }.items():
                outs[name] = home / f"{name}_{seed}"
                start = time.perf_counter()
                run("rl", *options, *shared, "--output-dir", outs[name])
                seconds[name] = time.perf_counter() - start
            reward = {name: final_reward(out) for name, out in outs.items()}
            weights = [
                last_weights(outs[name]) / "model.safetensors" for name in ("one", "level 0")
            ]
            rewards = [
                [row["reward/mean"] for row in rows(outs[name])] for name in ("one", "level 0")
            ]
            same.append(rewards[0] == rewards[1] and filecmp.cmp(*weights, shallow=False))
            gaps.append(abs(reward["level 1"] - reward["one"]))
            print(
                f"{seed:>4} {reward['one']:>12.4f} {reward['level 0']:>9.4f} {reward['level 1']:>9.4f}   "
                + " / ".join(f"{value:.0f} s" for value in seconds.values())
                + f"; level 0 the same to the bit: {same[-1]}",
                flush=True,
            )
        batch = ("--orchestrator.batch-size", 128, "--max-steps", 40, "--max-async-level", 0)
        starts, overheads = [], []
        for number in range(3):
            out = home / f"cost_{number}"
            words = [
                BIN / "rl",
                *TRAINER,
                *ORCHESTRATOR,
                *INFERENCE,
                *shared,
                *batch,
                "--output-dir",
                out,
            ]
            starts.append(start_up(words, out))
            overheads += [
                row["time/step"] - row["time/generate"] - row["time/train"] for row in rows(out)[5:]
            ]
    print(f"largest gap in final reward, level 1 to one process: {max(gaps):.4f}")
    print(
        f"start-up {median(starts):.1f} s, overhead of a step {median(overheads) * 1000:.0f} ms at 128 rollouts"
    )
    finish(
        ours_level_1_gap=max(gaps),
        ours_level_0_same=all(same),
        ours_start_up_seconds=median(starts),
        ours_overhead_seconds=median(overheads),
    )


if __name__ == "__main__":
    main()
