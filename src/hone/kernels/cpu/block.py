"""Compute each half of a transformer block in training with one call forward and one backward.

    x ─ add, norm ─ qkv ─ heads ─ attention ─► mixed                       mix
    x, mixed ─ out ─ add, norm ─ gate_up ─ swiglu ─ down ─► delta          feed

A task (one iteration of a parallel loop) computes consecutive steps for a few rows, so that
intermediate values stay in a core's cache. Attention and the gradients of weights need all rows, so
they have tasks of their own. Results have the same bits as those of the kernels that compute one
step each.

All tensors are passed as addresses of dense float32 memory. The variable `one` is a 64-bit 1: a
literal 1 has another type, for which numba would compile the kernels again. Dimensions: T tokens, D
hidden, H query heads and K key heads of size E, F feed-forward.
"""

import numpy as np
from numba import prange

from hone.kernels.cpu import attention
from hone.kernels.cpu.compiling import compiled, inlined, sequence
from hone.kernels.cpu.products import LINE, WIDTH, multiply_rows, multiply_transposed, packed_panels
from hone.kernels.cpu.row_kernels import (
    add_norm_rows,
    add_norm_rows_backward,
    add_row,
    blocks_of,
    bounds,
    norm_rope_rows,
    norm_rope_rows_backward,
    swiglu_row,
    swiglu_row_backward,
)
from hone.kernels.cpu.simd import prefetch

FLOAT = 4  # bytes


@inlined
def times(top, end, N, K, a, packed, out, out_first):
    """Multiply rows top … end - 1 of A (K columns) by a packed B (N columns).

    The first row of `out` is row `out_first` of the result.
    """
    multiply_rows(top, end, 0, (N + WIDTH - 1) // WIDTH, N, K, a, K, packed, out, out_first)


@inlined
def ask_for_rows(top, end, N, x):
    """Prefetch rows top … end - 1 of x (N columns), one row after the other.

    The matrix product that follows reads several rows at once.
    """
    for i in range(top * N, end * N, LINE):
        prefetch(x, i)


@compiled
def heads_of_rows(
    T,
    D,
    H,
    K,
    E,
    eps,
    x,
    delta,
    norm,
    weight,
    q_scale,
    k_scale,
    cos,
    sin,
    sums,
    normed,
    rstd,
    qkv,
    heads,
    heads_rstd,
):
    eps = np.float32(eps)
    for part in prange(blocks_of(T)):
        top, end = bounds(part, T)
        add_norm_rows(top, end, D, x, delta, eps, norm, sums, normed, rstd)
        times(top, end, (H + 2 * K) * E, D, normed, weight, qkv, 0)
        norm_rope_rows(top, end, H, K, E, qkv, q_scale, k_scale, cos, sin, eps, heads, heads_rstd)


@sequence
def mix_forward(
    T,
    D,
    H,
    K,
    E,
    eps,
    x,
    delta,
    norm,
    weight,
    q_scale,
    k_scale,
    cos,
    sin,
    sequences,
    groups,
    total,
    normed,
    rstd,
    qkv,
    heads,
    heads_rstd,
    mixed,
    logsum,
):
    """Compute the attention half of a transformer block, before the output projection.

    Outputs: total (T x D) (x + delta; not written if the address `delta` is 0), normed (T x D), rstd T,
    qkv (T x (H + 2K) x E), heads (T x (H + K) x E) (queries and keys after norm and rotary positions),
    heads_rstd (T x (H + K)), mixed (T x H x E) (attention outputs), logsum (T x H).
    """
    N, Q, one = (H + 2 * K) * E, (H + K) * E, np.int64(1)
    panels = packed_panels(N, D, weight, one, D)
    heads_of_rows(
        T,
        D,
        H,
        K,
        E,
        eps,
        x,
        delta,
        norm,
        panels,
        q_scale,
        k_scale,
        cos,
        sin,
        total,
        normed,
        rstd,
        qkv,
        heads,
        heads_rstd,
    )
    values = qkv + Q * FLOAT
    attention.forward(
        H, K, E, heads, Q, heads + H * E * FLOAT, Q, values, N, sequences, groups, mixed, logsum
    )


@compiled
def heads_of_rows_backward(
    T,
    D,
    H,
    K,
    E,
    of_q,
    of_k,
    of_v,
    grad_total,
    total,
    norm,
    rstd,
    weight,
    qkv,
    q_scale,
    k_scale,
    cos,
    sin,
    heads_rstd,
    of_qkv,
    of_x,
    of_norm,
    of_scales,
):
    N = (H + 2 * K) * E
    for part in prange(blocks_of(T)):
        top, end = bounds(part, T)
        of_normed = np.empty((end - top) * D, np.float32)
        norm_rope_rows_backward(
            top,
            end,
            H,
            K,
            E,
            of_q,
            of_k,
            of_v,
            qkv,
            q_scale,
            k_scale,
            cos,
            sin,
            heads_rstd,
            of_qkv,
            of_scales,
            part * 2 * E,
        )
        times(top, end, D, N, of_qkv, weight, of_normed, top)
        add_norm_rows_backward(
            top, end, D, of_normed, 0, grad_total, total, norm, rstd, of_x, of_norm, part * D
        )


@sequence
def mix_backward(
    T,
    D,
    H,
    K,
    E,
    threads,
    grad_total,
    grad_mixed,
    total,
    norm,
    rstd,
    normed,
    weight,
    qkv,
    q_scale,
    k_scale,
    cos,
    sin,
    heads,
    heads_rstd,
    mixed,
    logsum,
    sequences,
    groups,
    of_q,
    of_k,
    of_v,
    of_qkv,
    of_x,
    of_norm,
    of_scales,
    of_weight,
):
    """Compute the gradients of the attention half from those of `total` and `mixed`.

    Outputs, all gradients: of_x (T x D), of_weight, and of_norm and of_scales as partial sums, one
    per block of rows, that the caller adds. of_q to of_qkv are scratch memory.
    """
    N, Q, one = (H + 2 * K) * E, (H + K) * E, np.int64(1)
    keys, values = heads + H * E * FLOAT, qkv + Q * FLOAT
    attention.backward(
        H,
        K,
        E,
        grad_mixed,
        mixed,
        heads,
        Q,
        keys,
        Q,
        values,
        N,
        sequences,
        groups,
        logsum,
        of_q,
        of_k,
        of_v,
    )
    panels = packed_panels(D, N, weight, D, one)
    heads_of_rows_backward(
        T,
        D,
        H,
        K,
        E,
        of_q,
        of_k,
        of_v,
        grad_total,
        total,
        norm,
        rstd,
        panels,
        qkv,
        q_scale,
        k_scale,
        cos,
        sin,
        heads_rstd,
        of_qkv,
        of_x,
        of_norm,
        of_scales,
    )
    multiply_transposed(N, D, T, of_qkv, N, normed, D, threads, of_weight)


@compiled
def feed_rows(
    T, D, A, F, eps, x, mixed, out, norm, gate_up, down, total, normed, rstd, hidden, active, delta
):
    eps = np.float32(eps)
    for part in prange(blocks_of(T)):
        top, end = bounds(part, T)
        ask_for_rows(top, end, A, mixed)
        times(top, end, D, A, mixed, out, total, 0)
        add_row(total, top * D, x, top * D, (end - top) * D, total, top * D)
        add_norm_rows(top, end, D, total, 0, eps, norm, total, normed, rstd)
        times(top, end, 2 * F, D, normed, gate_up, hidden, 0)
        for t in range(top, end):
            swiglu_row(hidden, 2 * t * F, F, active, t * F)
        times(top, end, D, F, active, down, delta, 0)


@sequence
def feed_forward(
    T, D, A, F, eps, x, mixed, out, norm, gate_up, down, total, normed, rstd, hidden, active, delta
):
    """Compute the second half of a block: output projection, norm and feed-forward.

    A = H E. mixed (T x A); total, normed, delta (T x D); hidden T x 2F; active (T x F).
    """
    one = np.int64(1)
    weights = (
        packed_panels(D, A, out, one, A),
        packed_panels(2 * F, D, gate_up, one, D),
        packed_panels(D, F, down, one, F),
    )
    feed_rows(
        T,
        D,
        A,
        F,
        eps,
        x,
        mixed,
        weights[0],
        norm,
        weights[1],
        weights[2],
        total,
        normed,
        rstd,
        hidden,
        active,
        delta,
    )


@compiled
def feed_rows_backward(
    T,
    D,
    A,
    F,
    grad_total,
    grad,
    out,
    norm,
    total,
    rstd,
    gate_up,
    hidden,
    down,
    of_hidden,
    of_x,
    of_mixed,
    of_norm,
):
    for part in prange(blocks_of(T)):
        top, end = bounds(part, T)
        of_active, of_normed = (
            np.empty((end - top) * F, np.float32),
            np.empty((end - top) * D, np.float32),
        )
        ask_for_rows(top, end, D, grad)
        times(top, end, F, D, grad, down, of_active, top)
        for t in range(top, end):
            swiglu_row_backward(F, of_active, (t - top) * F, hidden, 2 * t * F, of_hidden)
        times(top, end, D, 2 * F, of_hidden, gate_up, of_normed, top)
        add_norm_rows_backward(
            top, end, D, of_normed, 0, grad_total, total, norm, rstd, of_x, of_norm, part * D
        )
        times(top, end, A, D, of_x, out, of_mixed, 0)


@sequence
def feed_backward(
    T,
    D,
    A,
    F,
    threads,
    grad_total,
    grad,
    mixed,
    out,
    norm,
    total,
    normed,
    rstd,
    gate_up,
    hidden,
    active,
    down,
    of_hidden,
    of_x,
    of_mixed,
    of_out,
    of_norm,
    of_gate_up,
    of_down,
):
    """Compute the gradients of `feed_forward` from those of `total` and `delta`.

    Outputs, all gradients: of_x (T x D), of_mixed (T x A), those of the weight matrices, and of_norm as
    partial sums, one per block of rows, that the caller adds.
    """
    one = np.int64(1)
    weights = (
        packed_panels(A, D, out, A, one),
        packed_panels(D, 2 * F, gate_up, D, one),
        packed_panels(F, D, down, F, one),
    )
    feed_rows_backward(
        T,
        D,
        A,
        F,
        grad_total,
        grad,
        weights[0],
        norm,
        total,
        rstd,
        weights[1],
        hidden,
        weights[2],
        of_hidden,
        of_x,
        of_mixed,
        of_norm,
    )
    multiply_transposed(D, F, T, grad, D, active, F, threads, of_down)
    multiply_transposed(2 * F, D, T, of_hidden, 2 * F, normed, D, threads, of_gate_up)
    multiply_transposed(D, A, T, of_x, D, mixed, A, threads, of_out)
