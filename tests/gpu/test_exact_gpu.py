"""Exact numerics: the sampler's logprobs are the trainer's, bit for bit, and a kernel that keeps no order is seen."""

import pytest
import torch
import torch.nn.functional as F

from hone.config.lora_config import LoRAConfig
from hone.kernels import numerics
from hone.kernels.linear import ordered
from hone.launch.numerics_probe import probe_model
from hone.models.families import parse_model_config
from hone.models.lora import add_lora, lora_modules
from hone.models.transformer import Transformer

pytestmark = pytest.mark.gpu
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 5000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}


@pytest.fixture(autouse=True)
def exact():
    numerics.use("exact")
    yield
    numerics.use("fast")


def model_of(**changes):
    with torch.device("cuda"):
        model = Transformer(parse_model_config({**SHAPE, **changes})).bfloat16()
    model.init_weights(torch.Generator("cuda").manual_seed(0))
    return model


@pytest.mark.parametrize(
    "changes", [{}, {"num_attention_heads": 8, "head_dim": 64}, {"tie_word_embeddings": False}]
)
def test_no_logprob_differs(changes):
    found = probe_model(model_of(**changes), 200, 60)
    assert found.tokens > 3000 and found.differ == 0, found.describe_result()


def test_no_logprob_differs_with_an_adapter():
    model = model_of()
    add_lora(model, LoRAConfig(rank=8, alpha=12), 0)
    for lora in lora_modules(model):
        torch.nn.init.normal_(lora.B, std=0.02)
    found = probe_model(model, 100, 60)
    assert found.differ == 0, found.describe_result()


@pytest.mark.parametrize("part", sorted(numerics.PARTS))
def test_a_part_that_keeps_no_order_is_seen(part):
    numerics.use("exact", but=part)
    found = probe_model(model_of(), 100, 60)
    assert found.differ > 0
    if part in ("attention", "products"):
        assert found.place.startswith("layer 0")


def test_fast_numerics_are_looked_at_layer_by_layer():
    """By kernels for few rows, which add to the stream what comes out of a block."""
    numerics.use("fast")
    found = probe_model(model_of(), 100, 60)
    assert found.differ > 0 and found.place.startswith("layer 0")


@pytest.mark.parametrize(
    "size", [(1024, 3072), (2560, 9728), (4096, 12288), (2048, 8192), (5000, 1024)]
)
def test_a_row_of_a_product_does_not_depend_on_the_others(size):
    N, K = size
    x, w = (
        torch.randn(8192, K, device="cuda").bfloat16(),
        (torch.randn(N, K, device="cuda") * 0.02).bfloat16(),
    )
    whole, exactly = F.linear(x, w), torch.mm(x, w.t(), out_dtype=torch.float32)
    for M in (
        1,
        5,
        16,
        17,
        64,
        100,
        128,
        200,
        256,
        300,
        500,
        512,
        777,
        1000,
        1500,
        2100,
        3000,
        4097,
    ):
        assert torch.equal(ordered(x[:M], w, x.dtype), whole[:M]), M
        assert torch.equal(ordered(x[:M], w, torch.float32), exactly[:M]), M
