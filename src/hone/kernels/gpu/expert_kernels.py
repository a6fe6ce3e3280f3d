"""Mixtures of experts: routing, and products of each expert's rows with its weight.

    x ─ route ─► experts and weights of each token, rows by expert
      ─ grouped product of x's rows by gate and up, SwiGLU ─► one row per pair of token and expert
      ─ grouped product by down, times the pair's weight ─► parts that the next norm sums

A pair is a token and one of its K experts; pair t * K + k is the k-th of token t. The work is divided
into tiles of up to BM rows of one expert. A program finds its tile in the numbers of rows per
expert, which are on the device, so that the host waits for nothing and CUDA graphs can capture all
of it. Only experts that have rows are read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels.gating import ClampedGating
from hone.kernels.gpu import options, power_of_2, stages_of
from hone.kernels.gpu.launching import wait
from hone.kernels.gpu.row_kernels import gated

# How to find a row of an operand: by the pair's token, by the pair, or by the place in the list of
# rows by expert; PART: part k, token t, of K x T rows.
TOKEN, PAIR, PLACE, PART = (tl.constexpr(i) for i in range(4))


class ExpertRows(NamedTuple):
    """The rows of each expert.

    Attributes:
        counts_E: int32, number of rows of each expert.
        pairs_M: int32, pairs of token and expert. Those of an expert are consecutive; they begin at
            `stride` times its number, or, if `stride` is 0, where those of the expert before end.
        stride: see there.
        tokens: number of tokens.
        experts_per_token: K.
    """

    counts_E: Tensor
    pairs_M: Tensor
    stride: int
    tokens: int
    experts_per_token: int

    @property
    def pair_count(self) -> int:
        return self.tokens * self.experts_per_token

    @property
    def token_M(self) -> Tensor:
        return self.pairs_M // self.experts_per_token


@triton.jit(do_not_specialize=["T", "STRIDE"])
def route_kernel(
    x,
    router,
    bias,
    weights,
    experts,
    counts,
    pairs,
    T,
    STRIDE,
    D,
    EXPERTS: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    NORMALIZES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the K likeliest experts of BT tokens; append the pairs to the rows of these experts."""
    t, e, k = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, E), tl.arange(0, KP)
    d = tl.arange(0, BD)
    rows = x + t[:, None].to(tl.int64) * D + d[None, :]
    columns = router + e[None, :] * D + d[:, None]
    wait(PDL)
    logits = tl.zeros((BT, E), tl.float32)
    for start in range(0, D, BD):
        inside = start + d < D
        a = tl.load(rows + start, (t < T)[:, None] & inside[None, :], other=0.0)
        b = tl.load(columns + start, (e < EXPERTS)[None, :] & inside[:, None], other=0.0)
        logits = tl.dot(a, b, logits)
    if HAS_BIAS:
        logits += tl.load(bias + e, e < EXPERTS, other=0.0).to(tl.float32)[None, :]
    # Rounded where a separate product rounds
    logits = logits.to(x.dtype.element_ty).to(tl.float32)
    logits = tl.where((e < EXPERTS)[None, :], logits, -1e30)
    left = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    left = tl.where((e < EXPERTS)[None, :], left / tl.sum(left, axis=1)[:, None], -1.0)
    weight = tl.zeros((BT, KP), tl.float32)
    expert = tl.zeros((BT, KP), tl.int32)
    for i in tl.static_range(K):
        best, at = tl.max(left, axis=1, return_indices=True)
        weight = tl.where((k == i)[None, :], best[:, None], weight)
        expert = tl.where((k == i)[None, :], at[:, None].to(tl.int32), expert)
        left = tl.where(e[None, :] == at[:, None], -1.0, left)
    if NORMALIZES:
        weight = weight / tl.sum(weight, axis=1)[:, None]
    there = (t < T)[:, None] & (k < K)[None, :]
    pair = t[:, None] * K + k[None, :]
    tl.store(weights + pair, weight, there)
    tl.store(experts + pair, expert, there)
    # The order of an expert's rows differs from run to run; no row's result depends on it.
    rank = tl.atomic_add(counts + expert, 1, there, sem="relaxed")
    tl.store(pairs + expert.to(tl.int64) * STRIDE + rank, pair, there)


def route_tokens(
    x_TD: Tensor,
    router_ED: Tensor,
    bias_E: Tensor | None,
    experts_per_token: int,
    normalizes: bool,
) -> tuple[Tensor, Tensor, ExpertRows]:
    """Return weights (T x K, fp32) and experts (T x K, int32) of each token, and the experts' rows."""
    (T, D), E, K = x_TD.shape, len(router_ED), experts_per_token
    x_TD = x_TD.contiguous()
    weights = torch.empty(T, K, device=x_TD.device)
    experts = torch.empty(T, K, device=x_TD.device, dtype=torch.int32)
    counts = torch.zeros(E, device=x_TD.device, dtype=torch.int32)
    pairs = torch.empty(E * T, device=x_TD.device, dtype=torch.int32)
    BT = 16
    route_kernel[(-(-T // BT),)](
        x_TD,
        router_ED,
        router_ED if bias_E is None else bias_E,
        weights,
        experts,
        counts,
        pairs,
        T,
        T,
        D,
        EXPERTS=E,
        E=max(16, power_of_2(E)),
        K=K,
        KP=power_of_2(K),
        NORMALIZES=normalizes,
        HAS_BIAS=bias_E is not None,
        BT=BT,
        BD=min(128, max(16, power_of_2(D))),
        **options(4),
    )
    return weights, experts, ExpertRows(counts, pairs, T, T, K)


@triton.jit
def _find_rows(place, pair, T, K: tl.constexpr, BY: tl.constexpr):
    """Return the rows of an operand as int64."""
    if BY == TOKEN:
        return (pair // K).to(tl.int64)
    if BY == PAIR:
        return pair.to(tl.int64)
    if BY == PART:
        return (pair % K).to(tl.int64) * T + pair // K
    return place.to(tl.int64)


@triton.jit
def _gate_clamped(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return (up + 1) * gate * sigmoid(ALPHA gate) in fp32, with both clamped to LIMIT first."""
    gate = tl.minimum(gate.to(tl.float32), LIMIT)
    up = tl.minimum(tl.maximum(up.to(tl.float32), -LIMIT), LIMIT)
    return (up + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))


@triton.jit
def clamped_backward_kernel(
    gate_up, grad, out, F, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the gradient of row t of gate_up (gates and ups alternate) from that of the units."""
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    both = tl.program_id(1) * BLOCK * 2 + tl.arange(0, 2 * BLOCK)
    numbers = tl.load(gate_up + t * 2 * F + both, both < 2 * F, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(numbers, (BLOCK, 2)))
    slope = tl.load(grad + t * F + f, f < F, other=0.0).to(tl.float32)
    low, inner = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    sigmoid = 1.0 / (1.0 + tl.exp(-ALPHA * low))
    of_gate = slope * (inner + 1.0) * sigmoid * (1.0 + ALPHA * low * (1.0 - sigmoid))
    of_up = slope * low * sigmoid
    of_gate = tl.where(gate <= LIMIT, of_gate, 0.0)
    of_up = tl.where((up >= -LIMIT) & (up <= LIMIT), of_up, 0.0)
    together = tl.reshape(tl.join(of_gate, of_up), (2 * BLOCK,))
    tl.store(out + t * 2 * F + both, together.to(out.dtype.element_ty), both < 2 * F)


def clamped_gating_backward(gate_up: Tensor, grad: Tensor, gating: ClampedGating) -> Tensor:
    """Return the gradient of gate_up (M x 2F) from that of the gated units (M x F)."""
    M, F = grad.shape
    out = torch.empty_like(gate_up)
    constants = {"ALPHA": gating.alpha, "LIMIT": gating.limit, "BLOCK": 1024}
    if M:
        clamped_backward_kernel[(M, -(-F // 1024))](gate_up, grad, out, F, **constants)
    return out


@triton.jit(do_not_specialize=["T", "STRIDE"])
def grouped_kernel(
    x,
    w,
    bias,
    added,
    scales,
    out,
    kept,
    factors,
    dots,
    counts,
    pairs,
    T,
    STRIDE,
    M,
    N,
    KI,
    EXPERTS: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    SWIGLU: tl.constexpr,
    KEEPS: tl.constexpr,
    BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ADDS: tl.constexpr,
    SCALES: tl.constexpr,
    DOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile, BM x BN, of one expert's rows of x times its weight, into rows of `out`.

    A weight is N x KI, or KI x N with BY_COLUMNS. Rows of x are found by IN, rows of out by OUT, all
    others by place. Flags add these operations, in this order:

        SWIGLU  w has twice as many rows, gates above ups: silu(gate) * up; where LIMIT is not 0, they
                alternate: (up + 1) * gate * sigmoid(ALPHA gate), clamped to LIMIT
        BIAS    first add the expert's bias (to gates and ups, with SWIGLU)
        ADDS    first add `added` (likewise)
        KEEPS   store gates and ups, in `kept`
        DOTS    store the sum over the tile's columns of the result times `factors`, in dots[n]
        SCALES  multiply by the pair's scale
    """
    pid_n, pid_m, e = tl.program_id(0), tl.program_id(1), tl.arange(0, E)
    wait(PDL)
    count = tl.load(counts + e, e < EXPERTS, other=0)
    tiles = (count + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= pid_m).to(tl.int32))
    if expert >= EXPERTS:
        return
    own = tl.sum(tl.where(e == expert, count, 0))
    first = (pid_m - tl.sum(tl.where(e == expert, ends - tiles, 0))) * BM
    start = expert.to(tl.int64) * STRIDE
    if STRIDE == 0:
        start += tl.sum(tl.where(e < expert, count, 0))
    # Gates and ups that alternate are columns of one product.
    PAIRS: tl.constexpr = SWIGLU and LIMIT != 0.0
    HALVES: tl.constexpr = SWIGLU and LIMIT == 0.0
    WIDE: tl.constexpr = BN * (1 + PAIRS)
    m = first + tl.arange(0, BM)
    n, k = pid_n * WIDE + tl.arange(0, WIDE), tl.arange(0, BK)
    there, inside_n = m < own, n < N * (1 + PAIRS)
    place = start + m
    pair = tl.load(pairs + place, there, other=0)
    rows = x + _find_rows(place, pair, T, K, IN)[:, None] * KI + k[None, :]
    w += expert.to(tl.int64) * N * KI * (1 + SWIGLU)
    if BY_COLUMNS:
        tl.static_assert(not HALVES, "gates and ups of a weight by columns alternate")
        line = N * (1 + PAIRS)
        columns, step = w + n[None, :] + k[:, None].to(tl.int64) * line, BK * line
    else:
        columns, step = w + n[None, :].to(tl.int64) * KI + k[:, None], BK
    to_up = N.to(tl.int64) * KI
    acc, up = tl.zeros((BM, WIDE), tl.float32), tl.zeros((BM, BN), tl.float32)
    for i in tl.range(0, tl.cdiv(KI, BK), num_stages=STAGES):
        inside_k = i * BK + k < KI
        inside = inside_k[:, None] & inside_n[None, :]
        a = tl.load(rows + i * BK, there[:, None] & inside_k[None, :], other=0.0)
        acc = tl.dot(a, tl.load(columns + i * step, inside, other=0.0), acc)
        if HALVES:
            up = tl.dot(a, tl.load(columns + to_up + i * step, inside, other=0.0), up)
    dtype: tl.constexpr = out.dtype.element_ty
    mask = there[:, None] & inside_n[None, :]
    wide = place[:, None] * (N * (1 + SWIGLU)) + n[None, :]
    if BIAS:
        of_expert = bias + expert * (N * (1 + SWIGLU)) + n
        acc += tl.load(of_expert, inside_n, other=0.0).to(tl.float32)[None, :]
        if HALVES:
            up += tl.load(of_expert + N, inside_n, other=0.0).to(tl.float32)[None, :]
    if ADDS:
        acc += tl.load(added + wide, mask, other=0.0).to(tl.float32)
        if HALVES:
            up += tl.load(added + wide + N, mask, other=0.0).to(tl.float32)
    result = acc.to(dtype)
    if KEEPS:
        tl.store(kept + wide, result, mask)
    if HALVES:
        if KEEPS:
            tl.store(kept + wide + N, up.to(dtype), mask)
        result = gated(result, up.to(dtype))
    if PAIRS:
        gate, up = tl.split(tl.reshape(result, (BM, BN, 2)))
        result = _gate_clamped(gate, up, ALPHA, LIMIT).to(dtype)
        n = pid_n * BN + tl.arange(0, BN)
        mask = there[:, None] & (n < N)[None, :]
    if DOTS:
        other = tl.load(factors + wide, mask, other=0.0).to(tl.float32)
        tl.store(dots + pid_n * M + pair, tl.sum(acc * other, axis=1), there)
    if SCALES:
        scale = tl.load(scales + pair, there, other=0.0)
        result = (result.to(tl.float32) * scale[:, None]).to(dtype)
    tl.store(out + _find_rows(place, pair, T, K, OUT)[:, None] * N + n[None, :], result, mask)


class Tile(NamedTuple):
    """Tile sizes of grouped_kernel."""

    BM: int
    BN: int
    BK: int
    STAGES: int
    num_warps: int


def choose_tile(rows_per_expert: float, is_swiglu: bool) -> Tile:
    """Return tile sizes for an average number of rows per expert."""
    if rows_per_expert <= 8:
        return Tile(16, 32 if is_swiglu else 64, 128, 3, 4)
    if rows_per_expert <= 24:
        return Tile(32, 64, 128, 3, 4)
    if rows_per_expert <= 64:
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 128, 64, 3, 8)


def multiply_grouped(
    x: Tensor,
    weight: Tensor,
    rows: ExpertRows,
    by: int,
    into: int,
    *,
    by_columns: bool = False,
    is_swiglu: bool = False,
    keeps: bool = False,
    bias: Tensor | None = None,
    gating: ClampedGating | None = None,
    added: Tensor | None = None,
    scales: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Multiply each row of x by the weight of its expert (`grouped_kernel`).

    Args:
        x: operand.
        by: how to find rows of x: TOKEN, PAIR or PLACE.
        weight: E x N x KI, or E x KI x N with `by_columns`; with `is_swiglu` 2N instead of N.
        into: how to find rows of the result: PAIR, PLACE or PART.
        keeps: return the gates and ups, M x 2N, too.
        bias: E x N, or E x 2N with `is_swiglu`.
        gating: with `is_swiglu`, how gates and ups are combined; they alternate then.
        added: M x N, or M x 2N with `is_swiglu`, by place.
        scales: fp32, factor of each pair.
        factors: M x N, by place; the result's products with them are summed per pair.

    Returns:
        The result (M x N, or K x T x N for PART), gates and ups or None, and sums (fp32, by pair) or
        None.
    """
    experts = len(weight)
    KI = x.shape[-1]
    N = weight[0].numel() // KI // (1 + is_swiglu)
    M = rows.pair_count
    tile = choose_tile(M / experts, is_swiglu)
    x = x.contiguous()
    shape = (rows.experts_per_token, rows.tokens, N) if into == PART.value else (M, N)
    out = x.new_empty(shape)
    kept = x.new_empty(M, 2 * N) if keeps else None
    columns = -(-N // tile.BN)
    dots = None if factors is None else torch.empty(columns, M, device=x.device)
    # As many tiles as there can be
    most = min(M, experts) + M // tile.BM
    grouped_kernel[(columns, most)](
        x,
        weight,
        x if bias is None else bias,
        x if added is None else added,
        x if scales is None else scales,
        out,
        out if kept is None else kept,
        x if factors is None else factors,
        out if dots is None else dots,
        rows.counts_E,
        rows.pairs_M,
        rows.tokens,
        rows.stride,
        M,
        N,
        KI,
        EXPERTS=experts,
        E=power_of_2(experts),
        K=rows.experts_per_token,
        BM=tile.BM,
        BN=tile.BN,
        BK=tile.BK,
        STAGES=stages_of(tile.STAGES, tile.BM + tile.BN * (1 + is_swiglu), tile.BK),
        IN=by,
        OUT=into,
        BY_COLUMNS=by_columns,
        SWIGLU=is_swiglu,
        KEEPS=keeps,
        BIAS=bias is not None,
        ALPHA=0.0 if gating is None else gating.alpha,
        LIMIT=0.0 if gating is None else gating.limit,
        ADDS=added is not None,
        SCALES=scales is not None,
        DOTS=factors is not None,
        **options(tile.num_warps),
    )
    return out, kept, None if dots is None else dots.sum(0)
