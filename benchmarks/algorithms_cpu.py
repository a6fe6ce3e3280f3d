"""Every algorithm on the tiny recipe: the greedy reward on held-out texts before, and after so many steps. Three seeds.

    python benchmarks/algorithms_cpu.py [--steps 80] [--seeds 3] [--only NAME]

Distillation has a teacher: the tiny model after 120 steps of the recipe's RL, on a server of its own. Its reward stands
beside. Exits with 1 where a seed of an algorithm has not gained a tenth of what there was to gain.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from peer import ROOT, finish, last_weights

from hone.config.algorithms import ALGORITHMS

BIN = Path(sys.executable).parent
TINY = "examples/reverse_text_tiny"


def run(*words: object) -> None:
    subprocess.run(
        [BIN / str(words[0]), *map(str, words[1:])],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
    )


def warmed_up(home: Path) -> Path:
    """The tiny model after the recipe's SFT."""
    data, sft = home / "sft.jsonl", home / "sft"
    run(
        "python",
        "-m",
        "reverse_text",
        "--out",
        data,
        "-n",
        16000,
        "--min-chars",
        12,
        "--max-chars",
        20,
    )
    run("sft", "@", f"{TINY}/sft.toml", "--data.name", data, "--output-dir", sft)
    return last_weights(sft)


ENVIRONMENT = {
    "id": "reverse-text",
    "args": {"texts": "generated", "min_chars": 4, "max_chars": 10},
}


def reinforced(
    model: Path, out: Path, steps: int, seed: int, *options: object
) -> tuple[float, float]:
    """The reward before and after."""
    run(
        "rl",
        "@",
        f"{TINY}/rl.toml",
        "--model.name",
        model,
        "--output-dir",
        out,
        "--max-steps",
        steps,
        "--seed",
        seed,
        "--orchestrator.env",
        json.dumps(ENVIRONMENT),
        "--trainer.scheduler.type",
        "constant",
        "--orchestrator.eval.env",
        json.dumps(ENVIRONMENT),
        "--orchestrator.eval.interval",
        steps,
        "--orchestrator.eval.num-examples",
        256,
        "--orchestrator.eval.max-tokens",
        20,
        *options,
    )
    rows = map(json.loads, (out / "metrics.jsonl").open())
    before, after = (
        row["eval/reverse-text/reward"] for row in rows if "eval/reverse-text/reward" in row
    )
    return before, after


class Teacher:
    """A model behind a server."""

    def __init__(self, model: Path, home: Path) -> None:
        log, self.model = home / "teacher.log", model
        words = [BIN / "inference", "--model.name", model, "--server.port", "0"]
        self.process = subprocess.Popen(list(map(str, words)), stdout=log.open("w"), cwd=ROOT)
        while " at http://" not in log.read_text():
            time.sleep(0.1)
        self.url = "http" + log.read_text().split(" at http")[1].split()[0]
        while True:
            try:
                urllib.request.urlopen(self.url.removesuffix("/v1") + "/health").close()
                return
            except OSError:
                time.sleep(0.1)

    def options(self) -> list[object]:
        return [
            "--orchestrator.teacher.model",
            self.model,
            "--orchestrator.teacher.base-url",
            self.url,
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=ALGORITHMS)
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    has_failed = False
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        model = warmed_up(home)
        wanted = [options.only] if options.only else list(ALGORITHMS)
        teacher = None
        if {"opd", "sft"} & set(wanted):
            found["teacher"] = [round(reinforced(model, home / "teaching", 120, 99)[1], 3)]
            teacher = Teacher(home / "teaching" / "weights" / "step_120", home)
        try:
            for name in wanted:
                more = teacher.options() if teacher and name in ("opd", "sft") else []
                found[name] = []
                for seed in range(options.seeds):
                    words = ["--algorithm", name, *more]
                    before, after = reinforced(
                        model, home / f"{name}_{seed}", options.steps, seed, *words
                    )
                    found[name].append(round(after, 3))
                    has_failed |= after - before < 0.1 * (1 - before)
                    print(f"{name}, seed {seed}: {before:.3f} -> {after:.3f}", flush=True)
        finally:
            if teacher is not None:
                teacher.process.terminate()
                teacher.process.wait()
    finish(**found)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
