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
    """Do nothing, as the default for `arrived`."""


class Sender(ABC):
    """The trainer's side; a context manager while versions are sent.

    `takes` is what `send_version` expects: "weights" (all of them) or "adapter" (the trained
    tensors, by peft names).
    """

    takes: ClassVar[Literal["weights", "adapter"]] = "weights"

    @property
    @abstractmethod
    def delivery_message(self) -> Message:
        """Return the message to receivers that a version's delivery carries."""

    @abstractmethod
    def send_version(self, version: int, tensors: Tensors, place: Path) -> int:
        """Make `tensors` available to receivers as version `version`; return their size in bytes."""

    def send_base(self, base: Tensors, broadcasts: Path) -> None:  # noqa: B027
        """Send an adapter's base weights, once before its first version."""

    def wait_for_receivers(self, is_waited_for: Callable[[], bool]) -> None:  # noqa: B027
        """Wait until every server that received an earlier version has the last one.

        Ends early when `is_waited_for()` returns False.
        """

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Receiver(ABC):
    """The server's side of a transport; one instance receives all versions."""

    @abstractmethod
    def receive_version(
        self,
        message: Message,
        version: int,
        place: Path,
        into: Tensors,
        arrived: Arrived = ignore_arrivals,
    ) -> None:
        """Copy the weights of a version into the tensors `into`.

        A transport that receives the tensors in portions calls `arrived` with the names of a
        portion's tensors as soon as the portion is complete. On a GPU, work launched on the current
        stream from then on sees the new values.

        Raises:
            Superseded: the trainer has another version.
            ValueError: the version is unavailable.
        """
