"""The lock has what the platforms need that people have, as wheels: nothing is compiled there."""

import os
import shutil
import subprocess

import pytest

from tests.conftest import patience

from .conftest import ROOT

PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_lock_resolves(platform, tmp_path):
    uv = shutil.which("uv") or ROOT / ".uv" / "bin" / "uv"
    words = ["sync", "--locked", "--dry-run", "--no-build", "--no-install-workspace", "--python-platform", platform]
    environment = {"UV_PROJECT_ENVIRONMENT": str(tmp_path / "environment"), "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    done = subprocess.run(
        [uv, *words], cwd=ROOT, capture_output=True, text=True, env=os.environ | environment, timeout=patience(120)
    )
    assert done.returncode == 0 and " + torch==" in done.stderr, done.stderr
