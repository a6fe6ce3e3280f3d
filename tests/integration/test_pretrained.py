"""A pretrained model, SmolLM2-135M-Instruct, through every command; transformers and vLLM are the oracles.

Marked `pretrained`: PRETRAINED_MODEL is the directory that scripts/pretrained.py writes (make test-pretrained).
"""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.hangs import HANG_SECONDS

from .conftest import ROOT, Server, command, http, read_rows

pytestmark = pytest.mark.pretrained
MODEL = os.environ.get("PRETRAINED_MODEL", "")
SUMS = str(ROOT / "examples" / "smollm2_sums")
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Name three colours."},
        {"role": "assistant", "content": "Red, green, blue."},
        {"role": "user", "content": "And three animals?"},
    ],
]
GREEDY_TOKENS = 32


@pytest.fixture(scope="module")
def oracle():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server("--model.name", MODEL, log=tmp_path_factory.mktemp("served") / "log")
    yield server
    server.stop()


def ask(server, messages, **fields):
    body = {"model": MODEL, "messages": messages, "max_tokens": GREEDY_TOKENS, "temperature": 0}
    body |= {"return_token_ids": True, "return_token_logprobs": True, **fields}
    return http.post(f"{server.url}/chat/completions", json=body).json()


def generate(oracle, messages):
    """Return transformers' prompt ids, greedy ids, and the logits of the whole."""
    model, tokenizer = oracle
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ids = model.generate(**encoded, do_sample=False, max_new_tokens=GREEDY_TOKENS)
        logits = model(ids).logits[0]
    prompt = encoded["input_ids"][0].tolist()
    return prompt, ids[0, len(prompt) :].tolist(), logits


@pytest.mark.parametrize("messages", CHATS)
def test_template_greedy_text_and_logprobs_are_those_of_transformers(server, oracle, messages):
    answer = ask(server, messages)
    choice = answer["choices"][0]
    prompt, expected, logits = generate(oracle, messages)
    assert answer["prompt_token_ids"] == prompt
    assert choice["token_ids"] == expected
    assert choice["message"]["content"] == oracle[1].decode(expected, skip_special_tokens=True)
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    wanted = logprobs.gather(1, torch.tensor(expected)[:, None])[:, 0].tolist()
    assert choice["token_logprobs"] == pytest.approx(wanted, abs=1e-3)


def test_logits_are_those_of_transformers(oracle):
    from hone.models.attention_layouts import PackedAttention
    from hone.models.hf import load_model

    ids = torch.tensor(oracle[1].encode("The quick brown fox jumps over the lazy dog. " * 6))
    model = load_model(Path(MODEL), dtype=torch.float32)
    with torch.no_grad():
        hidden = model(ids, torch.arange(len(ids)), PackedAttention([len(ids)]))
        found = model.compute_logits(hidden)
        expected = oracle[0](ids[None]).logits[0]
    assert (found - expected).abs().max() < 2e-3


def test_sft_lowers_the_loss(tmp_path):
    data = tmp_path / "sft.jsonl"
    command("python", "-m", "reverse_text", "--phrases", "--out", data, "-n", 64)
    words = ("--data.name", data, "--data.seq-len", 128, "--data.batch-size", 4, "--max-steps", 8)
    words += ("--optim.lr", 1e-4, "--output-dir", tmp_path / "run")
    command("sft", "--model.name", MODEL, *words)
    losses = [row["loss/mean"] for row in read_rows(tmp_path / "run" / "metrics_sft.jsonl")]
    assert losses[-1] < 0.8 * losses[0]


def test_rl_raises_the_reward_and_its_checkpoint_is_exported(tmp_path):
    run, exported = tmp_path / "run", tmp_path / "exported"
    words = ("@", f"{SUMS}/rl.toml", "--model.name", MODEL, "--output-dir", run)
    words += ("--max-steps", 20, "--orchestrator.eval", "None", "--ckpt.interval", 20)
    command("rl", *words, env={"PYTHONPATH": SUMS})
    rewards = [row["reward/mean"] for row in read_rows(run / "metrics.jsonl")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    words = ("--checkpoint", run / "checkpoints" / "step_20", "--output-dir", exported)
    command("hone", "export", *words, "--dtype", "float32")  # that of the run, on a CPU
    from safetensors.torch import load_file

    trained = load_file(run / "weights" / "step_20" / "model.safetensors")
    written = load_file(exported / "model.safetensors")
    assert trained.keys() == written.keys()
    assert all(torch.equal(trained[name], written[name]) for name in trained)


def test_the_notebook_runs(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("STEPS", "2")
    notebook = nbformat.read(ROOT / "examples" / "gpu_notebook.ipynb", 4)
    cell = next(cell for cell in notebook.cells if cell.id == "train")
    cell.source = cell.source.replace("batch_size=256", "batch_size=32")
    place = tmp_path / "notebook"
    place.mkdir()
    cell = next(cell for cell in notebook.cells if cell.id == "model")
    cell.source = cell.source.replace("Path.cwd(), *Path.cwd().parents", f"Path({str(ROOT)!r}),")
    paths = {"metadata": {"path": str(place)}}
    client = NotebookClient(notebook, timeout=HANG_SECONDS, kernel_name="python3", resources=paths)
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(str(output.get("text", "")) for output in outputs)
    assert "Step 2/2: reward=" in text and "step 2: " in text
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert (place / "outputs/sums/checkpoint-2/adapter_model.safetensors").exists()


def test_probe_finds_the_same_logprobs_in_sampling_and_training():
    from hone.launch.numerics_probe import probe_model
    from hone.models.hf import load_model

    found = probe_model(load_model(Path(MODEL), dtype=torch.float32), 16, 32)
    assert found.tokens > 200 and found.largest < 1e-3 and abs(found.mismatch) < 1e-8
    command("hone", "probe", "--model.name", MODEL, "--rollouts", 4, "--max-tokens", 8)


def test_vllm_samples_the_same(server, tmp_path):
    python = os.environ["VLLM_PYTHON"]
    words = ("--backend", "vllm", "--vllm-python", python, "--enforce-eager")
    words += ("--max-model-len", 512, "--model.dtype", "float32")
    other = Server("--model.name", MODEL, *words, log=tmp_path / "log")
    try:
        for messages in CHATS:
            ours, theirs = (ask(one, messages)["choices"][0] for one in (server, other))
            assert ours["token_ids"] == theirs["token_ids"]
            assert ours["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=2e-3)
    finally:
        other.stop()


def test_the_recipes_name_environments_and_keys_that_exist():
    for folder in sorted((ROOT / "examples").glob("smollm2_*")):
        for file in folder.glob("rl.toml"):
            words = ("--model.name", MODEL, "--dry-run")
            done = command("rl", "@", file, *words, env={"PYTHONPATH": str(folder)})
            assert json.dumps(MODEL) in done.stdout
