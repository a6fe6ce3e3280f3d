"""`hone probe` on the tiny model: both sides of a CPU agree closely, and a change to one of them is found."""

import copy
import random
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hone.config.base import load_config
from hone.config.lora_config import LoRAConfig
from hone.config.probe_config import ProbeConfig
from hone.config.sections import ModelConfig
from hone.kernels.gpu import Scaled
from hone.launch import numerics_probe as probing
from hone.launch.numerics_probe import first_layer, probe_model, sample_waves
from hone.models.hf import load_model
from hone.models.loading import load_configured
from hone.models.lora import add_lora

TINY_MODEL = Path(__file__).parents[2] / "examples" / "reverse_text_tiny" / "model"


def model():
    return load_model(TINY_MODEL, random_init=True, seed=0)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_the_two_sides_of_a_cpu_agree_closely(has_adapter):
    one = model()
    if has_adapter:
        add_lora(one, LoRAConfig(rank=4), 0)
    found = probe_model(one, 60, 40)
    assert found.tokens > 500 and found.largest < 1e-4 and abs(found.mismatch) < 1e-9
    assert "logprobs differ between sampler and trainer" in found.describe_result()


@pytest.mark.parametrize("adds", [False, True])
def test_a_changed_block_is_named(adds, monkeypatch):
    """`adds`: the sampler's blocks have added to the stream what they give, as kernels for few rows do."""
    # So exact that both sides agree to the last bits of what is compared
    trained = model().double()
    monkeypatch.setattr(probing, "_on_host", lambda x: x.detach().float().round(decimals=4))
    sampled, outputs_of = copy.deepcopy(trained), probing.outputs_of

    @contextmanager
    def added(of):
        with outputs_of(of) as found:
            yield found
        if of is sampled:
            for block in found:
                following = (
                    None if block is found[-1] else Scaled(torch.empty(0), torch.empty(0), 1e-6)
                )
                block[:] = [(stream + pending, following) for stream, pending in block]

    if adds:
        monkeypatch.setattr(probing, "outputs_of", added)
    engine = probing.Engine(trained, max_batch_size=8, max_model_len=64, kv_cache_gib=0.1)
    rollouts = [
        one for one in sample_waves(engine, 4, 16, 1.0, random.Random(0)) if len(one[1]) > 2
    ][:1]
    assert first_layer(trained, sampled, rollouts) == ""
    with torch.no_grad():
        sampled.blocks[1].mlp.down.weight.mul_(1.1)
    assert first_layer(trained, sampled, rollouts) == (
        "layer 1" if adds else "layer 1 (feed-forward)"
    )


def test_exact_numerics_are_for_a_gpu():
    with pytest.raises(ValueError, match=r"model.numerics exact is for a GPU.*take fast"):
        load_configured(
            ModelConfig(name=str(TINY_MODEL), random_init=True, device="cpu", numerics="exact")
        )
    assert load_config(ProbeConfig, ["--model.name", "m", "--lora.rank", "4"]).lora.rank == 4
