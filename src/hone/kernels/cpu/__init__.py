"""Kernels for the CPU, compiled by numba where it is installed (`hone-rl[cpu]`); plain torch does the same without it.

torch's operations on a CPU go through memory once each, and a small model's are over before their call is. Compiled
loops do a row's work in one pass: norms, rotary positions, SwiGLU, attention over the flat token axis, sampling,
logprobs. They take addresses (`tensor.data_ptr()`), which cost nothing to hand over; the functions of
`hone.kernels` that call them see to layout and dtype.

Compiled code (`compiling.py`) runs on torch's own threads where numba finds the same OpenMP library, and takes float32
alone.
"""

import functools
import importlib.util
import os
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from hone import machine

# numba reads this when it is imported. Its threads are torch's: with another number it would change torch's too.
if "numba" not in sys.modules:
    os.environ["NUMBA_NUM_THREADS"] = str(torch.get_num_threads())


@dataclass(frozen=True)
class Isa:
    """What the kernels need to know of an instruction set: floats in a vector, rows and vectors of a product's tile."""

    lanes: int
    rows: int
    vectors: int


ISAS = {"avx512": Isa(16, 8, 2), "avx2": Isa(8, 6, 2), "neon": Isa(4, 8, 2)}


@functools.cache
def isa() -> Isa:
    return ISAS[machine.instruction_set()]


IS_AVAILABLE = importlib.util.find_spec("numba") is not None and machine.instruction_set() != "none"


def words(device: str) -> str:
    """A type of device as log lines name it: a CPU with its kernels and threads."""
    kernels = machine.instruction_set() if IS_AVAILABLE else "plain torch"
    return f"cpu ({kernels}, {torch.get_num_threads()} threads)" if device == "cpu" else device


def takes(x: Tensor) -> bool:
    """Whether the compiled kernels take this tensor. They assume that there is something in it."""
    return IS_AVAILABLE and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
