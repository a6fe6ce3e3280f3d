"""The gated delta rule around its recurrence: convolution, gated norm, and one token of a decode step.

    projection ─ convolve: convolution, silu, norms of q and k ─ delta_chunks ─ norm(o) silu(z)

Training and prefill take sequences end to end. A decode step is two kernels: programs that share a
sequence's matrices among them compute the convolution's newest output and update the matrices in
place; then outputs are normalized and the convolution's columns move.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels import row_state
from hone.kernels.delta_rule import NORM_EPS, DeltaHeads, DeltaState, Segments
from hone.kernels.delta_shape import DeltaShape
from hone.kernels.gpu import options, processors
from hone.kernels.gpu.delta_chunks import (
    CHUNK,
    TABLE,
    Chunked,
    Gates,
    run_chunks,
    run_chunks_back,
)
from hone.kernels.gpu.launching import wait_beside_next

FIELDS, DONE = tl.constexpr(row_state.FIELDS), tl.constexpr(row_state.DONE)
EPS = tl.constexpr(NORM_EPS)
CHANNELS = 128  # of the convolution, by program
NORM_ROWS = 16  # by program
DECODE_COLUMNS = 32  # of a state, by program of a decode step
WEIGHT_PROGRAMS = 128  # parts of the convolution's weight gradient
ROWS, BACK_ROWS = 16, 8  # of a chunk that a program of the convolution computes at once


@triton.jit
def _shifted(x, columns, t, position, j, owner, inside, c, row_stride, C, WIDTH, HAS: tl.constexpr):
    """Load the inputs j tokens before tokens t; those before the sequence's start are `columns`."""
    at = position - j
    own = tl.load(
        x + (t - j)[:, None] * row_stride + c[None, :], (inside & (at >= 0))[:, None], other=0.0
    ).to(tl.float32)
    if HAS:
        row = owner * (WIDTH - 1) + WIDTH - 1 + at
        is_before = (inside & (at < 0))[:, None]
        own += tl.load(columns + row[:, None] * C + c[None, :], is_before, other=0.0).to(tl.float32)
    return own


@triton.jit
def convolve_kernel(
    x,
    weight,
    columns,
    chunks,
    out,
    row_stride,
    offset,
    scale,
    K,
    C,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    NORMALIZES: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
):
    """Compute silu(convolution) of ROWS tokens of a chunk, one head.

    With NORMALIZES q and k: they are normalized, and the first K heads scaled.
    """
    PIECES: tl.constexpr = CHUNK // ROWS
    i, h = tl.program_id(0) // PIECES, tl.program_id(1)
    first = tl.load(chunks + i * TABLE).to(tl.int64)
    owner = tl.load(chunks + i * TABLE + 2).to(tl.int64)
    r = tl.program_id(0) % PIECES * ROWS + tl.arange(0, ROWS)
    inside = r < tl.load(chunks + i * TABLE + 1)
    position = tl.load(chunks + i * TABLE + 3) * CHUNK + r
    t = first + r
    c = offset + h * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([ROWS, SIZE], tl.float32)
    for j in tl.static_range(WIDTH):
        value = _shifted(
            x, columns, t, position, j, owner, inside, c, row_stride, C, WIDTH, HAS_COLUMNS
        )
        total += value * tl.load(weight + c * WIDTH + WIDTH - 1 - j).to(tl.float32)[None, :]
    y = total * tl.sigmoid(total)
    if NORMALIZES:
        y *= tl.rsqrt(tl.sum(y * y, 1) + EPS)[:, None] * tl.where(h < K, scale, 1.0)
    tl.store(out + t[:, None] * C + c[None, :], y.to(out.dtype.element_ty), inside[:, None])


@triton.jit
def convolve_back_kernel(
    x,
    weight,
    columns,
    chunks,
    grad,
    grad_total,
    grad_weight,
    row_stride,
    offset,
    scale,
    C,
    M,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    NORMALIZES: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
):
    """Gradient before silu, and a part of the weight's gradient, of one head and every P-th piece.

    A piece is ROWS tokens of one of the M chunks. grad: tokens x (heads x GROUPS) x SIZE, GROUPS
    gradients of a head to be summed. With NORMALIZES the head was normalized and multiplied by
    `scale`.
    """
    tl.static_assert(WIDTH == 4)
    PIECES: tl.constexpr = CHUNK // ROWS
    p, h = tl.program_id(0), tl.program_id(1)
    own = tl.arange(0, SIZE)
    c = offset + h * SIZE + own
    taps = weight + c * WIDTH
    w0 = tl.load(taps + 3).to(tl.float32)[None, :]  # of the token itself
    w1 = tl.load(taps + 2).to(tl.float32)[None, :]
    w2 = tl.load(taps + 1).to(tl.float32)[None, :]
    w3 = tl.load(taps).to(tl.float32)[None, :]
    # Added up over rows at the end only
    of_w0 = tl.zeros([ROWS, SIZE], tl.float32)
    of_w1 = tl.zeros([ROWS, SIZE], tl.float32)
    of_w2 = tl.zeros([ROWS, SIZE], tl.float32)
    of_w3 = tl.zeros([ROWS, SIZE], tl.float32)
    stride = tl.num_programs(1) * GROUPS * SIZE
    for piece in range(p, M * PIECES, tl.num_programs(0)):
        i = piece // PIECES
        r = (piece - i * PIECES) * ROWS + tl.arange(0, ROWS)
        first = tl.load(chunks + i * TABLE).to(tl.int64)
        owner = tl.load(chunks + i * TABLE + 2).to(tl.int64)
        inside = r < tl.load(chunks + i * TABLE + 1)
        at = tl.load(chunks + i * TABLE + 3) * CHUNK + r
        t = first + r
        seen = inside[:, None]
        x0 = _shifted(x, columns, t, at, 0, owner, inside, c, row_stride, C, WIDTH, HAS_COLUMNS)
        x1 = _shifted(x, columns, t, at, 1, owner, inside, c, row_stride, C, WIDTH, HAS_COLUMNS)
        x2 = _shifted(x, columns, t, at, 2, owner, inside, c, row_stride, C, WIDTH, HAS_COLUMNS)
        x3 = _shifted(x, columns, t, at, 3, owner, inside, c, row_stride, C, WIDTH, HAS_COLUMNS)
        total = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
        change = tl.zeros([ROWS, SIZE], tl.float32)
        for g in tl.static_range(GROUPS):
            place = t[:, None] * stride + (h * GROUPS + g) * SIZE + own[None, :]
            change += tl.load(grad + place, seen, other=0.0).to(tl.float32)
        gate = tl.sigmoid(total)
        if NORMALIZES:
            y = total * gate
            inverse = tl.rsqrt(tl.sum(y * y, 1) + EPS)[:, None]
            along = tl.sum(change * y, 1)[:, None] * inverse * inverse
            change = scale * inverse * (change - y * along)
        change = change * gate * (1.0 + total * (1.0 - gate))
        rounded = change.to(grad_total.dtype.element_ty)
        tl.store(grad_total + t[:, None] * C + c[None, :], rounded, seen)
        change = tl.where(seen, change, 0.0)
        of_w0 += change * x0
        of_w1 += change * x1
        of_w2 += change * x2
        of_w3 += change * x3
    place = grad_weight + (p * C + c) * WIDTH
    tl.store(place + 3, tl.sum(of_w0, 0))
    tl.store(place + 2, tl.sum(of_w1, 0))
    tl.store(place + 1, tl.sum(of_w2, 0))
    tl.store(place, tl.sum(of_w3, 0))


@triton.jit
def input_grad_kernel(
    grad_total,
    weight,
    chunks,
    boundaries,
    grad_after,
    grad_x,
    row_stride,
    C,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_AFTER: tl.constexpr,
):
    """Gradient of the convolution's inputs, of one chunk and BLOCK channels."""
    i = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = c < C
    first = tl.load(chunks + i * TABLE).to(tl.int64)
    owner = tl.load(chunks + i * TABLE + 2).to(tl.int64)
    end = tl.load(boundaries + owner + 1)
    r = tl.arange(0, CHUNK)
    t = first + r
    seen = (r < tl.load(chunks + i * TABLE + 1))[:, None] & real[None, :]
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    for j in tl.static_range(WIDTH):
        value = tl.load(
            grad_total + (t + j)[:, None] * C + c[None, :], seen & (t + j < end)[:, None], other=0.0
        )
        of_weight = tl.load(weight + c * WIDTH + WIDTH - 1 - j, real, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * of_weight[None, :]
    if HAS_AFTER:
        row = t - (end - (WIDTH - 1))
        place = (owner * (WIDTH - 1) + row)[:, None] * C + c[None, :]
        total += tl.load(grad_after + place, seen & (row >= 0)[:, None], other=0.0).to(tl.float32)
    tl.store(grad_x + t[:, None] * row_stride + c[None, :], total.to(grad_x.dtype.element_ty), seen)


@triton.jit
def columns_kernel(
    x,
    columns,
    boundaries,
    after,
    row_stride,
    C,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
):
    """Copy the last WIDTH - 1 inputs of one sequence, BLOCK channels."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(boundaries + n), tl.load(boundaries + n + 1)
    for i in tl.static_range(WIDTH - 1):
        t = end - (WIDTH - 1) + i
        value = tl.load(x + t * row_stride + c, (c < C) & (t >= start), other=0.0)
        if HAS_COLUMNS:
            place = (n * (WIDTH - 1) + WIDTH - 1 + t - start) * C + c
            value += tl.load(columns + place, (c < C) & (t < start), other=0.0).to(value.dtype)
        tl.store(after + (n * (WIDTH - 1) + i) * C + c, value, c < C)


@triton.jit
def columns_grad_kernel(
    grad_total,
    weight,
    boundaries,
    grad_after,
    grad_columns,
    C,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_AFTER: tl.constexpr,
):
    """Gradient of the columns before one sequence, BLOCK channels."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = c < C
    start, end = tl.load(boundaries + n), tl.load(boundaries + n + 1)
    for i in tl.static_range(WIDTH - 1):  # WIDTH - 1 - i tokens before the first
        total = tl.zeros([BLOCK], tl.float32)
        for j in tl.static_range(WIDTH - 1 - i, WIDTH):
            t = start + j - (WIDTH - 1 - i)
            value = tl.load(grad_total + t * C + c, real & (t < end), other=0.0).to(tl.float32)
            total += value * tl.load(weight + c * WIDTH + WIDTH - 1 - j, real, other=0.0)
        if HAS_AFTER:
            row = i - (end - start)
            place = (n * (WIDTH - 1) + row) * C + c
            total += tl.load(grad_after + place, real & (row >= 0), other=0.0).to(tl.float32)
        place = (n * (WIDTH - 1) + i) * C + c
        tl.store(grad_columns + place, total.to(grad_columns.dtype.element_ty), real)


@triton.jit
def gated_norm_kernel(
    o, z, weight, out, eps, row_stride, rows, V: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr
):
    """Compute norm(o) * weight * silu(z) of ROWS rows, each of a token and value head."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    f = tl.arange(0, F)
    seen = (row < rows)[:, None]
    value = tl.load(o + row[:, None] * F + f[None, :], seen, other=0.0).to(tl.float32)
    place = (row // V)[:, None] * row_stride + (row % V)[:, None] * F + f[None, :]
    gate = tl.load(z + place, seen, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, 1) / F + eps)[:, None]
    y = value * rstd * tl.load(weight + f).to(tl.float32)[None, :] * gate * tl.sigmoid(gate)
    tl.store(out + row[:, None] * F + f[None, :], y.to(out.dtype.element_ty), seen)


@triton.jit
def gated_norm_back_kernel(
    o,
    z,
    weight,
    grad,
    grad_o,
    grad_z,
    grad_weight,
    eps,
    row_stride,
    rows,
    V: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
):
    f = tl.arange(0, F)
    scale = tl.load(weight + f).to(tl.float32)[None, :]
    of_weight = tl.zeros([F], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        seen = (row < rows)[:, None]
        own = row[:, None] * F + f[None, :]
        value = tl.load(o + own, seen, other=0.0).to(tl.float32)
        change = tl.load(grad + own, seen, other=0.0).to(tl.float32)
        place = (row // V)[:, None] * row_stride + (row % V)[:, None] * F + f[None, :]
        gate = tl.load(z + place, seen, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        rstd = tl.rsqrt(tl.sum(value * value, 1) / F + eps)[:, None]
        normed = value * rstd
        of_gate = change * normed * scale * share * (1.0 + gate * (1.0 - share))
        tl.store(grad_z + place, of_gate.to(grad_z.dtype.element_ty), seen)
        change = change * gate * share
        of_weight += tl.sum(change * normed, 0)
        change = change * scale
        along = tl.sum(change * normed, 1)[:, None] / F
        of_value = rstd * (change - normed * along)
        tl.store(grad_o + own, of_value.to(grad_o.dtype.element_ty), seen)
    tl.store(grad_weight + tl.program_id(0) * F + f, of_weight)


def mix_segments(
    projected_TO: Tensor, heads: DeltaHeads, segments: Segments, before: DeltaState | None
) -> tuple[Tensor, DeltaState]:
    """Return the outputs of a layer's mixer, T x VF, and the state after each sequence."""
    weights = (heads.conv_C1W, heads.decay_V, heads.bias_V, heads.norm_F)
    columns, matrices = (None, None) if before is None else before.tensors
    out, *after = _Mix.apply(  # type: ignore[no-untyped-call]
        projected_TO, *weights, columns, matrices, heads.shape, heads.eps, segments
    )
    return out, DeltaState(*after)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, projected, conv, decay, bias, norm, columns, matrices, shape, eps, segments
    ):
        projected = projected.contiguous()
        conv = conv.contiguous()
        columns = None if columns is None else columns.to(projected.dtype).contiguous()
        mixed = _convolve(projected, conv, columns, shape, segments)
        gates = _gates_of(projected, decay, bias, shape)
        out, after, chunked = run_chunks(mixed, gates, shape, segments, matrices)
        y = projected.new_empty(len(projected), shape.outputs)
        rows = len(projected) * shape.value_heads
        gated_norm_kernel[(triton.cdiv(rows, NORM_ROWS),)](
            out,
            projected[:, shape.channels :],
            norm,
            y,
            eps,
            projected.stride(0),
            rows,
            V=shape.value_heads,
            F=shape.value_size,
            ROWS=NORM_ROWS,
            num_warps=4,
        )
        last = projected.new_empty(segments.count, shape.conv_width - 1, shape.channels)
        columns_kernel[(segments.count, triton.cdiv(shape.channels, 1024))](
            projected,
            columns,
            segments.boundaries,
            last,
            projected.stride(0),
            shape.channels,
            WIDTH=shape.conv_width,
            BLOCK=1024,
            HAS_COLUMNS=columns is not None,
            num_warps=4,
        )
        ctx.save_for_backward(
            projected, conv, decay, bias, norm, columns, matrices, mixed, out, *chunked
        )
        ctx.sizes = (shape, eps, segments)
        ctx.set_materialize_grads(False)
        return y, last, after

    @staticmethod
    def backward(ctx, grad, grad_columns, grad_matrices):  # type: ignore[no-untyped-def]
        projected, conv, decay, bias, norm, columns, matrices, mixed, out, *kept = ctx.saved_tensors
        shape, eps, segments = ctx.sizes
        if grad is None:
            grad = projected.new_zeros(len(projected), shape.outputs)
        grad_projected = torch.empty_like(projected)
        programs = 4 * processors()
        grad_out = torch.empty_like(out)
        of_norm = norm.new_empty(programs, shape.value_size, dtype=torch.float32)
        z, grad_z = (x[:, shape.channels :] for x in (projected, grad_projected))
        gated_norm_back_kernel[(programs,)](
            out,
            z,
            norm,
            grad.contiguous(),
            grad_out,
            grad_z,
            of_norm,
            eps,
            projected.stride(0),
            len(projected) * shape.value_heads,
            V=shape.value_heads,
            F=shape.value_size,
            ROWS=NORM_ROWS,
            num_warps=4,
        )
        gates = _gates_of(projected, decay, bias, shape)
        grad_matrices = None if grad_matrices is None else grad_matrices.contiguous()
        found = run_chunks_back(
            mixed, gates, shape, segments, matrices, Chunked(*kept), grad_out, grad_matrices
        )
        of_decay, of_bias = _gates_back(gates, found.g, found.beta, grad_projected, shape)
        del grad_out, mixed
        of_total, of_conv = _convolve_back(
            projected, conv, columns, shape, segments, (found.q, found.k, found.v)
        )
        grad_columns = None if grad_columns is None else grad_columns.contiguous()
        input_grad_kernel[(len(segments.chunk_table), triton.cdiv(shape.channels, CHANNELS))](
            of_total,
            conv,
            segments.chunk_table,
            segments.boundaries,
            grad_columns,
            grad_projected,
            projected.stride(0),
            shape.channels,
            WIDTH=shape.conv_width,
            BLOCK=CHANNELS,
            HAS_AFTER=grad_columns is not None,
            num_warps=4,
        )
        of_columns = None
        if columns is not None:
            of_columns = torch.empty_like(columns)
            columns_grad_kernel[(segments.count, triton.cdiv(shape.channels, 1024))](
                of_total,
                conv,
                segments.boundaries,
                grad_columns,
                of_columns,
                shape.channels,
                WIDTH=shape.conv_width,
                BLOCK=1024,
                HAS_AFTER=grad_columns is not None,
                num_warps=4,
            )
        of_weights = (of_conv, of_decay, of_bias, of_norm.sum(0).to(norm.dtype))
        return grad_projected, *of_weights, of_columns, found.before, None, None, None


def _gates_of(projected: Tensor, decay: Tensor, bias: Tensor, shape: DeltaShape) -> Gates:
    *_, b_TV, a_TV = projected.split(shape.projection_rows, 1)
    return Gates(b_TV, a_TV, decay, bias)


def _gates_back(
    gates: Gates, grad_g: Tensor, grad_beta: Tensor, grad_projected: Tensor, shape: DeltaShape
) -> tuple[Tensor, Tensor]:
    """Write the gradients of b and a; return those of the heads' decays and biases."""
    *_, of_b, of_a = grad_projected.split(shape.projection_rows, 1)
    beta = gates.b_TV.float().sigmoid()
    of_b.copy_(grad_beta * beta * (1 - beta))
    raw = gates.a_TV.float() + gates.bias_V.float()
    of_rate = grad_g * -gates.decay_V.float().exp()
    grad_raw = of_rate * raw.sigmoid()
    of_a.copy_(grad_raw)
    of_decay = (of_rate * torch.nn.functional.softplus(raw)).sum(0)
    return of_decay.to(gates.decay_V.dtype), grad_raw.sum(0).to(gates.bias_V.dtype)


def _parts(shape: DeltaShape) -> list[tuple[int, int, int, bool]]:
    """Return offset, heads and size of the heads of q and k, then of v, and if they are normalized."""
    of_keys = 2 * shape.key_heads
    return [
        (0, of_keys, shape.key_size, True),
        (of_keys * shape.key_size, shape.value_heads, shape.value_size, False),
    ]


def _convolve(
    projected: Tensor, conv: Tensor, columns: Tensor | None, shape: DeltaShape, segments: Segments
) -> Tensor:
    """Return q, k and v of all tokens, T x C; q and k are normalized, q is scaled."""
    mixed = projected.new_empty(len(projected), shape.channels)
    chunks = segments.chunk_table
    for offset, heads, size, is_normalized in _parts(shape):
        convolve_kernel[(len(chunks) * (CHUNK.value // ROWS), heads)](
            projected,
            conv,
            columns,
            chunks,
            mixed,
            projected.stride(0),
            offset,
            shape.key_size**-0.5,
            shape.key_heads,
            shape.channels,
            WIDTH=shape.conv_width,
            ROWS=ROWS,
            SIZE=size,
            NORMALIZES=is_normalized,
            HAS_COLUMNS=columns is not None,
            num_warps=4,
        )
    return mixed


def _convolve_back(
    projected: Tensor,
    conv: Tensor,
    columns: Tensor | None,
    shape: DeltaShape,
    segments: Segments,
    grads: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sums before silu, T x C, and of the weight.

    `grads`: of q, k and v, by value head.
    """
    of_total = projected.new_empty(len(projected), shape.channels)
    chunks = segments.chunk_table
    programs = min(len(chunks), WEIGHT_PROGRAMS)
    of_weight = conv.new_empty(programs, *conv.shape, dtype=torch.float32)
    K, groups = shape.key_heads, shape.value_heads // shape.key_heads
    keys = K * shape.key_size
    parts = (
        (grads[0], 0, K, shape.key_size, groups, True, shape.key_size**-0.5),
        (grads[1], keys, K, shape.key_size, groups, True, 1.0),
        (grads[2], 2 * keys, shape.value_heads, shape.value_size, 1, False, 1.0),
    )
    for grad, offset, heads, size, summed, is_normalized, scale in parts:
        convolve_back_kernel[(programs, heads)](
            projected,
            conv,
            columns,
            chunks,
            grad,
            of_total,
            of_weight,
            projected.stride(0),
            offset,
            scale,
            shape.channels,
            len(chunks),
            GROUPS=summed,
            WIDTH=shape.conv_width,
            ROWS=BACK_ROWS,
            SIZE=size,
            NORMALIZES=is_normalized,
            HAS_COLUMNS=columns is not None,
            num_warps=4,
        )
    return of_total, of_weight.sum(0).to(conv.dtype)


# ------------------------------------------------------------------------------------------------- a decode step


@triton.jit
def _newest(x, columns, weight, c, C, WIDTH: tl.constexpr):
    """Return silu(convolution) of the newest token."""
    value = tl.load(x + c)
    total = value.to(tl.float32) * tl.load(weight + c * WIDTH + WIDTH - 1).to(tl.float32)
    for j in tl.static_range(1, WIDTH):
        before = tl.load(columns + (WIDTH - 1 - j) * C + c)
        total += before.to(tl.float32) * tl.load(weight + c * WIDTH + WIDTH - 1 - j).to(tl.float32)
    return (total * tl.sigmoid(total)).to(value.dtype).to(tl.float32)


@triton.jit
def update_states_kernel(
    projected,
    weight,
    decay,
    bias,
    columns,
    matrices,
    active,
    state,
    out,
    scale,
    row_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Update COLUMNS columns of the matrix of sequence active[n] and one value head; compute o there."""
    n, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e, f = tl.arange(0, E), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    C: tl.constexpr = 2 * K * E + V * F
    h = head // (V // K)
    wait_beside_next(PDL)
    slot = tl.load(active + n)
    place = matrices + ((slot * V + head) * E + e[:, None]) * F + f[None, :]
    matrix = tl.load(place)  # asked for first: most of the bytes
    goes_on = tl.load(state + slot * FIELDS + DONE) == 0
    x = projected + n * row_stride
    own = columns + slot * (WIDTH - 1) * C
    q = _newest(x, own, weight, h * E + e, C, WIDTH)
    k = _newest(x, own, weight, (K + h) * E + e, C, WIDTH)
    v = _newest(x, own, weight, 2 * K * E + head * F + f, C, WIDTH)
    q = q * tl.rsqrt(tl.sum(q * q) + EPS) * scale
    k = k * tl.rsqrt(tl.sum(k * k) + EPS)
    b = tl.load(x + C + V * F + head).to(tl.float32)
    raw = tl.load(x + C + V * F + V + head).to(tl.float32) + tl.load(bias + head).to(tl.float32)
    soft = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    matrix *= tl.exp(-tl.exp(tl.load(decay + head).to(tl.float32)) * soft)
    change = (v - tl.sum(matrix * k[:, None], 0)) * tl.sigmoid(b)
    matrix += k[:, None] * change[None, :]
    tl.store(place, matrix, mask=goes_on)
    tl.store(out + (n * V + head) * F + f, tl.sum(matrix * q[:, None], 0))


@triton.jit
def finish_token_kernel(
    o,
    projected,
    norm,
    columns,
    active,
    state,
    out,
    eps,
    row_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute norm(o) silu(z) of one value head; move the columns of its channels by one token.

    The first value head of a key head also moves those of q and k.
    """
    n, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    f = tl.arange(0, F)
    C: tl.constexpr = 2 * K * E + V * F
    scale = tl.load(norm + f).to(tl.float32)
    wait_beside_next(PDL)
    slot = tl.load(active + n)
    goes_on = tl.load(state + slot * FIELDS + DONE) == 0
    x = projected + n * row_stride
    value = tl.load(o + (n * V + head) * F + f)
    gate = tl.load(x + C + head * F + f).to(tl.float32)
    y = value * tl.rsqrt(tl.sum(value * value) / F + eps) * scale * gate * tl.sigmoid(gate)
    tl.store(out + (n * V + head) * F + f, y.to(out.dtype.element_ty))
    own = columns + slot * (WIDTH - 1) * C
    _move(x, own, 2 * K * E + head * F + f, C, WIDTH, goes_on)
    if head % (V // K) == 0:
        e = head // (V // K) * E + tl.arange(0, E)
        _move(x, own, e, C, WIDTH, goes_on)
        _move(x, own, K * E + e, C, WIDTH, goes_on)


@triton.jit
def _move(x, columns, c, C, WIDTH: tl.constexpr, writes):
    """Drop the oldest column of some channels and append the newest input."""
    newest = tl.load(x + c).to(columns.dtype.element_ty)
    for j in tl.static_range(1, WIDTH - 1):
        moved = tl.load(columns + j * C + c)
        tl.debug_barrier()  # several threads may have one channel: all read before one writes
        tl.store(columns + (j - 1) * C + c, moved, mask=writes)
    tl.debug_barrier()
    tl.store(columns + (WIDTH - 2) * C + c, newest, mask=writes)


def decode_delta(
    projected_BO: Tensor, heads: DeltaHeads, store: DeltaState, active_B: Tensor, state: Tensor
) -> Tensor:
    """Compute one new token of each sequence `active_B`, and update its state in place."""
    shape = heads.shape
    B, V = len(projected_BO), shape.value_heads
    sizes = {"K": shape.key_heads, "V": V, "E": shape.key_size, "F": shape.value_size}
    o = projected_BO.new_empty(B, shape.outputs, dtype=torch.float32)
    out = projected_BO.new_empty(B, shape.outputs)
    columns = min(DECODE_COLUMNS, shape.value_size)
    update_states_kernel[(B, V, shape.value_size // columns)](
        projected_BO,
        heads.conv_C1W,
        heads.decay_V,
        heads.bias_V,
        *store.tensors,
        active_B,
        state,
        o,
        shape.key_size**-0.5,
        projected_BO.stride(0),
        **sizes,
        WIDTH=shape.conv_width,
        COLUMNS=columns,
        **options(4),
    )
    finish_token_kernel[(B, V)](
        o,
        projected_BO,
        heads.norm_F,
        store.columns_NWC,
        active_B,
        state,
        out,
        heads.eps,
        projected_BO.stride(0),
        **sizes,
        WIDTH=shape.conv_width,
        **options(1),
    )
    return out
