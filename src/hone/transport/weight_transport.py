"""Interface of weight transports; each transport has a file.

    trainer ── Sender.send_version(version, tensors, place) ──► place, memory, …
       └─ delivery_message, in the delivery ─► orchestrator ─► server: Receiver.receive_version(message, …, into)

Tensors have their HF names. `place` is the directory of the version: unpublished for the sender,
published for the receiver.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from torch import Tensor

from hone.transport.delivery import Message

Tensors = Mapping[str, Tensor]
Arrived = Callable[[Iterable[str]], None]


def ignore_arrivals(names: Iterable[str]) -> None:
    """Ignore which tensors have arrived."""


class Sender(ABC):
    """The trainer's side; a context manager while versions are sent.

    `takes` says what it is given: all weights, or the trained adapter's tensors by peft's names.
    """

    takes: ClassVar[Literal["weights", "adapter"]] = "weights"

    @property
    @abstractmethod
    def delivery_message(self) -> Message:
        """Return the message for receivers."""

    @abstractmethod
    def send_version(self, version: int, tensors: Tensors, place: Path) -> int:
        """Make this the version that receivers get; return its size in bytes."""

    def send_base(self, base: Tensors, broadcasts: Path) -> None:  # noqa: B027
        """Send an adapter's base weights, once before its first version."""

    def wait_for_receivers(self, is_waited_for: Callable[[], bool]) -> None:  # noqa: B027
        """Wait until earlier receivers have the last version, while `is_waited_for()` is True."""

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Receiver(ABC):
    """The server's side; an instance is kept between versions."""

    @abstractmethod
    def receive_version(
        self,
        message: Message,
        version: int,
        place: Path,
        into: Tensors,
        arrived: Arrived = ignore_arrivals,
    ) -> None:
        """Fill the tensors with a version. Raises Superseded, or ValueError if it is unavailable.

        A transport that delivers tensors one by one calls `arrived` with the names of those that
        are complete, each once, while others are still to come. On a GPU the current stream then
        sees their values.
        """
