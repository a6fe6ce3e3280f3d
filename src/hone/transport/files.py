"""Weights as files in the directory of their version, in Hugging Face format."""

from pathlib import Path

from hone.models.hf import load_weights, write_weights
from hone.transport.delivery import Message
from hone.transport.weights import Arrived, Receiver, Sender, Tensors, nobody


class FileSender(Sender):
    @property
    def message(self) -> Message:
        return {"type": "filesystem"}

    def send(self, version: int, tensors: Tensors, place: Path) -> int:
        write_weights(tensors, place)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class FileReceiver(Receiver):
    def receive(self, message: Message, version: int, place: Path, into: Tensors, arrived: Arrived = nobody) -> None:
        load_weights(into, place)
