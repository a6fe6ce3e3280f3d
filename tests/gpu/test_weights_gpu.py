"""Weights from one GPU to another over NCCL, and from one process to another on the same. `make test-gpu`."""

import pytest
import torch

from tests.unit.test_network import sent_and_received

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_one_gpu_sends_to_another():
    sent_and_received("cuda:0", "cuda:1")


def test_a_process_copies_from_another_on_the_same_gpu():
    sent_and_received("cuda:0", "cuda:0")
