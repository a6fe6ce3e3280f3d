"""Compute y = x W^T for more rows than `few_row_products.py` supports.

Weights are read from memory once; the work is divided over rows and columns.

    short       for small weights, optionally with SwiGLU: starts while the previous kernel runs
    parts       splits the inner dimension to fill the GPU; the caller sums the parts
    in_order    sums each result over the inner dimension in order: same bits as torch's product of many rows
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels.gpu import (
    FEWEST_TOKENS,
    has_dependent_launch,
    options,
    power_of_2,
    processors,
    stages_of,
)
from hone.kernels.gpu.launching import prefetch, wait, wait_beside_next
from hone.kernels.gpu.row_kernels import finished


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x,
    w,
    bias,
    out,
    M,
    N,
    K,
    R: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    IS_PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute tile (m, n), R x BN, of x w^T over one split s of the inner dimension, into out[s].

    x is M x K, w is N x K. With several splits (IS_PART), some splits are one step of BK longer
    than others. Flags:

        HAS_BIAS  add the bias, in split 0
        SWIGLU    w has twice as many rows, gates above ups: silu(gate) * up
    """
    pid_n, pid_m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, n, k = pid_m * R + tl.arange(0, R), pid_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    first, end = 0, K // BK
    if IS_PART:
        first, end = split * end // tl.num_programs(2), (split + 1) * end // tl.num_programs(2)
    rows, there = x + m[:, None].to(tl.int64) * K + k[None, :], (m < M)[:, None]
    starts, to_up = w + (n % N).to(tl.int64) * K, N.to(tl.int64) * K
    if PDL:  # the weights do not depend on the kernel before
        ahead = starts[:, None] + first * BK
        prefetch(ahead, K, LINES)
        if SWIGLU:
            prefetch(ahead + to_up, K, LINES)
    of_m, of_n = (pid_m * R + tl.arange(0, R))[:, None], (pid_n * BN + tl.arange(0, BN))[None, :]
    inside, at = (of_m < M) & (of_n < N), (split * M + of_m).to(tl.int64) * N + of_n
    bias_1N, bias_up_1N = 0.0, 0.0
    if HAS_BIAS:
        bias_1N = tl.load(bias + of_n, of_n < N, other=0.0).to(tl.float32)
        if SWIGLU:
            bias_up_1N = tl.load(bias + N + of_n, of_n < N, other=0.0).to(tl.float32)
    columns = starts[None, :] + k[:, None]
    wait_beside_next(PDL)
    acc, up = tl.zeros((R, BN), tl.float32), tl.zeros((R, BN), tl.float32)
    for t in tl.range(first, end, num_stages=STAGES):
        # Rows that do not exist are not read: all programs would read the same ones.
        tile = tl.load(rows + t * BK, there, other=0.0)
        acc = tl.dot(tile, tl.load(columns + t * BK), acc)
        if SWIGLU:
            up = tl.dot(tile, tl.load(columns + to_up + t * BK), up)
    if HAS_BIAS:
        bias_1N = tl.where(split == 0, bias_1N, 0.0)
    result = finished(
        acc, up, 0.0, bias_1N, bias_up_1N, 0.0, out.dtype.element_ty, False, HAS_BIAS, SWIGLU, False
    )
    tl.store(out + at, result, inside)


def parts(x: Tensor, weight: Tensor, bias: Tensor | None, splits: int, width: int) -> Tensor:
    """Return parts (S x T x O) that sum to x W^T + b, one per stretch of the inner dimension.

    Tiles have `width` columns.
    """
    return _product(x, weight, bias, part_tile(len(x), width, x.shape[1]), splits)


def short(x: Tensor, weight: Tensor, bias: Tensor | None, is_swiglu: bool = False) -> Tensor:
    """Return x W^T + b, T x O.

    With `is_swiglu`, return silu(gate) * up of the two halves, T x O / 2. Only for inputs that
    `gpu.is_short` accepts.
    """
    return _product(x, weight, bias, short_tile(len(x), is_swiglu), is_swiglu=is_swiglu)[0]


class Tile(NamedTuple):
    """Tile sizes of product_kernel."""

    R: int
    BN: int
    BK: int
    STAGES: int
    LINES: int = 2  # of weights that are fetched ahead into the L2 cache, at most
    num_warps: int = 4

    def stages(self, is_swiglu: bool) -> int:
        """Return how many pipeline stages of these tile sizes, at most STAGES, fit into shared
        memory.
        """
        return stages_of(self.STAGES, self.R + self.BN * (1 + is_swiglu), self.BK)


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile,
    splits: int = 1,
    is_swiglu: bool = False,
) -> Tensor:
    x = x.contiguous()
    (M, K), N = x.shape, len(weight) // (1 + is_swiglu)
    out = x.new_empty(splits, M, N)
    lines = min(tile.LINES, power_of_2(K // splits // 64))
    tile = tile._replace(LINES=lines, STAGES=tile.stages(is_swiglu))
    product_kernel[(-(-N // tile.BN), -(-M // tile.R), splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        M,
        N,
        K,
        **(options(tile.num_warps) | tile._asdict()),
        HAS_BIAS=bias is not None,
        SWIGLU=is_swiglu,
        IS_PART=splits > 1,
    )
    return out


# Tiles as measured (benchmarks/kernels/tiles.py), with fewer stages where there is no room for them.


def part_tile(rows: int, width: int, inner: int) -> Tile:
    R, deep = min(max(power_of_2(rows), 16), 128), has_dependent_launch()
    if R <= FEWEST_TOKENS:
        return Tile(R, width, 128 if inner % 128 == 0 else 64, 4 if deep else 2)
    return Tile(R, width, 64, 6 if deep else 3, num_warps=8 if R == 128 else 4)


def short_tile(rows: int, is_swiglu: bool) -> Tile:
    if rows <= 64:
        return Tile(64, 32, 64, 6, LINES=4)
    return Tile(64, 64, 64, 5) if is_swiglu else Tile(64, 64, 64, 8, LINES=4)


@triton.jit(do_not_specialize=["M"])
def in_order_kernel(
    x,
    w,
    out,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile of x w^T, summing the inner dimension from first to last.

    x is M x K, w is N x K. Consecutive programs compute up to GROUP row tiles of the same columns.
    """
    tiles_m, tiles_n, pid = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.program_id(0)
    band = pid // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    pid_m, pid_n = (
        band * GROUP + pid % (GROUP * tiles_n) % height,
        pid % (GROUP * tiles_n) // height,
    )
    m, n, k = pid_m * BM + tl.arange(0, BM), pid_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    rows, there = x + m[:, None].to(tl.int64) * K + k[None, :], (m < M)[:, None]
    columns = w + (n % N)[None, :].to(tl.int64) * K + k[:, None]
    if PDL:  # the weights do not depend on the kernel before
        prefetch(w + (n % N)[:, None].to(tl.int64) * K, K, LINES)
    wait(PDL)
    acc = tl.zeros((BM, BN), tl.float32)
    for i in tl.range(0, K, BK, num_stages=STAGES):
        acc = tl.dot(tl.load(rows + i, there, other=0.0), tl.load(columns + i), acc)
    inside = there & (n < N)[None, :]
    tl.store(out + m[:, None].to(tl.int64) * N + n[None, :], acc.to(out.dtype.element_ty), inside)


def in_order(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x W^T, M x N, whose bits do not depend on tile sizes.

    The inner size must be a multiple of 16.
    """
    x = x.contiguous()
    (M, K), N = x.shape, len(weight)
    out = x.new_empty(M, N, dtype=dtype)
    BM = 16 if M <= 16 else 64 if M <= 256 else 128
    BN, enough = 64, processors() * 3 // 5
    while BN > 16 and enough > -(-N // BN) * -(-M // BM):
        BN //= 2
    BK = min(64 if BN == 64 else 128, K & -K)
    stages = stages_of(5 if has_dependent_launch() else 3, BM + BN, BK)
    in_order_kernel[(-(-M // BM) * -(-N // BN),)](
        x,
        weight,
        out,
        M,
        N,
        K,
        BM=BM,
        BN=BN,
        BK=BK,
        STAGES=stages,
        GROUP=8,
        LINES=min(power_of_2(-(-K // 64)), 16),
        **options(4),
    )
    return out
