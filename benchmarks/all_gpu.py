"""All benchmarks of one machine's GPUs, one after the other: their figures as a table, a step of RL by part as a plot.

    python benchmarks/all_gpu.py [--trl PYTHON] [--vllm PYTHON] [--only NAME …] [--out outputs/gpu]

PYTHON has TRL, or vLLM; without one ours are measured alone. Each program's output goes to OUT/NAME.log while it runs;
OUT/figures.md has the table, OUT/figures.json the same for programs, OUT/step.png the plot. A program that fails is
named in the table, the others go on, and the exit code is 1. weights_gpu is left out where there is one GPU.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from peer import ROOT

HERE = ROOT / "benchmarks"
PARTS = {"generate": "#0f766e", "train": "#4338ca", "rest": "#9ca3af"}


def programs(args: argparse.Namespace) -> dict[str, list[str]]:
    """Words of each, by name. The shortest first: a table that is cut short has the most."""
    trl, vllm = (
        (["--trl", args.trl] if args.trl else []),
        (["--vllm", args.vllm] if args.vllm else []),
    )
    return {
        "kernels/floor": [],
        "rl_step_gpu": trl,
        "rl_gpu": [],
        "weights_gpu": ["--ways", "nccl"],
        "generate_gpu": vllm,
        "train_gpu": trl or ["--only", "ours"],
        "kernels/shapes": vllm,
    }


def gpus() -> int:
    """Asked of another process, which gives back what it takes of them."""
    words = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def figures_in(log: Path) -> list[dict]:
    """The closing lines of a benchmark (`peer.finish`): one, or one a shape."""
    lines = [
        line
        for line in log.read_text().splitlines()
        if line.startswith("{") and '"machine"' in line
    ]
    return [json.loads(line) for line in lines]


def table(found: dict[str, dict]) -> str:
    rows = ["| program | seconds | figures |", "|---|---|---|"]
    for name, one in found.items():
        for figures in one["figures"] or [{}]:
            words = ", ".join(
                f"{key} {value}" for key, value in figures.items() if key != "machine"
            )
            failed = f"ended with {one['exit_code']}: {name}.log" if one["exit_code"] else ""
            rows.append(
                f"| `{name}` | {one['seconds']:.0f} | {'; '.join(filter(None, [words, failed]))} |"
            )
    return "\n".join(rows) + "\n"


def plot(steps: list[dict], path: Path) -> None:
    """Bars of each shape of rl_step_gpu: the floor and ours by part, peers whole."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8, 2.2 * len(steps) + 0.6), layout="constrained")
    for axes, row in zip(figure.subplots(len(steps), squeeze=False)[:, 0], steps, strict=True):
        ours = {part: row[f"ours_{part}_s"] for part in ("generate", "train")}
        bars = {
            "floor": {part: row[f"floor_{part}_s"] for part in ("generate", "train")},
            "Hone": ours | {"rest": row["ours_step_s"] - sum(ours.values())},
        }
        peers = {"peer_vllm_step_s": "TRL, vLLM", "peer_hf_step_s": "TRL, transformers"}
        bars |= {name: {"rest": row[key]} for key, name in peers.items() if key in row}
        for name, parts in bars.items():
            left = 0.0
            for part, seconds in parts.items():
                axes.barh(name, seconds, left=left, color=PARTS[part])
                left += seconds
            axes.annotate(f" {left:.3g} s", (left, name), va="center")
        axes.invert_yaxis()
        axes.set(title=f"A step of RL, {row['shape']}", xlabel="seconds")
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    colours = {"generating": "generate", "training": "train", "rest, or whole": "rest"}
    handles = [Patch(color=PARTS[part], label=label) for label, part in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl", help="a Python that has TRL, and vLLM beside it")
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--only", nargs="+", help="of these programs")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu")
    args = parser.parse_args()
    known = programs(args)
    if unknown := set(args.only or ()) - set(known):
        parser.error(
            f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    wanted = {name: words for name, words in known.items() if name in (args.only or known)}
    count = gpus()
    if not count:
        parser.error("torch sees no GPU here")
    if count < 2:
        wanted.pop("weights_gpu", None)
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict] = {}
    for name, words in wanted.items():
        print(f"{name} …", flush=True)
        log = args.out / f"{name.replace('/', '_')}.log"
        began = time.perf_counter()
        with log.open("w") as file:
            code = subprocess.run(
                [sys.executable, HERE / f"{name}.py", *words], stdout=file, stderr=file
            ).returncode
        found[name] = {
            "seconds": time.perf_counter() - began,
            "exit_code": code,
            "figures": figures_in(log),
        }
        (args.out / "figures.md").write_text(table(found))
        (args.out / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    if steps := found.get("rl_step_gpu", {}).get("figures"):
        plot(steps, args.out / "step.png")
    sys.exit(any(one["exit_code"] for one in found.values()))


if __name__ == "__main__":
    main()
