"""SIGUSR1 and Ctrl-C: a run ends at its next step with a checkpoint, and is resumed as if it had never ended."""

import json
import os
import shlex
import signal
import subprocess

import pytest

from hone.preemption import EXIT_INTERRUPTED, EXIT_PREEMPTED
from tests.hangs import HANG_SECONDS

from .conftest import BIN, RL_ENV, command, start, until

STEPS = 60


def words_of(kind, trained, out, tmp_path):
    if kind == "sft":
        rows = [{"prompt": "p", "completion": "c" * n} for n in range(1, 40)]
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [
            "sft",
            "--model.name",
            trained,
            "--data.name",
            tmp_path / "data.jsonl",
            "--data.batch-size",
            4,
            "--data.seq-len",
            64,
            "--max-steps",
            4 * STEPS,
            "--ckpt.interval",
            1000,
            "--output-dir",
            out,
        ]
    return [
        "rl",
        "--model.name",
        trained,
        "--orchestrator.env",
        RL_ENV,
        "--orchestrator.batch-size",
        64,
        "--orchestrator.rollouts-per-example",
        8,
        "--orchestrator.sampling.max-tokens",
        16,
        "--seq-len",
        64,
        "--max-steps",
        STEPS,
        "--trainer.optim.lr",
        1e-3,
        "--ckpt.interval",
        1000,
        "--max-async-level",
        0,
        "--deployment",
        kind,
        "--inference.server.port",
        0,
        "--output-dir",
        out,
    ]


def leave(words, out, tmp_path, metrics, number=signal.SIGUSR1, code=EXIT_PREEMPTED):
    """Start a run, ask it to leave after some steps by a signal, and return what it said."""
    with (tmp_path / "log").open("w+") as log:
        process = start(BIN / words[0], *words[1:], log=log)
        until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5, process)
        os.kill(process.pid, number)
        try:
            assert process.wait(HANG_SECONDS) == code
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        log.seek(0)
        return log.read()


@pytest.mark.parametrize("kind", ["colocated", "processes", "sft"])
def test_a_run_that_was_asked_to_leave_ends_as_one_that_was_not(kind, trained, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "left"
    command(*words_of(kind, trained, whole, tmp_path))
    name, last = ("metrics_sft.jsonl", 4 * STEPS) if kind == "sft" else ("metrics.jsonl", STEPS)
    words = words_of(kind, trained, out, tmp_path)
    said = leave(words, out, tmp_path, out / name)
    assert (
        "as requested; its checkpoint is in" in said and "--resume auto continues the run" in said
    )
    assert not (out / "weights" / f"step_{last}").exists()
    more = command(*words, "--resume", "auto")
    assert "Resuming from" in more.stdout
    files = [path / "weights" / f"step_{last}" / "model.safetensors" for path in (whole, out)]
    assert files[0].read_bytes() == files[1].read_bytes()
    steps = [json.loads(line)["step"] for line in (out / name).open()]
    assert steps == list(range(1, last + 1))


def test_without_checkpoints_it_says_what_is_lost(trained, tmp_path):
    words = [str(word) for word in words_of("sft", trained, tmp_path / "run", tmp_path)]
    at = words.index("--ckpt.interval")
    words = [*words[:at], "--ckpt", "None", *words[at + 2 :]]
    said = leave(words, tmp_path / "run", tmp_path, tmp_path / "run" / "metrics_sft.jsonl")
    assert "it cannot be resumed: ckpt is None" in said


@pytest.mark.parametrize("kind", ["colocated", "processes", "sft"])
def test_ctrl_c_writes_a_checkpoint_and_says_the_command_that_continues(kind, trained, tmp_path):
    out = tmp_path / "left"
    name, last = ("metrics_sft.jsonl", 4 * STEPS) if kind == "sft" else ("metrics.jsonl", STEPS)
    words = [*map(str, words_of(kind, trained, out, tmp_path)), "--clean"]
    at = words.index("--ckpt.interval")
    words = words[:at] + words[at + 2 :]  # checkpoints by default
    said = leave(words, out, tmp_path, out / name, signal.SIGINT, EXIT_INTERRUPTED)
    typed = next(line for line in said.splitlines() if line.startswith("continue with: "))
    again = shlex.split(typed.removeprefix("continue with: "))
    assert again[-len(words) - 1 :] == [*words[:-1], "--resume", "auto"]
    assert "Resuming from" in command(*again[-len(words) - 1 :]).stdout
    assert [json.loads(line)["step"] for line in (out / name).open()] == list(range(1, last + 1))


@pytest.mark.main_path
def test_a_signal_that_comes_while_python_shuts_down_changes_nothing():
    code = (
        "import os, signal; from hone import cli, preemption\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR1): kill(pid, number)\n"
        "preemption.listen_for_signals(); late = Late(); cli._exit_process(0)"
    )
    command("python", "-c", code)
