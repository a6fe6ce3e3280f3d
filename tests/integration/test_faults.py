"""What goes wrong on the way: weights that are not those of the trainer, processes that stand still, files that come
late, disks that are full, directories that another run has left."""

import json
import sys
from pathlib import Path

import pytest

from .conftest import BIN, ROOT, TINY, Server, command
from .test_services import SMALL, TINY_RL, metrics

FAULTY = (BIN / "python", Path(__file__).with_name("faulty_server.py"))


# ------------------------------------------------------------------------------ proof of delivery


@pytest.mark.parametrize(
    ("fault", "options", "words"),
    [
        ("corrupted", (), "of 35 weights 1 differ: model.layers.1.mlp.down_proj.weight"),
        ("stale", (), "of 35 weights 35 differ: model.embed_tokens.weight, model.norm.weight, "),
        ("dropped-adapter", ("--trainer.lora.rank", 4, "--trainer.optim.lr", 1e-2), "self_attn.q_proj.weight, "),
    ],
)
def test_weights_that_did_not_arrive_end_the_run_at_that_step(fault, options, words, trained, tmp_path):
    server = Server("--model.name", trained, log=tmp_path / "server.log", program=(*FAULTY, fault))
    out = tmp_path / "run"
    try:
        done = command(
            "rl", *TINY_RL, "--model.name", trained, "--output-dir", out, *SMALL, "--max-steps", 6,
            "--orchestrator.client.base-url", server.url, *options, ok=False,
        )  # fmt: skip
    finally:
        server.stop()
    last = done.stderr.splitlines()[-1]
    assert f"{server.url} serves other weights than version 2: checksum " in last and words in last, last
    assert "and 32 more" in last if fault == "stale" else True
    assert [row["step"] for row in metrics(out)] == [1, 2] and metrics(out)[0]["weights/canary_difference"] < 1e-4


def test_only_the_adapter_travels_and_the_server_has_the_weights_of_the_trainer(trained, tmp_path):
    out = tmp_path / "run"
    command(
        "rl", *TINY_RL, "--inference", "@", f"{TINY}/rl/infer.toml", "--model.name", trained, "--output-dir", out,
        *SMALL, "--inference.server.port", 0, "--max-steps", 4, "--trainer.lora.rank", 4, "--trainer.optim.lr", 1e-2,
        "--trainer.lora.modules-to-save", "embed_tokens",
    )  # fmt: skip
    rows, whole = metrics(out), (trained / "model.safetensors").stat().st_size
    assert len(rows) == 4 and all(0 < row["weights/bytes"] < whole / 2 for row in rows)
    assert max(row["weights/canary_difference"] for row in rows) < 1e-3
    log = (out / "logs" / "orchestrator.log").read_text()
    assert "Version 4: 1 servers took " in log and "MiB (adapter) in " in log and "checksum " in log
    assert sorted(p.name for p in (out / "broadcasts" / "step_4").iterdir()) == [
        "STABLE", "adapter_config.json", "adapter_model.safetensors", "delivery.json",
    ]  # fmt: skip
