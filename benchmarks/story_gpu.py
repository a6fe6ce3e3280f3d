"""The whole way at Qwen3-0.6B's shape on one GPU: random weights -> SFT -> RL, the same 256 held-out texts after each.

    python benchmarks/story_gpu.py [--seeds 0 1 2] [--sft-steps N] [--sft-chars 12 20] [--rl-steps N] [--shape 0.6b]
        [--unreversed 0.55] [--sft "--data.batch-size 8"] [--rl "--trainer.optim.lr 2e-5"] [--out DIR]

By the files of examples/reverse_text_0.6b and the commands that a user types. A text's reward is the similarity of the
answer, sampled at temperature 1, to its reversal. Must: at most 0.1 untrained, 0.6 after SFT, and at least 0.8 after
RL, in 180 s with every start, for each seed. DIR keeps the metrics of the runs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from peer import ROOT, finish
from serve_cpu import running

from hone.monitors.metrics_log import read_rows

RECIPE = ROOT / "examples" / "reverse_text_0.6b"
TEXTS = 256


def run(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def evaluate(model: Path, env: dict, tokens: int, *options: str) -> float:
    saved = Path(tempfile.mkdtemp(prefix="story_eval"))
    server = [sys.executable, "-m", "hone", "inference", "--model.name", str(model), *options]
    with running(server, "--port", str(model), {}) as (url, _):
        run(
            "-m",
            "hone",
            "vf-eval",
            env["id"],
            "-m",
            model,
            "-b",
            url,
            "-n",
            TEXTS,
            "-r",
            1,
            "-c",
            TEXTS,
            "-t",
            tokens,
            "-T",
            1,
            "-a",
            json.dumps(env["args"]),
            "-o",
            saved,
        )
    return json.loads((saved / "metadata.json").read_text())["reward"]


def story(seed: int, args: argparse.Namespace) -> dict[str, float]:
    home = Path(tempfile.mkdtemp(prefix="story_gpu"))
    model, data = home / "model", home / "sft.jsonl"
    rl = tomllib.loads((RECIPE / "rl.toml").read_text())
    env, tokens = rl["orchestrator"]["env"][0], rl["orchestrator"]["sampling"]["max_tokens"]
    seeded, (low, high) = ("--seed", seed), args.sft_chars
    if args.rl_chars:
        env["args"]["min_chars"], env["args"]["max_chars"] = args.rl_chars
    tries = ("--orchestrator.env", json.dumps([env]), *args.rl.split())
    sft_steps = args.sft_steps or tomllib.loads((RECIPE / "sft.toml").read_text())["max_steps"]
    rl_steps = args.rl_steps or rl["max_steps"]
    found: dict[str, float] = {}
    begun = clock = time.perf_counter()

    def stage(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        found[f"{name}_s"], clock = now - clock, now

    run(ROOT / "examples/reverse_text_tiny/make_model.py", model, "--shape", args.shape)
    run(
        "-m",
        "reverse_text",
        "--out",
        data,
        "-n",
        args.texts,
        "--min-chars",
        low,
        "--max-chars",
        high,
        "--unreversed",
        args.unreversed,
        *seeded,
    )
    stage("data")
    found["untrained"] = evaluate(model, env, tokens, "--model.random-init", "--seed", str(seed))
    stage("untrained")
    run(
        "-m",
        "hone",
        "sft",
        "@",
        RECIPE / "sft.toml",
        "--model.name",
        model,
        "--data.name",
        data,
        "--output-dir",
        home / "sft",
        "--max-steps",
        sft_steps,
        *seeded,
        *args.sft.split(),
    )
    stage("sft")
    weights = home / "sft" / "weights" / f"step_{sft_steps}"
    found["sft"] = evaluate(weights, env, tokens)
    stage("sft_eval")
    run(
        "-m",
        "hone",
        "rl",
        "@",
        RECIPE / "rl.toml",
        "--model.name",
        weights,
        "--output-dir",
        home / "rl",
        "--max-steps",
        rl_steps,
        *seeded,
        *tries,
    )
    stage("rl")
    found["rl"] = evaluate(home / "rl" / "weights" / f"step_{rl_steps}", env, tokens)
    stage("rl_eval")
    found["seconds"] = time.perf_counter() - begun
    rows = read_rows(home / "rl" / "metrics.jsonl")
    curve = [round(row["reward/mean"], 3) for row in rows]
    parts = ", ".join(
        f"{name[:-2]} {value:.0f}" for name, value in found.items() if name.endswith("_s")
    )
    print(
        f"seed {seed}: untrained {found['untrained']:.3f}, after SFT {found['sft']:.3f}, after RL {found['rl']:.3f}; "
        f"{found['seconds']:.0f} s ({parts})\n  reward by RL step: {' '.join(map(str, curve))}",
        flush=True,
    )
    if args.out:
        for kind, file in (("sft", "metrics_sft.jsonl"), ("rl", "metrics.jsonl")):
            (args.out / f"{kind}_{seed}.jsonl").write_text((home / kind / file).read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sft-steps", type=int, help="fewer than the recipe's, for a try")
    parser.add_argument("--rl-steps", type=int)
    parser.add_argument(
        "--sft-chars", type=int, nargs=2, default=[12, 20], help="lengths of its texts"
    )
    parser.add_argument(
        "--rl-chars", type=int, nargs=2, help="other lengths than the recipe's, for a try"
    )
    parser.add_argument(
        "--unreversed", type=float, default=0.55, help="share of the warm-up's answers that are not"
    )
    parser.add_argument("--texts", type=int, default=16000, help="of the warm-up")
    parser.add_argument("--sft", default="", help="words for `sft`")
    parser.add_argument("--rl", default="", help="words for `rl`")
    parser.add_argument(
        "--shape", choices=["tiny", "0.6b"], default="0.6b", help="tiny: to try this on a CPU"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = [story(seed, args) for seed in args.seeds]
    names = ("untrained", "sft", "rl", "seconds")
    worst = {name: (min if name == "rl" else max)(one[name] for one in found) for name in names}
    finish(**worst)


if __name__ == "__main__":
    main()
