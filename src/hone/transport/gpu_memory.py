"""Tensors in one piece of memory: sent to others a few large stretches at a time, or, by its CUDA IPC handle, read by
another process on the same GPU.

    owner: Owned(tensors like these) ── words(): layout and handle, as JSON ──► reader: opened(words), the same memory

The owner keeps the memory until no reader needs it, and says by other means when its contents are whole.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes, as torch's own allocations have
Layout = list[tuple[str, str, list[int], int]]  # of each tensor its name, dtype, shape, first byte


def layout_of(like: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> tuple[Layout, int]:
    """Where tensors of these shapes stand, in this dtype or their own, by the order of their names; bytes of all."""
    layout: Layout = []
    size = 0
    for name, tensor in sorted(like.items()):
        kind = dtype or tensor.dtype
        layout.append((name, str(kind).removeprefix("torch."), list(tensor.shape), size))
        size += -(-tensor.numel() * kind.itemsize // ALIGNMENT) * ALIGNMENT
    return layout, size


class Owned:
    """Room for tensors of these shapes and types, in one piece; `tensors`: by their names."""

    def __init__(self, like: Mapping[str, Tensor], device: torch.device | str) -> None:
        self.layout, size = layout_of(like)
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.tensors = tensors_in(self.memory, self.layout)

    def words(self) -> dict[str, Any]:
        """What one reader needs to open it, once."""
        _, *handle = self.memory.untyped_storage()._share_cuda_()
        plain = [b64encode(part).decode() if isinstance(part, bytes) else part for part in handle]
        return {"gpu": gpu_of(self.memory.device), "handle": plain, "layout": self.layout}


def opened(words: dict[str, Any]) -> dict[str, Tensor]:
    """The owner's tensors. Raises ValueError where this process does not see the owner's GPU."""
    torch.cuda.init()
    seen = {gpu_of(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    if words["gpu"] not in seen:
        raise ValueError(f"weights are on GPU {words['gpu']}, which this process does not see")
    index = seen[words["gpu"]]
    handle = [b64decode(part) if isinstance(part, str) else part for part in words["handle"]]
    storage = torch.UntypedStorage._new_shared_cuda(index, *handle)
    memory = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)
    return tensors_in(memory, words["layout"])


def gpu_of(device: torch.device) -> str:
    """What tells a GPU from all others; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def tensors_in(memory: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a layout, whose first one stands at the beginning of this memory."""
    found, begin = {}, layout[0][3] if layout else 0
    for name, dtype, shape, first in layout:
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        found[name] = memory[first - begin : first - begin + size].view(kind).view(shape)
    return found
