"""Kernels compiled ahead: what was gone through needs no other, and leaves no trace in numbers."""

import copy

import pytest
import torch

from hone.config.rl_config import TrainerConfig
from hone.engine.engine import Engine
from hone.engine.warm_up import compile_kernels
from hone.kernels.gpu.compiling import together
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.records import Batch, GenerateRequest, Sample, Sampling
from hone.trainer.rl.trainer import PolicyTrainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
# Sizes of no other test
SPEC = ModelSpec(
    384, 320, 704, 2, 4, 1, 32, 1e-6, make_plain_layers(10000.0, 32, 2), True, 1024, 0.06, False
)


def sampler_and_trainer(model):
    return Engine(model, max_batch_size=48, max_model_len=256, kv_cache_gib=0.5), PolicyTrainer(
        model, TrainerConfig(), 2
    )


def two_steps(engine, trainer):
    """The tokens sampled in two steps, and the loss and gradient norm of each."""
    seen = []
    for step in (1, 2):
        prompts = [[5 + i // 8] * 37 for i in range(48)]
        asked = [
            GenerateRequest(p, Sampling(max_tokens=20 + i % 7, seed=i), frozenset())
            for i, p in enumerate(prompts)
        ]
        done = engine.generate(asked)
        samples = [
            Sample(
                [*p, *c.ids],
                [False] * 37 + [True] * len(c.ids),
                [0.0] * 37 + c.logprobs,
                (-1.0) ** i,
                1.0,
            )
            for i, (p, c) in enumerate(zip(prompts, done, strict=True))
        ]
        values = trainer.step(Batch(step, samples))
        engine.set_version(step)
        seen += [c.ids for c in done] + [[values["loss/mean"], values["optim/grad_norm"]]]
    return seen


def test_what_was_rehearsed_compiles_no_more_and_changes_nothing():
    import triton

    model = Transformer(SPEC)
    model.init_weights(torch.Generator().manual_seed(0))
    model = model.to("cuda", torch.bfloat16)
    engine, trainer = sampler_and_trainer(copy.deepcopy(model))
    compiled = []
    with together():
        compile_kernels(engine, 48)
        trainer.compile_kernels()
    triton.knobs.compilation.listener = lambda **seen: compiled.append(
        str((seen["src"].name, seen["src"].constants, seen["src"].attrs, seen["src"].signature))
    )
    try:
        rehearsed = two_steps(engine, trainer)
    finally:
        triton.knobs.compilation.listener = None
    assert not compiled, "\n".join(compiled)
    assert rehearsed == two_steps(*sampler_and_trainer(copy.deepcopy(model)))
