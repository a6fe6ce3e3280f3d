"""How fast and how large: memory kept between steps, model FLOP utilisation, peak memory."""

import ctypes
import resource
import sys

import torch

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # dense bf16, data sheets


def keep_freed_memory() -> None:
    """Has glibc keep what a step frees for the next one: handing it back costs thousands of page faults a step."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent from other C libraries
        if mallopt is not None:
            mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large tensor
            mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: do not shrink the heap


def mfu(flops_per_second: float, device: torch.device) -> float | None:
    """Share of the card's dense bf16 rate; None where that rate is not known (a CPU, an unlisted card)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((flops for card, flops in PEAK_FLOPS.items() if card in name), None)
    return None if peak is None else flops_per_second / peak


def peak_memory_gib(device: torch.device) -> float:
    """Of the device so far; on a CPU, of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
