"""Kernels for the CPU, compiled by numba where it is installed (`hone-rl[cpu]`); plain torch does the same without it.

torch's operations on a CPU go through memory once each, and a small model's are over before their call is. Compiled
loops do a row's work in one pass: norms, rotary positions, SwiGLU, attention over the flat token axis, sampling,
logprobs. They take addresses (`tensor.data_ptr()`), which cost nothing to hand over; the functions of
`hone.kernels` that call them see to layout and dtype.

Compiled code is kept in the user's cache directory, by a hash of these sources and by processor: all environments and
clones that have the same ones use it. It runs on torch's own threads where numba finds the same OpenMP library, and
takes float32 alone.
"""

import functools
import hashlib
import importlib.util
import logging
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    return ISAS[machine.isa()]


IS_AVAILABLE = importlib.util.find_spec("numba") is not None and machine.isa() != "none"


def words(device: str) -> str:
    """A type of device as log lines name it: a CPU with its kernels and threads."""
    kernels = machine.isa() if IS_AVAILABLE else "plain torch"
    return f"cpu ({kernels}, {torch.get_num_threads()} threads)" if device == "cpu" else device


def takes(x: Tensor) -> bool:
    """Whether the compiled kernels take this tensor. They assume that there is something in it."""
    return IS_AVAILABLE and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0


class Kept:
    """Tells numba where a kernel's compiled code lies; numba's own locators go by the path of the source."""

    directory = Path()  # set by `_numba`

    def __init__(self, line: int) -> None:
        self._line = line

    @classmethod
    def from_function(cls, function: Any, file: str) -> "Kept":
        return cls(function.__code__.co_firstlineno)

    def ensure_cache_path(self) -> None:
        """There since `_numba`."""

    def get_cache_path(self) -> str:
        return str(self.directory)

    def get_source_stamp(self) -> str:
        return self.directory.name

    def get_disambiguator(self) -> str:
        return str(self._line)


@functools.cache
def _numba() -> tuple[Any, bool]:
    """numba, set up, and whether compiled code can be kept. Its settings come from the environment, also later on."""
    here = Path(__file__).parent
    sources = b"".join(path.read_bytes() for path in [*sorted(here.glob("*.py")), here.parent / "row_state.py"])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hone" / "kernels"
    machine.keep_to_isa()  # also where a program imports this and has prepared nothing
    os.environ.setdefault("NUMBA_THREADING_LAYER_PRIORITY", "omp workqueue tbb")
    import numba
    from llvmlite.binding import get_host_cpu_name

    numba.config.reload_config()
    # Code for two processors in one directory, as of machines that share a home, ended in a segmentation fault.
    processor = os.environ.get("NUMBA_CPU_NAME") or get_host_cpu_name()
    directory = cache / f"{hashlib.sha256(sources).hexdigest()[:12]}-{machine.isa()}-{processor}"
    log, keeps = logging.getLogger("hone"), True
    try:
        if not directory.exists():
            directory.mkdir(parents=True, exist_ok=True)
            log.info("Compiling the CPU kernels into %s: a minute or less, once", directory)
        tempfile.TemporaryFile(dir=directory).close()  # numba asks for a place to write, also to read
    except OSError as error:
        log.warning("The CPU kernels are compiled for this run alone, which takes a minute or less: %s", error)
        keeps = False
    Kept.directory = directory
    return numba, keeps


def compiled(function: Any, has_loops: bool = True) -> Any:
    """Compiles a kernel whose `prange` loops are shared among torch's threads."""
    numba, keeps = _numba()
    others, numba.config.CACHE_LOCATOR_CLASSES = numba.config.CACHE_LOCATOR_CLASSES, f"{__name__}.Kept"
    try:
        return numba.njit(parallel=has_loops, fastmath=True, cache=keeps, error_model="numpy")(function)
    finally:
        numba.config.CACHE_LOCATOR_CLASSES = others


def sequence(function: Any) -> Any:
    """Compiles a function that calls kernels, one after the other."""
    return compiled(function, has_loops=False)


def inlined(function: Any) -> Any:
    """Compiles a part of kernels."""
    return _numba()[0].njit(fastmath=True, error_model="numpy")(function)
