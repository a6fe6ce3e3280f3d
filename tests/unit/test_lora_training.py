"""LoRA as it is trained: against peft on the transformers model, merged, and as the sampler reads it."""

import json
import weakref

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from hone.config.lora_config import LoRAConfig
from hone.config.rl_config import TrainerConfig
from hone.engine.engine import Engine
from hone.models import eight_bit
from hone.models.attention_layouts import PackedAttention
from hone.models.eight_bit import EightBitLinear, quantize_blocks
from hone.models.families import parse_model_config
from hone.models.hf import find_weight, load_model, write_model
from hone.models.layers import Linear
from hone.models.lora import (
    LoRA,
    Merged,
    adapter_tensors,
    add_lora,
    lora_modules,
    without_lora,
    write_adapter,
)
from hone.models.transformer import Transformer
from hone.records import Batch, GenerateRequest, Sample, Sampling
from hone.trainer.memory_estimate import estimate_rl
from hone.trainer.ranks import Ranks
from hone.trainer.rl.trainer import PolicyTrainer
from hone.trainer.sharding import Export

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "initializer_range": 0.3,
}
IDS = [3, 14, 15, 9, 26, 5, 35, 8]


def made(**changes):
    model = Transformer(parse_model_config(CONFIG | changes))
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def logits(model, ids=IDS):
    attention = PackedAttention([len(ids)])
    with torch.no_grad():
        return model.compute_logits(
            model(torch.tensor(ids), attention.token_positions(), attention)
        )


def trained(model, steps=3, lr=1e-2, loss=None, **lora):
    """The trainer after steps that move the adapter far from 0."""
    settings = {"lora": lora, "optim": {"lr": lr}, "loss": loss or {"type": "sft"}}
    trainer = PolicyTrainer(model, TrainerConfig.model_validate(settings), 100)
    samples = [
        Sample(IDS[i:], [False] + [True] * (7 - i), [0.0] * (8 - i), 1.0, 1.0) for i in range(3)
    ]
    for step in range(1, steps + 1):
        trainer.last = trainer.step(Batch(step, samples))
    return trainer


CASES = {
    "all linear": {},
    "few targets": {"targets": ["q_proj", "v_proj", "down_proj"], "rank": 4, "alpha": 8.0},
    "rslora": {"rslora": True, "rank": 4},
    "whole modules": {
        "targets": ["k_proj", "up_proj"],
        "modules_to_save": ["embed_tokens", "norm", "q_norm"],
    },
}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_loaded_by_peft_gives_our_logits(case, is_tied, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    base = made(tie_word_embeddings=is_tied)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(
        json.dumps(CONFIG | {"tie_word_embeddings": is_tied})
    )
    write_model(base, tmp_path / "source", tmp_path / "base")
    before = logits(base)
    trained(base, **CASES[case])
    config = LoRAConfig(**CASES[case])
    write_adapter(
        adapter_tensors(base), config, base.spec, str(tmp_path / "base"), tmp_path / "adapter"
    )
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    reference = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter")
    with torch.no_grad():
        expected = reference(torch.tensor([IDS])).logits[0]
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(logits(base), expected, rtol=0, atol=1e-4)
    export = Export(base, Ranks(), torch.float32)
    for _ in range(2):  # the model itself stays as it is
        torch.testing.assert_close(logits(export()), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits(base), expected, rtol=0, atol=1e-4)


def test_only_the_adapter_is_trained_and_has_optimiser_state():
    model, untouched = made(), made()
    trainer = trained(model, rank=2, targets=["q_proj", "o_proj"])
    frozen = dict(untouched.named_parameters())
    for name, parameter in model.named_parameters():
        assert (name not in frozen) == parameter.requires_grad
        if name in frozen:
            assert torch.equal(parameter, frozen[name]) and parameter.grad is None
    kinds = {
        name.split(".", 1)[1].rsplit(".delta.", 1)[0] for name in trainer.optimizer.state_tensors()
    }
    assert kinds == {
        f"blocks.{i}.attention.{linear}" for i in range(2) for linear in ("qkv", "out")
    }
    assert sum(p.numel() for p in trainer.optimizer.parameters) == 2 * 2 * ((32 + 64) + (64 + 32))


def test_a_fresh_adapter_changes_nothing_and_without_it_the_model_is_the_base():
    model = made()
    before = logits(model)
    add_lora(model, LoRAConfig(), seed=1)
    assert torch.equal(logits(model), before)
    trained_model = made()
    trained(trained_model)
    with without_lora(trained_model):
        assert torch.equal(logits(trained_model), before)
    assert not torch.equal(logits(trained_model), before)


def test_the_sampler_follows_the_adapter_as_it_is_trained():
    model = made()
    trainer = trained(model, steps=0)
    sampled = Merged(model)
    assert sampled.model.embed.weight is model.embed.weight and not any(lora_modules(sampled.model))
    engine = Engine(sampled.model, max_batch_size=4, max_model_len=32, kv_cache_gib=0.1)
    request = GenerateRequest(IDS[:3], Sampling(1.0, 12, seed=7), frozenset())
    seen = []
    for step in (1, 2):
        completion = engine.generate([request])[0]
        expected = torch.log_softmax(logits(model, IDS[:3] + completion.ids)[2:-1], -1)
        expected = expected.gather(1, torch.tensor(completion.ids)[:, None]).squeeze(1)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), expected, rtol=1e-4, atol=1e-4
        )
        seen.append(completion.logprobs)
        trainer.step(Batch(step, [Sample(IDS, [False] + [True] * 7, [0.0] * 8, 1.0, 1.0)]))
        sampled.follow_step()
        engine.set_version(step)
    assert seen[0] != seen[1]
    for own, copied in zip(
        sampled.model.parameters(),
        Export(model, Ranks(), torch.float32)().parameters(),
        strict=True,
    ):
        assert torch.equal(own, copied)
    with pytest.raises(ValueError, match="has one that is being trained"):
        Engine(model, max_batch_size=4, max_model_len=32, kv_cache_gib=0.1).load_adapter(
            "x", "nowhere"
        )
    plain = made()
    assert Merged(plain).model is plain


def test_the_reference_of_an_adapter_is_the_model_under_it():
    loss = {"type": "sft", "kl_beta": 0.5}
    under, copied = trained(made(), loss=loss), trained(made(), loss=loss, modules_to_save=["norm"])
    assert under.reference is None and copied.reference is not None
    assert under.last["reference_kl/mean"] > 0 and copied.last["reference_kl/mean"] > 0
    first = trained(made(), steps=1, loss=loss).last
    assert first["reference_kl/mean"] == 0


def test_dropout_drops_in_training_alone_and_the_same_when_a_step_is_taken_again():
    model = made()
    first = trained(model, dropout=0.5).last
    torch.rand(100)  # what came between does not matter
    assert trained(made(), dropout=0.5).last["loss/mean"] == first["loss/mean"]
    x = torch.randn(200, 32)
    lora = next(lora_modules(model))
    assert not torch.equal(lora(x), lora(x))
    with torch.no_grad():
        assert torch.equal(lora(x), lora(x))
        plain = lora(x)
    lora.eval()
    torch.testing.assert_close(lora(x), plain)


def test_starting_from_an_adapter(tmp_path):
    model = made()
    trained(model, rank=4)
    write_adapter(adapter_tensors(model), LoRAConfig(rank=4), model.spec, "base", tmp_path / "a")
    again = made()
    add_lora(again, LoRAConfig(rank=4, alpha=7.0, start_from=tmp_path / "a"), seed=0)
    torch.testing.assert_close(logits(again), logits(model))
    with pytest.raises(
        ValueError,
        match=r"rank 4 on down_proj, .*; lora.rank is 8, lora.targets are q_proj, k_proj",
    ):
        add_lora(made(), LoRAConfig(rank=8, start_from=tmp_path / "a"), seed=0)
    saved = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert saved["base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"].shape == (4, 32)


def test_what_cannot_be_configured():
    with pytest.raises(ValueError, match="lm_head is embed_tokens in this model"):
        add_lora(made(), LoRAConfig(modules_to_save=["lm_head"]), seed=0)
    with pytest.raises(
        ValidationError,
        match="optim.type: muon moves whole weights, which lora freezes; for adapters set it to adamw",
    ):
        TrainerConfig.model_validate({"lora": {"rank": 4}, "optim": {"type": "muon"}})
    with pytest.raises(ValueError, match="proj has no adapter in this model; q_proj"):
        add_lora(made(), LoRAConfig(targets=["proj"]), seed=0)


@pytest.mark.parametrize("inputs", [1, 7, 64, 96, 128, 576, 640])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_in_eight_bits_is_near_the_one_that_was_given(inputs, dtype):
    generator = torch.Generator().manual_seed(inputs)
    linear = Linear(inputs, 33, bias=True)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(33, inputs, generator=generator))
        linear.weight[5] = 0.0
        linear.bias.copy_(torch.randn(33, generator=generator))
    linear.requires_grad_(False).to(dtype)
    short = EightBitLinear(linear)
    assert short.codes.dtype == torch.int8 and short.codes.numel() == 33 * inputs
    error = (short.weight.float() - linear.weight.float()).abs()
    # Half a step of 1/127 of the largest, and the rounding of the scale and of the result
    largest = linear.weight.float().abs().amax(1, keepdim=True)
    assert (error <= largest * (0.5 / 127 + 2**-8)).all() and not short.weight[5].any()
    x = torch.randn(4, inputs, generator=generator).to(dtype)
    expected = torch.nn.functional.linear(x, short.weight, linear.bias)
    torch.testing.assert_close(
        short(x), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3
    )
    assert short.weight.dtype == dtype and short.weight.shape == (33, inputs)


@pytest.mark.parametrize("lora", [{"merge": False}, {"base_bits": 8}, {"base_bits": 8, "rank": 4}])
def test_a_sampler_without_a_merged_copy_has_the_trainers_weights(lora, tmp_path):
    model = made()
    trained(model, **lora)
    sampled = Merged(model)
    assert sampled.model is model  # no second copy
    engine = Engine(sampled.model, max_batch_size=2, max_model_len=32)
    done = engine.generate([GenerateRequest(IDS, Sampling(1.0, 8, seed=3), frozenset())])[0]
    whole = IDS + done.ids
    expected = logits(model, whole[:-1]).log_softmax(-1)[len(IDS) - 1 :]
    found = expected.gather(1, torch.tensor(done.ids)[:, None])[:, 0].tolist()
    assert done.logprobs == pytest.approx(found, abs=1e-5)
    # What is written is that model, with the adapter merged
    export = Export(model, Ranks(), torch.float32)
    torch.testing.assert_close(logits(export()), logits(model), rtol=0, atol=1e-4)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(CONFIG))
    write_model(export(), tmp_path / "source", tmp_path / "written")
    written = load_model(tmp_path / "written")
    torch.testing.assert_close(logits(written), logits(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_over_eight_bits_are_those_over_the_same_weights(recomputes):
    short, plain = made(), made()
    quantize_blocks(short)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(find_weight(short, name))
    for model in (short, plain):
        add_lora(model, LoRAConfig(rank=4), seed=1)
        model.recomputes = recomputes
        for lora in lora_modules(model):
            with torch.no_grad():
                lora.B.copy_(torch.randn(lora.B.shape, generator=torch.Generator().manual_seed(2)))
        attention = PackedAttention([len(IDS)])
        hidden = model(torch.tensor(IDS), attention.token_positions(), attention)
        model.compute_logits(hidden).log_softmax(-1).square().sum().backward()
    for ours, theirs in zip(lora_modules(short), lora_modules(plain), strict=True):
        torch.testing.assert_close(ours.A.grad, theirs.A.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.B.grad, theirs.B.grad, rtol=1e-5, atol=1e-5)


def test_a_layer_is_released_before_the_next_is_stored_in_eight_bits(monkeypatch):
    alive = []

    class Watched(EightBitLinear):
        def __init__(self, source):
            assert not [one for one in alive if one() is not None]
            alive.append(weakref.ref(source.weight))
            super().__init__(source)

    monkeypatch.setattr(eight_bit, "EightBitLinear", Watched)
    quantize_blocks(made())
    assert len(alive) == 2 * 4


def test_eight_bits_are_counted_in_the_estimate():
    spec = parse_model_config(CONFIG | {"num_hidden_layers": 6})
    model = made(num_hidden_layers=6).to(torch.bfloat16)
    short = LoRAConfig(base_bits=8)
    trainer = PolicyTrainer(model, TrainerConfig(lora=short), max_steps=1)
    held = [*model.parameters(), *model.buffers()]
    found = estimate_rl(spec, trainer.config, 100, 2, 100).weights
    of_block = sum(a * b for a, b in spec.linear_shapes.values())
    assert found - 2 * of_block == pytest.approx(
        sum(x.numel() * x.element_size() for x in held if x.dtype != torch.int64), rel=0.1
    )
    assert found < estimate_rl(spec, TrainerConfig(lora=LoRAConfig()), 100, 2, 100).weights


@pytest.mark.parametrize("share_of_last_digit", [0.02, 0.2, 2.0, 20.0])
def test_a_merged_weight_of_bfloat16_keeps_what_the_adapter_adds(share_of_last_digit):
    """Of each output, over inputs that the adapter's direction meets; nearest rounding loses the small ones."""
    generator = torch.Generator().manual_seed(0)
    layer = Linear(1536, 64)
    layer.weight.data = (
        torch.randn(64, 1536, generator=generator).clamp(-3, 3).add(4).to(torch.bfloat16)
    )
    lora = LoRA(layer.weight, ["x"], [64], LoRAConfig(rank=1, alpha=1, targets=["q_proj"]))
    lora.targets = ["x"]
    direction = torch.where(torch.rand(1536, generator=generator) > 0.5, 1.0, -1.0)
    unit = 2.0**-6  # the last digit of bfloat16 from 2 to 4
    lora.A, lora.B = torch.nn.Parameter(direction[None]), torch.nn.Parameter(torch.ones(64, 1))
    lora.B.data *= share_of_last_digit * unit
    merged = lora.merge_into(layer.weight)
    assert merged.dtype == torch.bfloat16
    added = (merged.float() - layer.weight.float()) @ direction / len(direction)
    expected = share_of_last_digit * unit
    noise = unit / len(direction) ** 0.5
    assert (added.mean() - expected).abs() < 4 * noise / 8
    assert (added - expected).abs().max() < 5 * noise
    lora.B.data.zero_()
    assert torch.equal(lora.merge_into(layer.weight), layer.weight)
