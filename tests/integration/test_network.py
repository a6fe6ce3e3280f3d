"""Weights from memory to memory: what arrives, what is superseded, who comes again. Real processes, over Gloo (over
NCCL in tests/gpu)."""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from hone import machine
from hone.models.hf import hf_tensors
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.models.weight_proof import model_checksum
from hone.transport import network
from hone.transport.gpu_memory import (
    Owned,
    Stamp,
    StampReader,
    gpu_of,
    layout_of,
    machine_of,
    tensors_in,
)
from hone.transport.network import NetworkReceiver, NetworkSender, Secret
from tests.hangs import HANG_SECONDS

pytestmark = pytest.mark.main_path

SPEC = (50, 32, 64, 2, 4, 2, 8, 1e-6, make_plain_layers(1000.0, 8, 2), True, 96, 0.5, False)
LOG = logging.getLogger("test")
has_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc")
SERVER = """
import json, sys, torch
from hone.models.weight_proof import Proof
from hone.models.rope import Rope
from hone.models.spec import LayerAttention, ModelSpec
from hone.models.transformer import Transformer
from hone.transport import network
from hone.transport.network import NetworkReceiver, Superseded

message, device, dtype = json.loads(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3])
network.PORTION_BYTES = int(sys.argv[4])
if sys.argv[5:]:  # as if the trainer's memory were one that GPUs read; how it is opened here
    network.is_near = lambda message, device: True
    network.map_memory = eval(sys.argv[5])
model, receiver = Transformer(ModelSpec(*SPEC)).to(device, dtype), NetworkReceiver()
proof = Proof(model)
for line in sys.stdin:
    try:
        receiver.receive_version(message, int(line), None, proof.tensors, proof.follow_arrivals())
        how = "read" if receiver._trainer.shown else "sent"
        print(proof.combine_checksum(proof.weight_fingerprints()), how, flush=True)
    except (Superseded, ValueError) as error:
        print(error, flush=True)
""".replace("SPEC", repr(SPEC))


def made(seed, device="cpu"):
    model = Transformer(ModelSpec(*SPEC))
    model.init_weights(torch.Generator().manual_seed(seed))
    return model.to(device)


class Server:
    """`gpu`: the only one that it sees, as servers of `rl` do."""

    def __init__(self, message, gpu=None, dtype="float32", *words):
        device, environment = (
            ("cpu", {})
            if gpu is None
            else ("cuda", {"CUDA_VISIBLE_DEVICES": machine.usable_gpus()[gpu]})
        )
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                SERVER,
                json.dumps(message),
                device,
                dtype,
                str(network.PORTION_BYTES),
                *words,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def take(self, version):
        self.process.stdin.write(f"{version}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.kill()
        self.process.wait()


def sent_and_received(device="cpu", gpu=None, is_near=True, opening=()):
    """From a trainer's device to servers on a GPU or on the CPU. `is_near`: they know that it is on their machine.
    `opening`: how a server on the CPU opens the trainer's memory."""
    one, two = (dict(hf_tensors(made(seed, device))) for seed in (1, 2))
    way = "read" if (gpu is not None and is_near) or opening else "sent"
    with NetworkSender("127.0.0.1", LOG) as sender:
        servers = []
        try:
            assert sender.send_version(5, one, None) == sum(
                4 * tensor.numel() for tensor in one.values()
            )
            message = sender.delivery_message
            assert len(bytes.fromhex(message.pop("secret"))) == 32
            expected = {"type": "nccl", "source": sender.source, "dtype": "float32"}
            near = {"gpu": gpu_of(torch.device(device)), "machine": machine_of()}
            assert message == expected | ({} if device == "cpu" else near)
            message["secret"] = sender.secret.key.hex()
            message |= {} if is_near else {"gpu": "another", "machine": "another"}
            servers += [Server(message, gpu, dtype, *opening) for dtype in ("float32", "bfloat16")]
            assert servers[0].take(5) == f"{model_checksum(made(1))} {way}"
            assert servers[1].take(5) == f"{model_checksum(made(1).bfloat16())} {way}"
            assert servers[0].take(7) == "version 7 was requested, the trainer has 5"
            servers[1].end()
            servers[1] = Server(message, gpu, "float32", *opening)  # started again
            sender.send_version(6, two, None)
            assert [server.take(6) for server in servers] == [
                f"{model_checksum(made(2))} {way}"
            ] * 2
            assert servers[0].take(5) == "version 5 was requested, the trainer has 6"
            # The server that was ended had 5. That the others have 6 is said after they have it.
            deadline = time.monotonic() + HANG_SECONDS
            sender.wait_for_receivers(
                lambda: sorted(sender._taken.values()) != [5, 6, 6] and time.monotonic() < deadline
            )
            assert sorted(sender._taken.values()) == [5, 6, 6]
        finally:
            for server in servers:
                server.end()


@pytest.mark.parametrize("portion", [network.PORTION_BYTES, 5_000])
def test_servers_get_what_the_trainer_has(monkeypatch, portion):
    monkeypatch.setattr(network, "PORTION_BYTES", portion)
    sent_and_received()


def test_tensors_travel_in_portions_of_about_a_size(monkeypatch):
    monkeypatch.setattr(network, "PORTION_BYTES", 1000)
    like = {
        name: torch.empty(size, dtype=torch.uint8)
        for name, size in {"b": 700, "a": 300, "c": 10, "d": 2000}.items()
    }
    layout, size = layout_of(like)
    found = [
        ([name for name, *_ in part], first, end)
        for part, first, end in network.group_tensors(layout, size)
    ]
    assert found == [(["a", "b"], 0, 1280), (["c", "d"], 1280, 3584)] and size == 3584
    assert [end for *_, end in network.group_tensors(*layout_of({"a": like["a"]}))] == [512]


def test_a_server_that_asks_and_dies_keeps_nobody_waiting_for_long(monkeypatch):
    monkeypatch.setattr(network, "CONNECT", timedelta(seconds=1))
    sender, one = NetworkSender("127.0.0.1", LOG), made(1)
    sender.send_version(5, dict(hf_tensors(one)), None)
    with sender:
        host, _, port = sender.source.rpartition(":")
        store = network.distributed.TCPStore(
            host, int(port), is_master=False, timeout=timedelta(seconds=10)
        )
        store.queue_push("asks", json.dumps({"name": "gone", "number": 1, "version": 5}))
        server = Server(sender.delivery_message)
        try:
            assert server.take(5) == f"{model_checksum(one)} sent"
        finally:
            server.end()


class Mapped(Owned):
    """In a file, which a process on a CPU reads as those on GPUs read each other's memory."""

    def __init__(self, like, device):
        self.layout, self.size = layout_of(like)
        file = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self.memory, self.file = (
            torch.from_file(file.name, True, self.size, dtype=torch.uint8),
            file,
        )
        self.tensors = tensors_in(self.memory, self.layout)

    def describe_memory(self):
        return {"gpu": "", "handle": [self.file.name, self.size], "layout": self.layout}


MAPPED = "lambda words, _: torch.from_file(words['handle'][0], True, words['handle'][1], dtype=torch.uint8)"


@has_proc
def test_servers_read_what_the_trainer_has(monkeypatch):
    monkeypatch.setattr(network, "Owned", Mapped)
    sent_and_received(opening=[MAPPED])


@has_proc
def test_a_server_of_another_model_reads_nothing(monkeypatch):
    monkeypatch.setattr(network, "Owned", Mapped)
    with NetworkSender("127.0.0.1", LOG) as sender:
        other = {
            name: one[:1] if name == "model.norm.weight" else one
            for name, one in hf_tensors(made(1))
        }
        sender.send_version(5, other, None)
        server = Server(sender.delivery_message, None, "float32", MAPPED)
        try:
            said = "the trainer's weights are of another model than this server's: model.norm.weight differs"
            assert server.take(5) == said
        finally:
            server.end()


def test_memory_that_cannot_be_read_is_sent():
    """Of a trainer that cannot show it; the server does not ask for that again."""
    with NetworkSender("127.0.0.1", LOG) as sender:
        sender.send_version(5, dict(hf_tensors(made(1))), None)
        server = Server(sender.delivery_message, None, "float32", MAPPED)
        try:
            assert server.take(5) == f"{model_checksum(made(1))} sent"
            sender.send_version(6, dict(hf_tensors(made(2))), None)
            sender._describe_memory = None
            assert server.take(6) == f"{model_checksum(made(2))} sent"
        finally:
            server.end()


@pytest.mark.parametrize("is_guessed", [False, True])
def test_a_stranger_who_knows_the_port_gets_nothing_and_ends_nothing(is_guessed, caplog):
    """`is_guessed`: the names of the keys are known to them all the same, so that only signatures keep them out."""
    weights = dict(hf_tensors(made(1)))
    with NetworkSender("127.0.0.1", LOG) as sender:
        sender.send_version(5, weights, None)
        host, port = sender.source.split(":")
        stranger = torch.distributed.TCPStore(
            host, int(port), is_master=False, timeout=timedelta(seconds=5)
        )
        asks = sender.secret.key_name("asks") if is_guessed else "asks"
        asked = {"name": "evil", "number": 1, "version": 5, "what": "send", "device": "cpu"}
        wrong = Secret(b"x" * 32)
        for said in (
            json.dumps(asked),
            wrong.sign_message("asks", json.dumps(asked)),
            "",
            "{",
            "0" * 64 + "{}",
            "\x00\xff",
            "[" * 100_000,
            sender.secret.sign_message("memory/evil", json.dumps(asked)),
            sender.secret.sign_message("asks", "[]"),
            sender.secret.sign_message("asks", '{"name": 1}'),
            json.dumps([asked] * 1000),
        ):
            stranger.queue_push(asks, said)
        server = Server(sender.delivery_message, None, "float32")
        try:
            assert server.take(5) == f"{model_checksum(made(1))} sent"
        finally:
            server.end()
        assert (
            sender._thread.is_alive() and set(sender._taken) != {"evil"} and len(sender._taken) == 1
        )
        for key in ("answer/evil/1", "memory/evil", sender.secret.key_name("answer/evil/1")):
            assert not stranger.check([key])
    assert ("does not have the run's signature" in caplog.text) == is_guessed


def test_answers_of_a_stranger_are_not_believed():
    """A server whose trainer's port somebody else has taken: it takes no weights from there."""
    with NetworkSender("127.0.0.1", LOG) as sender:
        sender.send_version(5, dict(hf_tensors(made(1))), None)
        message = sender.delivery_message | {"secret": "00" * 32}
        receiver, into = NetworkReceiver(), dict(hf_tensors(made(0)))
        before = {name: one.clone() for name, one in into.items()}
        host, port = sender.source.split(":")
        store = torch.distributed.TCPStore(
            host, int(port), is_master=False, timeout=timedelta(seconds=5)
        )
        secret = Secret(b"\0" * 32)
        store.set(secret.key_name(f"answer/{receiver._name}/1"), "5")  # unsigned
        with pytest.raises(ValueError, match="does not have the run's signature"):
            receiver.receive_version(message, 5, None, into)
        assert all(torch.equal(into[name], before[name]) for name in into)


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
        NetworkReceiver().receive_version(message, 0, None, dict(hf_tensors(made(0))))


def test_room_for_tensors_in_one_piece():
    like = {
        "a": torch.empty(3, 5),
        "b": torch.empty(7, dtype=torch.bfloat16, device="meta"),
        "c": torch.empty(2, 2, 2),
    }
    owned = Owned(like, "cpu")
    for i, (name, tensor) in enumerate(owned.tensors.items()):
        assert (tensor.shape, tensor.dtype) == (
            like[name].shape,
            like[name].dtype,
        ) and tensor.data_ptr() % 16 == 0
        tensor.fill_(i)
    assert [tensor.unique().tolist() for tensor in owned.tensors.values()] == [[0], [1], [2]]
    assert owned.memory.numel() == 3 * 256


READER = """
import json, sys
from hone.transport.gpu_memory import StampReader
reader = StampReader(json.loads(sys.argv[1]))
for line in sys.stdin:
    with reader.hold_version(float(line)) as version:
        print(version, flush=True)
        sys.stdin.readline()
"""


@has_proc
def test_contents_change_while_nobody_reads_them():
    stamp = Stamp()
    reader = StampReader(stamp.describe_stamp())
    with (
        stamp.change_version(5, 0.0) as is_alone,
        pytest.raises(RuntimeError, match="have been changing for 0 s"),
    ):
        assert is_alone
        with reader.hold_version(0.0):
            pass
    with (
        reader.hold_version(0.0) as version,
        StampReader(stamp.describe_stamp()).hold_version(0.0) as beside,
    ):
        assert version == beside == 5
    with pytest.raises(ZeroDivisionError), stamp.change_version(6, 0.0):
        raise ZeroDivisionError
    # Of contents that are half of one version and half of another
    with reader.hold_version(0.0) as version:
        assert version == -1


@has_proc
def test_a_reader_that_is_waited_for_in_vain_is_told_and_not_waited_for_again():
    stamp = Stamp()
    with stamp.change_version(5, 0.0):
        pass
    with (
        pytest.raises(RuntimeError, match="were replaced while they were read"),
        StampReader(stamp.describe_stamp()).hold_version(0.0) as version,
    ):
        assert version == 5
        for seconds in (0.05, 100.0):
            start = time.monotonic()
            with stamp.change_version(6, seconds) as is_alone:
                assert not is_alone and 0.05 <= time.monotonic() - start + (seconds > 1) < 10
    with stamp.change_version(7, 0.0) as is_alone:
        assert is_alone


@has_proc
def test_a_reader_that_dies_reads_no_more():
    stamp = Stamp()
    with stamp.change_version(5, 0.0):
        pass
    words = [sys.executable, "-c", READER, json.dumps(stamp.describe_stamp())]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdin.write("1.0\n")
        process.stdin.flush()
        assert process.stdout.readline() == "5\n"
        with stamp.change_version(6, 0.0) as is_alone:
            assert not is_alone
        process.kill()
    with stamp.change_version(7, 1.0) as is_alone:
        assert is_alone


@has_proc
def test_another_file_at_its_place_is_no_stamp():
    one, other = Stamp(), Stamp()
    with pytest.raises(OSError, match="is not the file of the owner"):
        StampReader(one.describe_stamp() | {"path": other.describe_stamp()["path"]})
    with pytest.raises(OSError, match="No such file"):
        StampReader(one.describe_stamp() | {"path": "/proc/self/fd/9999"})
