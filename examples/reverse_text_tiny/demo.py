"""The whole way in one program: base -> SFT -> RL, with an eval after each, by the commands that a user types.

usage: make demo [SEED=n]        or  python examples/reverse_text_tiny/demo.py [--seed n] [--out outputs/demo]

Ends with a table and writes OUT/report.json and OUT/curves.png.
"""

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from hone.child_process import end_with_parent

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BIN = Path(sys.executable).parent
RECIPE = "examples/reverse_text_tiny"
RL_TEXTS = {"texts": "generated", "min_chars": 4, "max_chars": 10}
SFT_TEXTS = ("--min-chars", "12", "--max-chars", "20")
EVAL_PROMPTS = 256
# Of exact answers, sampled: lowest and highest of seeds 0 to 9 on two instruction sets (benchmarks/RESULTS.md).
EXPECTED = {"base": (0.0, 0.0), "sft": (0.0, 0.33), "rl": (0.94, 1.0)}


def show(command: list[str], background: bool = False) -> None:
    print(
        f"\n$ uv run {' '.join(shlex.quote(word) for word in command)}{' &' if background else ''}",
        flush=True,
    )


def find_program(name: str) -> list[str]:
    """The words that start a program of the environment, also where Hone is not installed but on the path of Python."""
    if name == "python":
        return [sys.executable]
    if (BIN / name).exists():
        return [str(BIN / name)]
    return [sys.executable, "-m", "hone", *([] if name == "hone" else [name])]


def run(*command: str) -> str:
    """Runs a command of the environment, shows it and what it prints, and returns that."""
    show(list(command))
    process = subprocess.Popen(
        [*find_program(command[0]), *command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    lines = []
    for line in process.stdout:
        print(f"  {line}", end="", flush=True)
        lines.append(line)
    if process.wait():
        sys.exit(f"demo: `{command[0]}` ended with exit code {process.returncode}")
    return "".join(lines)


@contextmanager
def server(model: str, *options: str):
    """An inference server on a free port, for as long as the block runs."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = ["inference", "--model.name", model, *options, "--server.port", str(port)]
    show(command, background=True)
    process = subprocess.Popen(
        [*find_program(command[0]), *command[1:]], stdout=subprocess.DEVNULL, cwd=ROOT
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except (urllib.error.URLError, OSError):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit("demo: the inference server did not come up within 120 s")
                time.sleep(0.05)
        yield f"http://localhost:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


def evaluate(model: str, results: Path, *options: str) -> dict:
    """Reward and exact answers on the held-out prompts, sampled and greedy, and the texts of both."""
    result = {}
    with server(model, *options) as url:
        for name, temperature in (("sampled", "1"), ("greedy", "0")):
            saved = results / name
            run(
                "vf-eval",
                "reverse-text",
                "-m",
                model,
                "-b",
                url,
                "-n",
                str(EVAL_PROMPTS),
                "-r",
                "1",
                "-c",
                "64",
                "-t",
                "32",
                "-T",
                temperature,
                "-a",
                json.dumps(RL_TEXTS),
                "-o",
                str(saved),
            )
            metadata = json.loads((saved / "metadata.json").read_text())
            rows = [json.loads(line) for line in (saved / "results.jsonl").open()]
            result[name] = {
                "reward": metadata["reward"],
                "exact": metadata["metrics"]["exact_match"],
                "rows": rows,
            }
    return result


def plot(sft: Path, rl: Path, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sft_rows, rl_rows = ([json.loads(line) for line in path.open()] for path in (sft, rl))
    step, column = [r["step"] for r in rl_rows], lambda name: [r[name] for r in rl_rows]
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), constrained_layout=True)
    (top_left, top_right), (bottom_left, bottom_right) = axes
    top_left.plot(
        [r["step"] for r in sft_rows], [r["loss/mean"] for r in sft_rows], color="tab:blue"
    )
    top_left.set(
        title="SFT: loss on texts of 12 to 20 characters",
        xlabel="step",
        ylabel="nats a token",
        yscale="log",
    )
    mean, spread = column("reward/mean"), column("reward/std")
    top_right.plot(step, mean, color="tab:green", label="reward")
    low, high = [m - s for m, s in zip(mean, spread)], [min(m + s, 1) for m, s in zip(mean, spread)]
    top_right.fill_between(
        step, low, high, color="tab:green", alpha=0.2, label="± std over rollouts"
    )
    top_right.plot(
        step,
        column("metrics/reverse-text/exact_match"),
        color="tab:gray",
        lw=0.8,
        label="exact answers",
    )
    top_right.set(title="RL: reward on 4 to 10 characters", xlabel="step", ylim=(0, 1.02))
    top_right.legend(loc="lower right")
    bottom_left.plot(step, column("entropy/mean"), color="tab:orange")
    bottom_left.set(title="RL: entropy", xlabel="step", ylabel="nats a token", ylim=(0, None))
    bottom_right.plot(step, column("mismatch_kl/mean"), color="tab:red")
    bottom_right.set(title="RL: mismatch KL, sampler against trainer", xlabel="step")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="base -> SFT -> RL -> eval of a tiny model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"))
    parser.add_argument(
        "--sft-steps", type=int, help="fewer than the recipe's, for a test of the demo itself"
    )
    parser.add_argument("--rl-steps", type=int)
    args = parser.parse_args()
    out, seed = args.out, str(args.seed)
    end_with_parent()
    os.environ["HONE_PARENT_PID"] = str(os.getpid())  # what is started here ends with this program
    shutil.rmtree(ROOT / out, ignore_errors=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    stages: dict[str, float] = {}
    start = clock = time.perf_counter()

    def stage(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        stages[name] = round(now - clock, 1)
        clock = now

    data, val = str(out / "data/sft.jsonl"), str(out / "data/val.jsonl")
    run("python", "-m", "reverse_text", "--out", data, "-n", "16000", *SFT_TEXTS, "--seed", seed)
    run(
        "python",
        "-m",
        "reverse_text",
        "--out",
        val,
        "-n",
        "128",
        *SFT_TEXTS,
        "--seed",
        seed,
        "--held-out",
    )
    stage("data")
    base = evaluate(
        f"{RECIPE}/model", ROOT / out / "eval_base", "--model.random-init", "--seed", seed
    )
    stage("base_eval")
    steps = ["--max-steps", str(args.sft_steps)] if args.sft_steps else []
    run(
        "sft",
        "@",
        f"{RECIPE}/sft.toml",
        "--data.name",
        data,
        "--val.name",
        val,
        "--seed",
        seed,
        "--output-dir",
        str(out / "sft"),
        *steps,
    )
    sft_weights = last_weights(out / "sft")
    stage("sft")
    sft = evaluate(sft_weights, ROOT / out / "eval_sft")
    stage("sft_eval")
    steps = ["--max-steps", str(args.rl_steps)] if args.rl_steps else []
    run(
        "rl",
        "@",
        f"{RECIPE}/rl.toml",
        "--model.name",
        sft_weights,
        "--seed",
        seed,
        "--output-dir",
        str(out / "rl"),
        *steps,
    )
    stage("rl")
    rl = evaluate(last_weights(out / "rl"), ROOT / out / "eval_rl")
    stage("rl_eval")

    plot(
        ROOT / out / "sft/metrics_sft.jsonl",
        ROOT / out / "rl/metrics.jsonl",
        ROOT / out / "curves.png",
    )
    report: dict = {"seed": args.seed}
    for name, result in (("base", base), ("sft", sft), ("rl", rl)):
        report[f"{name}_reward"] = round(result["sampled"]["reward"], 4)
        report[f"{name}_exact"] = round(result["sampled"]["exact"], 4)
        report[f"{name}_greedy_reward"] = round(result["greedy"]["reward"], 4)
        report[f"{name}_greedy_exact"] = round(result["greedy"]["exact"], 4)
    report |= {"stage_seconds": stages, "seconds": round(time.perf_counter() - start, 1)}
    (ROOT / out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    summarise(report, base, sft, rl, out)


def last_weights(directory: Path) -> str:
    steps = sorted((ROOT / directory / "weights").glob("step_*"), key=lambda p: int(p.name[5:]))
    return str(directory / "weights" / steps[-1].name)


def summarise(report: dict, base: dict, sft: dict, rl: dict, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(
        title=f"Reversing {EVAL_PROMPTS} held-out texts of 4 to 10 characters (seed {report['seed']})"
    )
    for heading in ("", "reward", "exact, sampled", "expected", "exact, greedy", "seconds"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=not heading)
    seconds = report["stage_seconds"]
    for name, label, spent in (
        ("base", "random weights", 0.0),
        ("sft", "after SFT", seconds["sft"]),
        ("rl", "after RL", seconds["rl"]),
    ):
        table.add_row(
            label,
            f"{report[f'{name}_reward']:.3f}",
            f"{report[f'{name}_exact']:.3f}",
            "{:.2f} to {:.2f}".format(*EXPECTED[name]),
            f"{report[f'{name}_greedy_exact']:.3f}",
            f"{spent:.1f}" if spent else "",
        )
    console.print()
    console.print(table)
    for row in range(3):
        prompt = rl["greedy"]["rows"][row]["prompt"][-1]["content"]
        console.print(f"{prompt!r}, reversed (greedy)", markup=False)
        for label, result in (("before", base), ("SFT", sft), ("RL", rl)):
            shown = result["greedy"]["rows"][row]
            text = "".join(c if c.isprintable() else "·" for c in shown["completion"][0]["content"])
            console.print(
                f"  {label:>6}  {text}  (reward {shown['reward']:.2f})",
                markup=False,
                soft_wrap=True,
            )
    console.print(
        f"\n{report['seconds']:.0f} s in all; {out}/report.json, {out}/curves.png, weights in {out}/rl/weights"
    )


if __name__ == "__main__":
    main()
