"""The lock has what the platforms need that people have, as wheels: nothing is compiled there."""

import os
import platform
import shutil
import subprocess

import pytest

from tests.hangs import HANG_SECONDS

from .conftest import ROOT, command

PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_lock_resolves(platform, tmp_path):
    uv = shutil.which("uv") or ROOT / ".uv" / "bin" / "uv"
    words = [
        "sync",
        "--locked",
        "--dry-run",
        "--no-build",
        "--no-install-workspace",
        "--python-platform",
        platform,
    ]
    environment = {
        "UV_PROJECT_ENVIRONMENT": str(tmp_path / "environment"),
        "MACOSX_DEPLOYMENT_TARGET": "14.0",
    }
    done = subprocess.run(
        [uv, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0 and " + torch==" in done.stderr, done.stderr


def test_compiled_kernels_leave_the_number_of_threads_as_it_was_asked_for():
    program = (
        "from hone import machine; machine.prepare_environment(); import torch; "
        "from hone.kernels.norm import add_norm; "
        "add_norm(torch.ones(4, 16), torch.ones(4, 16), torch.ones(16), 1e-6); print(torch.get_num_threads())"
    )
    assert command("python", "-c", program, env={"OMP_NUM_THREADS": "1"}).stdout.split() == ["1"]


@pytest.mark.main_path
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64")
def test_an_instruction_set_can_be_forced_and_one_that_is_not_there_is_refused():
    code = (
        "from hone import machine; machine.prepare_environment(); "
        "from hone.kernels import cpu; print(cpu.words('cpu'))"
    )
    for isa, shown in (("avx2", "cpu (avx2, "), ("none", "cpu (plain torch, ")):
        assert command("python", "-c", code, env={"HONE_CPU_ISA": isa}).stdout.startswith(shown)
    refused = command(
        "sft", "@", "examples/reverse_text_tiny/sft.toml", env={"HONE_CPU_ISA": "avx1"}, ok=False
    )
    assert "HONE_CPU_ISA=avx1" in refused.stderr and "avx2, none" in refused.stderr
