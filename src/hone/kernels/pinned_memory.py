"""Pinned host memory, and copies between host and GPU."""

import contextlib
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.machine import usable_cores

STRETCH = 2**26  # bytes of memory that one thread asks for
# Numbers of locked memory that travel together, and how many portions are on the GPU at once
PORTION = 2**23
ROOMS = 4


class _Pages(mmap.mmap):
    """Memory registered with CUDA while a tensor refers to it."""

    address = 0

    def __del__(self) -> None:
        if self.address:
            with contextlib.suppress(Exception):  # the process may be ending, and CUDA be gone
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaHostUnregister(self.address)


def reachable_zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a CPU tensor of zeros in pinned memory; `shape` has at least one element.

    torch's own pinned memory would round each tensor up to a power of two. Raises ValueError if
    CUDA cannot pin the memory.
    """
    size = shape.numel() * dtype.itemsize
    pages = _Pages(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    touch(whole)
    # For all of the process's contexts
    error = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), size, 1))
    if error:
        raise ValueError(
            f"CUDA could not lock {size / 2**30:.2f} GiB of the machine's memory (cudaError {error})"
        )
    pages.address = whole.data_ptr()
    return whole.view(dtype).view(shape)


def touch(memory: Tensor) -> None:
    """Write zeros to each page of new memory, on all cores, so that the system allocates it.

    CUDA would do so on one core, at 0.2 GiB/s in some VMs.
    """
    parts = memory.split(STRETCH)
    with ThreadPoolExecutor(min(usable_cores(), len(parts))) as pool:
        list(pool.map(lambda part: part[:: mmap.PAGESIZE].zero_(), parts))


@contextlib.contextmanager
def brought(tensors: list[Tensor], device: torch.device) -> Iterator[list[Tensor]]:
    """Context manager that provides tensors on a device and copies changes back at the end.

    Tensors that are already on the device are yielded without a copy.
    """
    there = [tensor.to(device) for tensor in tensors]
    yield there
    for home, tensor in zip(tensors, there, strict=True):
        if home is not tensor:
            home.copy_(tensor)


def started_to_host(tensors: list[Tensor]) -> "tuple[list[Tensor], torch.cuda.Event | None]":
    """Start to copy tensors to the host; return the copies and an event to wait for.

    The copies hold the tensors' values after all GPU work launched before this call. For CPU
    tensors, return the tensors without a copy, and None.
    """
    if tensors[0].device.type == "cpu":
        return tensors, None
    copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
    for copy, x in zip(copies, tensors, strict=True):
        copy.copy_(x, non_blocking=True)
    return copies, torch.cuda.current_stream().record_event()


def to_device(values: Any, device: torch.device) -> Tensor:
    """Copy values to the device without synchronizing: a list as int64, an array in its own type."""
    host = torch.from_numpy(
        values if isinstance(values, np.ndarray) else np.array(values, dtype=np.int64)
    )
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def copy_to_device(target: Tensor, values: Tensor) -> None:
    """Copy a CPU tensor to the memory of `target` without synchronizing."""
    host = values if target.device.type == "cpu" else values.pin_memory()
    target.copy_(host, non_blocking=True)
