"""The gated delta rule around its recurrence: convolution, gated norm, and one token of a decode step.

    projection ─ convolve: convolution, silu, norms of q and k ─ delta_chunks ─ norm(o) silu(z)

Training and prefill take sequences end to end. A decode step is one kernel: a program per sequence
and key head computes the convolution's newest output, updates the state in place, and normalizes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels import row_state
from hone.kernels.delta_plan import (
    NORM_EPS,
    DeltaHeads,
    DeltaPlan,
    DeltaState,
    ForwardPlan,
    LevelTables,
)
from hone.kernels.delta_shape import DeltaShape
from hone.kernels.gpu import options, processors
from hone.kernels.gpu.delta_chunks import (
    CHUNK,
    TABLE,
    Chunked,
    Gates,
    Level,
    TokenGrads,
    Tokens,
    run_chunks,
    run_chunks_back,
    source_rows,
)
from hone.kernels.gpu.launching import wait

FIELDS, DONE = tl.constexpr(row_state.FIELDS), tl.constexpr(row_state.DONE)
EPS = tl.constexpr(NORM_EPS)
CHANNEL_BLOCK = 128  # channels per program
WIDE_CHANNEL_BLOCK = 1024  # channels per program in kernels with few tokens
NORM_ROWS = 16  # rows per program
WEIGHT_PROGRAMS = 64  # parts of the convolution's weight gradient
CONV_ROWS, CONV_BACK_ROWS = 16, 8  # tokens per program of the convolution, and backward


@triton.jit
def _shifted(
    x,
    order,
    columns,
    t,
    position,
    j: tl.constexpr,
    owner,
    inside,
    c,
    row_stride,
    C,
    WIDTH: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
):
    """Load the inputs j tokens before tokens t; those before the sequence's start are `columns`."""
    at = position - j
    is_own = inside & (at >= 0)
    row = source_rows(order, t - j, is_own, HAS_ORDER)
    own = tl.load(x + row[:, None] * row_stride + c[None, :], is_own[:, None], other=0.0)
    own = own.to(tl.float32)
    if HAS_COLUMNS:
        row = owner * (WIDTH - 1) + WIDTH - 1 + at
        is_before = (inside & (at < 0))[:, None]
        own += tl.load(columns + row[:, None] * C + c[None, :], is_before, other=0.0).to(tl.float32)
    return own


@triton.jit
def convolve_kernel(
    x,
    order,
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
    HAS_ORDER: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
):
    """Compute silu(convolution) of ROWS tokens of a chunk, one head.

    With NORMALIZES, the heads are those of q and k: normalize them, and scale the first K, those of q.
    """
    PIECES: tl.constexpr = CHUNK // ROWS
    i, h = tl.program_id(0) // PIECES, tl.program_id(1)
    first = tl.load(chunks + i * TABLE).to(tl.int64)
    owner = tl.load(chunks + i * TABLE + 2).to(tl.int64)
    start, count = tl.program_id(0) % PIECES * ROWS, tl.load(chunks + i * TABLE + 1)
    if start >= count:
        return
    r = start + tl.arange(0, ROWS)
    inside = r < count
    position = tl.load(chunks + i * TABLE + 3) * CHUNK + r
    t = first + r
    c = offset + h * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([ROWS, SIZE], tl.float32)
    for j in tl.static_range(WIDTH):
        value = _shifted(
            x,
            order,
            columns,
            t,
            position,
            j,
            owner,
            inside,
            c,
            row_stride,
            C,
            WIDTH,
            HAS_ORDER,
            HAS_COLUMNS,
        )
        total += value * tl.load(weight + c * WIDTH + WIDTH - 1 - j).to(tl.float32)[None, :]
    y = total * tl.sigmoid(total)
    if NORMALIZES:
        y *= tl.rsqrt(tl.sum(y * y, 1) + EPS)[:, None] * tl.where(h < K, scale, 1.0)
    tl.store(out + t[:, None] * C + c[None, :], y.to(out.dtype.element_ty), inside[:, None])


@triton.jit
def convolve_back_kernel(
    x,
    order,
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
    HAS_ORDER: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
):
    """Compute the gradient before silu, and a part of the weight's gradient, of one head.

    Program p takes every num_programs-th piece; a piece is ROWS tokens of one of the M chunks.
    grad: tokens x (heads x GROUPS) x SIZE, GROUPS gradients of a head to be summed. With NORMALIZES
    the head was normalized and multiplied by `scale`.
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
        x0 = _shifted(
            x,
            order,
            columns,
            t,
            at,
            0,
            owner,
            inside,
            c,
            row_stride,
            C,
            WIDTH,
            HAS_ORDER,
            HAS_COLUMNS,
        )
        x1 = _shifted(
            x,
            order,
            columns,
            t,
            at,
            1,
            owner,
            inside,
            c,
            row_stride,
            C,
            WIDTH,
            HAS_ORDER,
            HAS_COLUMNS,
        )
        x2 = _shifted(
            x,
            order,
            columns,
            t,
            at,
            2,
            owner,
            inside,
            c,
            row_stride,
            C,
            WIDTH,
            HAS_ORDER,
            HAS_COLUMNS,
        )
        x3 = _shifted(
            x,
            order,
            columns,
            t,
            at,
            3,
            owner,
            inside,
            c,
            row_stride,
            C,
            WIDTH,
            HAS_ORDER,
            HAS_COLUMNS,
        )
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
    order,
    weight,
    chunks,
    boundaries,
    grad_after,
    grad_x,
    row_stride,
    C,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_AFTER: tl.constexpr,
):
    """Compute the gradient of the convolution's inputs, of one chunk and BLOCK channels."""
    i = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = c < C
    first = tl.load(chunks + i * TABLE).to(tl.int64)
    owner = tl.load(chunks + i * TABLE + 2).to(tl.int64)
    end = tl.load(boundaries + owner + 1)
    r = tl.arange(0, CHUNK)
    t = first + r
    inside = r < tl.load(chunks + i * TABLE + 1)
    seen = inside[:, None] & real[None, :]
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
    place = source_rows(order, t, inside, HAS_ORDER)[:, None] * row_stride + c[None, :]
    tl.store(grad_x + place, total.to(grad_x.dtype.element_ty), seen)


@triton.jit
def columns_kernel(
    x,
    order,
    columns,
    boundaries,
    after,
    row_stride,
    C,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
):
    """Copy the last WIDTH - 1 inputs of one sequence, BLOCK channels."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(boundaries + n), tl.load(boundaries + n + 1)
    for i in tl.static_range(WIDTH - 1):
        t = end - (WIDTH - 1) + i
        row = source_rows(order, t, t >= start, HAS_ORDER)
        value = tl.load(x + row * row_stride + c, (c < C) & (t >= start), other=0.0)
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
    """Compute the gradient of the columns before one sequence, BLOCK channels."""
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
    o,
    z,
    order,
    weight,
    out,
    eps,
    row_stride,
    rows,
    V: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    """Compute norm(o) * weight * silu(z) of ROWS rows, each of a token and value head.

    z and the outputs are in the order of the flat axis.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    f = tl.arange(0, F)
    seen = (row < rows)[:, None]
    value = tl.load(o + row[:, None] * F + f[None, :], seen, other=0.0).to(tl.float32)
    source = source_rows(order, row // V, row < rows, HAS_ORDER)
    place = source[:, None] * row_stride + (row % V)[:, None] * F + f[None, :]
    gate = tl.load(z + place, seen, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, 1) / F + eps)[:, None]
    y = value * rstd * tl.load(weight + f).to(tl.float32)[None, :] * gate * tl.sigmoid(gate)
    place = (source * V + row % V)[:, None] * F + f[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), seen)


@triton.jit
def gated_norm_back_kernel(
    o,
    z,
    order,
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
    HAS_ORDER: tl.constexpr,
):
    """Compute the gradients of `gated_norm_kernel`; `grad_weight` has a part from each program."""
    f = tl.arange(0, F)
    scale = tl.load(weight + f).to(tl.float32)[None, :]
    of_weight = tl.zeros([F], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        seen = (row < rows)[:, None]
        own = row[:, None] * F + f[None, :]
        value = tl.load(o + own, seen, other=0.0).to(tl.float32)
        source = source_rows(order, row // V, row < rows, HAS_ORDER)
        place = (source * V + row % V)[:, None] * F + f[None, :]
        change = tl.load(grad + place, seen, other=0.0).to(tl.float32)
        place = source[:, None] * row_stride + (row % V)[:, None] * F + f[None, :]
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


def run_plan(
    projected_TO: Tensor, heads: DeltaHeads, plan: ForwardPlan, before: DeltaState | None
) -> tuple[Tensor, DeltaState, DeltaState | None]:
    """Compute a layer's mixer as `delta_rule.run_plan` says."""
    weights = (heads.conv_C1W, heads.decay_V, heads.bias_V, heads.norm_F)
    columns, matrices = (None, None) if before is None else before.tensors
    out, *states = _Mix.apply(  # type: ignore[no-untyped-call]
        projected_TO, *weights, columns, matrices, heads.shape, heads.eps, plan
    )
    last = DeltaState(*states[2:]) if plan.rest is not None else None
    return out, DeltaState(*states[:2]), last


class _Mix(torch.autograd.Function):
    """All sequences of a plan: first those without a prefix, then their continuations.

    Inputs and outputs are on the flat axis; arrays in between are in the plan's order.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, projected, conv, decay, bias, norm, columns, matrices, shape, eps, plan
    ):
        projected, conv = projected.contiguous(), conv.contiguous()
        columns = None if columns is None else columns.to(projected.dtype).contiguous()
        matrices = None if matrices is None else matrices.contiguous()
        count, V = len(plan.order_T), shape.value_heads
        tokens = Tokens(
            projected.new_empty(count, shape.channels),
            projected.new_empty(count, V, shape.key_size),
            *(projected.new_empty(count, V, shape.value_size) for _ in range(2)),
        )
        gates = _gates_of(projected, decay, bias, shape)
        kept, states = [], []
        for level, segments in _levels(plan):
            if states:
                columns, matrices = (x.index_select(0, plan.parents_N) for x in states)
            _convolve(projected, conv, columns, shape, level, tokens.mixed)
            after, chunked = run_chunks(tokens, gates, shape, level, matrices)
            last = _last_columns(projected, columns, shape, level, segments)
            kept += [columns, matrices, *chunked]
            states += [last, after]
        order = _order_of(plan)
        has_others = count < len(projected)
        y = (projected.new_zeros if has_others else projected.new_empty)(
            len(projected), shape.outputs
        )
        gated_norm_kernel[(triton.cdiv(count * V, NORM_ROWS),)](
            tokens.out,
            projected[:, shape.channels :],
            order,
            norm,
            y,
            eps,
            projected.stride(0),
            count * V,
            V=V,
            F=shape.value_size,
            ROWS=NORM_ROWS,
            HAS_ORDER=order is not None,
            num_warps=4,
        )
        ctx.save_for_backward(projected, conv, decay, bias, norm, tokens.mixed, tokens.out, *kept)
        ctx.sizes = (shape, eps, plan)
        ctx.set_materialize_grads(False)
        return y, *states

    @staticmethod
    def backward(ctx, grad, *of_states):  # type: ignore[no-untyped-def]
        projected, conv, decay, bias, norm, mixed, out, *kept = ctx.saved_tensors
        shape, eps, plan = ctx.sizes
        count, V = len(plan.order_T), shape.value_heads
        if grad is None:
            grad = projected.new_zeros(len(projected), shape.outputs)
        has_others = count < len(projected)
        grad_projected = (torch.zeros_like if has_others else torch.empty_like)(projected)
        programs = 4 * processors()
        of_norm = norm.new_empty(programs, shape.value_size, dtype=torch.float32)
        z, grad_z = (x[:, shape.channels :] for x in (projected, grad_projected))
        order = _order_of(plan)
        w = projected.new_empty(count, V, shape.key_size)
        tokens = Tokens(mixed, w, torch.empty_like(out), torch.empty_like(out))
        gated_norm_back_kernel[(programs,)](
            out,
            z,
            order,
            norm,
            grad.contiguous(),
            tokens.out,  # its gradient from here on
            grad_z,
            of_norm,
            eps,
            projected.stride(0),
            count * V,
            V=V,
            F=shape.value_size,
            ROWS=NORM_ROWS,
            HAS_ORDER=order is not None,
            num_warps=4,
        )
        gates = _gates_of(projected, decay, bias, shape)
        grads = TokenGrads.empty(tokens)
        of_total = torch.empty_like(mixed)
        of_conv = torch.zeros_like(conv, dtype=torch.float32)
        of_columns = of_matrices = None
        levels = _levels(plan)
        for i, (level, segments) in reversed([*enumerate(levels)]):
            columns, matrices, *chunked = kept[5 * i : 5 * i + 5]
            after_columns, after_matrices = of_states[2 * i : 2 * i + 2]
            if i + 1 < len(levels):  # from the sequences that continue these
                after_columns = _add_grads(plan, after_columns, of_columns)
                after_matrices = _add_grads(plan, after_matrices, of_matrices)
            after_columns, after_matrices = (
                None if x is None else x.contiguous() for x in (after_columns, after_matrices)
            )
            of_matrices = run_chunks_back(
                tokens, gates, shape, level, matrices, Chunked(*chunked), after_matrices, grads
            )
            of_conv += _convolve_back(projected, conv, columns, shape, level, grads, of_total)
            of_columns = _inputs_back(
                of_total, conv, columns, shape, level, segments, after_columns, grad_projected
            )
        of_gates = _gates_back(gates, grads, order, grad_projected, shape)
        of_weights = (of_conv.to(conv.dtype), *of_gates, of_norm.sum(0).to(norm.dtype))
        return grad_projected, *of_weights, of_columns, of_matrices, None, None, None


def _order_of(plan: ForwardPlan) -> Tensor | None:
    return None if plan.is_in_order else plan.order_T


def _levels(plan: ForwardPlan) -> list[tuple[Level, LevelTables]]:
    """Return the sequences without a prefix, then the others, with their tables."""
    order = _order_of(plan)
    every = [one for one in (plan.first, plan.rest) if one is not None]
    return [(Level(one.chunk_table, one.sequence_table, order), one) for one in every]


def _add_grads(plan: DeltaPlan, own: Tensor | None, of_children: Tensor) -> Tensor:
    """Return the gradient of states that several sequences begin with, added in a fixed order."""
    total = (plan.children_PN @ of_children.flatten(1).float()).unflatten(1, of_children.shape[1:])
    return (total if own is None else total + own).to(of_children.dtype)


def _gates_of(projected: Tensor, decay: Tensor, bias: Tensor, shape: DeltaShape) -> Gates:
    *_, b_TV, a_TV = projected.split(shape.projection_rows, 1)
    return Gates(b_TV, a_TV, decay, bias)


def _gates_back(
    gates: Gates,
    grads: TokenGrads,
    order: Tensor | None,
    grad_projected: Tensor,
    shape: DeltaShape,
) -> tuple[Tensor, Tensor]:
    """Write the gradients of b and a; return those of the heads' decays and biases."""
    count = len(grads.g)
    b, a = (x[:count] if order is None else x.index_select(0, order) for x in gates[:2])
    beta = b.float().sigmoid()
    raw = a.float() + gates.bias_V.float()
    of_rate = grads.g * -gates.decay_V.float().exp()
    grad_raw = of_rate * raw.sigmoid()
    grad_b = grads.beta * beta * (1 - beta)
    *_, of_b, of_a = grad_projected.split(shape.projection_rows, 1)
    for target, found in ((of_b, grad_b), (of_a, grad_raw)):
        if order is None:
            target[:count].copy_(found)
        else:
            target.index_copy_(0, order, found.to(target.dtype))
    of_decay = (of_rate * torch.nn.functional.softplus(raw)).sum(0)
    return of_decay.to(gates.decay_V.dtype), grad_raw.sum(0).to(gates.bias_V.dtype)


def _convolve(
    projected: Tensor,
    conv: Tensor,
    columns: Tensor | None,
    shape: DeltaShape,
    level: Level,
    mixed: Tensor,
) -> None:
    """Fill q, k and v of a level's tokens, T x C; q and k are normalized, q is scaled."""
    of_keys = 2 * shape.key_heads
    for offset, heads, size, is_normalized in (
        (0, of_keys, shape.key_size, True),
        (of_keys * shape.key_size, shape.value_heads, shape.value_size, False),
    ):
        convolve_kernel[(len(level.chunks) * (CHUNK.value // CONV_ROWS), heads)](
            projected,
            level.order,
            conv,
            columns,
            level.chunks,
            mixed,
            projected.stride(0),
            offset,
            shape.key_size**-0.5,
            shape.key_heads,
            shape.channels,
            WIDTH=shape.conv_width,
            ROWS=CONV_ROWS,
            SIZE=size,
            NORMALIZES=is_normalized,
            HAS_ORDER=level.order is not None,
            HAS_COLUMNS=columns is not None,
            num_warps=4,
        )


def _last_columns(
    projected: Tensor,
    columns: Tensor | None,
    shape: DeltaShape,
    level: Level,
    segments: LevelTables,
) -> Tensor:
    """Return the last inputs of the convolution of each sequence."""
    last = projected.new_empty(segments.count, shape.conv_width - 1, shape.channels)
    columns_kernel[(segments.count, triton.cdiv(shape.channels, WIDE_CHANNEL_BLOCK))](
        projected,
        level.order,
        columns,
        segments.boundaries,
        last,
        projected.stride(0),
        shape.channels,
        WIDTH=shape.conv_width,
        BLOCK=WIDE_CHANNEL_BLOCK,
        HAS_ORDER=level.order is not None,
        HAS_COLUMNS=columns is not None,
        num_warps=4,
    )
    return last


def _convolve_back(
    projected: Tensor,
    conv: Tensor,
    columns: Tensor | None,
    shape: DeltaShape,
    level: Level,
    grads: TokenGrads,
    of_total: Tensor,
) -> Tensor:
    """Fill the gradients of the sums before silu, T x C; return that of the weight, float32."""
    programs = min(len(level.chunks) * (CHUNK.value // CONV_BACK_ROWS), WEIGHT_PROGRAMS)
    of_weight = conv.new_empty(programs, *conv.shape, dtype=torch.float32)
    K, groups = shape.key_heads, shape.value_heads // shape.key_heads
    keys = K * shape.key_size
    parts = (
        (grads.q, 0, K, shape.key_size, groups, True, shape.key_size**-0.5),
        (grads.k, keys, K, shape.key_size, groups, True, 1.0),
        (grads.v, 2 * keys, shape.value_heads, shape.value_size, 1, False, 1.0),
    )
    for grad, offset, heads, size, summed, is_normalized, scale in parts:
        convolve_back_kernel[(programs, heads)](
            projected,
            level.order,
            conv,
            columns,
            level.chunks,
            grad,
            of_total,
            of_weight,
            projected.stride(0),
            offset,
            scale,
            shape.channels,
            len(level.chunks),
            GROUPS=summed,
            WIDTH=shape.conv_width,
            ROWS=CONV_BACK_ROWS,
            SIZE=size,
            NORMALIZES=is_normalized,
            HAS_ORDER=level.order is not None,
            HAS_COLUMNS=columns is not None,
            num_warps=2,
        )
    return of_weight.sum(0)


def _inputs_back(
    of_total: Tensor,
    conv: Tensor,
    columns: Tensor | None,
    shape: DeltaShape,
    level: Level,
    segments: LevelTables,
    grad_after: Tensor | None,
    grad_projected: Tensor,
) -> Tensor | None:
    """Write the gradient of the convolution's inputs; return that of the columns before sequences."""
    sizes = {"WIDTH": shape.conv_width, "HAS_AFTER": grad_after is not None}
    input_grad_kernel[(len(level.chunks), triton.cdiv(shape.channels, CHANNEL_BLOCK))](
        of_total,
        level.order,
        conv,
        level.chunks,
        segments.boundaries,
        grad_after,
        grad_projected,
        grad_projected.stride(0),
        shape.channels,
        BLOCK=CHANNEL_BLOCK,
        HAS_ORDER=level.order is not None,
        **sizes,
        num_warps=4,
    )
    if columns is None:
        return None
    of_columns = torch.empty_like(columns)
    columns_grad_kernel[(segments.count, triton.cdiv(shape.channels, WIDE_CHANNEL_BLOCK))](
        of_total,
        conv,
        segments.boundaries,
        grad_after,
        of_columns,
        shape.channels,
        BLOCK=WIDE_CHANNEL_BLOCK,
        **sizes,
        num_warps=4,
    )
    return of_columns


# ------------------------------------------------------------------------------------------------- a decode step


@triton.jit
def _newest(x, columns, weight, c, C, WIDTH: tl.constexpr, writes):
    """Return silu(convolution) of the newest token; move the columns by one if `writes`."""
    value = tl.load(x + c)
    total = value.to(tl.float32) * tl.load(weight + c * WIDTH + WIDTH - 1).to(tl.float32)
    for j in tl.static_range(1, WIDTH):
        before = tl.load(columns + (WIDTH - 1 - j) * C + c)
        total += before.to(tl.float32) * tl.load(weight + c * WIDTH + WIDTH - 1 - j).to(tl.float32)
    for j in tl.static_range(1, WIDTH - 1):  # the oldest is dropped
        moved = tl.load(columns + j * C + c)
        tl.debug_barrier()  # several threads have the same column: all read before one writes
        tl.store(columns + (j - 1) * C + c, moved, mask=writes)
    tl.debug_barrier()
    tl.store(columns + (WIDTH - 2) * C + c, value.to(columns.dtype.element_ty), mask=writes)
    return (total * tl.sigmoid(total)).to(value.dtype).to(tl.float32)


@triton.jit
def decode_delta_kernel(
    projected,
    weight,
    decay,
    bias,
    norm,
    columns,
    matrices,
    active,
    state,
    out,
    eps,
    scale,
    row_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one token of sequence active[n], for one key head and the value heads that it serves."""
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e, f = tl.arange(0, E), tl.arange(0, F)
    C: tl.constexpr = 2 * K * E + V * F
    wait(PDL)
    slot = tl.load(active + n)
    is_running = tl.load(state + slot * FIELDS + DONE) == 0
    # Load the matrix first: it is most of the bytes.
    place = matrices + ((slot * V + h * (V // K)) * E + e[:, None]) * F + f[None, :]
    matrix = tl.load(place)
    x = projected + n * row_stride
    own = columns + slot * (WIDTH - 1) * C
    q = _newest(x, own, weight, h * E + e, C, WIDTH, is_running)
    k = _newest(x, own, weight, (K + h) * E + e, C, WIDTH, is_running)
    q = q * tl.rsqrt(tl.sum(q * q) + EPS) * scale
    k = k * tl.rsqrt(tl.sum(k * k) + EPS)
    for g in tl.static_range(V // K):
        head = h * (V // K) + g
        if g > 0:
            place = matrices + ((slot * V + head) * E + e[:, None]) * F + f[None, :]
            matrix = tl.load(place)
        v = _newest(x, own, weight, 2 * K * E + head * F + f, C, WIDTH, is_running)
        gate = tl.load(x + C + head * F + f).to(tl.float32)
        b = tl.load(x + C + V * F + head).to(tl.float32)
        raw = tl.load(x + C + V * F + V + head).to(tl.float32)
        raw += tl.load(bias + head).to(tl.float32)
        soft = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
        matrix *= tl.exp(-tl.exp(tl.load(decay + head).to(tl.float32)) * soft)
        change = (v - tl.sum(matrix * k[:, None], 0)) * tl.sigmoid(b)
        matrix += k[:, None] * change[None, :]
        tl.store(place, matrix, mask=is_running)
        o = tl.sum(matrix * q[:, None], 0)
        o *= tl.rsqrt(tl.sum(o * o) / F + eps) * tl.load(norm + f).to(tl.float32)
        y = o * gate * tl.sigmoid(gate)
        tl.store(out + (n * V + head) * F + f, y.to(out.dtype.element_ty))


def decode_delta(
    projected_BO: Tensor, heads: DeltaHeads, store: DeltaState, active_B: Tensor, state: Tensor
) -> Tensor:
    """Compute one new token of each sequence `active_B`, and update its state in place."""
    shape = heads.shape
    out = projected_BO.new_empty(len(projected_BO), shape.outputs)
    decode_delta_kernel[(len(projected_BO), shape.key_heads)](
        projected_BO,
        heads.conv_C1W,
        heads.decay_V,
        heads.bias_V,
        heads.norm_F,
        *store.tensors,
        active_B,
        state,
        out,
        heads.eps,
        shape.key_size**-0.5,
        projected_BO.stride(0),
        K=shape.key_heads,
        V=shape.value_heads,
        E=shape.key_size,
        F=shape.value_size,
        WIDTH=shape.conv_width,
        **options(4),
    )
    return out
