"""Real processes: the commands of this environment, a model trained by one of them, a served model."""

import fcntl
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TINY = "examples/reverse_text_tiny"
RL_ENV = '{"id": "reverse-text", "args": {"texts": "generated", "min_chars": 4, "max_chars": 8, "num_examples": 64}}'


def command(*words, ok=True, cwd=ROOT, env=None, timeout=120):
    """Runs a command; its exit code must (not) be 0 as `ok` says. A mistake shows no traceback."""
    words = [BIN / words[0], *map(str, words[1:])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})}
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=environment, timeout=timeout)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A model directory after a short SFT: its logits are far from uniform."""
    directory = tmp_path_factory.mktemp("trained")
    data = directory / "sft.jsonl"
    command("python", "-m", "reverse_text", "--out", data, "-n", 400, "--min-chars", 4, "--max-chars", 10)
    command(
        "sft", "@", f"{TINY}/sft.toml", "--data.name", data, "--max-steps", 60, "--scheduler.warmup-steps", 5,
        "--data.batch-size", 2, "--data.seq-len", 256, "--output-dir", directory / "out",
    )  # fmt: skip
    return directory / "out" / "weights" / "step_60"


@pytest.fixture
def rl(trained, tmp_path):
    """Runs `rl` on the trained model: a few small steps into `out`, with more options as given."""

    def run(*options, out=tmp_path / "run", **kwargs):
        return command(
            "rl", "--model.name", trained, "--orchestrator.env", RL_ENV, "--orchestrator.batch-size", 32,
            "--orchestrator.rollouts-per-example", 8, "--orchestrator.sampling.max-tokens", 16, "--seq-len", 64,
            "--max-steps", 4, "--trainer.optim.lr", "1e-4", "--output-dir", out, *options, **kwargs,
        )  # fmt: skip

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
        words = [*program, *map(str, options), "--server.port", "0"]
        self.process = subprocess.Popen(words, stdout=log.open("w"), stderr=subprocess.STDOUT, cwd=ROOT)
        deadline = time.monotonic() + 60
        while " at http://" not in log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        self.url = "http" + log.read_text().split(" at http")[1].split()[0]
        while True:
            try:
                urllib.request.urlopen(self.url.removesuffix("/v1") + "/health", timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def stop(self):
        self.process.terminate()
        assert self.process.wait(20) == 0, self.log.read_text()


@pytest.fixture(scope="session")
def server(trained, tmp_path_factory):
    server = Server("--model.name", trained, log=tmp_path_factory.mktemp("server") / "log")
    yield server
    server.stop()
