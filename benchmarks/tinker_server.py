"""A `hone tinker` process of a benchmark."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def serve_tinker(model: Path, work: Path, *options: object) -> Iterator[dict[str, str]]:
    """Context manager: serve a model; yield the environment in which clients find it."""
    report = work / "report.json"
    words = ["tinker", "--model.name", model, "--server.port", 0, "--directory", work / "saved"]
    server = subprocess.Popen(
        [sys.executable, "-m", "hone", *map(str, [*words, *options])],
        env=os.environ | {"HONE_REPORT_FILE": str(report)},
        stdout=sys.stderr,
    )
    try:
        while not (report.exists() and b"url" in report.read_bytes()):
            if server.poll() is not None:
                sys.exit(f"hone tinker did not start: exit code {server.returncode}")
            time.sleep(0.1)
        yield os.environ | {
            "TINKER_BASE_URL": json.loads(report.read_bytes())["url"],
            "TINKER_API_KEY": "tml-local",
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
        }
    finally:
        server.terminate()
        server.wait()
