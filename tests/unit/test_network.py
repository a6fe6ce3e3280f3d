"""Weights from memory to memory: what arrives, what is superseded, who comes again. Real processes, over Gloo (over
NCCL in tests/gpu)."""

import json
import logging
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from hone.models.hf import hf_tensors
from hone.models.proof import checksum
from hone.models.spec import ModelSpec
from hone.models.transformer import Transformer
from hone.transport import network
from hone.transport.gpu_memory import Owned, gpu_of, layout_of
from hone.transport.network import NetworkReceiver, NetworkSender

SPEC = (50, 32, 64, 2, 4, 2, 8, 1e-6, 1000.0, True, 96, 0.5, False)
LOG = logging.getLogger("test")
SERVER = """
import sys, torch
from hone.models.hf import hf_tensors
from hone.models.proof import checksum
from hone.models.spec import ModelSpec
from hone.models.transformer import Transformer
from hone.models.hf import hf_tensors
from hone.transport import network
from hone.transport.network import NetworkReceiver, Superseded

source, device, dtype, gpu = sys.argv[1], sys.argv[2], getattr(torch, sys.argv[3]), sys.argv[4]
network.PORTION = int(sys.argv[5])
model, receiver = Transformer(ModelSpec(*SPEC)).to(device, dtype), NetworkReceiver()
message = {"type": "nccl", "source": source, "dtype": "float32", "gpu": gpu}
for line in sys.stdin:
    try:
        receiver.receive(message, int(line), None, dict(hf_tensors(model)))
        print(checksum(model), flush=True)
    except (Superseded, ValueError) as error:
        print(error, flush=True)
""".replace("SPEC", repr(SPEC))


def made(seed, device="cpu"):
    model = Transformer(ModelSpec(*SPEC))
    model.init_weights(torch.Generator().manual_seed(seed))
    return model.to(device)


class Server:
    def __init__(self, source, device="cpu", dtype="float32", gpu=""):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, source, device, dtype, gpu, str(network.PORTION)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def take(self, version):
        self.process.stdin.write(f"{version}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.kill()
        self.process.wait()


def sent_and_received(device_of_trainer, device_of_server):
    one, two = (dict(hf_tensors(made(seed, device_of_trainer))) for seed in (1, 2))
    with NetworkSender("127.0.0.1", LOG) as sender:
        gpu = gpu_of(torch.device(device_of_trainer))
        kinds = ("float32", "bfloat16")
        servers = [Server(sender.source, device_of_server, dtype, gpu) for dtype in kinds]
        try:
            assert sender.send(5, one, None) == sum(4 * tensor.numel() for tensor in one.values())
            expected = {"type": "nccl", "source": sender.source, "dtype": "float32"}
            assert sender.message == expected | ({"gpu": gpu} if gpu else {})
            assert servers[0].take(5) == checksum(made(1))
            assert servers[1].take(5) == checksum(made(1).bfloat16())
            assert servers[0].take(7) == "version 7 was asked for, the trainer has 5"
            servers[1].end()
            servers[1] = Server(sender.source, device_of_server, gpu=gpu)  # started again
            sender.send(6, two, None)
            assert [server.take(6) for server in servers] == [checksum(made(2))] * 2
            sender.finish(lambda: False)
        finally:
            for server in servers:
                server.end()


@pytest.mark.parametrize("portion", [network.PORTION, 5_000])
def test_servers_get_what_the_trainer_has(monkeypatch, portion):
    monkeypatch.setattr(network, "PORTION", portion)
    sent_and_received("cpu", "cpu")


def test_tensors_travel_in_portions_of_about_a_size(monkeypatch):
    monkeypatch.setattr(network, "PORTION", 1000)
    like = {
        name: torch.empty(size, dtype=torch.uint8) for name, size in {"b": 700, "a": 300, "c": 10, "d": 2000}.items()
    }
    layout, size = layout_of(like)
    found = [([name for name, *_ in part], first, end) for part, first, end in network.portions(layout, size)]
    assert found == [(["a", "b"], 0, 1280), (["c", "d"], 1280, 3584)] and size == 3584
    assert [end for *_, end in network.portions(*layout_of({"a": like["a"]}))] == [512]


def test_a_server_that_asks_and_dies_keeps_nobody_waiting_for_long(monkeypatch):
    monkeypatch.setattr(network, "CONNECT", timedelta(seconds=1))
    sender, one = NetworkSender("127.0.0.1", LOG), made(1)
    sender.send(5, dict(hf_tensors(one)), None)
    with sender:
        host, _, port = sender.source.rpartition(":")
        store = network.distributed.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=10))
        store.queue_push("asks", json.dumps({"name": "gone", "number": 1, "version": 5}))
        server = Server(sender.source)
        try:
            assert server.take(5) == checksum(one)
        finally:
            server.end()


def test_a_host_that_is_not_this_machine_is_named():
    message = "weight_broadcast.host 192.0.2.1: cannot be listened on"
    with pytest.raises(ValueError, match=message), NetworkSender("192.0.2.1", LOG):
        pass


def test_a_trainer_that_is_gone_is_said_so(monkeypatch):
    monkeypatch.setattr(network, "CONNECT", timedelta(seconds=1))
    with NetworkSender("127.0.0.1", LOG) as sender:
        host, port = sender.source.split(":")
    assert (host, port.isdigit()) == ("127.0.0.1", True)
    message = {"type": "nccl", "source": "127.0.0.1:1", "dtype": "float32"}
    with pytest.raises(ValueError, match="weights could not be had from 127.0.0.1:1: "):
        NetworkReceiver().receive(message, 0, None, dict(hf_tensors(made(0))))


def test_room_for_tensors_in_one_piece():
    like = {"a": torch.empty(3, 5), "b": torch.empty(7, dtype=torch.bfloat16, device="meta"), "c": torch.empty(2, 2, 2)}
    owned = Owned(like, "cpu")
    for i, (name, tensor) in enumerate(owned.tensors.items()):
        assert (tensor.shape, tensor.dtype) == (like[name].shape, like[name].dtype) and tensor.data_ptr() % 16 == 0
        tensor.fill_(i)
    assert [tensor.unique().tolist() for tensor in owned.tensors.values()] == [[0], [1], [2]]
    assert owned.memory.numel() == 3 * 256
