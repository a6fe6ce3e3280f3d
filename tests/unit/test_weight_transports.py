"""One contract for all ways that weights travel, and for one that is made here."""

import json
import logging
from typing import ClassVar

import pytest
import torch

from hone.config.lora_config import LoRAConfig
from hone.config.sections import FilesystemConfig, NcclConfig
from hone.models.hf import hf_tensors
from hone.models.lora import add_lora, lora_modules
from hone.models.spec import ModelSpec, make_plain_layers
from hone.models.transformer import Transformer
from hone.trainer.ranks import Ranks
from hone.trainer.sharding import Export
from hone.transport import network
from hone.transport.delivery import Superseded
from hone.transport.transports import RECEIVERS, make_receiver, make_sender
from hone.transport.weight_transport import Receiver, Sender, ignore_arrivals

SPEC = ModelSpec(
    50, 32, 64, 2, 4, 2, 8, 1e-6, make_plain_layers(1000.0, 8, 2), True, 96, 0.5, False
)
LOG = logging.getLogger("test")


class Shelf(Sender, Receiver):
    """A way of one's own: tensors stay in this process."""

    versions: ClassVar = {}

    @property
    def delivery_message(self):
        return {"type": "shelf"}

    def send_version(self, version, tensors, place):
        self.versions.clear()
        self.versions[version] = {name: tensor.clone() for name, tensor in tensors.items()}
        return sum(tensor.nbytes for tensor in tensors.values())

    def receive_version(self, message, version, place, into, arrived=ignore_arrivals):
        if version not in self.versions:
            raise Superseded
        for name, tensor in into.items():
            tensor.copy_(self.versions[version][name])


def made(seed, lora=False):
    model = Transformer(SPEC)
    model.init_weights(torch.Generator().manual_seed(seed))
    if lora:
        add_lora(model, LoRAConfig(rank=4, modules_to_save=["norm"]), seed)
    return model


def train(model):
    """Stands for a step."""
    with torch.no_grad():
        for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parameter += 0.01 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(i)
            )


@pytest.mark.parametrize("way", ["filesystem", "adapter", "nccl", "nccl with an adapter", "shelf"])
def test_what_arrives_is_what_was_sent(way, tmp_path, monkeypatch):
    monkeypatch.setitem(RECEIVERS, "shelf", Shelf)
    monkeypatch.setattr(network, "PORTION_BYTES", 5000)
    trained = made(1, lora="adapter" in way)
    export = Export(trained, Ranks(), torch.float32)
    config = NcclConfig(type="nccl") if "nccl" in way else FilesystemConfig()
    write = (
        (lambda *files: export.write_adapter("base", *files))
        if any(lora_modules(trained))
        else None
    )
    sender = Shelf() if way == "shelf" else make_sender(config, write, LOG)
    assert (sender.takes == "adapter") == (way == "adapter")
    server, sizes = dict(hf_tensors(made(2))), []
    with sender:
        if sender.takes == "adapter":
            sender.send_base(dict(hf_tensors(export(merged=False))), tmp_path)
        for version in (1, 2, 7):
            train(trained)
            expected = {name: tensor.clone() for name, tensor in hf_tensors(export())}
            place = tmp_path / f"step_{version}"
            place.mkdir()
            sizes.append(
                sender.send_version(
                    version,
                    export.adapter_tensors() if sender.takes == "adapter" else expected,
                    place,
                )
            )
            message = json.loads(json.dumps(sender.delivery_message))  # it travels as JSON
            receiver, told = make_receiver(message["type"]), []

            def arrived(names, expected=expected, told=told):
                told.append({name: torch.equal(server[name], expected[name]) for name in names})

            for _ in range(2):  # as another server, or one that was started again
                told.clear()
                receiver.receive_version(message, version, place, server, arrived)
                names = [name for portion in told for name in portion]
                assert all(all(portion.values()) for portion in told) and len(set(names)) == len(
                    names
                )
                if "nccl" in way:
                    assert set(names) == set(server) and len(told) > 1
                for name, tensor in server.items():
                    assert torch.equal(tensor, expected[name]), name
                    tensor.zero_()
        with pytest.raises((Superseded, ValueError)):
            receiver.receive_version(message, 8, tmp_path / "step_8", server)
        sender.wait_for_receivers(lambda: False)
    whole = sum(tensor.nbytes for tensor in server.values())
    assert all(size < whole for size in sizes) if way == "adapter" else sizes == [whole] * 3


def test_a_way_that_there_is_not_is_named():
    with pytest.raises(
        ValueError, match="transport.type 'pigeon' is not one of filesystem, adapter, nccl"
    ):
        make_receiver("pigeon")
