"""What kernels of a chain have in common: waiting for the kernel before, fetching ahead."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
