"""Performance of training: memory reuse between steps, model FLOP utilization, peak memory."""

import ctypes
import logging
import resource
import sys
import time

import numpy as np
import torch
from torch import nn

from hone.machine import usable_memory
from hone.models.device_memory import total_bytes
from hone.models.language_model import LanguageModel
from hone.trainer.memory_plan import AnyConfig, choose_memory, describe_choice

PEAK_FLOPS = {  # dense bf16 with sums in fp32, data sheets
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "5090": 209e12,
    "4090": 165e12,
    "3090": 71e12,
}


class Laps:
    """Stopwatch that adds up seconds by name; does nothing unless `is_on`.

    A call `laps(name)` synchronizes the GPU and adds the time since the previous call to `name`.
    """

    def __init__(self, device: torch.device, is_on: bool) -> None:
        self.device = device
        self.is_on = is_on
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, name: str) -> None:
        if self.is_on:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
            self._last = now

    def clear_laps(self) -> None:
        self.seconds = {}
        self._last = time.perf_counter()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step; returning it costs thousands of page faults."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
        if mallopt is not None:
            mallopt(-4, 0)  # M_MMAP_MAX: no separate mapping for large tensors
            mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: do not shrink the heap


def model_flops_utilization(flops_per_second: float, device: torch.device) -> float | None:
    """Return a FLOP rate as a fraction of the GPU's dense bf16 peak, None if the peak is unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((flops for card, flops in PEAK_FLOPS.items() if card in name), None)
    return None if peak is None else flops_per_second / peak


def fit_to_device(config: AnyConfig, model: LanguageModel, log: logging.Logger) -> AnyConfig:
    """Return a configuration with the micro-batches that fit the model's device, and log them.

    On a CPU they are logged if they are not the default ones.
    """
    weight = model.embed.weight
    card_bytes = total_bytes(weight.device)
    sizes = (model.spec, weight.dtype.itemsize)
    device_bytes = usable_memory() if card_bytes is None else card_bytes
    chosen = choose_memory(config, *sizes, device_bytes, is_gpu=card_bytes is not None)
    if card_bytes is not None or chosen != choose_memory(config, *sizes, None):
        log.info("%s", describe_choice(chosen, *sizes, device_bytes))
    return chosen


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory in GiB: allocated on a GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


WARM_UP = 3  # steps before measurement


def print_bench(
    name: str, model: nn.Module, steps: list[dict[str, float]], seconds: dict[str, float]
) -> None:
    """Print medians of the metrics of measured steps, and each phase's share of the time.

    `seconds`: total time by phase, such as forward and backward.
    """
    from rich.console import Console
    from rich.table import Table

    def median_of(name: str) -> float:
        return float(np.median([values[name] for values in steps]))

    parameters = list(model.parameters())
    millions = sum(p.numel() for p in parameters) / 1e6
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    print(f"{name}: {millions:.1f}M parameters, {dtype} on {parameters[0].device}")
    table = Table(show_header=False)
    table.add_row("tokens a step", f"{median_of('progress/tokens'):,.0f}")
    table.add_row("seconds a step", f"{median_of('time/step'):.4f}")
    table.add_row("tokens/s", f"{median_of('perf/throughput'):,.0f}")
    table.add_row(
        "MFU",
        f"{median_of('perf/mfu'):.1%}"
        if "perf/mfu" in steps[0]
        else "n/a (no rate known for this device)",
    )
    table.add_row("peak memory", f"{steps[-1]['perf/peak_memory']:.1f} GiB")
    for name, value in seconds.items():
        table.add_row(name, f"{value / sum(seconds.values()):.1%}")
    Console().print(table)
