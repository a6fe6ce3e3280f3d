"""What kernels of a chain have in common: waiting for the kernel before, fetching ahead."""

import ctypes
from contextlib import suppress

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # of cuFuncSetAttribute
_told: set[int] = set()  # functions of the driver that have their share


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
        "prefetch.global.L2 [$1]; // $0",
        "=r,l",
        [address.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def set_memory_share(kernel, percent):
    """From its next launch on, so many percent of a multiprocessor's fast memory are shared memory where this compiled
    kernel runs, and the rest is cache. None: as the driver has it. Call it with one and the same number for a kernel:
    kernels that should differ in it have a constant SHARE.

    A kernel that wants another division than the one before it begins when that one has ended."""
    # There is no function before it is loaded; `getattr` would wait until it is compiled.
    function = None if kernel is None else vars(kernel).get("function")
    if percent is None or function is None or function in _told:
        return
    _told.add(function)
    with suppress(OSError):  # it is no more than a wish
        ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
            ctypes.c_void_p(function), PREFERRED_SHARED_MEMORY_CARVEOUT, percent
        )
