"""Weights from one GPU to another, by its memory and over NCCL, and between processes on one GPU. `make test-gpu`."""

import pytest
import torch

from tests.unit.test_network import sent_and_received

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
