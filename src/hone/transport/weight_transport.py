"""How versions of the weights travel from the trainer to servers: one interface, and a file for each way.

    trainer ── Sender.send(version, tensors, place) ──► place, memory, …
       └─ Sender.message, in the delivery ─► orchestrator ─► server: Receiver.receive(message, version, place, into)

Tensors go by their HF names. `place` is the directory of the version: the sender's is about to be published, the
receiver's has been.
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
    """Where nobody wants to know what has arrived."""


class Sender(ABC):
    """The trainer's side; used as a context manager while versions are sent.

    `takes` says what it is given: all weights, or the tensors of the adapter that is trained, in peft's names.
    """

    takes: ClassVar[Literal["weights", "adapter"]] = "weights"

    @property
    @abstractmethod
    def delivery_message(self) -> Message:
        """What a receiver has to know."""

    @abstractmethod
    def send_version(self, version: int, tensors: Tensors, place: Path) -> int:
        """Makes this the version that receivers get; returns its bytes."""

    def send_base(self, base: Tensors, broadcasts: Path) -> None:  # noqa: B027
        """Once, before the first version of an adapter: the weights that it is for."""

    def wait_for_receivers(self, is_waited_for: Callable[[], bool]) -> None:  # noqa: B027
        """Waits until those who took versions before have the last one, while `is_waited_for` says so."""

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Receiver(ABC):
    """A server's side; kept from one version to the next."""

    @abstractmethod
    def receive_version(
        self,
        message: Message,
        version: int,
        place: Path,
        into: Tensors,
        arrived: Arrived = ignore_arrivals,
    ) -> None:
        """Fills the tensors with a version. Raises Superseded, and ValueError where it cannot be had.

        A way in which tensors come one after the other tells `arrived` the names of those that have their new values,
        each name once, while others are still to come. On a GPU work of the present stream finds them so.
        """
