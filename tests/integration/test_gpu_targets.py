"""Kernels compile for cards that are not here, and need no more shared memory than those have (make test-targets)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.targets import CARDS, EXPERT_CARDS, EXPERTS, GPT_OSS, REHEARSED_IN_PART, SHAPES

CASES = [(card, shape) for card in CARDS for shape in SHAPES]
CASES += [(card, EXPERTS) for card in EXPERT_CARDS]
CASES += [(EXPERT_CARDS[0], name) for name in (GPT_OSS, *REHEARSED_IN_PART)]


@pytest.mark.targets
@pytest.mark.parametrize(("capability", "shape"), CASES)
def test_all_kernels_compile(capability, shape):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.targets", capability, shape],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kernels"] > (20 if shape in REHEARSED_IN_PART else 40) and not found["wrong"]
