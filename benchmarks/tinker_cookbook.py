"""Recipes of Tinker's cookbook, unchanged, against `hone tinker` on this machine.

    python benchmarks/tinker_cookbook.py --python COOKBOOK/bin/python [--model DIR] [group_size=8 …] [--then SETTING …]

COOKBOOK is a virtual environment with tinker 0.38.0 and tinker_cookbook 0.6.1 (docs/tinker.md).

Without --model, a base model of 0.6M parameters is made first: it is trained on sums in the form of the recipe's
prompts until about half of its answers are right. math_rl then trains an adapter on sums up to 100 + 100 by RL. The
recipe has no schedule of the learning rate; with --then it runs once more from the state that it saved, with these
settings instead. Ends with the share of right answers at first and at last, and the largest difference between the
sampler's and the trainer's log-probabilities.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from peer import finish
from tinker_server import serve_tinker
from tokenizers import AddedToken, Tokenizer

import hone
from hone.authoring.tiny_model import write_model

SHOWN = "User: What is 4 + 5?\n\nAssistant: 9\n\n"
TOKENS = ["User:", "Assistant:", " What is ", " + ", "?\n\n", "\n\n"]
SAMPLING = {"max_batch_size": 256, "max_model_len": 128, "kv_cache_gib": 0.3}
BASE_SHARE = 0.5  # of right answers, at which the base model is done
RECIPES = {
    "math_rl": [
        "tinker_cookbook.recipes.math_rl.train",
        "env=arithmetic",
        "loss_fn=importance_sampling",
        "max_tokens=6",
    ],
}


def write_sums_model(directory: Path) -> None:
    """Write a model directory without weights, whose tokenizer has the recipe's phrases."""
    write_model(directory, [["sums"]])
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    config["vocab_size"] = -(-tokenizer.get_vocab_size() // 8) * 8
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def train_base(directory: Path, max_steps: int) -> float:
    """Train all weights on sums; return the share of right answers."""
    session = hone.TrainingSession(directory, random_init=True, device="cpu", sampling=SAMPLING)
    draw = np.random.default_rng(0)
    encode = session.tokenizer.encode

    def encode_sum(x: int, y: int) -> tuple[list[int], list[int]]:
        prompt = f"{SHOWN}User: What is {x} + {y}?\n\nAssistant:"
        return encode(prompt), encode(f" {x + y}\n\nUser:")

    share = 0.0
    for step in range(1, max_steps + 1):
        pairs = [encode_sum(*draw.integers(0, 101, 2)) for _ in range(256)]
        session.forward_backward([hone.Datum.from_completion(*pair) for pair in pairs])
        session.optim_step(hone.AdamParams(lr=3e-3 * min(1.0, step / 50)))
        if step % 20 == 0:
            pairs = [encode_sum(*draw.integers(0, 101, 2)) for _ in range(400)]
            prompts = [prompt for prompt, _ in pairs]
            found = session.sample(prompts, max_tokens=6, stop_ids=[])
            right = [
                one[0].ids[: len(answer)] == answer
                for one, (_, answer) in zip(found, pairs, strict=True)
            ]
            share = float(np.mean(right))
            print(f"base model, step {step}: {share:.2f} of the answers are right", flush=True)
            if share >= BASE_SHARE:
                break
    session.export_weights(directory)
    return share


def run_recipe(args: argparse.Namespace, model: Path, work: Path) -> list[dict]:
    """Serve the model and run the recipe, once or twice; return the rows of its metrics."""
    rows = []
    with serve_tinker(model, work) as environment:
        state: list[str] = []
        for number, settings in enumerate([args.settings] + [args.then] * bool(args.then)):
            log_path = work / f"log_{number}"
            words = [*RECIPES[args.recipe], f"model_name={model}", "renderer_name=role_colon"]
            words += [f"log_path={log_path}", "behavior_if_log_dir_exists=delete", *state]
            output = work / "recipe.log"
            with output.open("w") as log:
                command = [args.python, "-m", *words, *settings]
                done = subprocess.run(command, env=environment, stdout=log, stderr=log, cwd=work)
            if done.returncode:
                sys.exit(f"tinker_cookbook: the recipe failed\n{output.read_text()[-3000:]}")
            rows += [json.loads(line) for line in (log_path / "metrics.jsonl").open()]
            *_, last = map(json.loads, (log_path / "checkpoints.jsonl").open())
            state = [f"load_checkpoint_path={last['state_path']}"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="of the cookbook's environment")
    parser.add_argument("--recipe", default="math_rl", choices=RECIPES)
    parser.add_argument("--model", type=Path, help="model directory; else one is made")
    parser.add_argument("--base-steps", type=int, default=3000)
    parser.add_argument(
        "--then", nargs="*", help="settings of a second run, from the first's state"
    )
    parser.add_argument("settings", nargs="*", help="settings of the recipe, such as group_size=8")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tinker_cookbook") as directory:
        work, begun = Path(directory), time.perf_counter()
        model = args.model
        if model is None:
            model = work / "model"
            write_sums_model(model)
            train_base(model, args.base_steps)
        made = time.perf_counter()
        rows = [row for row in run_recipe(args, model, work) if "env/all/correct" in row]
        seconds = time.perf_counter() - made
    right = [row["env/all/correct"] for row in rows]
    differences = [abs(row["optim/kl_sample_train_v1"]) for row in rows]
    print("share of right answers by step: " + " ".join(f"{x:.2f}" for x in right))
    finish(
        recipe=args.recipe,
        steps=len(rows),
        right_first=right[0],
        right_last=right[-1],
        right_mean_of_last_10=round(sum(right[-10:]) / len(right[-10:]), 3),
        most_kl_sample_train=f"{max(differences):.1e}",
        recipe_seconds=seconds,
        model_seconds=made - begun,
    )


if __name__ == "__main__":
    main()
