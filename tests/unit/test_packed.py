"""A whole model in one compiled call against the same model layer by layer."""

from dataclasses import replace

import pytest
import torch

from hone.engine.engine import Engine
from hone.engine.packed_model import PackedModel, Quickest
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.records import GenerateRequest, Sampling

# Sizes that leave edges everywhere
QWEN3 = ModelSpec(
    70, 40, 72, 2, 4, 2, 16, 1e-6, make_plain_layers(1000.0, 16, 2), True, 512, 0.3, False
)
SPECS = {
    "qwen3": QWEN3,
    "qwen2": replace(QWEN3, qkv_bias=True, qk_norm=None),
    "llama": replace(QWEN3, qk_norm=None, tie_word_embeddings=False),
    "llama with biases": replace(QWEN3, qk_norm=None, qkv_bias=True, out_bias=True, mlp_bias=True),
}


def made(spec):
    model = Transformer(spec)
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1, generator=generator)
    if not PackedModel.supports_model(model):
        pytest.skip("needs the compiled kernels")
    return model


def requests():
    lengths = [1, 3, 64, 65, 150, 30, 30, 300, 8, 9]
    return [
        GenerateRequest(
            [(7 * i + j * j) % 70 for j in range(n)], Sampling(1.0, 5 + i, seed=i), frozenset()
        )
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("family", SPECS)
def test_packed_and_layer_by_layer_give_the_same(family):
    packed, plain = (Engine(made(SPECS[family]), prefill_tokens=200) for _ in range(2))
    assert packed.packed is not None
    plain.packed = None
    for one, two in zip(packed.generate(requests()), plain.generate(requests()), strict=True):
        assert one.ids == two.ids
        torch.testing.assert_close(
            torch.tensor(one.logprobs), torch.tensor(two.logprobs), rtol=0, atol=2e-5
        )


def test_weights_that_change_in_place_are_packed_again():
    model = made(QWEN3)
    engine = Engine(model)
    first = engine.generate(requests())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.pool.forget_prefixes()
    assert engine.generate(requests()) == Engine(model).generate(requests()) != first
    for parameter in model.parameters():
        parameter.data.mul_(0.9)  # torch does not count this
    engine.set_version(0)
    assert engine.generate(requests()) == Engine(model).generate(requests())


def test_the_quickest_way_is_found_though_work_grows():
    way = Quickest(3)
    tried, cost = [], 1.0
    for _ in range(12 + Quickest.KEPT):
        tried.append(way.choose_way())
        way.record_time((3.0, 1.5, 2.0)[tried[-1]] * cost)
        cost *= 1.02 if len(tried) < 12 else 1.0
    assert sorted(tried[:12]) == [0] * 4 + [1] * 4 + [2] * 4 and set(tried[12:]) == {1}
    assert way.choose_way() == 0  # and they are tried again
