"""Does RL beat more SFT? The demo on three seeds, and for each a control: its SFT continued on the same data.

The control starts from the weights that RL starts from, and trains on the same SFT data for the wall time that RL took
(constant learning rate, a tenth of the recipe's peak). All are scored on the same 256 held-out prompts, sampled and
greedy.

usage: uv run python benchmarks/learning_cpu.py [SEED …]
"""

import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path

from peer import ROOT, finish

spec = importlib.util.spec_from_file_location(
    "demo", ROOT / "examples" / "reverse_text_tiny" / "demo.py"
)
demo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)

FIGURES = ("reward", "exact", "greedy_exact")


def one_seed(seed: int) -> dict:
    """The demo's report of a seed, with the control's figures added."""
    out = Path("outputs") / "learning" / f"seed_{seed}"
    program = ROOT / "examples" / "reverse_text_tiny" / "demo.py"
    subprocess.run(
        [sys.executable, program, "--seed", str(seed), "--out", out], check=True, cwd=ROOT
    )
    report = json.loads((ROOT / out / "report.json").read_text())
    demo.run(
        "sft",
        "@",
        f"{demo.RECIPE}/sft.toml",
        "--model.name",
        demo.last_weights(out / "sft"),
        "--model.no-random-init",
        "--data.name",
        str(out / "data/sft.jsonl"),
        "--seed",
        str(seed + 1000),
        "--output-dir",
        str(out / "control"),
        "--optim.lr",
        "4e-4",
        "--scheduler.type",
        "constant",
        "--scheduler.warmup-steps",
        "10",
        "--max-steps",
        "100000",
        "--max-seconds",
        str(report["stage_seconds"]["rl"]),
        "--log-interval",
        "100",
    )
    control = demo.evaluate(demo.last_weights(out / "control"), demo.ROOT / out / "eval_control")
    report["control_reward"] = control["sampled"]["reward"]
    report["control_exact"] = control["sampled"]["exact"]
    report["control_greedy_exact"] = control["greedy"]["exact"]
    return report


def main(seeds: list[int]) -> None:
    reports = [one_seed(seed) for seed in seeds]
    print(f"\n{'':<22}" + "".join(f"{name:>34}" for name in FIGURES))
    means = {}
    for stage in ("base", "sft", "control", "rl"):
        cells = []
        for figure in FIGURES:
            values = [report[f"{stage}_{figure}"] for report in reports]
            means[stage, figure] = statistics.mean(values)
            shown = " ".join(f"{value:.3f}" for value in values)
            cells.append(f"{means[stage, figure]:.3f} ± {statistics.pstdev(values):.3f} ({shown})")
        print(f"{stage:<22}" + "".join(f"{cell:>34}" for cell in cells))
    for figure in ("exact", "greedy_exact"):
        ahead = [report[f"rl_{figure}"] - report[f"control_{figure}"] for report in reports]
        gained = [report[f"rl_{figure}"] - report[f"sft_{figure}"] for report in reports]
        print(
            f"RL ahead in {figure}: of the control {min(ahead):.3f} to {max(ahead):.3f}, "
            f"of SFT {min(gained):.3f} to {max(gained):.3f}"
        )
    print("seconds of the demo: " + ", ".join(f"{report['seconds']:.0f}" for report in reports))
    mine, control = means["rl", "exact"], means["control", "exact"]
    finish(ours_exact=mine, peer_exact=control, ratio=mine / max(control, 1e-9))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [0, 1, 2])
