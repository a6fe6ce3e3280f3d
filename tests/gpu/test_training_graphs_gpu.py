"""Captured passes through the blocks against passes that are launched kernel by kernel, on a GPU."""

import copy

import pytest
import torch

from hone.config.lora_config import LoRAConfig
from hone.config.rl_config import TrainerConfig
from hone.config.sections import OptimConfig
from hone.models.attention_layouts import PackedAttention
from hone.models.families import parse_model_config
from hone.models.transformer import Transformer
from hone.records import Batch, Sample
from hone.trainer.rl.trainer import PolicyTrainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "tie_word_embeddings": True,
}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}


def draw_batch(step, draw):
    samples = []
    for group in range(4):
        prompt = torch.randint(3, 1024, (20 + group,), generator=draw).tolist()
        for _ in range(4):
            count = int(torch.randint(5, 60, (1,), generator=draw))
            ids = prompt + torch.randint(3, 1024, (count,), generator=draw).tolist()
            mask = [False] * len(prompt) + [True] * count
            advantage = float(torch.randn(1, generator=draw))
            samples.append(Sample(ids, mask, [-6.9 * is_own for is_own in mask], advantage, 1.0))
    return Batch(step, samples)


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("rank", [None, 4])
def test_captured_steps_are_those_without_graphs(config, rank):
    base = Transformer(parse_model_config(config)).to("cuda", torch.bfloat16)
    base.init_weights(torch.Generator("cuda").manual_seed(0))
    found, kept = [], []
    for has_graphs in (True, True, False):
        lora = None if rank is None else LoRAConfig(rank=rank)
        settings = TrainerConfig(optim=OptimConfig(lr=1e-4), lora=lora, micro_batch_tokens=700)
        model = copy.deepcopy(base)
        trainer = PolicyTrainer(model, settings, max_steps=10)
        assert trainer.graphs is not None
        if not has_graphs:
            trainer.graphs = None
        draw = torch.Generator().manual_seed(1)
        # A pass whose graph is alive, as that of the micro-batch before in `sft`.
        tokens_T = torch.arange(20, device="cuda")
        kept.append(model(tokens_T, tokens_T, PackedAttention([20], "cuda")).sum())
        rows = [trainer.step(draw_batch(step, draw)) for step in range(1, 9)]
        if has_graphs:
            assert trainer.graphs.captured
        weights = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
        found.append((rows, weights))
    (rows, weights), (again, same), (plain, other) = found
    assert torch.equal(weights, same)  # repeatable to the bit
    for one, two, three in zip(rows, again, plain, strict=True):
        assert one["loss/mean"] == two["loss/mean"]
        # With experts, rounding changes which of them a token goes through.
        for key in ("optim/grad_norm", "entropy/mean"):
            assert abs(one[key] - three[key]) < 0.05 * abs(three[key])
    started = torch.cat([p.detach().flatten() for p in base.parameters()])
    if rank is None:
        moved = (other - started).float()
        assert (weights - other).float().norm() < 0.2 * moved.norm()
