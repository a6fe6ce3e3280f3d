"""Weights from memory to memory: what arrives, what is superseded, who comes again. Real processes, over Gloo (over
NCCL in tests/gpu)."""

import json
import logging
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from hone.models.proof import checksum
from hone.models.spec import ModelSpec
from hone.models.transformer import Transformer
from hone.transport import network
from hone.transport.network import Receiver, Sender

SPEC = (50, 32, 64, 2, 4, 2, 8, 1e-6, 1000.0, True, 96, 0.5, False)
LOG = logging.getLogger("test")
SERVER = """
import sys, torch
from hone.models.proof import checksum
from hone.models.spec import ModelSpec
from hone.models.transformer import Transformer
from hone.transport.network import Receiver, Superseded

source, device, dtype = sys.argv[1], sys.argv[2], getattr(torch, sys.argv[3])
model, receiver = Transformer(ModelSpec(*SPEC)).to(device, dtype), Receiver()
for line in sys.stdin:
    try:
        receiver.receive(source, int(line), torch.float32, model)
        print(checksum(model), flush=True)
    except (Superseded, ValueError) as error:
        print(error, flush=True)
""".replace("SPEC", repr(SPEC))


def made(seed, device="cpu"):
    model = Transformer(ModelSpec(*SPEC))
    model.init_weights(torch.Generator().manual_seed(seed))
    return model.to(device)


class Server:
    def __init__(self, source, device="cpu", dtype="float32"):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, source, device, dtype],
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
    one, two = made(1, device_of_trainer), made(2, device_of_trainer)
    spec, device = ModelSpec(*SPEC), torch.device(device_of_trainer)
    sender = Sender("127.0.0.1", spec, device, torch.float32, LOG)
    sender.start()
    servers = [Server(sender.source, device_of_server), Server(sender.source, device_of_server, "bfloat16")]
    try:
        assert sender.publish(one, 5) == sum(4 * p.numel() for p in one.parameters())
        assert servers[0].take(5) == checksum(one)
        assert servers[1].take(5) == checksum(made(1).bfloat16())
        assert servers[0].take(7) == "version 7 was asked for, the trainer has 5"
        servers[1].end()
        servers[1] = Server(sender.source, device_of_server)  # started again
        sender.publish(two, 6)
        assert [server.take(6) for server in servers] == [checksum(two)] * 2
        sender.finish(lambda: False)
    finally:
        sender.stop()
        for server in servers:
            server.end()


def test_servers_get_what_the_trainer_has():
    sent_and_received("cpu", "cpu")


def test_a_server_that_asks_and_dies_keeps_nobody_waiting_for_long(monkeypatch):
    monkeypatch.setattr(network, "CONNECT", timedelta(seconds=1))
    sender = Sender("127.0.0.1", ModelSpec(*SPEC), torch.device("cpu"), torch.float32, LOG)
    one = made(1)
    sender.publish(one, 5)
    host, _, port = sender.source.rpartition(":")
    store = network.distributed.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=10))
    store.queue_push("asks", json.dumps({"name": "gone", "number": 1, "version": 5}))
    sender.start()
    server = Server(sender.source)
    try:
        assert server.take(5) == checksum(one)
    finally:
        sender.stop()
        server.end()


def test_a_host_that_is_not_this_machine_is_named():
    with pytest.raises(ValueError, match="weight_broadcast.host 192.0.2.1: cannot be listened on"):
        Sender("192.0.2.1", ModelSpec(*SPEC), torch.device("cpu"), torch.float32, LOG)


def test_a_trainer_that_is_gone_is_said_so(monkeypatch):
    monkeypatch.setattr(network, "CONNECT", timedelta(seconds=1))
    host, port = Sender("127.0.0.1", ModelSpec(*SPEC), torch.device("cpu"), torch.float32, LOG).source.split(":")
    assert (host, port.isdigit()) == ("127.0.0.1", True)
    with pytest.raises(ValueError, match="weights could not be had from 127.0.0.1:1: "):
        Receiver().receive("127.0.0.1:1", 0, torch.float32, made(0))
