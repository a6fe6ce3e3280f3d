"""What kernels of a chain have in common: waiting for the kernel before, fetching ahead."""

import ctypes
import functools

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # of cuFuncSetAttribute
_divided: dict[int, int] = {}  # functions of the driver, and what they were told


@triton.jit
def wait(PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def wait_beside_next(PDL: tl.constexpr):
    """`wait`, where the next kernel touches nothing before its own `wait` that the step has written: it starts at once,
    and fetches what it needs of weights or of the cache meanwhile."""
    let_next_start(PDL)
    wait_only(PDL)


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_only(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def prefetch(rows, size, LINES: tl.constexpr):
    """Asks for the first LINES x 128 bytes of rows of `size` numbers in half precision to be brought into the L2 cache;
    `rows`: the addresses of their starts, a column."""
    address = rows + tl.minimum(tl.arange(0, LINES) * 64, size - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


def divide(kernel, percent):
    """From its next launch on, so many percent of a multiprocessor's fast memory are for what this kernel's blocks
    share, and the rest is its cache, through which loads come. None: as the driver has it.

    A kernel that wants it divided otherwise than the one before it begins when that one has ended."""
    function = getattr(kernel, "function", None)  # there is none before it is loaded
    if percent is not None and function is not None and _divided.get(function) != percent:
        _driver().cuFuncSetAttribute(ctypes.c_void_p(function), PREFERRED_SHARED_MEMORY_CARVEOUT, percent)
        _divided[function] = percent


@functools.cache
def _driver():
    return ctypes.CDLL("libcuda.so.1")
