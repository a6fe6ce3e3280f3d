"""The ways that weights can travel: from the configuration the sender, from its message the receiver."""

from collections.abc import Callable
from logging import Logger
from pathlib import Path

from hone.config.sections import BroadcastConfig, FilesystemConfig, NcclConfig
from hone.transport.adapter import AdapterReceiver, AdapterSender
from hone.transport.delivery import Message
from hone.transport.files import FileReceiver, FileSender
from hone.transport.network import NetworkReceiver, NetworkSender
from hone.transport.weight_transport import Arrived, Receiver, Sender, Tensors, ignore_arrivals

RECEIVERS: dict[str, type[Receiver]] = {
    "filesystem": FileReceiver,
    "adapter": AdapterReceiver,
    "nccl": NetworkReceiver,
}


def make_sender(
    config: BroadcastConfig, write_adapter: Callable[[Tensors, Path], None] | None, log: Logger
) -> Sender:
    """`write_adapter` writes the tensors of the adapter that is trained as files, where one is."""
    match config:
        case NcclConfig():
            return NetworkSender(config.host, log)
        case FilesystemConfig():
            return FileSender() if write_adapter is None else AdapterSender(write_adapter)


class Receivers:
    """A server's receivers, one for each kind of message, kept from one version to the next."""

    def __init__(self) -> None:
        self._kinds: dict[str, Receiver] = {}

    def receive_version(
        self,
        message: Message,
        version: int,
        place: Path,
        into: Tensors,
        arrived: Arrived = ignore_arrivals,
    ) -> None:
        """Fills the tensors with a version, in the way of its message. Raises as `Receiver.receive_version`."""
        kind = message.get("type", "")
        if kind not in self._kinds:
            self._kinds[kind] = make_receiver(kind)
        self._kinds[kind].receive_version(message, version, place, into, arrived)


def make_receiver(kind: str) -> Receiver:
    """Raises ValueError for a kind that there is not."""
    if kind not in RECEIVERS:
        raise ValueError(f"transport.type {kind!r} is none of {', '.join(RECEIVERS)}")
    return RECEIVERS[kind]()
