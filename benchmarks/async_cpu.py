"""Sampling ahead of training, with an environment that takes 0.05 to 2 s a call: the tiny recipe as three processes.

    python benchmarks/async_cpu.py [--steps 300] [--on-policy-steps 100]

On-policy against max_async_level 2 with a quarter more groups under way: steps a second, the oldest token that was
trained on, and the reward after as many steps as the on-policy run has.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from peer import ROOT, finish, last_weights, median, with_tasks

BIN = Path(sys.executable).parent
TINY = "examples/reverse_text_tiny"
BOUND = 4
SLOW, ARGUMENTS = "slow-text", {"texts": "generated", "min_chars": 4, "max_chars": 10}


def run(*words: object) -> None:
    subprocess.run(
        [BIN / str(words[0]), *map(str, words[1:])],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
        env=with_tasks(),
    )


def warmed_up(home: Path) -> Path:
    """The tiny model after the recipe's SFT."""
    data, sft = home / "sft.jsonl", home / "sft"
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
    )
    run("sft", "@", f"{TINY}/sft.toml", "--data.name", data, "--output-dir", sft)
    return last_weights(sft)


def reinforced(
    model: Path, out: Path, steps: int, environment: str, *options: object
) -> list[dict[str, float]]:
    """The metrics of RL as three processes, a row a step."""
    run(
        "rl",
        "--trainer",
        "@",
        f"{TINY}/rl/train.toml",
        "--orchestrator",
        "@",
        f"{TINY}/rl/orch.toml",
        "--inference",
        "@",
        f"{TINY}/rl/infer.toml",
        "--inference.server.port",
        0,
        "--model.name",
        model,
        "--output-dir",
        out,
        "--max-steps",
        steps,
        "--trainer.scheduler.type",
        "constant",
        "--orchestrator.env",
        json.dumps({"id": environment, "args": ARGUMENTS}),
        *options,
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert len(rows) == steps
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--on-policy-steps", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        model = warmed_up(home)
        found = {}
        for name, level, steps in (
            ("on-policy", 0, options.on_policy_steps),
            ("ahead", 2, options.steps),
        ):
            rows = reinforced(
                model,
                home / name,
                steps,
                SLOW,
                "--max-async-level",
                level,
                "--orchestrator.oversampling-factor",
                1.25 if level else 1.0,
                "--orchestrator.max-off-policy-steps",
                BOUND,
            )
            seconds = median([row["time/step"] for row in rows[5:]])
            rewards = [row["reward/mean"] for row in rows[: options.on_policy_steps][-10:]]
            found[name] = {
                "rate": 1 / seconds,
                "oldest": max(row["batch/off_policy_level/max"] for row in rows),
                "stale": sum(row["batch/groups_stale"] for row in rows),
                "reward": sum(rewards) / len(rewards),
                "lag": max(row["perf/event_loop_lag/p99"] for row in rows),
            }
            print(f"{name}: {found[name]}", flush=True)
    ahead, on_policy = found["ahead"], found["on-policy"]
    finish(
        ours_ahead=ahead["rate"],
        ours_on_policy=on_policy["rate"],
        ratio=ahead["rate"] / on_policy["rate"],
        oldest=ahead["oldest"],
        bound=BOUND,
        reward_ahead=ahead["reward"],
        reward_on_policy=on_policy["reward"],
    )


if __name__ == "__main__":
    main()
