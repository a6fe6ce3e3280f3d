"""Kernels of a training step: norm, query and key heads, SwiGLU, logprobs and entropies.

Backward kernels recompute what the forward pass did not keep. For a sum over all rows (the gradient
of a scale) each program sums its own rows, and the programs' parts are added afterwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels.gpu import power_of_2, processors

PROGRAMS = 4  # a multiprocessor, of kernels whose programs go over many rows


# The number of tokens differs from step to step, and Triton would compile once more for the first that 16 divides.
@triton.jit(do_not_specialize=["P"])
def sum_parts_kernel(parts, out, P, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum parts (P x D) over P in a fixed order."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    p = tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(0, P, ROWS):
        total += tl.load(parts + (start + p) * D + d, (start + p < P) & (d < D), other=0.0)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + d, tl.sum(total, axis=0).to(out.dtype.element_ty), d < D)


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return parts P x … summed over P, thirty times faster than torch's sum for tall inputs."""
    out = torch.empty_like(parts[0], dtype=dtype)
    D = out.numel()
    sum_parts_kernel[(-(-D // 32),)](parts, out, len(parts), D, ROWS=64, BLOCK=32, num_warps=4)
    return out


@triton.jit(do_not_specialize=["T"])
def norm_backward_kernel(
    total,
    weight,
    grad,
    grad_total,
    normed,
    out,
    parts,
    eps,
    T,
    D,
    HAS_TOTAL: tl.constexpr,
    WITH_NORMED: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of a norm's input, and this program's part of the scale's gradient.

    total: T x D, the input. The norm is recomputed, and stored in `normed` if WITH_NORMED.
    """
    d = tl.arange(0, BLOCK)
    inside = d < D
    scale = tl.load(weight + d, inside, other=0.0).to(tl.float32) + OFFSET
    of_scale = tl.zeros([BLOCK], dtype=tl.float32)
    width = D.to(tl.int64)
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        row = t * width + d
        value = tl.load(total + row, inside, other=0.0)
        slope = tl.load(grad + row, inside, other=0.0).to(tl.float32)
        exact = value.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(exact * exact) / D + eps)
        unit = exact * rstd
        of_scale += slope * unit
        if WITH_NORMED:
            tl.store(normed + row, (unit * scale).to(value.dtype), inside)
        slope *= scale
        change = rstd * (slope - unit * (tl.sum(slope * unit) / D))
        if HAS_TOTAL:
            change += tl.load(grad_total + row, inside, other=0.0).to(tl.float32)
        tl.store(out + row, change.to(value.dtype), inside)
    tl.store(parts + tl.program_id(0) * D + d, of_scale, inside)


def norm_backward(
    total: Tensor,
    weight: Tensor,
    grad: Tensor,
    grad_total: Tensor | None,
    eps: float,
    with_normed: bool,
    offset: float = 0.0,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the normed rows if requested, and the gradients of `total` (T x D) and of the scale.

    grad_total: the gradient of `total` through its other uses, if any. `offset` is added to the
    weight.
    """
    T, D = total.shape
    out = torch.empty_like(total)
    normed = torch.empty_like(total) if with_normed else None
    programs = min(PROGRAMS * processors(), T)
    parts = total.new_empty(programs, D, dtype=torch.float32)
    norm_backward_kernel[(programs,)](
        total,
        weight,
        grad,
        out if grad_total is None else grad_total,
        out if normed is None else normed,
        out,
        parts,
        eps,
        T,
        D,
        HAS_TOTAL=grad_total is not None,
        WITH_NORMED=with_normed,
        OFFSET=offset,
        BLOCK=power_of_2(D),
        num_warps=4,
    )
    return normed, out, sum_parts(parts, weight.dtype)


@triton.jit
def rotate_heads_kernel(
    qkv,
    q_scale,
    k_scale,
    cos,
    sin,
    positions,
    q_out,
    k_out,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
):
    """Normalize and rotate the q and k heads of token t of qkv, T x (H + 2K) x E."""
    t = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = E // 2
    n, e = tl.arange(0, N)[:, None], tl.arange(0, half)[None, :]
    is_q, is_any = n < H, n < H + K
    row = qkv + (t * (H + 2 * K) + n) * E + e
    turn = tl.load(positions + t) * E + e
    cos_x, cos_y = tl.load(cos + turn).to(tl.float32), tl.load(cos + turn + half).to(tl.float32)
    sin_x, sin_y = tl.load(sin + turn).to(tl.float32), tl.load(sin + turn + half).to(tl.float32)
    first, second = tl.load(row, is_any, other=0.0), tl.load(row + half, is_any, other=0.0)
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
    q_row, k_row = (t * H + n) * E + e, (t * K + n - H) * E + e
    tl.store(q_out + q_row, turned_x, is_q)
    tl.store(q_out + q_row + half, turned_y, is_q)
    is_k = (n >= H) & is_any
    tl.store(k_out + k_row, turned_x, is_k)
    tl.store(k_out + k_row + half, turned_y, is_k)


def rotate_heads(
    qkv: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    eps: float,
    H: int,
) -> tuple[Tensor, Tensor]:
    """Return q (T x H x E) and k (T x K x E), normalized and rotated, of qkv (T x (H + 2K) x E).

    Without scales, q and k are only rotated.
    """
    T, N, E = qkv.shape
    K = (N - H) // 2
    q, k = qkv.new_empty(T, H, E), qkv.new_empty(T, K, E)
    has_norm = q_scale is not None
    scales = (q_scale, k_scale) if has_norm else (qkv, qkv)
    rotate_heads_kernel[(T,)](
        qkv,
        *scales,
        cos,
        sin,
        positions,
        q,
        k,
        eps,
        H=H,
        K=K,
        E=E,
        N=power_of_2(N),
        NORM=has_norm,
        num_warps=4,  # as many rows as in `heads_kernel`: the same sums
    )
    return q, k


@triton.jit(do_not_specialize=["T"])
def rotate_heads_backward_kernel(
    qkv,
    q_scale,
    k_scale,
    cos,
    sin,
    positions,
    dq,
    dk,
    dv,
    out,
    parts,
    eps,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
):
    """Compute the gradient of qkv, T x (H + 2K) x E, and this program's part of both scale
    gradients.
    """
    half: tl.constexpr = E // 2
    n, e = tl.arange(0, N).to(tl.int64)[:, None], tl.arange(0, half)[None, :]
    is_q, is_k, is_v = n < H, (n >= H) & (n < H + K), (n >= H + K) & (n < H + 2 * K)
    of_scale_x, of_scale_y = (
        tl.zeros([N, half], dtype=tl.float32),
        tl.zeros([N, half], dtype=tl.float32),
    )
    if NORM:
        scale_x = tl.where(is_q, tl.load(q_scale + e), tl.load(k_scale + e)).to(tl.float32)
        scale_y = tl.where(is_q, tl.load(q_scale + half + e), tl.load(k_scale + half + e)).to(
            tl.float32
        )
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        turn = tl.load(positions + t) * E + e
        cos_x, cos_y = tl.load(cos + turn).to(tl.float32), tl.load(cos + turn + half).to(tl.float32)
        sin_x, sin_y = tl.load(sin + turn).to(tl.float32), tl.load(sin + turn + half).to(tl.float32)
        q_row, k_row, v_row = (
            (t * H + n) * E + e,
            (t * K + n - H) * E + e,
            (t * K + n - H - K) * E + e,
        )
        u = (tl.load(dq + q_row, is_q, other=0.0) + tl.load(dk + k_row, is_k, other=0.0)).to(
            tl.float32
        )
        w = (
            tl.load(dq + q_row + half, is_q, other=0.0)
            + tl.load(dk + k_row + half, is_k, other=0.0)
        ).to(tl.float32)
        # The rotation back: its matrix transposed.
        slope_x, slope_y = u * cos_x + w * sin_y, w * cos_y + u * sin_x
        row = (t * (H + 2 * K) + n) * E + e
        if NORM:
            x = tl.load(qkv + row, n < H + K, other=0.0).to(tl.float32)
            y = tl.load(qkv + row + half, n < H + K, other=0.0).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(x * x + y * y, axis=1) / E + eps)[:, None]
            x *= rstd
            y *= rstd
            of_scale_x += slope_x * x
            of_scale_y += slope_y * y
            slope_x *= scale_x
            slope_y *= scale_y
            inner = (tl.sum(slope_x * x + slope_y * y, axis=1) / E)[:, None]
            slope_x = rstd * (slope_x - x * inner)
            slope_y = rstd * (slope_y - y * inner)
        slope_x += tl.load(dv + v_row, is_v, other=0.0).to(tl.float32)
        slope_y += tl.load(dv + v_row + half, is_v, other=0.0).to(tl.float32)
        tl.store(out + row, slope_x.to(out.dtype.element_ty), n < H + 2 * K)
        tl.store(out + row + half, slope_y.to(out.dtype.element_ty), n < H + 2 * K)
    if NORM:
        part = parts + tl.program_id(0) * 2 * E + tl.arange(0, half)
        tl.store(part, tl.sum(tl.where(is_q, of_scale_x, 0.0), axis=0))
        tl.store(part + half, tl.sum(tl.where(is_q, of_scale_y, 0.0), axis=0))
        tl.store(part + E, tl.sum(tl.where(is_k, of_scale_x, 0.0), axis=0))
        tl.store(part + E + half, tl.sum(tl.where(is_k, of_scale_y, 0.0), axis=0))


def rotate_heads_backward(
    qkv: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the projection and of the two scales, from those of q, k and v."""
    T, N, E = qkv.shape
    H = dq.shape[1]
    out = torch.empty_like(qkv)
    programs = min(PROGRAMS * processors(), T)
    parts = qkv.new_empty(programs, 2, E, dtype=torch.float32)
    has_norm = q_scale is not None
    scales = (q_scale, k_scale) if has_norm else (qkv, qkv)
    rotate_heads_backward_kernel[(programs,)](
        qkv,
        *scales,
        cos,
        sin,
        positions,
        dq,
        dk,
        dv,
        out,
        parts,
        eps,
        T,
        H=H,
        K=(N - H) // 2,
        E=E,
        N=power_of_2(N),
        NORM=has_norm,
        num_warps=8,
    )
    if q_scale is None:
        return out, None, None
    of_q, of_k = sum_parts(parts, q_scale.dtype)
    return out, of_q, of_k


@triton.jit
def swiglu_backward_kernel(gate_up, grad, act, out, F, WITH_ACT: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the gradient of gate_up's row t (T x 2F), and recompute its SwiGLU."""
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    half = tl.load(gate_up + t * 2 * F + f, inside, other=0.0)
    gate, up = (
        half.to(tl.float32),
        tl.load(gate_up + t * 2 * F + F + f, inside, other=0.0).to(tl.float32),
    )
    slope = tl.load(grad + t * F + f, inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = (gate * sigmoid).to(half.dtype).to(tl.float32)
    if WITH_ACT:
        tl.store(act + t * F + f, (silu * up).to(half.dtype), inside)
    of_gate = slope * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(out + t * 2 * F + f, of_gate.to(half.dtype), inside)
    tl.store(out + t * 2 * F + F + f, (slope * silu).to(half.dtype), inside)


def swiglu_backward(gate_up: Tensor, grad: Tensor, with_act: bool) -> tuple[Tensor | None, Tensor]:
    """Return the recomputed SwiGLU T x F if requested, and the gradient of gate_up, T x 2F."""
    T, F = grad.shape
    out = torch.empty_like(gate_up)
    act = torch.empty_like(grad) if with_act else None
    swiglu_backward_kernel[(T, -(-F // 1024))](
        gate_up,
        grad,
        out if act is None else act,
        out,
        F,
        WITH_ACT=with_act,
        BLOCK=1024,
        num_warps=4,
    )
    return act, out


@triton.jit(
    do_not_specialize_on_alignment=["targets", "temperature", "logsums", "logprobs", "entropies"]
)
def statistics_kernel(
    logits, targets, temperature, logsums, logprobs, entropies, V, BLOCK: tl.constexpr
):
    """Compute log-sum-exp, target logprob and entropy of row n of logits (N x V), at its temperature."""
    n = tl.program_id(0).to(tl.int64)
    scale = 1.0 / tl.load(temperature + n)
    v = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -1e30, dtype=tl.float32)
    size, moment = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        inside = start + v < V
        x = tl.load(logits + n * V + start + v, inside, other=-1e30) * scale
        higher = tl.maximum(top, x)
        kept, p = tl.exp(top - higher), tl.where(inside, tl.exp(x - higher), 0.0)
        size = size * kept + p
        moment = moment * kept + p * x
        top = higher
    highest = tl.max(top)
    kept = tl.exp(top - highest)
    total = tl.sum(size * kept)
    logsum = highest + tl.log(total)
    tl.store(logsums + n, logsum)
    tl.store(logprobs + n, tl.load(logits + n * V + tl.load(targets + n)) * scale - logsum)
    tl.store(entropies + n, logsum - tl.sum(moment * kept) / total)


def statistics(
    logits: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-sum-exp, target logprob and entropy, fp32, of each row of logits (N x V).

    Logits are divided by the row's temperature.
    """
    results = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    logsums, logprobs, entropies = results
    statistics_kernel[(len(logits),)](
        logits,
        targets,
        temperature,
        logsums,
        logprobs,
        entropies,
        logits.shape[1],
        BLOCK=4096,
        num_warps=8,
    )
    return logsums, logprobs, entropies


@triton.jit(
    do_not_specialize_on_alignment=[
        "targets",
        "temperature",
        "logsums",
        "entropies",
        "grads",
        "entropy_grads",
    ]
)
def slope_kernel(
    logits,
    targets,
    temperature,
    logsums,
    entropies,
    grads,
    entropy_grads,
    out,
    V,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of row n of logits (N x V).

    grads and entropy_grads are the gradients of the targets' logprobs and of the entropies.
    """
    n = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < V
    scale, grad = 1.0 / tl.load(temperature + n), tl.load(grads + n)
    logprob = tl.load(logits + n * V + v, inside, other=0.0) * scale - tl.load(logsums + n)
    p = tl.exp(logprob)
    slope = tl.where(v == tl.load(targets + n), grad, 0.0) - grad * p
    if HAS_ENTROPY:
        slope -= tl.load(entropy_grads + n) * p * (logprob + tl.load(entropies + n))
    tl.store(out + n * V + v, (slope * scale).to(out.dtype.element_ty), inside)


def slope(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    logsums: Tensor,
    entropies: Tensor,
    grads: Tensor,
    entropy_grads: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of logits (N x V) in `dtype`, from those of the logprobs and entropies."""
    N, V = logits.shape
    out = logits.new_empty(N, V, dtype=dtype)
    slope_kernel[(N, -(-V // 2048))](
        logits,
        targets,
        temperature,
        logsums,
        entropies,
        grads,
        grads if entropy_grads is None else entropy_grads,
        out,
        V,
        HAS_ENTROPY=entropy_grads is not None,
        BLOCK=2048,
        num_warps=4,
    )
    return out
