"""Models on transformers' modules through the commands: `sft`, `rl` in processes, `inference`, `hone probe`."""

import json
import shutil

import pytest
import torch

from tests.unit.test_hf_models import FAMILIES, SHAPE

from .conftest import RL_ENV, ROOT, Server, command, http, read_rows

TINY_MODEL = ROOT / "examples" / "reverse_text_tiny" / "model"


@pytest.fixture(scope="module", params=["gemma3_text", "gpt_oss"])
def model(request, tmp_path_factory):
    """A directory with random weights, and the tokenizer of the tiny model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = json.loads((TINY_MODEL / "config.json").read_text())
    tokens = {key: own[key] for key in ("vocab_size", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(request.param, **SHAPE | FAMILIES[request.param] | tokens)
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp(request.param) / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for file in TINY_MODEL.iterdir():
        if not (directory / file.name).exists():
            shutil.copy(file, directory)
    return directory


def test_warm_up_rl_in_processes_and_a_server(model, tmp_path):
    data = tmp_path / "sft.jsonl"
    command("python", "-m", "reverse_text", "--out", data, "-n", 64, "--max-chars", 16)
    words = ("--data.batch-size", 16, "--data.seq-len", 64, "--max-steps", 3)
    done = command(
        "sft",
        "--model.name",
        model,
        "--data.name",
        data,
        "--output-dir",
        tmp_path / "sft",
        *words,
    )
    assert "is computed by transformers' modules" in done.stdout + done.stderr
    losses = [row["loss/mean"] for row in read_rows(tmp_path / "sft" / "metrics_sft.jsonl")]
    assert losses[-1] < losses[0]
    trained = tmp_path / "sft" / "weights" / "step_3"
    words = ("--orchestrator.env", RL_ENV, "--orchestrator.batch-size", 32, "--max-steps", 3)
    words += ("--orchestrator.sampling.max-tokens", 16, "--seq-len", 64, "--max-async-level", 0)
    words += ("--trainer.lora.rank", 4, "--deployment", "processes", "--inference.server.port", 0)
    command("rl", "--model.name", trained, "--output-dir", tmp_path / "rl", *words)
    rows = [row for row in read_rows(tmp_path / "rl" / "metrics.jsonl") if "loss/mean" in row]
    assert len(rows) == 3  # and the canary and fingerprints of each version agreed
    assert all(row["mismatch_kl/mean"] < 1e-9 for row in rows)
    weights = tmp_path / "rl" / "weights" / "step_3"
    server = Server(
        "--model.name", weights, "--model.implementation", "transformers", log=tmp_path / "log"
    )
    try:
        version = http.get(server.url.removesuffix("/v1") + "/version").json()
        assert version["implementation"] == "transformers"
        body = {"model": str(weights), "prompt": "abc", "max_tokens": 8, "temperature": 0}
        assert http.post(f"{server.url}/completions", json=body).json()["choices"][0]["text"]
    finally:
        server.stop()
    words = ("--rollouts", 4, "--max-tokens", 16)
    done = command("hone", "probe", "--model.name", weights, *words)
    assert "4 rollouts, fast numerics" in done.stdout


def test_what_is_not_supported_is_refused_by_name(model, tmp_path):
    done = command("inference", "--model.name", model, "--model.implementation", "hone", ok=False)
    assert "architecture" in done.stderr and "is not supported" in done.stderr
    config = json.loads((model / "config.json").read_text()) | {"layer_types": ["mamba"] * 4}
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    done = command("inference", "--model.name", tmp_path / "model", ok=False)
    assert "layers of the kind" in done.stderr and "supported: full_attention" in done.stderr
