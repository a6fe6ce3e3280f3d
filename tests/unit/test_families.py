"""What is asked of a family: sizes without torch, adapters, fast paths; a mixture of experts from sampling to a step.

Logits, gradients, greedy tokens and files of every family: test_transformer.py.
"""

import subprocess
import sys

import pytest
import torch

from hone.config.lora import LoRAConfig
from hone.config.rl import TrainerConfig
from hone.config.sections import OptimConfig
from hone.engine.engine import Engine
from hone.engine.packed import PackedModel
from hone.models.adapters import Adapter, Adapters
from hone.models.families import parse_model_config
from hone.models.hf import hf_names
from hone.models.lora import add_lora, loras
from hone.models.transformer import Transformer, grouped_linear
from hone.records import Batch, GenerateRequest, Sample, Sampling
from hone.trainer.rl.trainer import RLTrainer

COMMON = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 96, "initializer_range": 0.3,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
CONFIGS = {
    "dense": COMMON | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "experts": COMMON | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"]},
}


def made(family, seed=0):
    model = Transformer(parse_model_config(CONFIGS[family]))
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


@pytest.mark.parametrize("family", CONFIGS)
def test_sizes_are_those_of_the_model(family):
    model = made(family)
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    assert model.spec.parameters() == matrices
    active = matrices - 50 * 32 * (family == "experts")  # the embedding is looked up, not multiplied
    if family == "experts":
        active -= 2 * (6 - 2) * 3 * 32 * 16  # four of six experts in each block are not asked
    assert model.spec.flops_per_token() == 2 * active
    assert set(hf_names(model.spec)) == dict(model.named_parameters()).keys()


def test_the_arithmetic_needs_no_torch():
    code = "import sys, hone.models.families as f; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fast_paths_are_refused_by_asking():
    assert PackedModel.takes(made("dense")) == made("dense").spec.has_fast_paths
    assert not PackedModel.takes(made("experts")) and Engine(made("experts")).decoder.packed is None


def test_grouped_products_with_groups_of_none():
    x, weights = torch.randn(5, 4), torch.randn(4 * 3, 4)
    found = grouped_linear(x, weights, torch.tensor([2, 0, 3, 0]))
    torch.testing.assert_close(found, torch.cat([x[:2] @ weights[:3].T, x[2:] @ weights[6:9].T]))
    assert grouped_linear(x[:0], weights, torch.tensor([0, 0, 0, 0])).shape == (0, 3)


def test_adapters_of_a_mixture_are_those_of_attention():
    model = made("experts")
    add_lora(model, LoRAConfig(rank=2), seed=0)
    assert {name.rsplit(".", 1)[-1] for lora in loras(model) for name in lora.targets} == {*model.spec.linears}
    with pytest.raises(ValueError, match="lora.targets: up_proj has no adapter in this model; q_proj, k_proj"):
        add_lora(made("experts"), LoRAConfig(targets=["q_proj", "up_proj"]), seed=0)
    expert = Adapter(2, {"model.layers.0.mlp.experts.1.up_proj": (torch.zeros(2, 32), torch.zeros(16, 2))})
    with pytest.raises(ValueError, match=r"the model has no linear model.layers.0.mlp.experts.1.up_proj"):
        Adapters(made("experts")).load("a", expert)


@pytest.mark.parametrize("kind", ["adamw", "muon", "lora"])
def test_what_the_sampler_wrote_the_trainer_scores_alike_and_learns(kind):
    model = made("experts")
    optim = OptimConfig(type="muon" if kind == "muon" else "adamw", lr=1e-2)
    lora = LoRAConfig(rank=4) if kind == "lora" else None
    trainer = RLTrainer(model, TrainerConfig(optim=optim, lora=lora), max_steps=2)
    engine = Engine(model, max_batch_size=8, kv_cache_gib=0.1)
    prompts = [[1, 2, 3, 4 + i % 2] for i in range(8)]
    before = None
    for step in (1, 2):
        asked = [GenerateRequest(p, Sampling(0.8, 12, seed=i), frozenset()) for i, p in enumerate(prompts)]
        samples = [
            Sample(p + c.ids, [False] * 4 + [True] * len(c.ids), [0.0] * 4 + c.logprobs, (-1.0) ** i, 0.8)
            for i, (p, c) in enumerate(zip(prompts, engine.generate(asked), strict=True))
        ]
        values = trainer.step(Batch(step, samples))
        engine.set_version(step)
        assert values["mismatch_kl/max"] < 1e-6
        assert before is None or values["loss/mean"] != before
        before = values["loss/mean"]
