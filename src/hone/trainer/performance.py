"""How fast and how large: model FLOP utilisation and peak memory."""

import resource
import sys

import torch

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # dense bf16, data sheets


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
