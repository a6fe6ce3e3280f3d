"""What the dashboard costs: a directory of 5,000 steps and 100,000 rollouts, and a run that goes on beside it.

    python benchmarks/dashboard_cpu.py [--steps 5000] [--rollouts 20] [--seconds 20]

Must: the first index in under 60 s; with a warm index the first page in under 1 s and any filter in under 0.3 s; memory
of the server under 300 MB; beside a run at most 1 % of a core with no page open, and 5 % with one.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from peer import ROOT, finish

MODEL = ROOT / "src/hone/launch/workspace/models/reverse-text-tiny-sft"
TINY = ROOT / "examples/reverse_text_tiny"
FILTERS = (
    {"text": "abc"},
    {"text": "qu", "sort": "reward"},
    {"text": "no such text"},
    {"text": "100%"},
    {"reward_from": 0.99, "sort": "tokens"},
    {"step_from": 100, "step_to": 4000, "text": "the", "sort": "advantage"},
    {"unused": "no_signal", "sort": "reward", "down": 0},
    {"truncated": 1},
    {"sort": "seconds"},
    {"env": "reverse-text", "skip": 40_000},
)


def rl(place: Path, *words: object) -> list[str]:
    said = [
        "rl",
        "@",
        TINY / "rl.toml",
        "--model.name",
        MODEL,
        "--trainer.optim.type",
        "adamw",
        "--trainer.optim.lr",
        "1e-4",
        "--log-interval",
        0,
        "--output-dir",
        place,
        *words,
    ]
    return [sys.executable, "-m", "hone", *map(str, said)]


def write_large(place: Path, like: Path, steps: int, each: int) -> None:
    """As large as is asked, of what a real run wrote: rows of metrics as they are, rollouts of 100 words."""
    draw = random.Random(0)
    words = [
        "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9)))
        for _ in range(5000)
    ]
    rows = [json.loads(line) for line in (like / "metrics.jsonl").read_text().splitlines()]
    steps_of = sorted((like / "rollouts").glob("step_*"))
    lines = [
        json.loads(line)
        for d in steps_of
        for line in (d / "rollouts.jsonl").read_text().splitlines()
    ]
    shutil.copytree(like / "configs", place / "configs")
    shutil.copy(like / "run_rl.json", place)
    with (place / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(draw.choice(rows) | {"step": step}) + "\n")
    for step in range(1, steps + 1):
        directory = place / "rollouts" / f"step_{step}"
        directory.mkdir(parents=True)
        with (directory / "rollouts.jsonl").open("w") as file:
            for i in range(each):
                ids = [draw.randrange(1000) for _ in range(128)]
                turn = {
                    "prompt_ids": ids[:40],
                    "ids": ids,
                    "logprobs": [-draw.random() for _ in ids],
                    "version": step - 1,
                    "last_version": step - 1,
                    "finish_reason": "stop",
                }
                said = [{"role": "assistant", "content": " ".join(draw.choices(words, k=100))}]
                of = {
                    "completion": said,
                    "turns": [turn],
                    "group": step,
                    "member": i,
                    "reward": draw.random(),
                }
                file.write(json.dumps(draw.choice(lines) | of) + "\n")


class Server:
    def __init__(self, root: Path) -> None:
        words = [sys.executable, "-m", "hone", "dashboard", str(root), "--port", "0"]
        environment = {"XDG_CACHE_HOME": str(root / ".cache"), "HONE_DASHBOARD_TOKEN": "key"}
        import os

        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )
        lines = [self.process.stdout.readline() for _ in range(2)]
        self.http = httpx.Client(base_url=lines[1].split()[-1].split("/#")[0], timeout=120)

    def get(self, path: str, **asked: object) -> tuple[float, dict]:
        start = time.perf_counter()
        found = self.http.get(path, params=asked)
        found.raise_for_status()
        return time.perf_counter() - start, found.json()

    def page(self, run: str, names: str, since: int) -> float:
        """What an open page of a run asks every two seconds."""
        return (
            self.get("/api/run", run=run)[0]
            + self.get("/api/series", run=run, names=names, since=since)[0]
        )

    def seconds(self) -> float:
        """Of a processor, so far."""
        said = subprocess.check_output(
            ["ps", "-o", "cputimes=,time=", "-p", str(self.process.pid)], text=True
        ).split()
        try:  # finer where there is /proc
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / 100
        except OSError:
            return float(said[0])

    def megabytes(self) -> float:
        return (
            int(
                subprocess.check_output(
                    ["ps", "-o", "rss=", "-p", str(self.process.pid)], text=True
                )
            )
            / 1000
        )

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    names = "reward/mean,reward/std,loss/mean,entropy/mean,mismatch_kl/mean,completion_len/mean,optim/grad_norm"
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        subprocess.run(rl(root / "small", "--max-steps", 20), check=True, stdout=subprocess.DEVNULL)
        (root / "large").mkdir()
        write_large(root / "large", root / "small", args.steps, args.rollouts)
        with Server(root) as server:
            start = time.perf_counter()
            server.get("/api/run", run="large:rl")
            while (
                server.get("/api/rollouts", run="large:rl", most=1)[1]["total"]
                < args.steps * args.rollouts
            ):
                time.sleep(0.2)
            result["first_index_s"] = time.perf_counter() - start
        with Server(root) as server:  # the index is warm, the server is not
            result["first_page_s"] = server.get("/api/runs")[0] + server.page("large:rl", names, -1)
            result["slowest_filter_s"] = max(
                server.get("/api/rollouts", run="large:rl", **one)[0] for one in FILTERS
            )
            result["server_mb"] = server.megabytes()
            run = subprocess.Popen(
                rl(root / "beside", "--max-steps", 100_000), stdout=subprocess.DEVNULL
            )
            try:
                while not (root / "beside" / "metrics.jsonl").exists():
                    time.sleep(0.2)
                for what, is_open in (("no_page", False), ("one_page", True)):
                    result[f"core_share_{what}"] = beside(server, args.seconds, is_open, names)
            finally:
                run.terminate()
                run.wait(30)
    finish(**result)


def beside(server: Server, seconds: float, is_open: bool, names: str) -> float:
    """The share of a core that the server takes beside a run; `is_open`: with a page that asks every two seconds."""
    before, until, since = server.seconds(), time.perf_counter() + seconds, -1
    while time.perf_counter() < until:
        if is_open:
            server.page("beside:rl", names, since)
            since = int(
                server.get("/api/series", run="beside:rl", names="reward/mean")[1]["reward/mean"][
                    0
                ][-1]
            )
        time.sleep(2.0)
    return (server.seconds() - before) / seconds


if __name__ == "__main__":
    main()
