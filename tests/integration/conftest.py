"""Real processes: the commands of this environment, a model trained by one of them, a served model."""

import contextlib
import fcntl
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import httpx
import pytest

from tests import shared_run
from tests.hangs import HANG_SECONDS
from tests.integration.forks import CAN_FORK, fork_command, forked_processes, start_templates

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
http = httpx.Client(timeout=HANG_SECONDS)
TINY = "examples/reverse_text_tiny"
# Environment of commands that are started as users start them, not forked
AFRESH = {"HONE_TEST_AFRESH": "1"}
RL_ENV = '{"id": "reverse-text", "args": {"texts": "generated", "min_chars": 4, "max_chars": 8, "num_examples": 64}}'


def command(*words, ok=True, cwd=ROOT, env=None):
    """Runs a command; its exit code must (not) be 0 as `ok` says. A mistake shows no traceback."""
    words = [BIN / words[0], *words[1:]]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = start(*words, log=out, err=err, cwd=cwd, env=env)
        try:
            process.wait(HANG_SECONDS)
        finally:
            end(process)
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(words, process.returncode, out.read(), err.read())
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def at_a_shell(script, cwd, uv_run=True):
    """A script as somebody types it, `uv run` being the environment of the tests."""
    if uv_run:
        shim = cwd / ".shim" / "uv"
        shim.parent.mkdir(exist_ok=True)
        shim.write_text('#!/bin/sh\n[ "$1" = run ] || exit 99\nshift\nexec "$@"\n')
        shim.chmod(0o755)
    path = f"{cwd / '.shim'}:{BIN}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-emc", script],
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"},
        timeout=HANG_SECONDS,
    )


def start(*words, log=None, err=None, cwd=ROOT, env=None):
    """A command in the background, in a session of its own; whoever starts it calls `end`."""
    words, environment = list(map(str, words)), {**os.environ, **(env or {})}
    with open(os.devnull, "r+") as nowhere:
        out = log or nowhere
        files = [file.fileno() for file in (nowhere, out, err or out)]
        forked = fork_command(words, cwd, environment, files) if ensure_templates() else None
        return forked or subprocess.Popen(
            words,
            stdout=out,
            stderr=err or out,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )


@functools.cache
def ensure_templates():
    """Start the processes that commands are forked from; return whether there can be such."""
    # Not by `python -m tests.fuzz`, which is no test run
    can_fork = CAN_FORK and shared_run.run_directory() is not None
    if can_fork:
        start_templates(os.environ)
    return can_fork


def end(process):
    """Ends what may still run of it, and what it has started: in order if it can, a component that stands still too."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def processes_now():
    """Return (parent's pid, arguments) of all processes by pid, without those that have ended and wait to be read."""
    listed = subprocess.run(
        ["ps", "-axww", "-o", "pid=,ppid=,stat=,command="], capture_output=True, text=True
    ).stdout
    rows = [line.split(None, 3) for line in listed.splitlines()]
    found = {}
    for row in rows:
        if len(row) == 4 and row[2][0] != "Z":
            found[int(row[0])] = (int(row[1]), _read_arguments(row[0]) or row[3].split())
    return found | {pid: row for pid, row in forked_processes().items() if pid in found}


def _read_arguments(pid):
    """Return the arguments of a process as /proc has them, which may contain spaces; [] where it does not tell."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in data.split(b"\0")[:-1]]


def until(ready, process=None, words=lambda: "", pause=0.02):
    """Waits for something that a process is to do, while it lives."""
    deadline = time.monotonic() + HANG_SECONDS
    while not ready():
        assert process is None or process.poll() is None, words()
        assert time.monotonic() < deadline, words()
        time.sleep(pause)


@pytest.fixture
def started():
    """`start`, and the end of all that was started by it when the test is over, however it went."""
    processes = []

    def begin(*words, **kwargs):
        processes.append(start(*words, **kwargs))
        return processes[-1]

    yield begin
    for process in reversed(processes):
        end(process)


def train_model(directory, steps=60):
    data = directory / "sft.jsonl"
    command(
        "python",
        "-m",
        "reverse_text",
        "--out",
        data,
        "-n",
        400,
        "--min-chars",
        4,
        "--max-chars",
        10,
    )
    command(
        "sft",
        "@",
        f"{TINY}/sft.toml",
        "--data.name",
        data,
        "--max-steps",
        steps,
        "--scheduler.warmup-steps",
        5,
        "--data.batch-size",
        2,
        "--data.seq-len",
        256,
        "--optim.type",
        "adamw",
        "--output-dir",
        directory / "out",
    )


@pytest.fixture(scope="session")
def trained():
    """A model directory after a short SFT: its logits are far from uniform. Built once for all tests, only read."""
    return shared_run.build_once("trained", train_model) / "out" / "weights" / "step_60"


TINY_RL = ("--trainer", "@", f"{TINY}/rl/train.toml", "--orchestrator", "@", f"{TINY}/rl/orch.toml")
THREE_PROCESSES = ("--inference", "@", f"{TINY}/rl/infer.toml", "--inference.server.port", 0)
SMALL = (
    "--seq-len",
    32,
    "--orchestrator.batch-size",
    32,
    "--orchestrator.rollouts-per-example",
    8,
    "--orchestrator.sampling.max-tokens",
    16,
)
# Of the finished runs below: on policy, evaluated and saved every other step.
ON_POLICY_STEPS = 6
EVALUATION = {
    "interval": 2,
    "num_examples": 12,
    "env": [{"id": "reverse-text", "args": {"texts": "generated", "max_chars": 18}}],
}
ON_POLICY = (
    *SMALL,
    "--max-async-level",
    0,
    "--max-steps",
    ON_POLICY_STEPS,
    "--trainer.scheduler.type",
    "constant",
    "--orchestrator.eval",
    json.dumps(EVALUATION),
    "--ckpt.interval",
    2,
    "--ckpt.keep",
    9,
)
SECRET_KEY = "hush"  # of the run of three processes, which must not be written anywhere


@pytest.fixture(scope="session")
def on_policy_run(trained):
    """The directory of a finished run in three processes, with SECRET_KEY. Built once for all tests, only read."""

    def build(directory):
        words = (
            "rl",
            *TINY_RL,
            *THREE_PROCESSES,
            "--model.name",
            trained,
            "--output-dir",
            directory,
            *ON_POLICY,
        )
        command(*words, env={"HONE_API_KEY": SECRET_KEY})

    return shared_run.build_once("on_policy", build)


@pytest.fixture
def rl(trained, tmp_path):
    """Runs `rl` on the trained model: a few small steps into `out`, with more options as given."""

    def run(*options, out=tmp_path / "run", **kwargs):
        return command(
            "rl",
            "--model.name",
            trained,
            "--orchestrator.env",
            RL_ENV,
            "--orchestrator.batch-size",
            32,
            "--orchestrator.rollouts-per-example",
            8,
            "--orchestrator.sampling.max-tokens",
            16,
            "--seq-len",
            64,
            "--max-steps",
            4,
            "--trainer.optim.lr",
            "1e-4",
            "--output-dir",
            out,
            *options,
            **kwargs,
        )

    return run


@pytest.fixture
def port_8000():
    """The port that is taken where none is given, for one test at a time of those that run side by side."""
    with (Path(tempfile.gettempdir()) / "hone_tests_port_8000").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Server:
    """An `inference` process on a free port, or another program that takes its options."""

    def __init__(self, *options, log, program=(BIN / "inference",)):
        self.log = log
        if "--allowed-dirs" not in options and "transformers_sampler" not in str(program):
            options += ("--allowed-dirs", '["/"]')  # tests have directories of their own
        self.process = start(*program, *options, "--server.port", "0", log=log.open("w"))
        try:
            until(lambda: " at http://" in log.read_text(), self.process, log.read_text)
            self.url = "http" + log.read_text().split(" at http")[1].split()[0]
            until(lambda: answers(self.url), self.process, words=log.read_text)
        except BaseException:
            end(self.process)
            raise

    def stop(self):
        end(self.process)
        assert self.process.returncode == 0, self.log.read_text()


def answers(url):
    try:
        urllib.request.urlopen(url.removesuffix("/v1") + "/health", timeout=5).close()
    except OSError:
        return False
    return True


def read_rows(file):
    """Return the rows of a JSONL file that another process may be writing: a last line without its end is left out."""
    text = file.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


V1_ENVIRONMENTS = Path(__file__).parent / "v1_environments"


def library_home(version):
    """Return the virtual environment of a version of verifiers, or skip the test."""
    home = os.environ.get(f"VERIFIERS_{version.replace('.', '_')}")
    if home is None:
        pytest.skip(f"no virtual environment with verifiers {version} is named")
    return home


def generated_tokens(server):
    """Return how many tokens a server has written in requests that are over."""
    text = http.get(server.url.removesuffix("/v1") + "/metrics").text
    return int(
        float(re.search(r"^\w*generated_tokens_total(?:\{.*\})? (\S+)$", text, re.MULTILINE)[1])
    )


@pytest.fixture(scope="session")
def server(trained, tmp_path_factory):
    server = Server("--model.name", trained, log=tmp_path_factory.mktemp("server") / "log")
    yield server
    server.stop()
