"""On a GPU: the same model, engine and trainer as on the CPU, in bf16 and fp32. `make test-gpu`."""

from pathlib import Path

import pytest
import torch

from hone.config.rl_config import TrainerConfig
from hone.config.sections import OptimConfig
from hone.engine.engine import Engine
from hone.models.attention_layouts import PackedAttention
from hone.models.hf import load_model
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.records import Batch, GenerateRequest, Sample, Sampling
from hone.trainer.rl.trainer import PolicyTrainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
TINY = Path(__file__).parents[2] / "examples" / "reverse_text_tiny" / "model"
SPEC = ModelSpec(
    512, 256, 512, 3, 8, 2, 64, 1e-6, make_plain_layers(10000.0, 64, 3), True, 512, 0.06, False
)


def model(dtype, seed=0):
    made = Transformer(SPEC)
    made.init_weights(torch.Generator().manual_seed(seed))
    return made.to("cuda", dtype)


def forward(made, sequences):
    attention = PackedAttention([len(s) for s in sequences], "cuda")
    tokens = torch.cat(sequences).cuda()
    return made.compute_logits(made(tokens, attention.token_positions(), attention))


def test_flash_attention_in_bf16_equals_padded_attention_in_fp32():
    sequences = [torch.randint(0, 512, (n,)) for n in (3, 64, 17, 200)]
    exact, half = model(torch.float32), model(torch.bfloat16)
    expected = forward(exact, sequences)
    got = forward(half, sequences)
    assert (got.float() - expected).norm() / expected.norm() < 0.02
    direction = torch.randn_like(expected) / expected.numel()
    (expected * direction).sum().backward()
    (got.float() * direction).sum().backward()
    for (name, one), (_, two) in zip(
        exact.named_parameters(), half.named_parameters(), strict=True
    ):
        assert (two.grad.float() - one.grad).norm() / one.grad.norm() < 0.05, name


def test_cpu_and_gpu_agree_in_fp32():
    made = load_model(TINY, random_init=True)
    sequences = [torch.randint(0, 256, (n,)) for n in (5, 40)]
    attention = PackedAttention([5, 40])
    with torch.no_grad():
        expected = made.compute_logits(
            made(torch.cat(sequences), attention.token_positions(), attention)
        )
        got = forward(made.cuda(), sequences)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_engine_logprobs_equal_a_plain_forward(dtype, limit):
    made = model(dtype)
    prompts = [torch.randint(0, 512, (n,)).tolist() for n in (4, 30, 100) for _ in range(8)]
    requests = [
        GenerateRequest(p, Sampling(1.0, 40, seed=i), frozenset({7})) for i, p in enumerate(prompts)
    ]
    differences = []
    for prompt, completion in zip(prompts, Engine(made).generate(requests), strict=True):
        with torch.no_grad():
            logits = forward(made, [torch.tensor(prompt + completion.ids)])[
                len(prompt) - 1 : -1
            ].float()
        ids = torch.tensor(completion.ids, device="cuda")
        expected = torch.log_softmax(logits, -1).gather(1, ids[:, None]).squeeze(1)
        differences.append((torch.tensor(completion.logprobs, device="cuda") - expected).abs())
    assert torch.cat(differences).mean() < limit


def test_training_moves_the_storage_that_the_engine_reads():
    made = model(torch.bfloat16)
    engine, trainer = (
        Engine(made),
        PolicyTrainer(made, TrainerConfig(optim=OptimConfig(lr=1e-2)), max_steps=10),
    )
    request = GenerateRequest([1, 2, 3], Sampling(1.0, 8, seed=1), frozenset())
    address = made.embed.weight.data_ptr()
    for step in range(1, 11):
        completion = engine.generate([request])[0]
        mask = [False] * 3 + [True] * 8
        good = Sample([1, 2, 3, *completion.ids], mask, [0.0] * 3 + completion.logprobs, 1.0, 1.0)
        values = trainer.step(Batch(step, [good]))
        assert abs(values["importance_ratio/mean"] - 1) < 0.1
    assert made.embed.weight.data_ptr() == address
    before = sum(completion.logprobs)
    # The rewarded tokens did not become unlikely
    assert sum(engine.generate([request])[0].logprobs) > before - 1
    assert values["entropy/mean"] < 5
