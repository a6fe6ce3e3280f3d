"""Memory of a GPU, or of the part of it that HONE_GPU_GIB leaves to a process."""

import os

import torch

LIMIT_VARIABLE = "HONE_GPU_GIB"


def read_limit() -> int | None:
    """Return the limit in bytes, None if there is none. Raises ValueError if it is no number."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return None
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise ValueError(f"{LIMIT_VARIABLE}: a number of GiB is wanted, found {text!r}")
    return int(gib * 2**30)


def apply_limit(device: torch.device) -> None:
    """Let this process allocate no more of the GPU than the limit, CUDA's own memory included."""
    limit = read_limit()
    if limit is None or device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    context = total - free - torch.cuda.memory_reserved(device)  # and other processes
    share = max(0.0, min(1.0, (limit - context) / total))
    torch.cuda.set_per_process_memory_fraction(share, device.index)


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes that this process can still allocate, and those of the GPU, within the limit.

    Memory that torch keeps for reuse counts as free.
    """
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limit = read_limit()
    if limit is None or limit >= total:
        return free + kept, total
    used = total - free
    return max(0, limit - used) + kept, limit


def total_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU, within the limit; None for other devices."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return min(total, read_limit() or total)
