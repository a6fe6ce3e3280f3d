"""On two GPUs: weights from one to the other over NCCL. `make test-gpu`."""

import pytest
import torch

from tests.unit.test_network import sent_and_received

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")]


def test_one_gpu_sends_to_another():
    sent_and_received("cuda:0", "cuda:1")
