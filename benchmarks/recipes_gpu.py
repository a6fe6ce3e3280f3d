"""Time and memory of the recipes for published models on one GPU, on models of the same shape with random weights.

    python benchmarks/recipes_gpu.py [--recipes qwen3_0.6b qwen3_1.7b_lora …] [--steps 3]

A recipe of `examples/gsm8k` runs as it is, but for the model, the environment and the evaluations: prompts have
PROMPT_TOKENS tokens of any text, the reward is any number, and every completion has its full length, which answers to
GSM8K do not reach. So the times are upper bounds, and nothing is learned. A line of JSON a recipe.
"""

import argparse
import json
import tempfile
import tomllib
from pathlib import Path

from cards_gpu import GIB, SYSTEM, median_times, run_rl, write_model
from peer import ROOT, finish

PROMPT_TOKENS = 160
RECIPES = {
    "qwen3_0.6b": "Qwen3-0.6B",
    "qwen3_1.7b_lora": "Qwen3-1.7B",
    "qwen3_4b_lora": "Qwen3-4B",
    "qwen2.5_math_1.5b_rank1": "Qwen2.5-1.5B",
}


def flatten_keys(table: dict, prefix: str = "") -> list[str]:
    """Return the command line options that say what a table of TOML says."""
    words = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            words += flatten_keys(value, f"{name}.")
        else:
            words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return words


def run_recipe(name: str, model: Path, steps: int) -> dict:
    recipe = tomllib.loads((ROOT / "examples" / "gsm8k" / f"{name}.toml").read_text())
    del recipe["orchestrator"]["eval"], recipe["orchestrator"]["env"], recipe["model"]
    characters = PROMPT_TOKENS - SYSTEM
    task = {"texts": "generated", "min_chars": characters, "max_chars": characters}
    env = json.dumps({"id": "any_text", "args": task})
    with tempfile.TemporaryDirectory(prefix="recipes_gpu") as directory:
        run = Path(directory) / "run"
        recipe |= {"output_dir": str(run), "max_steps": steps, "log_interval": 1}
        words = ["--model.name", str(model), "--orchestrator.env", env]
        words += ["--orchestrator.no-drop-zero-signal", *flatten_keys(recipe)]
        peak, error = run_rl(words, name, {})
        if error:
            return {"error": error}
        rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    settings = recipe["orchestrator"]
    decoded = settings["batch_size"] * settings["sampling"]["max_tokens"]
    middle = median_times(rows)
    return {
        "rollouts": settings["batch_size"],
        "completion_tokens": settings["sampling"]["max_tokens"],
        "step_s": middle["time/step"],
        "generate_s": middle["time/generate"],
        "train_s": middle["time/train"],
        "decoded_tokens_per_s": decoded / middle["time/generate"],
        "trained_tokens_per_s": decoded / middle["time/train"],
        "peak_gib": rows[-1]["perf/peak_memory"],
        "in_use_gib": peak / GIB,
        "mismatch_kl": rows[0]["mismatch_kl/mean"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    for name in args.recipes:
        with tempfile.TemporaryDirectory(prefix="recipes_gpu") as directory:
            model = Path(directory) / RECIPES[name]
            write_model(model)
            finish(recipe=name, **run_recipe(name, model, args.steps))


if __name__ == "__main__":
    main()
