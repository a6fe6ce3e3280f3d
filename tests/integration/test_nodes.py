"""Several nodes by hand, as docs/nodes.md types it, in network namespaces; and the panes of scripts/tmux.sh. Marked
`cluster`: needs root, iproute2 and tmux (make test-slurm)."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time

import pytest

from . import namespaces
from .conftest import BIN, HANG_SECONDS, ROOT, TINY, until

pytestmark = pytest.mark.cluster
ENV = '{"id": "reverse-text", "args": {"texts": "generated", "min_chars": 4, "max_chars": 10}}'
SMALL = ("--max-steps", "4", "--seq-len", "64")


@pytest.fixture
def nodes():
    if not namespaces.is_possible():
        pytest.skip("network namespaces need root and iproute2")
    with namespaces.Nodes(["node0", "node1", "node2"]) as nodes:
        yield nodes


class Typed:
    """Commands typed on nodes, with what was exported there."""

    def __init__(self, nodes, place, exported):
        self.nodes, self.place, self.running = nodes, place, {}
        self.environment = {
            **os.environ,
            **exported,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }

    def type(self, node, name, line):
        log = (self.place / f"{name}.log").open("w")
        self.running[name] = subprocess.Popen(
            [*self.nodes.words(node), "bash", "-c", line],
            cwd=ROOT,
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def text(self, name):
        return (self.place / f"{name}.log").read_text()

    def ends_well(self, *names):
        for name in names:
            code = self.running[name].wait(HANG_SECONDS)
            assert code == 0, "\n".join(
                f"== {one}\n{self.text(one)[-3000:]}" for one in self.running
            )

    def end(self):
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_the_page_of_several_nodes(nodes, trained, tmp_path):
    """A server on one node, a trainer over two by torchrun, an orchestrator beside it; who has no key gets nothing."""
    out = tmp_path / "shared"
    exported = {
        "OUTPUT_DIR": str(out),
        "INFERENCE_SERVER_IP": nodes.address(2),
        "INFERENCE_SERVER_API_KEY": "a key of the run",
        "RDZV_ENDPOINT": f"{nodes.address(0)}:1234",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    typed, model = Typed(nodes, tmp_path, exported), f"--model.name {trained} --model.device cpu"
    small = " ".join(SMALL)
    try:
        typed.type(
            2,
            "inference",
            f'inference @ {TINY}/rl/infer.toml {model} --max-model-len 64 --api-key "$INFERENCE_SERVER_API_KEY"',
        )
        for rank in (0, 1):
            typed.type(
                rank,
                f"trainer{rank}",
                f"torchrun --nnodes=2 --nproc_per_node 1 --node-rank {rank} --rdzv_endpoint=$RDZV_ENDPOINT "
                f"src/hone/trainer/rl/train.py @ {TINY}/rl/train.toml {model} --max-steps 4 --output-dir $OUTPUT_DIR",
            )
        typed.type(
            0,
            "orchestrator",
            f"orchestrator @ {TINY}/rl/orch.toml {small} --model.name {trained} --env '{ENV}' --batch-size 16 "
            "--rollouts-per-example 4 --client.base-url http://$INFERENCE_SERVER_IP:8000/v1 "
            "--client.api-key-var INFERENCE_SERVER_API_KEY --output-dir $OUTPUT_DIR",
        )
        typed.ends_well("orchestrator", "trainer0", "trainer1")
        assert (out / "weights" / "step_4" / "model.safetensors").is_file()
        assert " x 2) with an orchestrator over " in typed.text("trainer0")
        typed.type(
            1,
            "asked",
            "curl -s -o /dev/null -w '%{http_code}' http://$INFERENCE_SERVER_IP:8000/v1/models",
        )
        typed.ends_well("asked")
        assert typed.text("asked") == "401"
        typed.type(
            2,
            "again",
            f'inference @ {TINY}/rl/infer.toml {model} --api-key "$INFERENCE_SERVER_API_KEY"',
        )
        assert typed.running["again"].wait(HANG_SECONDS) == 1
        assert re.search(
            r":8000: Address already in use by process \d+ \(.*inference", typed.text("again")
        ), typed.text("again")
    finally:
        typed.end()


def test_a_node_that_is_cut_off_ends_the_trainer_with_words(nodes, trained, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "data.jsonl").write_text(
        "".join(
            json.dumps({"prompt": "p", "completion": "c" * (i % 30 + 1)}) + "\n" for i in range(400)
        )
    )
    typed = Typed(nodes, tmp_path, {"GLOO_SOCKET_IFNAME": "eth0"})
    try:
        for rank in (0, 1):
            typed.type(
                rank,
                f"sft{rank}",
                f"torchrun --nnodes=2 --nproc_per_node 1 --node-rank {rank} --rdzv_endpoint={nodes.address(0)}:1234 "
                f"src/hone/trainer/sft/train.py @ {TINY}/sft.toml --model.name {trained} --model.device cpu "
                f"--data.name {tmp_path}/data.jsonl --max-steps 100000 --output-dir {out} --ranks-timeout 5",
            )
        metrics = out / "metrics_sft.jsonl"
        until(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3,
            words=lambda: typed.text("sft0"),
        )
        nodes.link(1, "down")
        for rank in (0, 1):
            assert typed.running[f"sft{rank}"].wait(HANG_SECONDS) != 0
    finally:
        typed.end()


def test_the_panes_of_tmux_show_a_run(trained, tmp_path):
    if not shutil.which("tmux"):
        pytest.skip("tmux is not installed")
    environment = {**os.environ, "TMUX_TMPDIR": str(tmp_path), "SHELL": "/bin/bash"}
    environment.pop("TMUX", None)

    def tmux(*words):
        return subprocess.run(
            ["tmux", *words], env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
        ).stdout

    out, model = tmp_path / "out", str(trained)
    done = subprocess.run(
        ["bash", "scripts/tmux.sh", "-s", "try", "-o", out, "--no-attach"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    try:
        titles = tmux(
            "list-panes", "-s", "-t", "try", "-F", "#{window_name} #{pane_title} #{pane_id}"
        ).splitlines()
        panes = {tuple(line.split()[:2]): line.split()[2] for line in titles[:3]}
        assert set(panes) == {("RL", "Trainer"), ("RL", "Orchestrator"), ("RL", "Inference")}
        line = (
            f"{shlex.quote(str(BIN / 'rl'))} @ {TINY}/rl.toml --model.name {model} --model.device cpu "
            "--deployment processes --max-steps 6 "
            f"--inference.server.port 0 --orchestrator.batch-size 16 --output-dir {out} --log-interval 1"
        )
        tmux("send-keys", "-t", panes["RL", "Trainer"], line, "C-m")

        def shown(pane):
            return tmux("capture-pane", "-p", "-J", "-S", "-200", "-t", pane)

        expected = {
            panes["RL", "Trainer"]: "Weights of step 6",
            panes["RL", "Orchestrator"]: "Step 6 | Time",
            panes["RL", "Inference"]: "Serving",
            "try:Monitor": "Step 6",
        }
        deadline = time.monotonic() + HANG_SECONDS
        while missing := {pane: word for pane, word in expected.items() if word not in shown(pane)}:
            assert time.monotonic() < deadline, [
                (word, shown(pane)[-1500:]) for pane, word in missing.items()
            ]
            time.sleep(0.5)
        monitor = shown("try:Monitor")
        assert all(
            re.search(rf"^{name} +\S", monitor, re.M) for name in ("GPU", "CPU", "Memory", "Disk")
        ), monitor
    finally:
        tmux("kill-server")
