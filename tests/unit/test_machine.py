"""What a process may use of the machine, and what it is told where that is asked for wrongly."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hone import machine
from tests.hangs import HANG_SECONDS

ROOT = Path(__file__).parents[2]


def run(code, **environment):
    ours = ("HONE_CPU", "ATEN_", "NUMBA_CPU", "OMP_")
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(ours)
    } | environment
    words = [sys.executable, "-c", code]
    return subprocess.run(
        words, capture_output=True, text=True, env=kept, cwd=ROOT, timeout=HANG_SECONDS
    )


def test_threads_follow_affinity_and_what_the_user_says(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert 1 <= machine.usable_cores() <= (os.cpu_count() or 1)
    if hasattr(os, "sched_setaffinity"):
        one = sorted(os.sched_getaffinity(0))[0]
        done = run(
            f"import os; os.sched_setaffinity(0, [{one}]); from hone import machine; print(machine.usable_cores())"
        )
        assert done.stdout.strip() == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert machine.usable_cores() == 7


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "50000 100000"}, 1.0),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_time_that_a_control_group_leaves_counts(files, quota, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert machine._cpu_quota(tmp_path) == quota


def test_a_thread_that_waits_soon_sleeps_unless_the_user_says_otherwise(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    machine.prepare_environment()
    assert "GOMP_SPINCOUNT" not in os.environ and os.environ["OMP_NUM_THREADS"] == str(
        machine.usable_cores()
    )
    monkeypatch.delenv("OMP_WAIT_POLICY")
    machine.prepare_environment()
    tells = Path("/proc/self/schedstat").exists()  # then `Neighbours` switches
    assert os.environ.get("GOMP_SPINCOUNT") == (None if tells else "1000")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("KMP_BLOCKTIME")


def test_deadlines_are_longer_where_starting_takes_longer(monkeypatch):
    monkeypatch.setattr(machine, "_slowness", 1.0)
    machine.started_in(0.5)
    assert machine.silence_seconds() == 15.0
    machine.started_in(6.0)
    assert machine.silence_seconds() == 30.0
    machine.started_in(100.0)
    assert machine.silence_seconds() == 45.0


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(),
    reason="the kernel does not tell how long threads wait",
)
def test_waiting_threads_sleep_while_other_programs_want_the_cores(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    spares = lambda: [thread for thread in threading.enumerate() if thread.name == "spare"]  # noqa: E731
    neighbours = machine.Neighbours()
    computed = neighbours.before[0]
    sum(range(10**6))
    assert neighbours._thread_times()[0] > computed
    for share, count in ((0.05, 0), (0.3, 1), (0.3, 1), (0.05, 1)):
        neighbours.adapt_threads(share)
        assert len(spares()) == count
    (spare,) = spares()
    neighbours.adapt_threads(0.01)
    spare.join(HANG_SECONDS)
    assert not spares()


@pytest.mark.parametrize(
    ("mode", "words"), [(0o700, ""), (0o755, ""), (0o777, "everybody may write"), (0o775, "")]
)
def test_code_is_loaded_only_from_directories_that_others_cannot_write(
    tmp_path, monkeypatch, mode, words
):
    cache = tmp_path / "triton"
    cache.mkdir()
    cache.chmod(mode)
    assert words in machine.written_by_others(cache) and bool(words) == bool(
        machine.written_by_others(cache)
    )
    assert not words or cache.stat().st_mode & 0o777 == mode
    assert words or cache.stat().st_mode & 0o022 == 0  # the group's right to write is taken away
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    machine.trust_triton_cache()
    assert (os.environ["TRITON_CACHE_DIR"] == str(cache)) == (not words)


def test_a_module_of_the_working_directory_is_not_imported(tmp_path):
    for name in ("numpy", "torch", "json"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'was_run')!r}, 'w')\nraise SystemExit(3)\n"
        )
    words = [sys.executable, "-m", "hone", "sft", "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, machine.ALLOCATOR_SETTING),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "0", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None),
        (
            {"CUDA_VISIBLE_DEVICES": "0", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
            "max_split_size_mb:64",
        ),
    ],
)
def test_gpu_memory_grows_unless_the_user_says_otherwise(given, expected, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    machine.grow_gpu_segments()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
