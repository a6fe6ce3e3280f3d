"""Send a LoRA adapter as peft files for each version, and the base weights once.

    broadcasts/base/model.safetensors
    broadcasts/step_N/{adapter_config.json, adapter_model.safetensors}

A server merges each adapter into the base weights.
"""

from collections.abc import Callable
from pathlib import Path

from hone.models.hf import load_weights, write_weights
from hone.models.lora import merge_adapter
from hone.transport.delivery import Message
from hone.transport.weight_transport import Arrived, Receiver, Sender, Tensors, ignore_arrivals

BASE = "base"  # directory beside the versions


class AdapterSender(Sender):
    takes = "adapter"

    def __init__(self, write: Callable[[Tensors, Path], None]) -> None:
        self.write = write  # writes an adapter's tensors as peft files

    @property
    def delivery_message(self) -> Message:
        return {"type": "adapter"}

    def send_base(self, base: Tensors, broadcasts: Path) -> None:
        (broadcasts / BASE).mkdir(parents=True, exist_ok=True)
        write_weights(base, broadcasts / BASE)

    def send_version(self, version: int, tensors: Tensors, place: Path) -> int:
        self.write(tensors, place)
        return (place / "adapter_model.safetensors").stat().st_size


class AdapterReceiver(Receiver):
    def receive_version(
        self,
        message: Message,
        version: int,
        place: Path,
        into: Tensors,
        arrived: Arrived = ignore_arrivals,
    ) -> None:
        load_weights(into, place.parent / BASE)
        merge_adapter(into, place)
