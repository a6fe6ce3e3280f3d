"""How much of a GPU keys and values take, and how many sequences are decoded together."""

import pytest
import torch

from hone.config.sections import EngineConfig
from hone.engine.cache_budget import plan_gpu_cache
from hone.models.device_memory import apply_limit, free_and_total_bytes, read_limit

GIB = 2**30


def shared(of_sequence, reserved=0, free=100, least=None, of_state=0, **config):
    least = of_sequence if least is None else least
    sizes = [int(size * GIB) for size in (of_sequence, free, 140, reserved, least, of_state)]
    room = plan_gpu_cache(EngineConfig(**config), *sizes)
    return room["max_batch_size"], round(room["kv_cache_gib"], 6)


def test_what_is_left_goes_to_keys_and_values():
    assert shared(0.25, reserved=30) == (256, 100 - 14 - 30)  # room for 224: the others wait
    assert shared(0.125, reserved=6) == (640, 80)
    assert shared(0.001) == (1024, 86)
    assert shared(0.125, reserved=6, gpu_memory_utilization=0.8) == (528, 66)


def test_what_is_given_stands():
    assert shared(0.125, reserved=90, kv_cache_gib=8, max_batch_size=16) == (16, 8)
    assert shared(0.125, kv_cache_gib=50) == (400, 50)
    assert shared(0.125, max_batch_size=16) == (16, 86)


def test_states_of_sequences_take_at_most_half():
    """One for each sequence and for padding, and up to 64 snapshots of prompts."""
    assert shared(0.1, of_state=1 / 64) == (256, round(86 - 321 / 64, 6))
    assert shared(0.1, of_state=1.0) == (14, 86 - 14 - 1 - 28)
    assert shared(0.1, of_state=1.0, max_batch_size=4) == (4, 86 - 4 - 1 - 8)


def test_no_room_says_what_takes_it():
    with pytest.raises(
        ValueError, match=r"has 100.0 GiB free.* may take 80.0 .* leaves 14.0; .* take 6.50"
    ):
        shared(6.5, reserved=80)


def test_a_model_whose_own_limit_has_no_room_is_served_to_the_length_that_has():
    assert shared(200, least=0.001) == (256, 86)
    with pytest.raises(ValueError, match="take 0.00"):
        shared(200, reserved=90, least=0.001)


@pytest.fixture
def card(monkeypatch):
    """A card of 80 GiB, of which other processes have 1 GiB and this one 20, 5 of them kept for reuse."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (59 * GIB, 80 * GIB))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 20 * GIB)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 15 * GIB)
    shares = []
    monkeypatch.setattr(
        "torch.cuda.set_per_process_memory_fraction", lambda share, device: shares.append(share)
    )
    return shares


@pytest.mark.parametrize(
    "limit, free, total", [(None, 64, 80), (100, 64, 80), (40, 24, 40), (21, 5, 21), (8, 5, 8)]
)
def test_a_process_takes_no_more_than_its_part_of_a_card(limit, free, total, card, monkeypatch):
    if limit is not None:
        monkeypatch.setenv("HONE_GPU_GIB", str(limit))
    assert free_and_total_bytes(torch.device("cuda")) == (free * GIB, total * GIB)
    apply_limit(torch.device("cuda"))
    assert card == ([] if limit is None else [min(1.0, (limit - 1) / 80)])
    apply_limit(torch.device("cpu"))
    assert len(card) == (limit is not None)


@pytest.mark.parametrize("text", ["many", "-3", "0", "inf", "nan"])
def test_a_limit_that_is_no_number_is_refused(text, monkeypatch):
    monkeypatch.setenv("HONE_GPU_GIB", text)
    with pytest.raises(ValueError, match="HONE_GPU_GIB"):
        read_limit()
