"""Killed runs and runs as processes end at the bits of a run that was left alone (tests/gpu/resume.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def test_killed_runs_and_processes_end_at_the_same_bits(tmp_path):
    words = ["--steps", "40", "--warm-up", "40", "--interval", "10", "--rollouts", "0"]
    runs = ["--runs", "killed", "processes", "--broadcast", "filesystem", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.resume", *words, *runs],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
