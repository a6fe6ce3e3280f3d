"""Provenance of a run: versions, source commit, device."""

import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any


@functools.cache
def made_by() -> dict[str, str]:
    """Return versions of Hone, torch and Python, and the commit of the working directory, if any."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("hone-rl", "torch"):
        try:
            found[name.removesuffix("-rl")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = commit_of(Path.cwd())
    return found | ({"commit": commit} if commit else {})


def commit_of(directory: Path) -> str:
    """Return the first 12 digits of the commit, with `+` if files have changed; "" without git."""
    try:
        words = [
            "git",
            "-C",
            str(directory),
            "describe",
            "--always",
            "--dirty=+",
            "--abbrev=12",
            "--exclude=*",
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=1)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def device_name(device: Any, count: int = 1) -> str:
    """Return the name of a torch device, as `NVIDIA H200` or `CPU (avx512)`."""
    if device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(device)
    else:
        from hone import machine

        name = f"CPU ({machine.instruction_set()})"
    return f"{count} x {name}" if count > 1 else name
