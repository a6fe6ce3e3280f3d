"""y = x W^T for few rows of x: threads load weights before x is available.

A decode step of few sequences is a chain of kernels, each of which needs weights and the previous
kernel's result. A kernel therefore starts while the previous one runs, requests its first weights,
and only then waits for x. Weights and rows of x are loaded directly into registers, as operands of
the tensor cores. Each warp multiplies its own stretches of the inner dimension, so warps exchange
nothing until all stretches are multiplied:

    weights ──────► registers ─┐
    wait ──► rows ─► registers ┴─► partial sums per warp ─► shared memory ─► summed ─► epilogue

Written in Gluon, a Triton language in which a kernel states which thread holds which tensor
elements.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from hone.kernels import gpu
from hone.kernels.gpu import Scaled, options, power_of_2
from hone.kernels.gpu.launching import let_next_start, set_memory_share, wait_only
from hone.kernels.gpu.row_kernels import finished

VECTOR = gl.constexpr(8)  # numbers that a thread fetches at once


@triton.jit
def _fetched(at, step, there, FIRST: gl.constexpr, END: gl.constexpr):
    """Start loading tiles FIRST … END - 1 at `at`, `step` numbers apart; return them as a tuple.

    `there`: mask of the loads, or None.
    """
    other: gl.constexpr = None if there is None else 0.0
    found = (gl.load(at + FIRST * step, there, other),)
    for c in gl.static_range(FIRST + 1, END):
        found = found + (gl.load(at + c * step, there, other),)  # noqa: RUF005 - the language has no unpacking
    return found


@gluon.jit(do_not_specialize=["M", "P"])
def held_kernel(
    x,
    w,
    bias,
    squares,
    residual,
    norm,
    out,
    scaled,
    own_squares,
    M,
    N,
    K,
    P,
    eps,
    R: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    HELD: gl.constexpr,
    AHEAD: gl.constexpr,
    WARPS: gl.constexpr,
    COUNT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SWIGLU: gl.constexpr,
    SQUARES: gl.constexpr,
    ONTO: gl.constexpr,
    SHARE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute tile (m, n), R x BN, of x w^T, fused with the operations before and after the
    product.

    x is M x K, w is N x K. Each of WARPS warps multiplies COUNT stretches of BK along K. A warp
    requests its first HELD stretches of w before the previous kernel ends, and its first AHEAD
    stretches of x as soon as that kernel has ended. Flags add these operations, in this order:

        SQUARES   x is from a `Scaled`: divide by its root mean square, of P sums of squares per row
        HAS_BIAS  add the bias
        SWIGLU    w has twice as many rows, gates above ups: silu(gate) * up
        ONTO      add residual (M x N), and write the unfinished norm (`Scaled`) of the sum

    On the tensor cores, w is the left operand, with at least 16 rows, and x^T the right operand,
    with at least 8 columns.
    """
    gl.static_assert(
        BK % (4 * VECTOR) == 0,
        "four threads have a row of a stretch; with fewer results would be wrong",
    )
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    of_w: gl.constexpr = gl.DotOperandLayout(0, of_sums, VECTOR)
    of_x: gl.constexpr = gl.DotOperandLayout(1, of_sums, VECTOR)
    # What the warps have of a number comes together in one thread; threads side by side have columns side by side.
    SIDE: gl.constexpr = min(BN // 16, WARPS)
    of_parts: gl.constexpr = gl.BlockedLayout(
        [WARPS, 1, 1], [1, 16, 2], [1, SIDE, WARPS // SIDE], [1, 2, 0]
    )
    of_tile: gl.constexpr = gl.SliceLayout(0, of_parts)
    let_next_start(PDL)
    pid_n, pid_m = gl.program_id(0), gl.program_id(1)
    s = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, of_w)))[:, None, None]
    # Columns that the last two tiles share are the last but one's
    first_n = gl.minimum(pid_n * BN, N - BN)
    n = first_n + gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(2, of_w)))[None, :, None]
    k = gl.arange(0, BK, gl.SliceLayout(0, gl.SliceLayout(1, of_w)))[None, None, :]
    of_n, step = w + (n.to(gl.int64) * K + s * BK + k), WARPS * BK
    held = _fetched(of_n, step, None, 0, HELD)
    if SWIGLU:
        of_up = of_n + N.to(gl.int64) * K
        held_up = _fetched(of_up, step, None, 0, HELD)
    m = pid_m * R + gl.arange(0, R, gl.SliceLayout(0, of_tile))
    n_1 = first_n + gl.arange(0, BN, gl.SliceLayout(1, of_tile))[:, None]
    inside, at = (m[None, :] < M) & (n_1 >= pid_n * BN), m[None, :] * N + n_1
    rstd, bias_N1, bias_up_N1, before = 0.0, 0.0, 0.0, 0.0
    if HAS_BIAS:
        bias_N1 = gl.load(bias + n_1).to(gl.float32)
        if SWIGLU:
            bias_up_N1 = gl.load(bias + N + n_1).to(gl.float32)
    if ONTO:
        norm_N1 = gl.load(norm + n_1).to(gl.float32)
    s_x = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, of_x)))[:, None, None]
    k_x = gl.arange(0, BK, gl.SliceLayout(0, gl.SliceLayout(2, of_x)))[None, :, None]
    m_x = pid_m * R + gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(1, of_x)))[None, None, :]
    of_m = x + (m_x * K + s_x * BK + k_x)
    wait_only(PDL)
    rows = _fetched(of_m, step, m_x < M, 0, AHEAD)
    if SQUARES:
        of_squares: gl.constexpr = gl.BlockedLayout(
            [1, max(SQUARES // 32, 1)], [1, 32], [WARPS, 1], [1, 0]
        )
        m_s = pid_m * R + gl.arange(0, R, gl.SliceLayout(1, of_squares))[:, None]
        p = gl.arange(0, SQUARES, gl.SliceLayout(0, of_squares))[None, :]
        squares_RP = gl.load(squares + m_s * P + p, (p < P) & (m_s < M), other=0.0)
    if ONTO:
        before = gl.load(residual + at, inside, other=0.0).to(gl.float32)
    acc, up = (
        gl.zeros([WARPS, BN, R], gl.float32, of_sums),
        gl.zeros([WARPS, BN, R], gl.float32, of_sums),
    )
    for c in gl.static_range(COUNT):
        if c + AHEAD < COUNT:
            rows = rows + _fetched(of_m, step, m_x < M, c + AHEAD, c + AHEAD + 1)
        acc = mma_v2(held[c], rows[c], acc)
        if SWIGLU:
            up = mma_v2(held_up[c], rows[c], up)
        if c + HELD < COUNT:
            held = held + _fetched(of_n, step, None, c + HELD, c + HELD + 1)
            if SWIGLU:
                held_up = held_up + _fetched(of_up, step, None, c + HELD, c + HELD + 1)
    # All into shared memory, then one barrier, then all out of it.
    in_memory: gl.constexpr = gl.SwizzledSharedLayout(2, 1, min(R // 2, 8), [2, 1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [WARPS, BN, R], in_memory, acc)
    if SWIGLU:
        sums_up = gl.allocate_shared_memory(gl.float32, [WARPS, BN, R], in_memory, up)
    if SQUARES:
        size = gl.allocate_shared_memory(
            gl.float32, [R], gl.SwizzledSharedLayout(1, 1, 1, [0]), gl.sum(squares_RP, 1)
        )
        rstd = gl.rsqrt(size.load(gl.SliceLayout(0, of_tile)) / K + eps)[None, :]
    total, total_up = gl.sum(sums.load(of_parts), axis=0), 0.0
    if SWIGLU:
        total_up = gl.sum(sums_up.load(of_parts), axis=0)
    dtype: gl.constexpr = out.dtype.element_ty
    result = finished(
        total, total_up, rstd, bias_N1, bias_up_N1, before, dtype, SQUARES, HAS_BIAS, SWIGLU, ONTO
    )
    gl.store(out + at, result, inside)
    if ONTO:
        exact = gl.where(inside, result.to(gl.float32), 0.0)
        gl.store(scaled + at, (exact * norm_N1).to(dtype), inside)
        gl.store(own_squares + m * gl.num_programs(0) + pid_n, gl.sum(exact * exact, axis=0), m < M)


class Held(NamedTuple):
    """Tile sizes of held_kernel."""

    R: int
    BN: int
    BK: int
    HELD: int
    AHEAD: int
    WARPS: int = 8
    maxnreg: int | None = None

    def constants(self, inner: int) -> dict[str, int | None]:
        """Return the compile-time arguments of held_kernel for inner dimension `inner`."""
        count = inner // (self.WARPS * self.BK)
        return {
            **self._asdict(),
            "COUNT": count,
            "HELD": min(self.HELD, count),
            "AHEAD": min(self.AHEAD, count),
        }


# As measured (benchmarks/kernels/tiles.py): for a projection to heads, one with SwiGLU, one onto a stream. Where
# threads have up to 128 registers, a block of the next kernel finds room on the same multiprocessor; the others do
# better without.
Tiles = tuple[Held, Held, Held]
NARROW: dict[int, Tiles] = {
    8: (Held(8, 64, 64, 2, 4), Held(8, 32, 64, 2, 4), Held(8, 32, 64, 6, 3)),
    16: (
        Held(16, 32, 64, 2, 2, 8, 200),
        Held(16, 16, 32, 4, 4, 8, 128),
        Held(16, 16, 64, 3, 2, 16, 128),
    ),
    32: (
        Held(32, 32, 32, 3, 4, 8, 168),
        Held(32, 16, 32, 8, 4, 4),
        Held(16, 16, 32, 11, 8, 8, 128),
    ),
}
MIDDLE: dict[int, Tiles] = {
    8: (
        Held(8, 32, 64, 3, 4, 8, 168),
        Held(8, 16, 64, 3, 4, 8, 128),
        Held(8, 16, 32, 10, 12, 8, 168),
    ),
    16: (
        Held(16, 32, 64, 2, 2, 8, 128),
        Held(16, 16, 64, 2, 1, 4, 168),
        Held(16, 16, 32, 8, 8, 8, 128),
    ),
    32: (
        Held(32, 32, 32, 3, 2, 8, 128),
        Held(32, 16, 32, 3, 2, 4, 128),
        Held(16, 16, 32, 3, 4, 8, 128),
    ),
}
BROAD: dict[int, Tiles] = {
    **MIDDLE,
    8: (
        Held(8, 32, 64, 2, 4, 8, 128),
        Held(8, 16, 64, 3, 4, 8, 128),
        Held(8, 16, 64, 6, 6, 8, 128),
    ),
}
WIDE: dict[int, Tiles] = {
    **MIDDLE,
    8: (Held(8, 64, 32, 4, 16), Held(8, 16, 64, 4, 16, 4), Held(8, 16, 64, 8, 16, 4)),
}
# By the smaller size of a weight, which is the model's width or less, up to these.
BROAD_WIDTH = 3583
WIDTHS = {gpu.NARROW_WIDTH: NARROW, gpu.FUSED_WIDTH: MIDDLE, BROAD_WIDTH: BROAD, math.inf: WIDE}


def held_tile(rows: int, columns: int, inner: int, is_swiglu: bool, is_of_heads: bool) -> Held:
    """Return the tile sizes of held_kernel for up to 32 rows and at least 16 output columns.

    `inner` is a multiple of 64. `is_of_heads`: the product is the QKV projection.
    """
    tiles = next(found for most, found in WIDTHS.items() if min(columns, inner) <= most)
    tile = tiles[min(most for most in tiles if rows <= most)][
        0 if is_of_heads else 1 if is_swiglu else 2
    ]
    BN, BK, warps = tile.BN, tile.BK, tile.WARPS
    while columns < BN:
        BN //= 2
    if inner % (warps * BK):
        BK = 32
    while inner % (warps * BK):
        warps //= 2
    return tile._replace(BN=BN, BK=BK, WARPS=warps)


def few(normed: Scaled, weight: Tensor, bias: Tensor | None, is_swiglu: bool = False) -> Tensor:
    """Return x W^T + b, T x O, of a normalized x.

    With `is_swiglu`, return silu(gate) * up of the two halves, T x O / 2. Only for inputs that
    `gpu.is_few` accepts.
    """
    return _product(normed, weight, bias, is_swiglu)[0]


def few_onto(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Scaled | None]:
    """Return residual + x W^T + b, T x O, and its unfinished norm (`Scaled`) with weight `norm`.

    If `norm` is None, no norm is returned. Only for inputs that `gpu.is_few` accepts.
    """
    # Without a norm one is made of any numbers, and not read: that costs less than another kernel to compile.
    out, made = _product(x, weight, bias, onto=(residual, weight if norm is None else norm, eps))
    return out, None if norm is None else made


def _product(
    x: Tensor | Scaled,
    weight: Tensor,
    bias: Tensor | None,
    is_swiglu: bool = False,
    onto: tuple[Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Scaled | None]:
    """Launch held_kernel; return its result, and with `onto` also the unfinished norm (`Scaled`).

    `onto`: a residual stream, and weight and epsilon of the norm after it.
    """
    squares, eps = (None, 0.0) if isinstance(x, Tensor) else (x.squares_TP, x.eps)
    x = (x if isinstance(x, Tensor) else x.scaled_TD).contiguous()
    (M, K), N = x.shape, len(weight) // (1 + is_swiglu)
    P = 0 if squares is None else squares.shape[1]
    tile = held_tile(M, N, K, is_swiglu, is_of_heads=not is_swiglu and onto is None)
    tiles, out = -(-N // tile.BN), x.new_empty(M, N)
    share = gpu.memory_share(K if onto is None else N, M)
    made = (
        None
        if onto is None
        else Scaled(x.new_empty(M, N), x.new_empty(M, tiles, dtype=torch.float32), onto[2])
    )
    kernel = held_kernel[(tiles, -(-M // tile.R))](
        x,
        weight,
        weight if bias is None else bias,
        x if squares is None else squares,
        *((x, x) if onto is None else (onto[0].contiguous(), onto[1])),
        out,
        *((out, out) if made is None else (made.scaled_TD, made.squares_TP)),
        M,
        N,
        K,
        P,
        eps,
        **tile.constants(K),
        HAS_BIAS=bias is not None,
        SWIGLU=is_swiglu,
        SQUARES=power_of_2(P) if P else 0,
        ONTO=onto is not None,
        SHARE=share,
        **options(tile.WARPS),
    )
    set_memory_share(kernel, share)
    return out, made
