"""What another program's busy loops leave of `sft`, `rl` (in one process and in several) and `inference`, tiny model.

    python benchmarks/busy_cpu.py [--loops 1] [--rounds 3] [--only sft rl processes inference]

Each is measured alone and beside `--loops` times `while True: pass`, in turns. A step's tokens or rollouts a second,
medians over a run's steps; of inference, output tokens a second over HTTP.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from peer import ROOT, beside, finish, median

TINY = ROOT / "examples" / "reverse_text_tiny"
BIN = Path(sys.executable).parent
TEXTS = '{"id": "reverse-text", "args": {"texts": "generated", "min_chars": 4, "max_chars": 10}}'


def run(*words: object) -> None:
    words = [str(BIN / str(words[0])), *map(str, words[1:])]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def rows(file: Path, name: str, skip: int) -> float:
    return median([json.loads(line)[name] for line in file.open()][skip:])


def sft(home: Path) -> float:
    data = home / "sft.jsonl"
    if not data.exists():
        run(
            "python",
            "-m",
            "reverse_text",
            "--out",
            data,
            "-n",
            4000,
            "--min-chars",
            20,
            "--max-chars",
            32,
        )
    run(
        "sft",
        "@",
        TINY / "sft.toml",
        "--data.name",
        data,
        "--max-steps",
        40,
        "--output-dir",
        home / "sft",
        "--clean",
    )
    return rows(home / "sft" / "metrics_sft.jsonl", "perf/throughput", 10)


def reinforced(home: Path, *options: object) -> float:
    """Rollouts a second. The model is one after little SFT: what it is worth is not asked."""
    weights = home / "sft" / "weights" / "step_40"
    if not weights.exists():
        sft(home)
    run(
        "rl",
        "--trainer",
        "@",
        TINY / "rl/train.toml",
        "--orchestrator",
        "@",
        TINY / "rl/orch.toml",
        *options,
        "--model.name",
        weights,
        "--max-steps",
        25,
        "--orchestrator.env",
        TEXTS,
        "--output-dir",
        home / "rl",
    )
    return 256 / rows(home / "rl" / "metrics.jsonl", "time/step", 5)


def rl(home: Path) -> float:
    return reinforced(home, "--deployment", "colocated")


def processes(home: Path) -> float:
    return reinforced(
        home, "--inference", "@", TINY / "rl/infer.toml", "--inference.server.port", 0
    )


def inference(home: Path) -> float:
    words = [
        BIN / "inference",
        "--model.name",
        TINY / "model",
        "--model.random-init",
        "--server.port",
        "0",
    ]
    server = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        url = next(line for line in server.stdout if " at http" in line).split(" at ")[1].split()[0]
        body = {
            "model": str(TINY / "model"),
            "messages": [{"role": "user", "content": "some text to be continued"}],
            "n": 128,
            "max_tokens": 128,
            "ignore_eos": True,
            "logprobs": True,
        }
        request = urllib.request.Request(
            f"{url}/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        speeds = []
        for _ in range(6):
            start = time.perf_counter()
            urllib.request.urlopen(request, timeout=300).read()
            speeds.append(128 * 128 / (time.perf_counter() - start))
        return median(speeds[1:])
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    works = {work.__name__: work for work in (sft, rl, processes, inference)}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loops", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=works, default=list(works))
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="busy") as directory:
        for name in options.only:
            alone, busy = [], []
            for _ in range(options.rounds):
                alone.append(works[name](Path(directory)))
                with beside(options.loops):
                    busy.append(works[name](Path(directory)))
            kept = median([b / a for a, b in zip(alone, busy, strict=True)])
            print(
                f"{name:>10}: alone {median(alone):>9,.0f}/s, beside {median(busy):>9,.0f}/s, kept {kept:.0%}  "
                f"{[f'{b / a:.0%}' for a, b in zip(alone, busy, strict=True)]}",
                flush=True,
            )
            figures |= {
                f"{name}_alone": median(alone),
                f"{name}_beside": median(busy),
                f"{name}_kept": kept,
            }
    finish(**figures, loops=options.loops, isa=os.environ.get("HONE_CPU_ISA", ""))


if __name__ == "__main__":
    main()
