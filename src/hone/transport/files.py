"""Weights as files in the directory of their version, in Hugging Face format."""

from pathlib import Path

from hone.models.hf import load_weights, write_weights
from hone.transport.delivery import Message
from hone.transport.weight_transport import Arrived, Receiver, Sender, Tensors, ignore_arrivals


class FileSender(Sender):
    @property
    def delivery_message(self) -> Message:
        return {"type": "filesystem"}

    def send_version(self, version: int, tensors: Tensors, place: Path) -> int:
        write_weights(tensors, place)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class FileReceiver(Receiver):
    def receive_version(
        self,
        message: Message,
        version: int,
        place: Path,
        into: Tensors,
        arrived: Arrived = ignore_arrivals,
    ) -> None:
        load_weights(into, place)
