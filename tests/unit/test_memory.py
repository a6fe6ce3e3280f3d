"""How much of a GPU keys and values take, and how many sequences are decoded together."""

import pytest

from hone.config.sections import EngineConfig
from hone.engine.cache_budget import plan_gpu_cache

GIB = 2**30


def shared(of_sequence, reserved=0, free=100, least=None, **config):
    least = of_sequence if least is None else least
    sizes = [int(size * GIB) for size in (of_sequence, free, 140, reserved, least)]
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


def test_no_room_says_what_takes_it():
    with pytest.raises(
        ValueError, match=r"has 100.0 GiB free.* may take 80.0 .* leaves 14.0; .* take 6.50"
    ):
        shared(6.5, reserved=80)


def test_a_model_whose_own_limit_has_no_room_is_served_to_the_length_that_has():
    assert shared(200, least=0.001) == (256, 86)
    with pytest.raises(ValueError, match="take 0.00"):
        shared(200, reserved=90, least=0.001)
