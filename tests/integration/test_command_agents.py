"""`rl` trains a program that asks the policy through OpenAI's API: the shipped coding agent, with the tiny model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.hangs import HANG_SECONDS

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "reverse_text_tiny" / "model"
FOLDER = ROOT / "examples" / "coding_agent"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_coding_agent_s_turns_are_trained_on(tmp_path, workers):
    """Contained by bubblewrap where it is installed."""
    contain = "bubblewrap" if shutil.which("bwrap") else "none"
    args = {"contain": contain, "num_examples": 8, "num_eval_examples": 4}
    env = {"id": "coding-agent", "args": args, "workers": workers}
    words = ["rl", "@", FOLDER / "rl.toml", "--model.name", TINY, "--model.random-init"]
    words += ["--orchestrator.env", json.dumps(env), "--orchestrator.eval", "None"]
    words += ["--orchestrator.batch-size", 8, "--orchestrator.rollouts-per-example", 4]
    words += ["--orchestrator.sampling.max-tokens", 24, "--max-steps", 2, "--seq-len", 1800]
    words += ["--orchestrator.no-drop-zero-signal", "--output-dir", tmp_path / "run"]
    done = subprocess.run(
        [sys.executable, "-m", "hone", *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    # Nothing is repaired: half of the tests pass, or fewer where a file was broken.
    assert all(0 <= row["reward/mean"] <= 0.5 for row in rows)
    assert all(row["mismatch_kl/mean"] < 1e-6 for row in rows)
    assert all(row["time/rollout/environment"] > 0 for row in rows)
    files = sorted((tmp_path / "run" / "rollouts" / "step_1").glob("*.jsonl"))
    rollouts = [json.loads(line) for file in files for line in file.open()]
    assert len(rollouts) == 8
    for rollout in rollouts:
        answers = [m for m in rollout["completion"] if m["role"] == "assistant"]
        assert len(answers) == 2 and np.isfinite(rollout["reward"])
