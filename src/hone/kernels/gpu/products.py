"""y = x W^T for few rows: the weights pass through the chip once, so the work is spread over their rows and columns.

few         with what stands before and after it in the same kernel (RMS norm, SwiGLU, residual): for the fewest rows
parts       of the inner dimension, by as many programs as fill the chip: the quickest for more of them
in_order    all of it by one program, from the first to the last: the bits that torch's own product has for many rows
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels.gpu import FEWEST_TOKENS, has_dependent_launch, options, power_of_2, processors
from hone.kernels.gpu.launching import prefetch, wait, wait_beside_next


@triton.jit
def _silu_times(gate, up, dtype: tl.constexpr):
    """silu(gate) * up, rounded where the kernels that this stands for round."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(dtype) * up.to(dtype)


@triton.jit
def _joined(acc, R: tl.constexpr, S: tl.constexpr, BN: tl.constexpr):
    """R x BN of R * S x BN * S, of which only those count whose row and column are of one stretch."""
    i, j = tl.arange(0, R * S)[:, None] % S, tl.arange(0, BN * S)[None, :] % S
    return tl.sum(tl.sum(tl.reshape(tl.where(i == j, acc, 0.0), (R, S, BN, S)), axis=3), axis=1)


@triton.jit(do_not_specialize=["M"])
def few_kernel(
    x, norm, w, bias, residual, out, M, N, K, stretch, eps,
    R: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, HAS_BIAS: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of out M x N = x M x K times w N x K transposed, for M up to R rows, and what stands around it:
    x / rms(x) * norm instead of x; silu(gate) * up of twice as many rows of w, gates above ups; residual M x N added.

    A matrix product has at least 16 rows, and each of its steps waits for the one before. So the inner dimension is cut
    into S stretches, K = S * stretch, which are rows and columns of their own: row m * S + s is stretch s of row m,
    column n * S + s that of column n. What comes of two different stretches is thrown away.
    """
    i, j, k = tl.arange(0, R * S), tl.arange(0, BN * S), tl.arange(0, BK)
    m, n = i // S, tl.program_id(0) * BN + j // S
    begins = ((i % S) * stretch)[:, None] + k[None, :]
    rows, there = x + m[:, None].to(tl.int64) * K + begins, (m < M)[:, None]
    starts = w + (n % N).to(tl.int64) * K + (j % S) * stretch
    to_up = N.to(tl.int64) * K
    if PDL:  # the weights do not depend on the kernel before
        prefetch(starts[:, None], stretch, LINES)
        if SWIGLU:
            prefetch(starts[:, None] + to_up, stretch, LINES)
    wait_beside_next(PDL)
    columns = starts[None, :] + k[:, None]
    acc, up = tl.zeros((R * S, BN * S), tl.float32), tl.zeros((R * S, BN * S), tl.float32)
    squares = tl.zeros((R * S, BK), tl.float32)
    for t in tl.range(0, stretch // BK, num_stages=STAGES):
        tile = tl.load(rows + t * BK, there, other=0.0)
        if NORM:  # the root mean square is one number a row, by which the result is divided
            exact = tile.to(tl.float32)
            squares += exact * exact
            tile = (exact * tl.load(norm + begins + t * BK).to(tl.float32)).to(tile.dtype)
        acc = tl.dot(tile, tl.load(columns + t * BK), acc)
        if SWIGLU:
            up = tl.dot(tile, tl.load(columns + to_up + t * BK), up)
    result = _joined(acc, R, S, BN)
    other = _joined(up, R, S, BN) if SWIGLU else result
    if NORM:
        rstd = tl.rsqrt(tl.sum(tl.reshape(tl.sum(squares, axis=1), (R, S)), axis=1) / K + eps)[:, None]
        result, other = result * rstd, other * rstd
    m, n = tl.arange(0, R)[:, None], (tl.program_id(0) * BN + tl.arange(0, BN))[None, :]
    if HAS_BIAS:
        result += tl.load(bias + n, n < N, other=0.0).to(tl.float32)
        if SWIGLU:
            other += tl.load(bias + N + n, n < N, other=0.0).to(tl.float32)
    if SWIGLU:
        result = _silu_times(result, other, out.dtype.element_ty).to(tl.float32)
    inside, at = (m < M) & (n < N), m.to(tl.int64) * N + n
    if RESIDUAL:
        result += tl.load(residual + at, inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), inside)


def few(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Tensor | None = None, eps: float = 0.0,
    residual: Tensor | None = None, is_swiglu: bool = False,
) -> Tensor:  # fmt: skip
    """x W^T + b, T x O, of x / rms(x) * norm where there is a norm; silu(g) * u where that is g and u side by side;
    added to the residual. For what `gpu.is_few` accepts."""
    x = x.contiguous()
    (M, K), N = x.shape, len(weight) // (1 + is_swiglu)
    out = x.new_empty(M, N)
    R, S, BN, lines, stages = few_tile(M, N, K)
    few_kernel[(-(-N // BN),)](
        x, weight if norm is None else norm, weight, weight if bias is None else bias,
        out if residual is None else residual.contiguous(), out, M, N, K, K // S, eps,
        R=R, S=S, BN=BN, BK=64, LINES=lines, STAGES=stages, NORM=norm is not None, HAS_BIAS=bias is not None,
        SWIGLU=is_swiglu, RESIDUAL=residual is not None, **options(4),
    )  # fmt: skip
    return out


def few_tile(rows: int, columns: int, inner: int) -> tuple[int, int, int, int, int]:
    """Room for rows, stretches, columns, lines of weights fetched ahead, and stages, as measured (RESULTS.md)."""
    R = max(power_of_2(rows), 4)
    S = max(32 // R, 1)
    while inner % (64 * S):
        S //= 2
    R, BN = max(R, 16 // S), 8
    while BN * S < 64 and -(-columns // (2 * BN)) >= processors() * 7 // 8:
        BN *= 2
    return R, S, BN, power_of_2(inner // S // 64), 4


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x, w, bias, out, M, N, K, k_split,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tile (m, n) of x M x K times w N x K transposed, over the k of split s: out[s] M x N. Split 0 adds the bias.

    SWIGLU: w has twice as many rows, gates above ups, and what comes of both is silu(gate) * up.
    """
    pid_n, pid_m, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = pid_m * BM + tl.arange(0, BM)
    n = pid_n * BN + tl.arange(0, BN)
    first = split * k_split
    k = first + tl.arange(0, BK)
    rows = x + m[:, None].to(tl.int64) * K + k[None, :]
    columns = w + (n % N)[None, :].to(tl.int64) * K + k[:, None]
    to_up = N.to(tl.int64) * K
    if PDL:  # the weights do not depend on the kernel before
        starts = w + (n % N)[:, None].to(tl.int64) * K + first
        prefetch(starts, k_split, LINES)
        if SWIGLU:
            prefetch(starts + to_up, k_split, LINES)
    wait(PDL)
    acc, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    there = (m < M)[:, None]  # rows that do not exist are not read: all programs would read the same ones
    for i in tl.range(0, k_split // BK, num_stages=STAGES):
        tile = tl.load(rows + i * BK, there, other=0.0)
        acc = tl.dot(tile, tl.load(columns + i * BK), acc)
        if SWIGLU:
            up = tl.dot(tile, tl.load(columns + to_up + i * BK), up)
    if HAS_BIAS:
        acc += tl.where(split == 0, tl.load(bias + n, n < N, other=0.0).to(tl.float32), 0.0)[None, :]
    result = acc.to(out.dtype.element_ty)
    if SWIGLU:
        if HAS_BIAS:
            up += tl.load(bias + N + n, n < N, other=0.0).to(tl.float32)[None, :]
        result = _silu_times(acc, up, out.dtype.element_ty)
    inside = there & (n < N)[None, :]
    tl.store(out + (split * M + m[:, None]).to(tl.int64) * N + n[None, :], result, inside)


def parts(x: Tensor, weight: Tensor, bias: Tensor | None, splits: int) -> Tensor:
    """Parts S x T x O of x W^T + b, each over a stretch of the inner dimension."""
    return _product(x, weight, bias, splits, is_swiglu=False)


def swiglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu(g) * u, T x F, where x W^T + b is g and u side by side."""
    return _product(x, weight, bias, 1, is_swiglu=True)[0]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, splits: int, is_swiglu: bool) -> Tensor:
    x = x.contiguous()
    (M, K), N = x.shape, len(weight) // (1 + is_swiglu)
    out = x.new_empty(splits, M, N)
    BM, BN, BK, lines, stages = tile_of(M, K // splits, splits)
    product_kernel[(-(-N // BN), -(-M // BM), splits)](
        x, weight, weight if bias is None else bias, out, M, N, K, K // splits,
        BM=BM, BN=BN, BK=BK, LINES=min(lines, power_of_2(K // splits // 64)), STAGES=stages,
        HAS_BIAS=bias is not None, SWIGLU=is_swiglu, **options(4),
    )  # fmt: skip
    return out


def tile_of(rows: int, inner: int, splits: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and inner size of a tile, lines of weights that are fetched ahead, and stages, as measured
    (benchmarks/RESULTS.md)."""
    BM, deep = min(max(power_of_2(rows), 16), 128), has_dependent_launch()
    if BM <= FEWEST_TOKENS:
        return BM, 64, 128 if inner % 128 == 0 else 64, 2, 4 if deep else 2
    return BM, 64 if splits > 1 else 32, 64, 2 if splits > 1 else 4, 6 if deep else 3


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
    stages = 5 if has_dependent_launch() else 3
    in_order_kernel[(-(-M // BM) * -(-N // BN),)](
        x, weight, out, M, N, K, BM=BM, BN=BN, BK=BK, STAGES=stages, GROUP=8, LINES=min(power_of_2(-(-K // 64)), 16),
        **options(4),
    )  # fmt: skip
    return out
