"""Weights as files in the directory of their version, in Hugging Face format."""

from collections.abc import Mapping
from pathlib import Path

from hone.models.hf import list_stored, load_weights, match_names, write_weights
from hone.transport.delivery import Message
from hone.transport.weight_transport import Arrived, Receiver, Sender, Tensors, ignore_arrivals


class FileSender(Sender):
    """Write a version's weights as files.

    Args:
        names: names to write, by HF name, of the text part of a model whose files have others.
    """

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self.names = names or {}

    @property
    def delivery_message(self) -> Message:
        return {"type": "filesystem"}

    def send_version(self, version: int, tensors: Tensors, place: Path) -> int:
        named = {self.names.get(name, name): tensor for name, tensor in tensors.items()}
        write_weights(named, place)
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
        names = match_names(into, list_stored(place))
        load_weights({names[name]: tensor for name, tensor in into.items()}, place)
