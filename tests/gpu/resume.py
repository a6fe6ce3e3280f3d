"""Runs that are killed and go on, on one GPU: the same weights, bit for bit, as a run that was left alone.

    python -m tests.gpu.resume [--shape Qwen3-0.6B] [--steps 200] [--kills 3] [--seed 0]
        [--runs killed processes sharded fast vllm] [--vllm PYTHON] [--out DIR]

A warm-up of random weights by SFT, then RL in exact numerics: once left alone, once killed (SIGKILL) at random moments
and resumed, once as processes that wait for each other (level 0; on two GPUs where there are two), for some steps with
a trainer sharded over two GPUs, once in fast numerics, and once with a vLLM as sampler, of an environment whose PYTHON
is given. Prints how many logprobs of the trained weights differ between sampler and trainer, and whether the runs end
at the same bits; exits with 1 if they do not. DIR keeps the metrics; `--draw DIR` makes a picture of their mismatch by
step.
"""

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hone.monitors.metrics_log import read_rows

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from model_shapes import MODELS, TINY, write_shape  # noqa: E402

SHARDED = 20  # steps with a trainer over two GPUs, whose gradients are sums of another order than one GPU's


def start(words: list, log: Path) -> subprocess.Popen:
    with log.open("a") as out:
        return subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def ended(process: subprocess.Popen, log: Path) -> None:
    if process.wait():
        raise SystemExit(
            f"{process.args[1:4]} ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        )


def last_step(run: Path) -> int:
    rows = read_rows(run / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


def weights(run: Path, step: int) -> str:
    """A digest of them."""
    files = sorted((run / "weights" / f"step_{step}").glob("*.safetensors"))
    if not files:
        raise SystemExit(f"{run} has no weights of step {step}")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def plot(directory: Path) -> None:
    """The mismatch of every step, of the runs whose metrics are in a directory, as DIRECTORY/exact.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.add_subplot()
    names = {"vllm": "vLLM samples, Hone trains", "fast": "Hone, fast", "alone": "Hone, exact: 0"}
    for (name, label), colour in zip(names.items(), ("#b45309", "#4338ca", "#0f766e"), strict=True):
        if (file := directory / f"{name}.jsonl").exists():
            rows = read_rows(file)
            values = [row["mismatch_kl/mean"] for row in rows]
            axes.plot(
                [row["step"] for row in rows], values, color=colour, label=label, linewidth=1.4
            )
    axes.set_yscale("symlog", linthresh=1e-6)
    axes.set_ylim(-1e-7, None)
    axes.set(
        title="Mismatch KL of sampler and trainer, before each update", xlabel="step", ylabel="nats"
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(directory / "exact.png", dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[*MODELS, "tiny"], default="Qwen3-0.6B")
    parser.add_argument(
        "--numerics", choices=["exact", "fast"], default="exact", help="fast: to try this on a CPU"
    )
    parser.add_argument("--warm-up", type=int, default=150, help="steps of SFT")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--interval", type=int, default=40, help="steps from a checkpoint to the next"
    )
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--runs",
        nargs="*",
        choices=["killed", "processes", "sharded", "fast", "vllm"],
        default=["killed", "processes", "fast"],
        help="beside the run that is left alone; digests of weights can be compared between calls",
    )
    parser.add_argument(
        "--rollouts",
        type=int,
        default=1000,
        help="of the trained weights, whose logprobs are compared",
    )
    parser.add_argument("--vllm", help="the Python of an environment that has vLLM")
    parser.add_argument(
        "--broadcast", choices=["nccl", "filesystem"], default="nccl", help="of weights to a server"
    )
    parser.add_argument(
        "--expected", help="digest of the weights of a run that was left alone, to leave it out"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--draw", type=Path, metavar="DIR", help="only draw the mismatch of the runs that DIR has"
    )
    args = parser.parse_args()
    if args.draw:
        plot(args.draw)
        return 0
    draw = random.Random(args.seed)
    home = Path(tempfile.mkdtemp(prefix="resume_gpu"))
    out = args.out or home
    model, log = home / "model", out / "resume.log"
    if args.shape == "tiny":
        model = TINY
    else:
        write_shape(model, args.shape)
    figures: dict[str, float] = {}

    data = home / "sft.jsonl"
    ended(
        start(
            ["-m", "reverse_text", "--out", data, "-n", 8000, "--min-chars", 12, "--max-chars", 20],
            log,
        ),
        log,
    )
    began = time.perf_counter()
    words = [
        "-m",
        "hone",
        "sft",
        "@",
        ROOT / "examples/reverse_text_tiny/sft.toml",
        "--model.name",
        model,
        "--data.name",
        data,
        "--max-steps",
        args.warm_up,
        "--optim.lr",
        1e-3,
        "--output-dir",
        home / "sft",
        "--model.numerics",
        args.numerics,
    ]
    ended(start(words, log), log)
    trained = home / "sft" / "weights" / f"step_{args.warm_up}"
    digest = weights(home / "sft", args.warm_up)
    print(f"warm-up: {time.perf_counter() - began:.0f} s, weights {digest}", flush=True)

    def rl(name: str, numerics: str, *options: object, max_steps: int = args.steps) -> list:
        deployment = () if "--deployment" in options else ("--deployment", "colocated")
        return [
            "-m",
            "hone",
            "rl",
            "@",
            ROOT / "examples/reverse_text_tiny/rl.toml",
            "--model.name",
            trained,
            "--model.numerics",
            numerics,
            "--output-dir",
            home / name,
            "--orchestrator.batch-size",
            128,
            "--orchestrator.rollouts-per-example",
            16,
            "--max-steps",
            max_steps,
            "--trainer.optim.lr",
            2e-4,
            "--ckpt.interval",
            args.interval,
            "--log-interval",
            1,
            "--inference.kv-cache-gib",
            16,
            *deployment,
            *options,
        ]

    def whole(name: str, *words: object, max_steps: int = args.steps) -> float:
        began = time.perf_counter()
        ended(start(rl(name, *words, max_steps=max_steps), log), log)
        took = time.perf_counter() - began
        rows = read_rows(home / name / "metrics.jsonl")
        differ = sum(row.get("exact/differs", 0) for row in rows)
        rewards = [row["reward/mean"] for row in rows]
        print(
            f"{name}: {took:.0f} s, reward {sum(rewards[:10]) / 10:.3f} to {sum(rewards[-10:]) / 10:.3f}, "
            f"mismatch KL at most {max(row['mismatch_kl/mean'] for row in rows):.3g}, {differ:.0f} logprobs differ",
            flush=True,
        )
        (out / f"{name}.jsonl").write_text((home / name / "metrics.jsonl").read_text())
        return took

    for options in ((), ("--lora.rank", 16)) if args.numerics == "exact" and args.rollouts else ():
        words = [
            "-m",
            "hone",
            "probe",
            "--model.name",
            trained,
            "--model.numerics",
            "exact",
            "--rollouts",
            args.rollouts,
            *options,
        ]
        done = subprocess.run(
            [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True
        )
        print(
            "probe of the trained weights",
            *options,
            done.stdout.strip()[-300:],
            done.stderr.strip()[-300:],
            flush=True,
        )
    alone = args.expected
    if alone is None:
        figures["alone_s"] = whole("alone", args.numerics)
        alone = weights(home / "alone", args.steps)
        print(f"alone: weights {alone}", flush=True)

    if "killed" in args.runs:
        moments = sorted(draw.sample(range(5, args.steps - 1), args.kills))
        began = time.perf_counter()
        for moment in moments:
            process = start(rl("killed", args.numerics, "--resume", "auto"), log)
            while last_step(home / "killed") < moment and process.poll() is None:
                time.sleep(0.01)
            time.sleep(draw.random() * 0.2)
            if process.poll() is not None:
                raise SystemExit(
                    f"the run ended before it was killed at step {moment}:\n{log.read_text()[-3000:]}"
                )
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        ended(start(rl("killed", args.numerics, "--resume", "auto"), log), log)
        figures["killed_s"] = time.perf_counter() - began
        found = weights(home / "killed", args.steps)
        figures["killed_same"] = float(found == alone)
        print(
            f"killed at steps {moments}: {figures['killed_s']:.0f} s, weights {found}, same bits: {found == alone}"
        )

    ports: tuple = (
        "--deployment",
        "processes",
        "--max-async-level",
        0,
        "--inference.server.port",
        0,
        "--weight-broadcast.type",
        args.broadcast,
    )
    if "processes" in args.runs:
        figures["processes_s"] = whole("processes", args.numerics, *ports)
        found = weights(home / "processes", args.steps)
        figures["processes_same"] = float(found == alone)
        print(f"processes at level 0: weights {found}, same bits: {found == alone}", flush=True)
    if "sharded" in args.runs:
        shared = (
            "--trainer-gpu-ids",
            "[0, 1]",
            "--inference-gpu-ids",
            "[0]",
            "--weight-broadcast.type",
            "filesystem",
        )
        figures["sharded_s"] = whole("sharded", args.numerics, *ports, *shared, max_steps=SHARDED)
    if "fast" in args.runs and args.numerics == "exact":
        figures["fast_s"] = whole("fast", "fast")
    if "vllm" in args.runs:
        vllm = (
            "--inference.backend",
            "vllm",
            "--inference.vllm-python",
            args.vllm,
            "--inference.enforce-eager",
            "true",
        )
        figures["vllm_s"] = whole(
            "vllm", "fast", *ports, *vllm, "--inference.gpu-memory-utilization", 0.3
        )
    print(figures)
    return int(any(value != 1 for name, value in figures.items() if name.endswith("_same")))


if __name__ == "__main__":
    sys.exit(main())
