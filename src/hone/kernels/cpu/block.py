"""Both halves of a block as they are trained, each in one call going forward and one going back.

    x ─ add, norm ─ qkv ─ heads ─ attention ─► mixed                       mix
    x, mixed ─ out ─ add, norm ─ gate_up ─ swiglu ─ down ─► delta          feed

They call the kernels that take one step each, so every number has the same bits. What they save is the time between
kernels: Python's, and that of threads which fall asleep when nothing follows at once and have to be woken.

All tensors are addresses of dense float32 memory. `one` is a number of 64 bits, where a literal 1 would have kernels
compiled for it once more. T tokens, D hidden, H query and K key heads of E, F feed-forward.
"""

import numpy as np

from hone.kernels.cpu import attention, sequence
from hone.kernels.cpu.products import multiply, multiply_transposed
from hone.kernels.cpu.rows import (
    add_norm_backward,
    add_norm_forward,
    norm_rope_backward,
    norm_rope_forward,
    swiglu_backward,
    swiglu_forward,
)

FLOAT = 4  # bytes


@sequence
def mix_forward(
    T, D, H, K, E, eps, x, delta, norm, weight, q_scale, k_scale, cos, sin, sequences, groups, total, normed, rstd,
    qkv, heads, heads_rstd, mixed, logsum,
):  # fmt: skip
    """total T x D (x + delta; unused where delta is 0), normed T x D, rstd T, qkv T x (H + 2K) x E, heads T x (H + K) x
    E and heads_rstd of queries and keys, mixed T x H x E, logsum T x H."""
    N, Q, one = (H + 2 * K) * E, (H + K) * E, np.int64(1)
    add_norm_forward(T, D, x, delta, eps, norm, total, normed, rstd)
    multiply(T, N, D, normed, D, one, weight, one, D, qkv)
    norm_rope_forward(T, H, K, E, qkv, q_scale, k_scale, cos, sin, eps, heads, heads_rstd)
    values = qkv + Q * FLOAT
    attention.forward(H, K, E, heads, Q, heads + H * E * FLOAT, Q, values, N, sequences, groups, mixed, logsum)


@sequence
def mix_backward(
    T, D, H, K, E, threads, grad_total, grad_mixed, total, norm, rstd, normed, weight, qkv, q_scale, k_scale, cos, sin,
    heads, heads_rstd, mixed, logsum, sequences, groups, of_q, of_k, of_v, of_qkv, of_normed, of_x, of_norm, of_scales,
    of_weight,
):  # fmt: skip
    """of_x T x D, of_weight as the weight, of_norm and of_scales in parts (`rows.py`)."""
    N, Q, one = (H + 2 * K) * E, (H + K) * E, np.int64(1)
    keys, values = heads + H * E * FLOAT, qkv + Q * FLOAT
    attention.backward(
        H, K, E, grad_mixed, mixed, heads, Q, keys, Q, values, N, sequences, groups, logsum, of_q, of_k, of_v
    )
    norm_rope_backward(T, H, K, E, of_q, of_k, of_v, qkv, q_scale, k_scale, cos, sin, heads_rstd, of_qkv, of_scales)
    multiply(T, D, N, of_qkv, N, one, weight, D, one, of_normed)
    multiply_transposed(N, D, T, of_qkv, N, normed, D, threads, of_weight)
    add_norm_backward(T, D, of_normed, grad_total, total, norm, rstd, of_x, of_norm)


@sequence
def feed_forward(
    T, D, A, F, eps, x, mixed, out, norm, gate_up, down, added, total, normed, rstd, hidden, active, delta
):
    """A = H E. added, total, normed and delta T x D, rstd T, hidden T x 2F, active T x F."""
    one = np.int64(1)
    multiply(T, D, A, mixed, A, one, out, one, A, added)
    add_norm_forward(T, D, x, added, eps, norm, total, normed, rstd)
    multiply(T, 2 * F, D, normed, D, one, gate_up, one, D, hidden)
    swiglu_forward(T, F, hidden, active)
    multiply(T, D, F, active, F, one, down, one, F, delta)


@sequence
def feed_backward(
    T, D, A, F, threads, grad_total, grad, mixed, out, norm, total, normed, rstd, gate_up, hidden, active, down,
    of_active, of_hidden, of_normed, of_x, of_mixed, of_out, of_norm, of_gate_up, of_down,
):  # fmt: skip
    """of_x T x D, of_mixed T x A, gradients of weights as these; of_norm in parts."""
    one = np.int64(1)
    multiply(T, F, D, grad, D, one, down, F, one, of_active)
    multiply_transposed(D, F, T, grad, D, active, F, threads, of_down)
    swiglu_backward(T, F, of_active, hidden, of_hidden)
    multiply(T, D, 2 * F, of_hidden, 2 * F, one, gate_up, D, one, of_normed)
    multiply_transposed(2 * F, D, T, of_hidden, 2 * F, normed, D, threads, of_gate_up)
    add_norm_backward(T, D, of_normed, grad_total, total, norm, rstd, of_x, of_norm)
    multiply(T, A, D, of_x, D, one, out, A, one, of_mixed)
    multiply_transposed(D, A, T, of_x, D, mixed, A, threads, of_out)
