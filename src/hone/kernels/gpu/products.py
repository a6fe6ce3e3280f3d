"""y = x W^T for few rows: the weights pass through the chip once, so the work is spread over their rows and columns.

few         with what stands before and after it in the same kernel (RMS norm, SwiGLU, residual): for the fewest rows
short       with SwiGLU or nothing, for more rows of small weights: it starts while the kernel before it runs
parts       of the inner dimension, by as many programs as fill the chip: the quickest for more rows
in_order    all of it by one program, from the first to the last: the bits that torch's own product has for many rows
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels.gpu import FEWEST_TOKENS, Scaled, has_dependent_launch, options, power_of_2, processors, stages_of
from hone.kernels.gpu.held import WARPS, Held, held_kernel, held_tile
from hone.kernels.gpu.launching import prefetch, wait, wait_beside_next
from hone.kernels.gpu.rows import finished


@triton.jit
def _joined(acc, R: tl.constexpr, S: tl.constexpr, BN: tl.constexpr):
    """R x BN of R * S x BN * S, of which only those count whose row and column are of one stretch."""
    if S == 1:
        return acc
    i, j = tl.arange(0, R * S)[:, None] % S, tl.arange(0, BN * S)[None, :] % S
    return tl.sum(tl.sum(tl.reshape(tl.where(i == j, acc, 0.0), (R, S, BN, S)), axis=3), axis=1)


@triton.jit(do_not_specialize=["M", "P"])
def product_kernel(
    x, w, bias, squares, residual, norm, out, scaled, own_squares, M, N, K, stretch, P, eps,
    R: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, SWIGLU: tl.constexpr, SQUARES: tl.constexpr, ONTO: tl.constexpr, IS_PART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Tile (m, n), R x BN, of x M x K times w N x K transposed, over the k of split s: out[s] M x N. Where there are
    several splits (IS_PART), some are a step longer than others, and no more than a bias comes after the product. Else
    in this order:

    SQUARES   x is that of a `Scaled`: division by its root mean square, of P sums of squares a row (SQUARES: room for)
    bias      in split 0
    SWIGLU    w has twice as many rows, gates above ups: silu(gate) * up
    ONTO      residual M x N is added, and the `Scaled` of the result is made as well

    A matrix product on the chip has at least 16 rows, and each of its steps waits for the one before. So for fewer rows
    the inner dimension is cut into S stretches, which are rows and columns of their own: row m * S + s is stretch s of
    row m, column n * S + s that of column n. What comes of two different ones is thrown away.
    """
    pid_n, pid_m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, j, k = tl.arange(0, R * S), tl.arange(0, BN * S), tl.arange(0, BK)
    m, n = pid_m * R + i // S, pid_n * BN + j // S
    steps = stretch // BK
    first, end = 0, steps
    if IS_PART:
        first, end = split * steps // tl.num_programs(2), (split + 1) * steps // tl.num_programs(2)
    rows = x + m[:, None].to(tl.int64) * K + ((i % S) * stretch)[:, None] + k[None, :]
    starts = w + (n % N).to(tl.int64) * K + (j % S) * stretch
    to_up = N.to(tl.int64) * K
    if PDL:  # the weights do not depend on the kernel before
        ahead = starts[:, None] + first * BK
        prefetch(ahead, stretch, LINES)
        if SWIGLU:
            prefetch(ahead + to_up, stretch, LINES)
    of_m, of_n = (pid_m * R + tl.arange(0, R))[:, None], (pid_n * BN + tl.arange(0, BN))[None, :]
    inside, at = (of_m < M) & (of_n < N), (split * M + of_m).to(tl.int64) * N + of_n
    # What is added after the loop is fetched before it. The weights do not depend on the kernel before.
    rstd, bias_1N, bias_up_1N, before = 0.0, 0.0, 0.0, 0.0
    if HAS_BIAS:
        bias_1N = tl.load(bias + of_n, of_n < N, other=0.0).to(tl.float32)
        if SWIGLU:
            bias_up_1N = tl.load(bias + N + of_n, of_n < N, other=0.0).to(tl.float32)
    if ONTO:
        norm_1N = tl.load(norm + of_n, of_n < N, other=0.0).to(tl.float32)
    columns = starts[None, :] + k[:, None]
    wait_beside_next(PDL)
    if SQUARES:
        p = tl.arange(0, SQUARES)[None, :]
        squares_RP = tl.load(squares + of_m * P + p, (p < P) & (of_m < M), other=0.0)
    if ONTO:
        before = tl.load(residual + at, inside, other=0.0).to(tl.float32)
    acc, up = tl.zeros((R * S, BN * S), tl.float32), tl.zeros((R * S, BN * S), tl.float32)
    there = (m < M)[:, None]  # rows that do not exist are not read: all programs would read the same ones
    for t in tl.range(first, end, num_stages=STAGES):
        tile = tl.load(rows + t * BK, there, other=0.0)
        acc = tl.dot(tile, tl.load(columns + t * BK), acc)
        if SWIGLU:
            up = tl.dot(tile, tl.load(columns + to_up + t * BK), up)
    acc = _joined(acc, R, S, BN)
    if SWIGLU:
        up = _joined(up, R, S, BN)
    if SQUARES:
        rstd = tl.rsqrt(tl.sum(squares_RP, axis=1) / K + eps)[:, None]
    if HAS_BIAS:
        bias_1N = tl.where(split == 0, bias_1N, 0.0)
    dtype: tl.constexpr = out.dtype.element_ty
    result = finished(acc, up, rstd, bias_1N, bias_up_1N, before, dtype, SQUARES, HAS_BIAS, SWIGLU, ONTO)
    tl.store(out + at, result, inside)
    if ONTO:
        exact = result.to(tl.float32)
        tl.store(scaled + at, (exact * norm_1N).to(result.dtype), inside)
        row = pid_m * R + tl.arange(0, R)
        tl.store(
            own_squares + row * tl.num_programs(0) + pid_n,
            tl.sum(tl.where(inside, exact * exact, 0.0), axis=1),
            row < M,
        )


def parts(x: Tensor, weight: Tensor, bias: Tensor | None, splits: int, width: int) -> Tensor:
    """Parts S x T x O of x W^T + b, each over a stretch of the inner dimension, in tiles of so many columns."""
    return _product(x, weight, bias, part_tile(len(x), width, x.shape[1]), splits)[0]


def short(x: Tensor, weight: Tensor, bias: Tensor | None, is_swiglu: bool = False) -> Tensor:
    """x W^T + b, T x O, or silu(g) * u where that is g and u side by side. For what `gpu.is_short` accepts."""
    return _product(x, weight, bias, short_tile(len(x), is_swiglu), is_swiglu=is_swiglu)[0][0]


def few(normed: Scaled, weight: Tensor, bias: Tensor | None, is_swiglu: bool = False) -> Tensor:
    """`short` of a norm. For what `gpu.is_few` accepts."""
    (T, D), N = normed.scaled_TD.shape, len(weight) // (1 + is_swiglu)
    tile = fewest_tile(T, N, D, is_swiglu, is_of_heads=not is_swiglu)
    return _product(normed, weight, bias, tile, is_swiglu=is_swiglu)[0][0]


def few_onto(
    residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float
) -> tuple[Tensor, Scaled | None]:
    """residual + x W^T + b, T x O, and its norm where there is the weight of one. For what `gpu.is_few` accepts."""
    tile = fewest_tile(*residual.shape, x.shape[1], is_swiglu=False, is_of_heads=False)
    # Without a norm one is made of any numbers, and not read: that costs less than another kernel to compile.
    following = weight if norm is None else norm
    out, made = _product(x, weight, bias, tile, onto=(residual, following, eps))
    return out[0], None if norm is None else made


class Tile(NamedTuple):
    """How product_kernel is cut."""

    R: int
    S: int
    BN: int
    BK: int
    STAGES: int
    LINES: int = 2  # of weights that are fetched ahead into the L2 cache, at most
    num_warps: int = 4

    def stages(self, is_swiglu: bool) -> int:
        """How many of its stages there is room for."""
        return stages_of(self.STAGES, self.S * (self.R + self.BN * (1 + is_swiglu)), self.BK)


def _product(
    x: Tensor | Scaled, weight: Tensor, bias: Tensor | None, tile: Tile | Held, splits: int = 1,
    is_swiglu: bool = False, onto: tuple[Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Scaled | None]:  # fmt: skip
    """`onto`: a residual stream, and weight and epsilon of the norm after it."""
    squares, eps = (None, 0.0) if isinstance(x, Tensor) else (x.squares_TP, x.eps)
    x = (x if isinstance(x, Tensor) else x.scaled_TD).contiguous()
    (M, K), N = x.shape, len(weight) // (1 + is_swiglu)
    P = 0 if squares is None else squares.shape[1]
    out, tiles = x.new_empty(splits, M, N), -(-N // tile.BN)
    made = None if onto is None else Scaled(x.new_empty(M, N), x.new_empty(M, tiles, dtype=torch.float32), onto[2])
    inputs = (
        x, weight, weight if bias is None else bias, x if squares is None else squares,
        *((x, x) if onto is None else (onto[0].contiguous(), onto[1])), out,
        *((out, out) if made is None else (made.scaled_TD, made.squares_TP)), M, N, K,
    )  # fmt: skip
    around = {
        "HAS_BIAS": bias is not None,
        "SWIGLU": is_swiglu,
        "SQUARES": power_of_2(P) if P else 0,
        "ONTO": onto is not None,
    }
    if isinstance(tile, Held):
        held_kernel[(tiles,)](*inputs, P, eps, **tile._asdict(), **around, **options(WARPS))
        return out, made
    stretch = K // tile.S
    lines = min(tile.LINES, power_of_2(stretch // splits // 64))
    tile = tile._replace(LINES=lines, STAGES=tile.stages(is_swiglu))
    product_kernel[(tiles, -(-M // tile.R), splits)](
        *inputs, stretch, P, eps, **(options(tile.num_warps) | tile._asdict()), **around, IS_PART=splits > 1
    )
    return out, made


# Tiles as measured (benchmarks/RESULTS.md), with fewer stages where there is no room for them.


def part_tile(rows: int, width: int, inner: int) -> Tile:
    R, deep = min(max(power_of_2(rows), 16), 128), has_dependent_launch()
    if R <= FEWEST_TOKENS:
        return Tile(R, 1, width, 128 if inner % 128 == 0 else 64, 4 if deep else 2)
    return Tile(R, 1, width, 64, 6 if deep else 3, num_warps=8 if R == 128 else 4)


def short_tile(rows: int, is_swiglu: bool) -> Tile:
    if rows <= 64:
        return Tile(64, 1, 32, 64, 6, LINES=4)
    return Tile(64, 1, 64, 64, 5) if is_swiglu else Tile(64, 1, 64, 64, 8, LINES=4)


# R, S, BN, BK and stages of a product's tile by how many rows it takes at most: for few columns, and for many, without
# SwiGLU and with it.
NARROW = {2: (2, 8, 8, 128, 5), 8: (8, 8, 8, 64, 8), 16: (16, 4, 8, 128, 5), 32: (16, 4, 16, 128, 4)}
WIDE = {4: (4, 4, 16, 128, 4), 8: (8, 2, 32, 128, 8), 16: (16, 4, 32, 64, 5), 32: (32, 2, 32, 128, 4)}
GATED = {4: (4, 4, 16, 128, 4), 8: (8, 2, 32, 128, 5), 16: (16, 2, 32, 128, 4), 32: (32, 2, 32, 64, 5)}


HELD_WIDTH = 2048  # of a model at most, for one row of whose products threads hold the weights
HELD_HEADS = 2**22  # numbers at most of a projection to heads that they hold


def fewest_tile(rows: int, columns: int, inner: int, is_swiglu: bool, is_of_heads: bool) -> Tile | Held:
    """The tile of `few` and `few_onto`; is_of_heads: attention comes after the product."""
    is_small = min(columns, inner) <= HELD_WIDTH and not (is_of_heads and columns * inner > HELD_HEADS)
    held = held_tile(inner, is_swiglu) if rows == 1 and is_small else None
    return held or few_tile(rows, columns, inner, is_swiglu)


def few_tile(rows: int, columns: int, inner: int, is_swiglu: bool) -> Tile:
    """The tile of products of up to 32 rows. Few columns are cut so that no multiprocessor has two tiles of 3 to 32."""
    is_narrow = columns < 16 * processors()
    table = NARROW if is_narrow else GATED if is_swiglu else WIDE
    R, S, BN, BK, stages = table[min(most for most in table if rows <= most)]
    if is_narrow and rows > 2 and -(-columns // BN) * -(-rows // R) > processors():
        stages, BN = -(-stages * (R + BN) // (R + 2 * BN)), 2 * BN
    elif is_swiglu and R == 8 and 32 * processors() < columns <= 64 * processors():
        BN, BK = 64, 64
    while inner % (64 * S):
        S //= 2
    tile = Tile(max(R, 16 // S), S, BN, BK, stages)
    return tile if inner % (BK * S) == 0 and tile.stages(is_swiglu) > 1 else tile._replace(BK=64)


@triton.jit(do_not_specialize=["M"])
def in_order_kernel(
    x, w, out, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of x M x K times w N x K transposed. GROUP tiles of rows go over the same columns side by side."""
    tiles_m, tiles_n, pid = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.program_id(0)
    band = pid // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    pid_m, pid_n = band * GROUP + pid % (GROUP * tiles_n) % height, pid % (GROUP * tiles_n) // height
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
    """x W^T, M x N. The inner size is a multiple of 16. How it is cut into tiles changes no bit."""
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
        x, weight, out, M, N, K, BM=BM, BN=BN, BK=BK, STAGES=stages, GROUP=8, LINES=min(power_of_2(-(-K // 64)), 16),
        **options(4),
    )  # fmt: skip
    return out
