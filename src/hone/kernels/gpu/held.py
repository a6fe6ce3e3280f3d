"""y = x W^T for one row of x and small weights: threads hold their weights before x is there.

A step of one sequence is a chain of kernels that each need what the one before made, and nothing else but weights. So a
kernel starts while the one before it runs, fetches all of its weights into registers, and only then waits. What is left
to do after that is short: x passes through plain arithmetic, a row of weights in one warp or a few.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hone.kernels.gpu.launching import let_next_start, wait_only
from hone.kernels.gpu.rows import finished

WARPS, LANES = 8, 32
VECTOR = 8  # numbers that a thread fetches at once
HELD = 12  # such vectors of weights a thread, at most


@triton.jit
def _tiles(at, step, COUNT: tl.constexpr):
    """COUNT tiles, each `step` numbers after the one before, all asked for at once."""
    found = (tl.load(at),)
    for c in tl.static_range(1, COUNT):
        found = found + (tl.load(at + c * step),)  # noqa: RUF005 - the kernel language has no unpacking
    return found


@triton.jit(do_not_specialize=["P"])
def held_kernel(
    x, w, bias, squares, residual, norm, out, scaled, own_squares, M, N, K, P, eps,
    BN: tl.constexpr, BK: tl.constexpr, COUNT: tl.constexpr, HAS_BIAS: tl.constexpr, SWIGLU: tl.constexpr,
    SQUARES: tl.constexpr, ONTO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN of the N numbers of W x, in tiles of BK of its K, with what `product_kernel` does around it. M, which it takes
    as that kernel does, is 1.

    Every tile is BN x BK, those of x too, so that no number changes its thread before all are added up.
    """
    let_next_start(PDL)
    pid = tl.program_id(0)
    n, k = pid * BN + tl.arange(0, BN)[:, None], tl.arange(0, BK)[None, :]
    inside, at = n < N, w + (n % N).to(tl.int64) * K + k
    held = _tiles(at, BK, COUNT)
    if SWIGLU:
        held_up = _tiles(at + N.to(tl.int64) * K, BK, COUNT)
    rstd, bias_N, bias_up_N, before = 0.0, 0.0, 0.0, 0.0
    if HAS_BIAS:
        bias_N = tl.load(bias + n, inside, other=0.0).to(tl.float32)
        if SWIGLU:
            bias_up_N = tl.load(bias + N + n, inside, other=0.0).to(tl.float32)
    if ONTO:
        norm_N = tl.load(norm + n, inside, other=0.0).to(tl.float32)
    wait_only(PDL)
    if SQUARES:  # added up at last: it would hold up what is fetched after it
        p = tl.arange(0, SQUARES)[None, :] + 0 * n
        squares_P = tl.load(squares + p, p < P, other=0.0)
    if ONTO:
        before = tl.load(residual + n, inside, other=0.0).to(tl.float32)
    acc, up = tl.zeros((BN, BK), tl.float32), tl.zeros((BN, BK), tl.float32)
    for c in tl.static_range(COUNT):
        tile = tl.load(x + c * BK + k + 0 * n).to(tl.float32)
        acc += held[c].to(tl.float32) * tile
        if SWIGLU:
            up += held_up[c].to(tl.float32) * tile
    total, total_up = tl.sum(acc, axis=1, keep_dims=True), tl.sum(up, axis=1, keep_dims=True)
    if SQUARES:
        rstd = tl.rsqrt(tl.sum(squares_P, axis=1, keep_dims=True) / K + eps)
    dtype: tl.constexpr = out.dtype.element_ty
    result = finished(total, total_up, rstd, bias_N, bias_up_N, before, dtype, SQUARES, HAS_BIAS, SWIGLU, ONTO)
    tl.store(out + n, result, inside)
    if ONTO:
        exact = tl.where(inside, result.to(tl.float32), 0.0)
        tl.store(scaled + n, (exact * norm_N).to(result.dtype), inside)
        tl.store(own_squares + pid, tl.sum(exact * exact))


class Held(NamedTuple):
    """How held_kernel is cut."""

    BN: int
    BK: int
    COUNT: int


def held_tile(inner: int, is_swiglu: bool) -> Held | None:
    """A row of weights, of gate and up two, is spread over the fewest warps that have room; None where none have."""
    for warps in (1, 2, 4):
        BK = warps * LANES * VECTOR
        if inner % BK == 0 and inner // BK * (1 + is_swiglu) <= HELD:
            return Held(WARPS // warps, BK, inner // BK)
    return None
