"""Run a recipe by the commands that a user types, with an evaluation before and after RL on the same held-out examples.

usage: python examples/run_recipe.py RECIPE [--seed n] [--out DIR] [--rl-steps n] [--kv-cache-gib n] [--defaults]

RECIPE is a folder here with a recipe.toml. Its model is made from the environment's texts, or is the pretrained one
that `scripts/pretrained.py` writes; with an sft.toml the recipe begins with a supervised warm-up. Ends with a line of
the paired gain and some answers before and after, and writes OUT/report.json, OUT/samples.json and OUT/curves.png.
`--defaults` gives `rl` no more than model, environment, number of steps and length of an answer.
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


def evaluate(
    model: str, env: dict, settings: dict, place: list[str], saved: Path, engine: list[str]
) -> dict:
    """Rewards of every held-out example, sampled, and the metrics; saved in `saved`."""
    with server(model, *engine) as url:
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
        "rows": rows,
    }


def plot_runs(rows: list[dict], metrics: list[str], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    count = 2 if metrics else 1
    figure, grid = plt.subplots(
        1, count, figsize=(5 * count, 3.6), constrained_layout=True, squeeze=False
    )
    axes = grid[0]
    trained = [row for row in rows if "reward/mean" in row]
    step = [row["step"] for row in trained]
    axes[0].plot(step, [row["reward/mean"] for row in trained], color="tab:green", label="training")
    for key in sorted({key for row in rows for key in row if key.startswith("eval/")}):
        if key.endswith("/reward"):
            points = [(row["step"], row[key]) for row in rows if key in row]
            axes[0].plot(*zip(*points), "o-", color="tab:blue", label="held out")
    axes[0].set(title="RL: reward", xlabel="step")
    axes[0].legend()
    for name in metrics:
        axes[1].plot(step, [row.get(name) for row in trained], label=name.rpartition("/")[2], lw=1)
    if metrics:
        axes[1].set(title="RL: metrics", xlabel="step")
        axes[1].legend()
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def make_data(recipe: dict, env: dict, shown: list[str], data: str, seed: str) -> None:
    """Write the conversations of the warm-up, by the environment or by its own program."""
    if "program" in recipe["data"]:
        words = map(str, recipe["data"]["words"])
        run("python", "-m", recipe["data"]["program"], *words, "--out", data, "--seed", seed)
    else:
        examples = str(recipe["data"]["examples"])
        run("hone", "env", "data", env["id"], "-o", data, "-n", examples, *shown)


def pick_samples(found: dict[str, dict]) -> list[dict]:
    """Five held-out examples with what each model answered, and its reward."""
    samples = []
    for i in range(0, len(found["after"]["rows"]), max(1, len(found["after"]["rows"]) // 5)):
        row = found["after"]["rows"][i]
        sample = {"prompt": row["prompt"][-1]["content"], "answer": row.get("answer")}
        for name, one in found.items():
            said = [m["content"] for m in one["rows"][i]["completion"] if m["role"] == "assistant"]
            sample[name] = {"text": " | ".join(map(str, said)), "reward": one["rewards"][i]}
        samples.append(sample)
    return samples[:5]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rl-steps", type=int, help="fewer than the recipe's, for a try")
    parser.add_argument(
        "--kv-cache-gib", help="memory for keys and values, where several runs share a GPU"
    )
    parser.add_argument(
        "--defaults", action="store_true", help="RL with the defaults instead of the recipe's keys"
    )
    args = parser.parse_args()
    folder, seed = Path("examples") / args.recipe, str(args.seed)
    if not (ROOT / folder / "recipe.toml").is_file():
        names = sorted(path.parent.name for path in (ROOT / "examples").glob("*/recipe.toml"))
        sys.exit(f"run_recipe: no recipe {args.recipe!r}; there are {', '.join(names)}")
    out = args.out or Path("outputs") / args.recipe / f"seed_{seed}"
    end_with_parent()
    os.environ["HONE_PARENT_PID"] = str(os.getpid())  # what is started here ends with this program
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / folder), os.environ.get("PYTHONPATH", "")]
    )
    shutil.rmtree(ROOT / out, ignore_errors=True)
    recipe = tomllib.loads((ROOT / folder / "recipe.toml").read_text())
    keys = tomllib.loads((ROOT / folder / "rl.toml").read_text())
    env = keys["orchestrator"]["env"][0]
    env.setdefault("args", {})
    place, start = ["-p", str(folder)], time.perf_counter()
    data_args = env["args"] | recipe.get("data", {}).get("args", {})
    shown = ["-a", json.dumps(data_args), "--seed", seed]
    found: dict[str, dict] = {}
    engine = ["--kv-cache-gib", args.kv_cache_gib] if args.kv_cache_gib else []

    def evaluate_as(name: str, model: str) -> None:
        found[name] = evaluate(
            model, env, recipe["eval"], place, ROOT / out / f"eval_{name}", engine
        )

    model = recipe.get("pretrained") or str(out / "model")
    if "pretrained" not in recipe:
        run("hone", "env", "model", env["id"], "-o", model, *shown)
    elif not (ROOT / model / "config.json").is_file():
        run("python", "scripts/pretrained.py", "--out", model)
    common = ["--seed", seed]
    if (ROOT / folder / "sft.toml").is_file():
        data = str(out / "sft.jsonl")
        make_data(recipe, env, shown, data, seed)
        if "pretrained" in recipe:
            evaluate_as("base", model)
        words = ["sft", "@", str(folder / "sft.toml"), "--model.name", model, "--data.name", data]
        words += [] if "pretrained" in recipe else ["--model.random-init"]
        run(*words, "--output-dir", str(out / "sft"), *common)
        model = last_weights(out / "sft")
    evaluate_as("before", model)
    steps = ["--max-steps", str(args.rl_steps)] if args.rl_steps else []
    words = ["rl", "@", str(folder / "rl.toml"), "--model.name", model]
    if args.defaults:
        words = ["rl", "--model.name", model, "--orchestrator.env", json.dumps(env)]
        most_tokens = str(keys["orchestrator"]["sampling"]["max_tokens"])
        words += ["--orchestrator.sampling.max-tokens", most_tokens]
        words += [] if steps else ["--max-steps", str(keys["max_steps"])]
    words += ["--inference.kv-cache-gib", args.kv_cache_gib] if engine else []
    begun = time.perf_counter()
    run(*words, "--output-dir", str(out / "rl"), *common, *steps)
    rl_seconds = time.perf_counter() - begun
    evaluate_as("after", last_weights(out / "rl"))

    rows = [json.loads(line) for line in (ROOT / out / "rl/metrics.jsonl").open()]
    samples = pick_samples(found)
    gains = np.array(found["after"]["rewards"]) - np.array(found["before"]["rewards"])
    report = {
        "recipe": args.recipe,
        "seed": args.seed,
        **{name: float(np.mean(one["rewards"])) for name, one in found.items()},
        "gain": float(gains.mean()),
        "gain_error": float(gains.std() / np.sqrt(len(gains))),
        **{f"metrics_{name}": one["metrics"] for name, one in found.items()},
        "rl_seconds": round(rl_seconds, 1),
        "seconds": round(time.perf_counter() - start, 1),
        "peak_memory_gib": max((row.get("perf/peak_memory", 0.0) for row in rows), default=0.0),
    }
    (ROOT / out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (ROOT / out / "samples.json").write_text(json.dumps(samples, indent=2) + "\n")
    plot_runs(
        rows, [f"metrics/{env['id']}/{name}" for name in recipe["plot"]], ROOT / out / "curves.png"
    )
    for sample in samples:
        print(
            f"\n{sample['prompt']!r}"
            + (f", answer {sample['answer']!r}" if sample["answer"] else "")
        )
        for name in found:
            print(f"  {name:>6}  {sample[name]['text']!r}  (reward {sample[name]['reward']:.2f})")
    base = f"{report['base']:.3f} at first, " if "base" in report else ""
    print(
        f"\n{args.recipe}, seed {seed}: reward {base}{report['before']:.3f} before RL, {report['after']:.3f} after; "
        f"paired gain {report['gain']:.3f} ± {report['gain_error']:.3f}; {report['seconds']:.0f} s, of which RL "
        f"{rl_seconds:.0f}; {out}/curves.png"
    )


if __name__ == "__main__":
    main()
