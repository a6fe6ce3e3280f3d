"""Kernels over rows: embedding, residual + RMS norm, SwiGLU, and the heads of a QKV projection."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels import numerics, row_state
from hone.kernels.gpu import FEW_TOKENS, options, power_of_2, processors
from hone.kernels.gpu.launching import wait, wait_beside_next

FIELDS, LENGTH = tl.constexpr(row_state.FIELDS), tl.constexpr(row_state.LENGTH)
LAST = tl.constexpr(row_state.LAST)


@triton.jit
def newest_embeddings_kernel(embed, active, state, out, D, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy the embedding (a row of `embed` V x D) of sequence active[b]'s newest token."""
    b = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    # Not beside the next: kernels after it read what the step before has written, ahead of their
    # own wait
    wait(PDL)
    token = tl.load(state + tl.load(active + b) * FIELDS + LAST)
    tl.store(out + b * D + d, tl.load(embed + token * D + d, d < D), d < D)


def newest_embeddings(embed: Tensor, active: Tensor, state: Tensor) -> Tensor:
    """Return embeddings (B x D) of the newest token of each active sequence."""
    B, D = len(active), embed.shape[1]
    out = embed.new_empty(B, D)
    newest_embeddings_kernel[(B,)](embed, active, state, out, D, BLOCK=power_of_2(D), **options(4))
    return out


@triton.jit
def add_norm_kernel(
    x,
    delta,
    after,
    weight,
    total,
    out,
    eps,
    split_stride,
    D,
    PARTS: tl.constexpr,
    AFTER: tl.constexpr,
    FACTOR: tl.constexpr,
    HAS_OUT: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute total = x + FACTOR * delta, out = total / rms(total) * (weight + OFFSET), of row t.

    delta is the sum of PARTS parts; with AFTER it is normalized first, with the weight `after`.
    """
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    if HAS_OUT:
        scale = tl.load(weight + d, inside, other=0.0).to(tl.float32) + OFFSET
    if AFTER:
        scale_after = tl.load(after + d, inside, other=0.0).to(tl.float32) + OFFSET
    wait_beside_next(PDL)
    value = tl.load(x + t * D + d, inside, other=0.0)
    if PARTS:
        change = tl.load(delta + t * D + d, inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):  # their loads do not wait for each other
            change += tl.load(delta + part * split_stride + t * D + d, inside, other=0.0).to(
                tl.float32
            )
        if AFTER:  # rounded where separate steps round
            change = change.to(value.dtype).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(change * change) / D + eps)
            change = (change * rstd * scale_after).to(value.dtype).to(tl.float32)
        if FACTOR != 1.0:
            change = change.to(value.dtype).to(tl.float32)
            change = (change * FACTOR).to(value.dtype).to(tl.float32)
        value = (value.to(tl.float32) + change).to(value.dtype)
        tl.store(total + t * D + d, value, inside)
    if HAS_OUT:
        exact = value.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(exact * exact) / D + eps)
        tl.store(out + t * D + d, (exact * rstd * scale).to(value.dtype), inside)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + delta and its RMS norm, on a GPU.

    delta is T x D, or S x T x D: S parts to be summed.
    """
    return add_branch(x, delta, None, 1.0, weight, 0.0, eps)


def add_branch(
    x: Tensor,
    delta: Tensor | None,
    after: Tensor | None,
    factor: float,
    weight: Tensor | None,
    offset: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return total = x + factor * delta and its RMS norm; without `weight` the total twice.

    Args:
        x: T x D.
        delta: T x D, or S x T x D, S parts to be summed.
        after: weight of a norm of delta, if there is one.
        weight: weight of the norm of the total.
        offset: added to both weights, in float32.
    """
    T, D = x.shape
    x = x.contiguous()
    out = x if weight is None else torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    parts = 0 if delta is None else len(delta) if delta.dim() == 3 else 1
    block = power_of_2(D)
    warps = min(max(block // 128, 8), 32) if T < 1024 or numerics.keeps_order("norms") else 2
    add_norm_kernel[(T,)](
        x,
        x if delta is None else delta.contiguous(),
        x if after is None else after,
        x if weight is None else weight,
        total,
        out,
        eps,
        T * D,
        D,
        PARTS=parts,
        AFTER=after is not None and parts > 0,
        FACTOR=factor,
        HAS_OUT=weight is not None,
        OFFSET=offset,
        BLOCK=block,
        **options(warps),
    )
    return total, total if weight is None else out


@triton.jit
def normalize_projections_kernel(
    qkv, q_scale, k_scale, eps, Q, K, O, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Normalize the first Q numbers of row t of qkv (T x O), or with program 1 the K after them."""
    t, is_k = tl.program_id(0).to(tl.int64), tl.program_id(1) == 1
    o = tl.arange(0, BLOCK)
    inside = o < tl.where(is_k, K, Q)
    scale = tl.load(tl.where(is_k, k_scale + o, q_scale + o), inside, other=0.0).to(tl.float32)
    wait(PDL)
    at = qkv + t * O + tl.where(is_k, Q, 0) + o
    value = tl.load(at, inside, other=0.0)
    exact = value.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(exact * exact) / tl.where(is_k, K, Q) + eps)
    tl.store(at, (exact * rstd * scale).to(value.dtype), inside)


def normalize_projections(qkv: Tensor, q_scale: Tensor, k_scale: Tensor, eps: float) -> Tensor:
    """Normalize q and k of a projection (T x O) in place over their whole widths; return it."""
    qkv = qkv.contiguous()
    Q, K = len(q_scale), len(k_scale)
    block = power_of_2(max(Q, K))
    warps = min(max(block // 256, 4), 16)
    normalize_projections_kernel[(len(qkv), 2)](
        qkv, q_scale, k_scale, eps, Q, K, qkv.shape[1], BLOCK=block, **options(warps)
    )
    return qkv


@triton.jit
def gated(gate, up, GELU: tl.constexpr = False):
    """Return silu(gate) * up, or gelu(gate) * up with gelu in its tanh form.

    The activation and the product are each rounded to the inputs' type.
    """
    exact = gate.to(tl.float32)
    slope = exact
    if GELU:  # 0.5 (1 + tanh(y)) = 1 / (1 + exp(-2 y)), y = sqrt(2 / pi) (x + 0.044715 x^3)
        slope = 1.5957691216057308 * exact * (1.0 + 0.044715 * exact * exact)
    return (exact / (1.0 + tl.exp(-slope))).to(gate.dtype) * up


@triton.jit
def finished(
    acc,
    up,
    rstd,
    bias,
    bias_up,
    before,
    dtype: tl.constexpr,
    SQUARES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    ONTO: tl.constexpr,
):
    """Apply the epilogue of a matrix product to tile `acc`; arguments of unset flags are ignored."""
    if SQUARES:
        acc *= rstd
        if SWIGLU:
            up *= rstd
    if HAS_BIAS:
        acc += bias
        if SWIGLU:
            up += bias_up
    if ONTO:
        acc += before
    result = acc.to(dtype)
    if SWIGLU:  # rounded where the two kernels that this stands for round
        result = gated(result, up.to(dtype))
    return result


@triton.jit
def swiglu_kernel(gate_up, out, F, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Compute `gated` of row t, with gate and up the halves of gate_up T x 2F."""
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    wait_beside_next(PDL)
    gate = tl.load(gate_up + t * 2 * F + f, inside, other=0.0)
    up = tl.load(gate_up + t * 2 * F + F + f, inside, other=0.0)
    tl.store(out + t * F + f, gated(gate, up, GELU), inside)


def swiglu(gate_up: Tensor, is_gelu: bool = False) -> Tensor:
    """Return silu(gate) * up, T x F, of gate_up T x 2F; with `is_gelu` gelu in place of silu."""
    gate_up = gate_up.contiguous()
    T, F = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(T, F)
    # Blocks of 4 warps; what has far more of them is bound by its bytes
    at_once = 16 * processors()
    block = 2048 if at_once < T * -(-F // 1024) and T <= FEW_TOKENS else 1024
    swiglu_kernel[(T, -(-F // block))](gate_up, out, F, GELU=is_gelu, BLOCK=block, **options(4))
    return out


@triton.jit
def heads_kernel(
    qkv,
    q_scale,
    k_scale,
    cos,
    sin,
    positions,
    cells,
    active,
    state,
    table,
    table_row,
    q_out,
    k_out,
    v_out,
    keys,
    values,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    N: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize and rotate the heads of token t; write k and v to the cache.

    qkv: T x (H + 2K) x E. If PAGE is 0 (prefill), position and cache cell are read from `positions`
    and `cells`, and k and v also go to k_out and v_out. Otherwise (decoding) token t is the newest
    token of sequence active[t], and the sequence's rows of `state` and `table` give its position
    and cell.
    """
    t = tl.program_id(0).to(tl.int64)
    if PAGE:
        slot = tl.load(active + t)
        position = tl.load(state + slot * FIELDS + LENGTH)
        cell = tl.load(table + slot * table_row + position // PAGE) * PAGE + position % PAGE
    else:
        position, cell = tl.load(positions + t), tl.load(cells + t)
    half: tl.constexpr = E // 2
    n, e = tl.arange(0, N)[:, None], tl.arange(0, half)[None, :]
    is_q, is_k = n < H, (n >= H) & (n < H + K)
    is_v = (n >= H + K) & (n < H + 2 * K)
    row = qkv + (t * (H + 2 * K) + n) * E + e
    turn = position * E + e
    cos_x, cos_y = tl.load(cos + turn).to(tl.float32), tl.load(cos + turn + half).to(tl.float32)
    sin_x, sin_y = tl.load(sin + turn).to(tl.float32), tl.load(sin + turn + half).to(tl.float32)
    if PAGE:
        wait_beside_next(PDL)
    else:
        wait(PDL)
    first, second = (
        tl.load(row, n < H + 2 * K, other=0.0),
        tl.load(row + half, n < H + 2 * K, other=0.0),
    )
    x, y = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(x * x + y * y, axis=1) / E + eps)[:, None]
        x = (x * rstd).to(first.dtype).to(tl.float32)
        y = (y * rstd).to(first.dtype).to(tl.float32)
        x *= tl.where(is_q, tl.load(q_scale + e), tl.load(k_scale + e)).to(tl.float32)
        y *= tl.where(is_q, tl.load(q_scale + half + e), tl.load(k_scale + half + e)).to(tl.float32)
    turned_x, turned_y = (
        (x * cos_x + y * sin_x).to(first.dtype),
        (y * cos_y + x * sin_y).to(first.dtype),
    )
    q_row, k_row, v_row = (t * H + n) * E + e, n - H, n - H - K
    tl.store(q_out + q_row, turned_x, is_q)
    tl.store(q_out + q_row + half, turned_y, is_q)
    tl.store(keys + (cell * K + k_row) * E + e, turned_x, is_k)
    tl.store(keys + (cell * K + k_row) * E + e + half, turned_y, is_k)
    tl.store(values + (cell * K + v_row) * E + e, first, is_v)
    tl.store(values + (cell * K + v_row) * E + e + half, second, is_v)
    if not PAGE:
        tl.store(k_out + (t * K + k_row) * E + e, turned_x, is_k)
        tl.store(k_out + (t * K + k_row) * E + e + half, turned_y, is_k)
        tl.store(v_out + (t * K + v_row) * E + e, first, is_v)
        tl.store(v_out + (t * K + v_row) * E + e + half, second, is_v)


def heads(
    qkv: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cells: Tensor,
    keys: Tensor,
    values: Tensor,
    eps: float,
    H: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k, normalized and rotated, and v of a QKV projection; write k and v to the
    cache.

    qkv: T x (H + 2K) x E; cells: cache cell of each token; keys, values: … x K x E.
    """
    T, N, E = qkv.shape
    K = (N - H) // 2
    qkv = qkv.contiguous()
    q, k, v = qkv.new_empty(T, H, E), qkv.new_empty(T, K, E), qkv.new_empty(T, K, E)
    scales, norm = head_scales(qkv, q_scale, k_scale)
    heads_kernel[(T,)](
        qkv,
        *scales,
        cos,
        sin,
        positions,
        cells,
        qkv,
        qkv,
        qkv,
        0,
        q,
        k,
        v,
        keys,
        values,
        eps,
        H=H,
        K=K,
        E=E,
        N=power_of_2(N),
        PAGE=0,
        NORM=norm,
        **options(4),
    )
    return q, k, v


def newest_heads(
    qkv: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    active: Tensor,
    state: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    eps: float,
    H: int,
) -> Tensor:
    """Return q, normalized and rotated, of each active sequence's newest token; write its k and v.

    k and v go to the sequence's pages. qkv: B x (H + 2K) x E; keys, values: … x PAGE x K x E.
    """
    B, N, E = qkv.shape
    K = (N - H) // 2
    qkv = qkv.contiguous()
    q = qkv.new_empty(B, H, E)
    scales, norm = head_scales(qkv, q_scale, k_scale)
    heads_kernel[(B,)](
        qkv,
        *scales,
        cos,
        sin,
        qkv,
        qkv,
        active,
        state,
        table,
        table.shape[1],
        q,
        q,
        q,
        keys,
        values,
        eps,
        H=H,
        K=K,
        E=E,
        N=power_of_2(N),
        PAGE=keys.shape[1],
        NORM=norm,
        **options(4),
    )
    return q


@triton.jit
def prepare_heads_kernel(
    qkv,
    source,
    q_scale,
    k_scale,
    cos,
    sin,
    positions,
    out,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    ROT: tl.constexpr,
    OWN_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize head n of token t, rotate it if it is of q or k, and write it to out.

    out: T x (H + 2K) x E, q, k and v. With OWN_KEYS qkv is like out; otherwise it has q alone,
    and k and v are copied from `source`, which is like out.
    """
    t, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e = tl.arange(0, E)
    N: tl.constexpr = H + 2 * K
    row_out = out + (t * N + n) * E
    wait(PDL)
    if (not OWN_KEYS) and n >= H:
        tl.store(row_out + e, tl.load(source + (t * N + n) * E + e))
        return
    is_rotated = (e < ROT) & (n < H + K)
    swapped = tl.where(is_rotated, (e + ROT // 2) % ROT, e)
    turn = tl.load(positions + t) * ROT + e
    own = tl.load(cos + turn, is_rotated, other=1.0).to(tl.float32)
    other = tl.load(sin + turn, is_rotated, other=0.0).to(tl.float32)
    row = qkv + (t * (N if OWN_KEYS else H) + n) * E
    half = tl.load(row + e)
    x, y = half.to(tl.float32), tl.load(row + swapped).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x) / E + eps)
    x, y = x * rstd, y * rstd
    if n < H + K:
        scale = q_scale if n < H else k_scale
        x *= tl.load(scale + e).to(tl.float32)
        y *= tl.load(scale + swapped).to(tl.float32)
    x, y = x.to(half.dtype).to(tl.float32), y.to(half.dtype).to(tl.float32)
    tl.store(row_out + e, (x * own + y * other).to(half.dtype))


def prepare_heads(
    qkv: Tensor,
    source: Tensor | None,
    q_scale: Tensor,
    k_scale: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    eps: float,
    heads: tuple[int, int],
) -> Tensor:
    """Return q and k, normalized and rotated, and v, normalized without a scale, side by side.

    Args:
        qkv: T x (H + 2K) x E, or T x H x E with `source`.
        source: T x (H + 2K) x E, prepared heads of another layer, whose k and v are returned.
        k_scale: None with `source`.
        cos, sin: a row per position, with as many columns as are rotated; sin with its sign.
        positions: of the tokens, T.
        heads: H and K.
    """
    T, _, E = qkv.shape
    H, K = heads
    out = qkv.new_empty(T, H + 2 * K, E)
    prepare_heads_kernel[(T, H + 2 * K)](
        qkv.contiguous(),
        qkv if source is None else source,
        q_scale,
        q_scale if k_scale is None else k_scale,
        cos,
        sin,
        positions.contiguous(),
        out,
        eps,
        H=H,
        K=K,
        E=E,
        ROT=cos.shape[1],
        OWN_KEYS=source is None,
        **options(1),
    )
    return out


def head_scales(
    qkv: Tensor, q_scale: Tensor | None, k_scale: Tensor | None
) -> tuple[tuple[Tensor, Tensor], bool]:
    """Return q_scale and k_scale (placeholders if None), and True if heads are to be normalized."""
    if q_scale is None or k_scale is None:
        return (qkv, qkv), False
    return (q_scale, k_scale), True
