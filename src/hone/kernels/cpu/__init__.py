"""CPU kernels compiled by numba, if it is installed (`hone-rl[cpu]`); plain torch is the fallback.

torch's CPU operations each pass through memory once, and a small model's take less time than their
calls. Compiled loops process a row in one pass: norms, rotary positions, SwiGLU, attention over the
flat token axis, sampling, logprobs. They take addresses (`tensor.data_ptr()`), which are free to
pass; the functions of `hone.kernels` that call them check layout and dtype.

Compiled code (`compiling.py`) runs on torch's threads if numba finds the same OpenMP library, and
takes float32 only.
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
    """Parameters of an instruction set: floats per vector, rows and vectors of a product's tile."""

    lanes: int
    rows: int
    vectors: int


ISAS = {"avx512": Isa(16, 8, 2), "avx2": Isa(8, 6, 2), "neon": Isa(4, 8, 2)}


@functools.cache
def isa() -> Isa:
    return ISAS[machine.instruction_set()]


IS_AVAILABLE = importlib.util.find_spec("numba") is not None and machine.instruction_set() != "none"


def words(device: str) -> str:
    """Return a device type for log lines: a CPU with its kernels and threads."""
    kernels = machine.instruction_set() if IS_AVAILABLE else "plain torch"
    return f"cpu ({kernels}, {torch.get_num_threads()} threads)" if device == "cpu" else device


def takes(x: Tensor) -> bool:
    """Return True if the compiled kernels support this tensor, which must not be empty."""
    return IS_AVAILABLE and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
