"""Mixtures of experts on a GPU: kernels against torch in fp64, sampling against training."""

import pytest
import torch
import torch.nn.functional as F

from hone.config.lora_config import LoRAConfig
from hone.config.rl_config import TrainerConfig
from hone.config.sections import OptimConfig
from hone.engine.engine import Engine
from hone.kernels.expert_products import (
    ExpertWeights,
    decode_experts,
    multiply_experts,
    multiply_groups,
)
from hone.kernels.gating import ClampedGating
from hone.models.families import parse_model_config
from hone.models.lora import Merged
from hone.models.transformer import Transformer
from hone.orchestrator.group import samples_of
from hone.records import Batch, Example, GenerateRequest, Rollout, Sampling, Turn
from hone.trainer.rl.trainer import PolicyTrainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 0,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "num_experts": 24,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
}


def draw(*shape, inner=1):
    return torch.randn(*shape, device="cuda").bfloat16() / inner**0.5


def relative_error(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


GATING = ClampedGating(alpha=1.702, limit=7.0)


def draw_experts(E, D, width, is_gpt_oss):
    shapes = [(E, 2 * width, D), (E, D, width)]
    if is_gpt_oss:
        shapes = [(E, D, 2 * width), (E, width, D), (E, 2 * width), (E, D)]
    return [draw(*shape, inner=shape[1 if is_gpt_oss else -1]) for shape in shapes]


def make_experts(tensors, is_gpt_oss, **deltas):
    form = {"is_input_major": True, "gating": GATING} if is_gpt_oss else {}
    return ExpertWeights(*tensors, **form, **deltas)


@pytest.mark.parametrize("T", [1, 7, 33, 130, 300, 2000])
@pytest.mark.parametrize("sizes", [(64, 8, 1024, 512), (24, 6, 320, 96)])
@pytest.mark.parametrize("is_gpt_oss", [False, True])
def test_decoding(T, sizes, is_gpt_oss):
    E, K, D, width = sizes
    x, router = draw(T, D), draw(E, D, inner=D)
    bias = draw(E) if is_gpt_oss else None
    tensors = draw_experts(E, D, width, is_gpt_oss)
    with torch.no_grad():
        own = make_experts(tensors, is_gpt_oss)
        parts, experts = decode_experts(x, router, bias, own, K, normalizes=True)
    probabilities = F.linear(x, router, bias).softmax(-1, dtype=torch.float32)
    likeliest = probabilities.topk(K)[1]
    assert (
        experts.sort(1)[0] == likeliest.sort(1)[0]
    ).float().mean() > 0.98  # but for ties in bf16
    weights = probabilities.gather(1, experts.long())
    exact = make_experts([one.double() for one in tensors], is_gpt_oss)
    wanted = multiply_experts(x.double(), exact, weights / weights.sum(1, True), experts)
    assert relative_error(parts.double().sum(0), wanted) < 0.01


@pytest.mark.parametrize("has_deltas", [False, True])
@pytest.mark.parametrize("is_gpt_oss", [False, True])
def test_training(has_deltas, is_gpt_oss):
    T, E, K, D, width = 1500, 64, 8, 256, 128
    experts = torch.stack([torch.randperm(E, device="cuda")[:K] for _ in range(T)])
    tensors = [draw(T, D), torch.rand(T, K, device="cuda"), draw(E, 2 * width, D, inner=D)]
    tensors += [draw(E, D, width, inner=width), *draw_experts(E, D, width, is_gpt_oss)]
    direction = torch.randn(T, D, device="cuda", dtype=torch.float64)
    results = []
    for dtype in (None, torch.float64):
        leaves = [x.to(dtype or x.dtype).clone().requires_grad_() for x in tensors]
        names = ("gate_up_delta", "down_delta") if has_deltas else ()
        deltas = {
            name: lambda x, counts, w=w: multiply_groups(x, w, counts)
            for name, w in zip(names, leaves[2:4], strict=False)
        }
        own = make_experts(leaves[4:], is_gpt_oss, **deltas)
        out = multiply_experts(leaves[0], own, leaves[1], experts)
        (out.double() * direction).sum().backward()
        results.append([out, *(x.grad for x in leaves if x.grad is not None)])
    for found, wanted in zip(*results, strict=True):
        assert relative_error(found, wanted) < 0.015


@pytest.mark.parametrize("kind", ["full", "lora", "lora, not merged"])
def test_the_trainer_scores_what_the_sampler_wrote_alike(kind):
    model = Transformer(parse_model_config(CONFIG)).to("cuda", torch.bfloat16)
    model.init_weights(torch.Generator("cuda").manual_seed(0))
    assert model.stays_on_device
    lora = None if kind == "full" else LoRAConfig(rank=4, merge=kind == "lora")
    config = TrainerConfig(optim=OptimConfig(lr=1e-3), lora=lora, replay_routing=True)
    trainer = PolicyTrainer(model, config, max_steps=4)
    merged = Merged(model)
    engine = Engine(merged.model, max_batch_size=32, max_model_len=256, kv_cache_gib=0.5)
    prompts = [[5, 6, 7, 8 + i % 4] for i in range(32)]
    for step in (1, 2, 3):
        requests = [
            GenerateRequest(ids, Sampling(1.0, 40, seed=i, ignore_eos=True), frozenset())
            for i, ids in enumerate(prompts)
        ]
        samples = []
        for i, (ids, one) in enumerate(zip(prompts, engine.generate(requests), strict=True)):
            rollout = Rollout(Example(0, []), [Turn(ids, one, "")], [])
            samples += samples_of(rollout, (-1.0) ** i, 1.0, "")
        found = trainer.step(Batch(step, samples))
        merged.follow_step()
        engine.set_version(step)
        print(kind, step, {k: v for k, v in found.items() if "mismatch" in k or "rout" in k})
        assert found["mismatch_kl/mean"] < 3e-3
