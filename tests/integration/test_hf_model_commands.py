"""Families through the commands, on both implementations: `sft`, `rl` in processes, `inference`, `hone probe`."""

import json
import shutil

import pytest
import torch

from tests.unit.test_hf_models import FAMILIES, KINDS, OWN, SHAPE

from .conftest import RL_ENV, ROOT, Server, command, http, read_rows

TINY_MODEL = ROOT / "examples" / "reverse_text_tiny" / "model"


WITH_ATTENTION = """qwen3 llama qwen2 olmo2 olmo3 smollm3 mistral ministral3 gemma2 gemma3_text
granite phi3 gpt_oss gemma4_e""".split()
HYBRIDS = "qwen3_5_moe_text olmo_hybrid lfm2 granitemoehybrid nemotron_h".split()
CASES = [(kind, "transformers") for kind in WITH_ATTENTION + HYBRIDS] + [
    (kind, "hone") for kind in OWN if kind not in ("qwen3", "llama", "qwen2", "qwen3_5_moe_text")
]
COMPUTED = {"hone": "Hone's own implementation", "transformers": "transformers' modules"}


def make_model(kind, directory):
    """Write a model with random weights, and the tokenizer of the tiny model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = json.loads((TINY_MODEL / "config.json").read_text())
    tokens = {key: own[key] for key in ("vocab_size", "eos_token_id", "pad_token_id")}
    shape = SHAPE | FAMILIES[kind] | tokens
    if "vocab_size_per_layer_input" in shape:
        shape["vocab_size_per_layer_input"] = own["vocab_size"]
    torch.manual_seed(0)
    config = AutoConfig.for_model(KINDS.get(kind, kind), **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for file in TINY_MODEL.iterdir():
        if not (directory / file.name).exists():
            shutil.copy(file, directory)
    return directory


@pytest.mark.parametrize(("kind", "implementation"), CASES)
def test_warm_up_rl_in_processes_and_a_server(kind, implementation, tmp_path):
    model = make_model(kind, tmp_path / "model")
    by = ("--model.implementation", implementation)
    data = tmp_path / "sft.jsonl"
    command("python", "-m", "reverse_text", "--out", data, "-n", 64, "--max-chars", 16)
    words = ("--data.batch-size", 16, "--data.seq-len", 64, "--max-steps", 3)
    files = ("--model.name", model, "--data.name", data, "--output-dir", tmp_path / "sft")
    done = command("sft", *files, *by, *words)
    assert f"is computed by {COMPUTED[implementation]}" in done.stdout + done.stderr
    losses = [row["loss/mean"] for row in read_rows(tmp_path / "sft" / "metrics_sft.jsonl")]
    assert losses[-1] < losses[0]
    trained = tmp_path / "sft" / "weights" / "step_3"
    words = ("--orchestrator.env", RL_ENV, "--orchestrator.batch-size", 32, "--max-steps", 3)
    words += ("--orchestrator.sampling.max-tokens", 16, "--seq-len", 64, "--max-async-level", 0)
    words += ("--trainer.lora.rank", 4, "--deployment", "processes", "--inference.server.port", 0)
    command("rl", "--model.name", trained, "--output-dir", tmp_path / "rl", *by, *words)
    rows = [row for row in read_rows(tmp_path / "rl" / "metrics.jsonl") if "loss/mean" in row]
    assert len(rows) == 3  # and the canary and fingerprints of each version agreed
    assert all(row["mismatch_kl/mean"] < 1e-9 for row in rows)
    weights = tmp_path / "rl" / "weights" / "step_3"
    server = Server("--model.name", weights, *by, log=tmp_path / "log")
    try:
        version = http.get(server.url.removesuffix("/v1") + "/version").json()
        assert version["implementation"] == implementation
        body = {"model": str(weights), "prompt": "abc", "max_tokens": 8, "temperature": 0}
        assert http.post(f"{server.url}/completions", json=body).json()["choices"][0]["text"]
    finally:
        server.stop()
    if kind in ("gpt_oss", "gemma3_text"):
        words = ("--rollouts", 4, "--max-tokens", 16)
        done = command("hone", "probe", "--model.name", weights, *by, *words)
        assert "4 rollouts, fast numerics" in done.stdout


def test_what_is_not_supported_is_refused_by_name(tmp_path):
    model = make_model("cohere2", tmp_path / "model")
    done = command("inference", "--model.name", model, "--model.implementation", "hone", ok=False)
    assert "architecture" in done.stderr and "is not supported" in done.stderr
    config = json.loads((model / "config.json").read_text()) | {
        "layer_types": ["chunked_attention"] * 4
    }
    (model / "config.json").write_text(json.dumps(config))
    done = command("inference", "--model.name", model, ok=False)
    assert "layers of the kind" in done.stderr and "supported: full_attention" in done.stderr
