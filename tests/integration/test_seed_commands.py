"""The commands of PRIME-RL's reverse-text pages, typed in their order, with the tiny example and few steps."""

import json
import os

import pytest

from hone.models.hf import load_model, save_model
from tests.hangs import HANG_SECONDS

from .conftest import BIN, ROOT, TINY, answers, command, end, until

pytestmark = pytest.mark.usefixtures("port_8000")
FEW = ("--max-steps", 2, "--orchestrator.batch-size", 32)
URL = "http://localhost:8000/v1"


@pytest.fixture
def page(tmp_path, started):
    """A directory to type in: the examples, and a warmed-up model where their configurations look for it."""
    for name in ("examples", "src", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    model = ROOT / TINY / "model"
    save_model(
        load_model(model, random_init=True, seed=0),
        model,
        tmp_path / "outputs" / "weights" / "step_350",
    )

    def type_(*words, background=False):
        if not background:
            return command(*words, cwd=tmp_path, env={"WANDB_MODE": "offline"})
        return started(
            BIN / words[0], *words[1:], cwd=tmp_path, log=(tmp_path / f"{words[0]}.log").open("w")
        )

    return type_


def until_served():
    until(lambda: answers(URL))


def stop(shell):
    end(shell)
    assert shell.returncode == 0


def steps(tmp_path, name="metrics.jsonl"):
    return [json.loads(line)["step"] for line in (tmp_path / "outputs" / name).open()]


def test_the_rl_page(page, tmp_path):
    trainer = ("--trainer", "@", f"{TINY}/rl/train.toml")
    orchestrator = ("--orchestrator", "@", f"{TINY}/rl/orch.toml")
    page("rl", *trainer, *orchestrator, "--inference", "@", f"{TINY}/rl/infer.toml", *FEW)
    assert steps(tmp_path) == [1, 2]

    server = page("inference", "@", f"{TINY}/rl/infer.toml", background=True)
    until_served()
    for _ in range(2):
        page("rl", *trainer, *orchestrator, *FEW)
    assert steps(tmp_path) == [1, 2]
    stop(server)

    # Each by itself; the orchestrator comes before the trainer and must not take the last run for its own.
    server = page("inference", "@", f"{TINY}/rl/infer.toml", background=True)
    few = ("--max-steps", 2)
    shell = page(
        "orchestrator", "@", f"{TINY}/rl/orch.toml", *few, "--batch-size", 32, background=True
    )
    page("trainer", "@", f"{TINY}/rl/train.toml", *few)
    assert shell.wait(HANG_SECONDS) == 0, (tmp_path / "orchestrator.log").read_text()
    assert steps(tmp_path) == [1, 2]
    stop(server)


def test_the_multi_node_commands_on_one_node(page, tmp_path, monkeypatch):
    monkeypatch.setenv("INFERENCE_SERVER_API_KEY", "secret")
    shared = tmp_path / "shared"
    page("inference", "@", f"{TINY}/rl/infer.toml", "--api-key", "secret", background=True)
    until_served()
    page(
        "rl",
        "--trainer",
        "@",
        f"{TINY}/rl/train.toml",
        "--orchestrator",
        "@",
        f"{TINY}/rl/orch.toml",
        *FEW,
        "--orchestrator.client.base-url",
        "http://127.0.0.1:8000/v1",
        "--orchestrator.client.api-key-var",
        "INFERENCE_SERVER_API_KEY",
        "--output-dir",
        shared,
    )
    shell = page(
        "orchestrator",
        "@",
        f"{TINY}/rl/orch.toml",
        "--max-steps",
        2,
        "--batch-size",
        32,
        "--output-dir",
        shared,
        "--client.base-url",
        f'["{URL}"]',
        "--client.api-key-var",
        "INFERENCE_SERVER_API_KEY",
        background=True,
    )
    page(
        "python",
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        "--nproc_per_node",
        1,
        "--local-ranks-filter",
        0,
        "src/hone/trainer/rl/train.py",
        "@",
        f"{TINY}/rl/train.toml",
        "--max-steps",
        2,
        "--output-dir",
        shared,
    )
    assert shell.wait(HANG_SECONDS) == 0, (tmp_path / "orchestrator.log").read_text()
    assert len((shared / "metrics.jsonl").read_text().splitlines()) == 2
    assert not any("secret" in path.read_text() for path in (shared / "configs").iterdir())


def test_the_reverse_text_page(page, tmp_path):
    ready = tmp_path / "outputs" / "weights" / "step_350"
    page("python", "-c", "import reverse_text")
    server = page("inference", "--model.name", ready, background=True)
    until_served()
    offline = ("-a", '{"texts": "generated"}')  # the page's texts are on the hub
    page(
        "vf-eval", "reverse-text", "-m", ready, "-b", URL, "-n", 20, "--max-tokens", 1024, *offline
    )
    stop(server)
    os.rename(ready, tmp_path / "warmed-up")

    page("python", "-m", "reverse_text", "--out", "outputs/data/sft.jsonl", "-n", 200)
    wandb = ("--wandb.project", "p", "--wandb.name", "n")
    page("sft", "@", f"{TINY}/sft.toml", *wandb, "--max-steps", 2)
    page(
        "python",
        "-m",
        "torch.distributed.run",
        "--local-ranks-filter",
        0,
        "--nproc-per-node",
        1,
        "src/hone/trainer/sft/train.py",
        "@",
        f"{TINY}/sft/train.toml",
        *wandb,
        "--max-steps",
        2,
    )
    page(
        "rl",
        "@",
        f"{TINY}/rl.toml",
        "--model.name",
        "outputs/weights/step_2",
        *wandb,
        "--max-steps",
        3,
        "--orchestrator.batch-size",
        32,
    )
    assert steps(tmp_path) == [1, 2, 3] and steps(tmp_path, "metrics_sft.jsonl") == [1, 2]
    server = page("inference", "--model.name", "outputs/weights/step_3", background=True)
    until_served()
    page(
        "vf-eval",
        "reverse-text",
        "-m",
        "outputs/weights/step_3",
        "-b",
        URL,
        "-n",
        20,
        "--max-tokens",
        1024,
        *offline,
    )
    stop(server)
