"""Use and memory of this machine's NVIDIA GPUs, from nvidia-smi."""

import shutil
import subprocess
from typing import Any

QUERY = "index,name,utilization.gpu,memory.used,memory.total"
TIMEOUT_SECONDS = 10.0


def read_gpus() -> dict[str, Any]:
    """Return {"gpus": [{index, name, busy (share), used and total (MiB)}]}; empty without GPUs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"gpus": []}
    command = [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return {"gpus": []}
    return {"gpus": parse_gpus(done.stdout) if done.returncode == 0 else []}


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Parse lines of nvidia-smi; values that a GPU does not report are None."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5:
            index, name, *numbers = parts
            busy, used, total = (float(n) if n.isdigit() else None for n in numbers)
            share = None if busy is None else busy / 100
            found.append(
                {"index": index, "name": name, "busy": share, "used": used, "total": total}
            )
    return found
