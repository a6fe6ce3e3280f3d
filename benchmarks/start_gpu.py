"""Start-up on one GPU: seconds until a server of Qwen3-0.6B's shape answers, and until vf-eval's own one has answered.

    python benchmarks/start_gpu.py [--logs DIRECTORY]

The model is read from files on local disk, but for one start that draws random weights. The first start has an empty
cache of Triton's kernels, the others have the kernels of the first. vf-eval asks for one token of one prompt.
Must: 15 s the first time, 7 s after, random weights 2 s more, vf-eval 9 s before its first request.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from generate_gpu import STORED, write_model
from model_shapes import TINY
from peer import finish, with_tasks

HONE = (sys.executable, "-P", "-m", "hone")
LIMIT_SECONDS = 120
END_SECONDS = 20


def seconds_until_ready(words: list[str], logs: Path, environment: dict[str, str]) -> float:
    """Seconds from the start of the command to the address in its report."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        start = time.perf_counter()
        with logs.open("w") as log:
            server = subprocess.Popen(
                [*HONE, "inference", *words, "--server.port", "0"],
                env=environment | {"HONE_REPORT_FILE": str(report)},
                stdout=log,
                stderr=log,
            )
            while not (report.exists() and b"url" in report.read_bytes()):
                if server.poll() is not None or time.perf_counter() - start > LIMIT_SECONDS:
                    sys.exit(f"the server did not start: {logs.read_text()[-2000:]}")
                time.sleep(0.02)
            ready = time.perf_counter() - start
            server.terminate()
            try:
                server.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                end_with_stacks(server.pid)
                sys.exit(f"the server did not end: {logs.read_text()[-20000:]}")
    return ready


def end_with_stacks(pid: int) -> None:
    """End a process and its children; each writes the stacks of its threads to its log."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        parent = status.read_text().rsplit(")", 1)[1].split()[1]
        if int(parent) == pid:
            os.kill(int(status.parent.name), signal.SIGABRT)
    os.kill(pid, signal.SIGABRT)
    time.sleep(2)


def seconds_of_evaluation(model: Path, logs: Path, environment: dict[str, str]) -> float:
    """Return the seconds until the first answer is scored."""
    scored = model.parent / "scored"
    task = json.dumps({"texts": "generated", "scored_file": str(scored)})
    words = ["vf-eval", "any_digits", "-a", task, "-m", str(model), "-n", "1", "-r", "1", "-t", "1"]
    with logs.open("w") as log:
        start = logs.stat().st_mtime
        done = subprocess.run([*HONE, *words], env=environment, stdout=log, stderr=log)
    if done.returncode:
        sys.exit(f"vf-eval failed: {logs.read_text()[-2000:]}")
    return scored.stat().st_mtime - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=Path, help="where the logs of the commands are kept")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="start_gpu") as directory:
        home = Path(directory)
        logs = arguments.logs or home
        model = home / "model"
        model.mkdir()
        write_model(model, STORED)
        for file in TINY.iterdir():
            if file.name != "config.json":
                (model / file.name).write_bytes(file.read_bytes())
        environment = with_tasks() | {"TRITON_CACHE_DIR": str(home / "kernels")}
        environment |= {"PYTHONFAULTHANDLER": "1"}
        words = ["--model.name", str(model), "--max-model-len", "2048"]
        figures = {
            name: seconds_until_ready([*words, *more], logs / f"{name}.log", environment)
            for name, more in (
                ("first_ever", []),
                ("second", []),
                ("third", []),
                ("random_weights", ["--model.random-init"]),
            )
        }
        figures["vf_eval"] = seconds_of_evaluation(model, logs / "vf_eval.log", environment)
    finish(model=STORED, **figures)


if __name__ == "__main__":
    main()
