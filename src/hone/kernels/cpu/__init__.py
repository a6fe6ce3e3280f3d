"""CPU kernels compiled by numba, if it is installed (`hone-rl[cpu]`); plain torch is the fallback.

Each torch operation on a CPU reads and writes whole tensors, and in a small model its Python call
takes longer than the operation itself. Compiled loops do all work on a row in one pass: norms,
rotary positions, SwiGLU, attention over packed sequences, sampling, logprobs. Kernels receive
addresses (`tensor.data_ptr()`), which cost nothing to pass; the functions of `hone.kernels` that
call the kernels check layout and dtype.

Compiled code (`compiling.py`) supports only float32. It runs on torch's threads if numba finds the
OpenMP library that torch uses.
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
    """Vector and tile sizes for an instruction set.

    Attributes:
        lanes: floats per vector.
        rows: rows of a matrix product's tile.
        vectors: vectors per row of the tile.
    """

    lanes: int
    rows: int
    vectors: int


ISAS = {"avx512": Isa(16, 8, 2), "avx2": Isa(8, 6, 2), "neon": Isa(4, 8, 2)}


@functools.cache
def isa() -> Isa:
    return ISAS[machine.instruction_set()]


IS_AVAILABLE = importlib.util.find_spec("numba") is not None and machine.instruction_set() != "none"


def words(device: str) -> str:
    """Return a device type for log lines; for a CPU, add instruction set and number of threads."""
    kernels = machine.instruction_set() if IS_AVAILABLE else "plain torch"
    return f"cpu ({kernels}, {torch.get_num_threads()} threads)" if device == "cpu" else device


def takes(x: Tensor) -> bool:
    """Return True if the compiled kernels support this tensor: on a CPU, float32, not empty."""
    return IS_AVAILABLE and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
