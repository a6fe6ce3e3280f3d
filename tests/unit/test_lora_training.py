"""LoRA as it is trained: against peft on the transformers model, merged, and as the sampler reads it."""

import json

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from hone.config.lora_config import LoRAConfig
from hone.config.rl_config import TrainerConfig
from hone.engine.engine import Engine
from hone.models.attention_layouts import PackedAttention
from hone.models.families import parse_model_config
from hone.models.hf import write_model
from hone.models.lora import (
    Merged,
    adapter_tensors,
    add_lora,
    lora_modules,
    without_lora,
    write_adapter,
)
from hone.models.transformer import Transformer
from hone.records import Batch, GenerateRequest, Sample, Sampling
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
    with pytest.raises(ValidationError, match="targets"):
        LoRAConfig(targets=["proj"])
