"""Tensors in one block of memory, sent in few large transfers or shared by CUDA IPC.

Readers are processes of the same machine, on the same GPU or another one over NVLink or PCIe.

    owner: Owned(tensors, device) ── describe_memory(): layout and handle, as JSON ──► reader: map_memory(words, GPU)
           Stamp().change_version(version) ── describe_stamp() ─────────────────► StampReader(words).hold_version()

A `Stamp` holds the version of the block's contents. The owner waits, up to a time limit, before it
changes a block that a process reads.
"""

import fcntl
import os
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

ALIGNMENT_BYTES = 256  # bytes, like torch's allocations
BOOT = Path("/proc/sys/kernel/random/boot_id")
NONE = -1  # version of invalid contents
LOCK_POLL_SECONDS = 0.0005  # seconds between attempts to lock a stamp
Layout = list[tuple[str, str, list[int], int]]  # name, dtype, shape and first byte of each tensor


def layout_of(like: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> tuple[Layout, int]:
    """Return the layout of tensors in one block, sorted by name, and the block's size in bytes.

    `dtype` replaces the dtype of every tensor; None keeps their dtypes.
    """
    layout: Layout = []
    size = 0
    for name, tensor in sorted(like.items()):
        kind = dtype or tensor.dtype
        layout.append((name, str(kind).removeprefix("torch."), list(tensor.shape), size))
        size += -(-tensor.numel() * kind.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return layout, size


class Owned:
    """A block of memory for tensors with the shapes and dtypes of `like`.

    `tensors` has a view of the block for each tensor, by name.
    """

    def __init__(self, like: Mapping[str, Tensor], device: torch.device | str) -> None:
        self.layout, size = layout_of(like)
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.tensors = tensors_in(self.memory, self.layout)

    def describe_memory(self) -> dict[str, Any]:
        """Return the block's layout and a CUDA IPC handle, as plain data, for one reader.

        The reader may open the handle once.
        """
        _, *handle = self.memory.untyped_storage()._share_cuda_()
        plain = [b64encode(part).decode() if isinstance(part, bytes) else part for part in handle]
        return {"gpu": gpu_of(self.memory.device), "handle": plain, "layout": self.layout}


def open_tensors(words: dict[str, Any]) -> dict[str, Tensor]:
    """Map memory of another process, as described by its `Owned`, and return the tensors in it."""
    return tensors_in(
        map_memory(words, torch.device("cuda", torch.cuda.current_device())), words["layout"]
    )


def map_memory(words: dict[str, Any], device: torch.device) -> Tensor:
    """Map another process's memory for use on `device`, a GPU of this process; return it as uint8.

    The memory may be on the same GPU or on another one, which need not be visible in this process.
    `words` is what `Owned.describe_memory` returned. Raises RuntimeError if the memory cannot be
    reached.
    """
    handle = [b64decode(part) if isinstance(part, str) else part for part in words["handle"]]
    handle[-1] = False  # do not wait for the owner's GPU work
    with torch.cuda.device(device):
        storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *handle)
        return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)


class Stamp:
    """Version of a shared memory's contents, in an unnamed file that readers lock to read.

    The lock of a process that dies is released.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._was_alone = True
        self._write_version(NONE)

    def describe_stamp(self) -> dict[str, Any]:
        """Return what a `StampReader` needs to open and verify the file, as plain data."""
        path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        return {"path": path, "file": _file_identity(self._file)}

    def _write_version(self, version: int) -> None:
        self.version = version
        os.pwrite(self._file.fileno(), version.to_bytes(8, "little", signed=True), 0)

    @contextmanager
    def change_version(self, version: int, seconds: float) -> Iterator[bool]:
        """Context manager in which the owner may change the contents to those of `version`.

        Waits up to `seconds` until nobody reads; does not wait if the previous call waited in vain.
        Yields True if nobody reads; the contents may be changed in either case. If the body of the
        `with` statement raises, the contents have no version.
        """
        self._was_alone = _acquire_lock(
            self._file, fcntl.LOCK_EX, seconds if self._was_alone else 0.0
        )
        try:
            self._write_version(NONE)
            yield self._was_alone
            self._write_version(version)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class StampReader:
    """Reader of a Stamp.

    Raises OSError if the owner's file is gone, or its owner runs as another user or in another PID
    namespace.
    """

    def __init__(self, words: dict[str, Any]) -> None:
        def at_once(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NONBLOCK)

        self._file = open(words["path"], "rb", buffering=0, opener=at_once)  # noqa: SIM115
        if _file_identity(self._file) != words["file"]:
            raise OSError(f"{words['path']} is not the file of the owner")

    @contextmanager
    def hold_version(self, seconds: float) -> Iterator[int]:
        """Context manager that yields the version and keeps the contents from changing.

        Waits up to `seconds` for a change in progress. Raises RuntimeError if the change does not
        end in time, or, on exit, if the owner changed the contents without waiting for this reader.
        """
        if not _acquire_lock(self._file, fcntl.LOCK_SH, seconds):
            raise RuntimeError(f"they have been changing for {seconds:.0f} s")
        try:
            version = self._read_version()
            yield version
            if self._read_version() != version:
                raise RuntimeError("they were replaced while they were read")
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read_version(self) -> int:
        return int.from_bytes(os.pread(self._file.fileno(), 8, 0), "little", signed=True)


def _file_identity(file: IO[bytes]) -> list[int]:
    status = os.fstat(file.fileno())
    return [status.st_dev, status.st_ino]


def _acquire_lock(file: IO[bytes], kind: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOCK_POLL_SECONDS)


def machine_of() -> str:
    """Return an id of this machine, "" if unknown; in a container it is the host's id."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def gpu_of(device: torch.device) -> str:
    """Return an id of a GPU, "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def tensors_in(memory: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return views of a block of memory as the tensors of a layout, by name."""
    found = {}
    begin = layout[0][3] if layout else 0
    for name, dtype, shape, first in layout:
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        found[name] = memory[first - begin : first - begin + size].view(kind).view(shape)
    return found
