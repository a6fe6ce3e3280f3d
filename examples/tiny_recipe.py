"""A recipe of a tiny model on a CPU, by the commands that a user types: data -> model -> SFT -> RL, an eval before and
after RL on the same held-out examples.

usage: python examples/tiny_recipe.py wordle_tiny|alphabet_sort_tiny|calculator_tiny [--seed n] [--out DIR]

Ends with a line of the paired gain and writes OUT/report.json and OUT/curves.png.
"""

import argparse
import json
import os
import shutil
import sys
import time
import tomllib
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "reverse_text_tiny"))
from demo import ROOT, last_weights, run, server

from hone.child_process import end_with_parent


def evaluate(model: str, env: dict, settings: dict, place: list[str], saved: Path) -> dict:
    """Rewards of every held-out example, sampled, and the metrics; saved in `saved`."""
    with server(model) as url:
        run(
            "vf-eval",
            env["id"],
            "-m",
            model,
            "-b",
            url,
            "-n",
            str(settings["examples"]),
            "-r",
            str(settings.get("rollouts", 1)),
            "-c",
            "64",
            "-t",
            str(settings["max_tokens"]),
            "-T",
            "1",
            "-o",
            str(saved),
            "-a",
            json.dumps(env["args"]),
            *place,
        )
    metadata = json.loads((saved / "metadata.json").read_text())
    rows = [json.loads(line) for line in (saved / "results.jsonl").open()]
    return {
        "rewards": [row["reward"] for row in rows],
        "metrics": metadata["metrics"],
        "folder": str(saved),
    }


def plot(rows: list[dict], metrics: list[str], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    step = [row["step"] for row in rows]
    axes[0].plot(step, [row["reward/mean"] for row in rows], color="tab:green")
    axes[0].set(title="RL: reward", xlabel="step")
    for name in metrics:
        axes[1].plot(step, [row.get(name) for row in rows], label=name.rpartition("/")[2], lw=1)
    axes[1].set(title="RL: metrics", xlabel="step")
    axes[1].legend()
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rl-steps", type=int, help="fewer than the recipe's, for a try")
    args = parser.parse_args()
    folder, seed = Path("examples") / args.recipe, str(args.seed)
    out = args.out or Path("outputs") / args.recipe / f"seed_{seed}"
    end_with_parent()
    os.environ["HONE_PARENT_PID"] = str(os.getpid())  # what is started here ends with this program
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / folder), os.environ.get("PYTHONPATH", "")]
    )
    shutil.rmtree(ROOT / out, ignore_errors=True)
    recipe = tomllib.loads((ROOT / folder / "recipe.toml").read_text())
    env = tomllib.loads((ROOT / folder / "rl.toml").read_text())["orchestrator"]["env"][0]
    place, start = ["-p", str(folder)], time.perf_counter()
    shown = ["-a", json.dumps(env["args"] | recipe["data"].get("args", {})), "--seed", seed]
    data, model = str(out / "sft.jsonl"), str(out / "model")
    run("hone", "env", "data", env["id"], "-o", data, "-n", str(recipe["data"]["examples"]), *shown)
    run("hone", "env", "model", env["id"], "-o", model, *shown)
    run(
        "sft",
        "@",
        str(folder / "sft.toml"),
        "--model.name",
        model,
        "--model.random-init",
        "--data.name",
        data,
        "--output-dir",
        str(out / "sft"),
        "--seed",
        seed,
    )
    before_weights = last_weights(out / "sft")
    before = evaluate(before_weights, env, recipe["eval"], place, ROOT / out / "eval_sft")
    steps = ["--max-steps", str(args.rl_steps)] if args.rl_steps else []
    begun = time.perf_counter()
    run(
        "rl",
        "@",
        str(folder / "rl.toml"),
        "--model.name",
        before_weights,
        "--output-dir",
        str(out / "rl"),
        "--seed",
        seed,
        *steps,
    )
    rl_seconds = time.perf_counter() - begun
    after = evaluate(last_weights(out / "rl"), env, recipe["eval"], place, ROOT / out / "eval_rl")
    rows = [json.loads(line) for line in (ROOT / out / "rl/metrics.jsonl").open()]
    plot(
        rows, [f"metrics/{env['id']}/{name}" for name in recipe["plot"]], ROOT / out / "curves.png"
    )
    gains = np.array(after["rewards"]) - np.array(before["rewards"])
    report = {
        "recipe": args.recipe,
        "seed": args.seed,
        "before": float(np.mean(before["rewards"])),
        "after": float(np.mean(after["rewards"])),
        "gain": float(gains.mean()),
        "gain_error": float(gains.std() / np.sqrt(len(gains))),
        "metrics_before": before["metrics"],
        "metrics_after": after["metrics"],
        "rl_seconds": round(rl_seconds, 1),
        "seconds": round(time.perf_counter() - start, 1),
    }
    (ROOT / out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(
        f"\n{args.recipe}, seed {seed}: reward {report['before']:.3f} after SFT, {report['after']:.3f} after RL; "
        f"paired gain {report['gain']:.3f} ± {report['gain_error']:.3f}; {report['seconds']:.0f} s; {out}/curves.png"
    )


if __name__ == "__main__":
    main()
