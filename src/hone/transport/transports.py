"""Choose the weight transport: a sender by configuration, a receiver by the sender's message."""

from collections.abc import Callable, Mapping
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
    config: BroadcastConfig,
    write_adapter: Callable[[Tensors, Path], None] | None,
    log: Logger,
    names: Mapping[str, str] | None = None,
) -> Sender:
    """Return the configured sender.

    Args:
        write_adapter: writes a trained adapter's tensors as files.
        names: see `FileSender`.
    """
    match config:
        case NcclConfig():
            return NetworkSender(config.host, log)
        case FilesystemConfig():
            return FileSender(names) if write_adapter is None else AdapterSender(write_adapter)


class Receivers:
    """A server's receivers by kind of message, kept between versions."""

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
        """Fill the tensors with a version. Raises as `Receiver.receive_version`."""
        kind = message.get("type", "")
        if kind not in self._kinds:
            self._kinds[kind] = make_receiver(kind)
        self._kinds[kind].receive_version(message, version, place, into, arrived)


def make_receiver(kind: str) -> Receiver:
    """Return a receiver. Raises ValueError for an unknown kind."""
    if kind not in RECEIVERS:
        raise ValueError(f"transport.type {kind!r} is not one of {', '.join(RECEIVERS)}")
    return RECEIVERS[kind]()
