"""`hone tinker` on a GPU, driven by Tinker's SDK: several clients at once, and the unembedding."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

tinker = pytest.importorskip("tinker")
types = tinker.types

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

TINY = Path(__file__).parents[2] / "examples" / "reverse_text_tiny" / "model"
# Qwen3-0.6B's shape
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
START_SECONDS = 180
STEPS, SEQUENCES, TOKENS = 8, 16, 64


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """URL and model directory of a server with random weights."""
    found = tmp_path_factory.mktemp("tinker")
    model = found / "model"
    model.mkdir()
    for file in TINY.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((TINY / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | SHAPE))
    report = found / "report.json"
    words = ["tinker", "--model.name", model, "--model.random-init", "--max-model-len", 1024]
    words += ["--server.port", 0, "--directory", found / "saved"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hone", *map(str, words)],
        env=os.environ | {"HONE_REPORT_FILE": str(report)},
    )
    until = time.monotonic() + START_SECONDS
    while not (report.exists() and b"url" in report.read_bytes()):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    os.environ["TINKER_TELEMETRY"] = "0"
    yield json.loads(report.read_bytes())["url"], str(model)
    process.terminate()
    process.wait()


def create_clients(served, ranks, **keys):
    url, base = served
    return [
        tinker.ServiceClient(base_url=url, api_key="tml-local")
        .create_lora_training_client(base, rank=rank, seed=i, **keys)
        .result()
        for i, rank in ranks
    ]


def draw_data(seed):
    draw = np.random.default_rng(seed)
    rows = draw.integers(3, 60, (SEQUENCES, TOKENS + 1)).tolist()
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData(data=row[1:], dtype="int64"),
                "weights": types.TensorData(data=[1.0] * TOKENS, dtype="float32"),
            },
        )
        for row in rows
    ]


def train_at_once(clients, data):
    """Return each client's loss by step; calls of all clients are in flight together."""
    rows = []
    for _ in range(STEPS):
        passed = [
            one.forward_backward(of, "cross_entropy") for one, of in zip(clients, data, strict=True)
        ]
        for one in clients:
            one.optim_step(types.AdamParams(learning_rate=1e-3))
        rows.append([one.result().metrics["loss:sum"] for one in passed])
    return np.array(rows).T / (SEQUENCES * TOKENS)


def test_three_clients_at_once_learn_what_each_learns_alone(served):
    ranks = [(0, 32), (1, 8), (2, 64)]
    data = [draw_data(i) for i, _ in ranks]
    together = train_at_once(create_clients(served, ranks), data)
    alone = [
        train_at_once(create_clients(served, [one]), [of])[0]
        for one, of in zip(ranks, data, strict=True)
    ]
    print(together.round(4), np.abs(together - alone).max())
    assert (together[:, -1] < together[:, 0] - 0.5).all()  # they learn
    np.testing.assert_allclose(together, alone, atol=1e-3)


def test_a_snapshot_with_an_adapter_of_the_unembedding_scores_as_the_trainer_does(served):
    [training] = create_clients(served, [(5, 32)], train_attn=False, train_mlp=False)
    data = draw_data(5)
    [losses] = train_at_once([training], [data])
    assert losses[-1] < losses[0] - 0.1
    sampler = training.save_weights_and_get_sampling_client().result()
    for one in data[:3]:
        output = training.forward([one], "cross_entropy").result().loss_fn_outputs[0]
        wanted = output["logprobs"].to_numpy()
        ids = [*one.model_input.to_ints(), one.loss_fn_inputs["target_tokens"].data[-1]]
        found = sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()
        difference = np.abs(np.array(found[1:]) - wanted)
        print(difference.mean(), difference.max())
        assert difference.mean() < 0.03  # bf16, weights merged for sampling
