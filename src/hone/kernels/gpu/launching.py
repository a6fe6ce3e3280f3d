"""Helpers of chained kernels: waiting for the previous kernel and prefetching."""

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
    """Let the next kernel start at once, then wait for the previous one.

    The next kernel may then prefetch weights or cache entries. Use this only if the next kernel,
    before its own `wait`, touches nothing that the same decode step writes.
    """
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
    """Prefetch the first LINES x 128 bytes of each row into the L2 cache.

    `rows`: a column of the addresses of half-precision rows, each of `size` numbers.
    """
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
    """Set the percentage of L1/shared memory that a kernel's next launches use as shared memory.

    None leaves the choice to the driver. A compiled kernel keeps its first percentage; the constant
    SHARE makes kernels with different percentages compile separately. A kernel whose percentage
    differs from the previous kernel's starts only when the previous kernel has ended.
    """
    # There is no function before it is loaded; `getattr` would wait until it is compiled.
    function = None if kernel is None else vars(kernel).get("function")
    if percent is None or function is None or function in _told:
        return
    _told.add(function)
    with suppress(OSError):  # it is no more than a wish
        ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
            ctypes.c_void_p(function), PREFERRED_SHARED_MEMORY_CARVEOUT, percent
        )
