"""Weights from one GPU to another, by its memory and over NCCL, and between processes on one GPU. `make test-gpu`."""

import pytest
import torch

from hone.models.hf import empty_model
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.weight_proof import CanaryScorer, canary_ids, score_sequence
from tests.integration.test_network import sent_and_received

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")


@two_gpus
@pytest.mark.parametrize("is_near", [True, False])
def test_one_gpu_gives_another_what_it_has(is_near):
    sent_and_received("cuda:0", 1, is_near)


def test_a_process_copies_from_another_on_the_same_gpu():
    sent_and_received("cuda:0", 0)


def test_a_gpu_gives_a_cpu_what_it_has():
    sent_and_received("cuda:0")


def test_a_canary_that_is_scored_again_is_that_of_the_weights_as_they_are():
    spec = ModelSpec(
        500, 256, 512, 3, 4, 2, 64, 1e-6, make_plain_layers(10000.0, 64, 3), True, 64, 0.06, False
    )
    model = empty_model(spec, torch.bfloat16, "cuda")
    scorer, ids = CanaryScorer(model), canary_ids(model.spec)
    found = []
    for seed in range(3):
        model.init_weights(torch.Generator("cuda").manual_seed(seed))
        found.append(scorer(ids))
        assert found[-1] == score_sequence(model, ids)
        assert scorer(ids[::-1]) == score_sequence(model, ids[::-1])
        assert scorer(ids[:16]) == score_sequence(model, ids[:16])
        # What is free is written over: the graph reads nothing that nobody keeps.
        junk = [
            torch.full((size,), -1, dtype=torch.int64, device="cuda")
            for size in (8, 32, 33, 64, 4096) * 50
        ]
        del junk
    assert found[0] != found[1] != found[2]
