"""Norms, rotary positions and SwiGLU: all work on a row in one pass.

The gradient of a norm's weight is computed as partial sums, one per block of rows, that are added
in order. The result therefore does not depend on the number of threads.
"""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hone.kernels.cpu.compiling import compiled, inlined
from hone.kernels.cpu.products import BLOCK_M, ROWS
from hone.kernels.cpu.simd import (
    LANES,
    add,
    divide,
    exp,
    get,
    load,
    multiply,
    multiply_add,
    put,
    splat,
    store,
    total,
)

_f = np.float32


@inlined
def block_of(T):
    """Return the rows per block: BLOCK_M, or fewer if there would be fewer than about 16 blocks."""
    return max(ROWS, min(BLOCK_M, T // 16 // ROWS * ROWS))


@inlined
def blocks_of(T):
    return (T + block_of(T) - 1) // block_of(T)


@inlined
def bounds(part, T):
    """Return the first row of block `part`, and the row after its last."""
    return part * block_of(T), min(T, (part + 1) * block_of(T))


def parts(T: int) -> int:
    """Return the number of blocks of T rows, each with a partial sum of a weight's gradient."""
    return -(-T // int(block_of.py_func(T)))


def added_up(parts: Tensor) -> Tensor:
    """Sum a tensor over its first dimension, in order.

    For few terms, numpy does this ten times faster than torch.
    """
    return torch.from_numpy(parts.numpy().sum(axis=0))


@inlined
def _whole(n):
    """Return how many of n numbers fill whole vectors."""
    return n // LANES * LANES


@inlined
def _rstd(x, at, n, eps):
    """Return 1 / sqrt(mean of squares + eps) of n numbers."""
    sums = splat(_f(0))
    for i in range(at, at + _whole(n), LANES):
        sums = multiply_add(load(x, i), load(x, i), sums)
    squares = total(sums)
    for i in range(at + _whole(n), at + n):
        squares += get(x, i) * get(x, i)
    return _f(1) / np.sqrt(squares / _f(n) + eps)


@inlined
def add_row(x, at, delta, delta_at, n, out, out_at):
    """Compute out = x + delta over n numbers; `out` may be x or delta."""
    for i in range(0, _whole(n), LANES):
        store(out, out_at + i, add(load(x, at + i), load(delta, delta_at + i)))
    for i in range(_whole(n), n):
        put(out, out_at + i, get(x, at + i) + get(delta, delta_at + i))


@inlined
def norm_row(x, at, D, eps, weight, out, out_at):
    """Compute out = x * rstd * weight of the D numbers at `at`; return rstd."""
    r = _rstd(x, at, D, eps)
    for d in range(0, _whole(D), LANES):
        store(out, out_at + d, multiply(multiply(load(x, at + d), splat(r)), load(weight, d)))
    for d in range(_whole(D), D):
        put(out, out_at + d, get(x, at + d) * r * get(weight, d))
    return r


@inlined
def norm_rope_head(x, at, E, scale, cos, sin, turn, eps, out, out_at):
    """Apply RMS norm, scale and rotary position to one head of E numbers; return its rstd.

    If the address `scale` is 0, only rotate the head, and return 1.
    """
    half, r = E // 2, _f(1) if scale == 0 else _rstd(x, at, E, eps)
    for e in range(0, _whole(half), LANES):
        first, second = load(x, at + e), load(x, at + half + e)
        if scale != 0:
            first = multiply(multiply(first, splat(r)), load(scale, e))
            second = multiply(multiply(second, splat(r)), load(scale, half + e))
        across = multiply(second, load(sin, turn + e)), multiply(first, load(sin, turn + half + e))
        store(out, out_at + e, multiply_add(first, load(cos, turn + e), across[0]))
        store(out, out_at + half + e, multiply_add(second, load(cos, turn + half + e), across[1]))
    for e in range(_whole(half), half):
        one, two = get(x, at + e), get(x, at + half + e)
        if scale != 0:
            one, two = one * r * get(scale, e), two * r * get(scale, half + e)
        put(out, out_at + e, one * get(cos, turn + e) + two * get(sin, turn + e))
        put(
            out,
            out_at + half + e,
            two * get(cos, turn + half + e) + one * get(sin, turn + half + e),
        )
    return r


@inlined
def swiglu_row(gate_up, at, F, out, out_at):
    """Compute out = silu(gate) * up of F gates at `at` and the F ups after them."""
    for f in range(0, _whole(F), LANES):
        x = load(gate_up, at + f)
        silu = divide(x, add(splat(_f(1)), exp(multiply(x, splat(_f(-1))))))
        store(out, out_at + f, multiply(silu, load(gate_up, at + F + f)))
    for f in range(_whole(F), F):
        one = get(gate_up, at + f)
        put(out, out_at + f, one / (_f(1) + exp(-one)) * get(gate_up, at + F + f))


# ------------------------------------------------------------------------------------------- rows of a block


@inlined
def add_norm_rows(top, end, D, x, delta, eps, weight, sums, out, rstd):
    """Compute sums = x + delta and out = sums * rstd * weight for rows top … end - 1.

    If the address `delta` is 0, x itself is normalized and `sums` is not written.
    """
    for t in range(top, end):
        if delta != 0:
            add_row(x, t * D, delta, t * D, D, sums, t * D)
        put(rstd, t, norm_row(sums if delta != 0 else x, t * D, D, eps, weight, out, t * D))


@inlined
def add_norm_rows_backward(
    top, end, D, grad, grad_at, grad_sums, sums, weight, rstd, grad_x, grad_weight, at
):
    """Compute gradients of rows top … end - 1 of x (and delta), and of the weight over them.

    The weight's gradient, summed over these rows, goes to D numbers of grad_weight from `at` on.
    grad: gradient of the normalized rows, which for row `top` begins at `grad_at`. grad_sums:
    gradient of `sums`, or 0 if there is none.
    """
    of_weight, whole = np.zeros(D, np.float32), _whole(D)
    for t in range(top, end):
        g_at, row, r = grad_at + (t - top) * D, t * D, get(rstd, t)
        products = splat(_f(0))
        for d in range(0, whole, LANES):
            products = multiply_add(
                multiply(load(grad, g_at + d), load(weight, d)), load(sums, row + d), products
            )
        inner = total(products)
        for d in range(whole, D):
            inner += get(grad, g_at + d) * get(weight, d) * get(sums, row + d)
        inner *= -r * r / _f(D)
        for d in range(0, whole, LANES):
            g, x = load(grad, g_at + d), load(sums, row + d)
            of_x = multiply(multiply_add(x, splat(inner), multiply(g, load(weight, d))), splat(r))
            store(of_weight, d, multiply_add(multiply(g, x), splat(r), load(of_weight, d)))
            store(grad_x, row + d, add(of_x, load(grad_sums, row + d)) if grad_sums != 0 else of_x)
        for d in range(whole, D):
            one, value = get(grad, g_at + d), get(sums, row + d)
            of_one = (one * get(weight, d) + value * inner) * r
            put(of_weight, d, get(of_weight, d) + one * value * r)
            put(grad_x, row + d, of_one + get(grad_sums, row + d) if grad_sums != 0 else of_one)
    for d in range(D):
        put(grad_weight, at + d, get(of_weight, d))


@inlined
def norm_rope_rows(top, end, H, K, E, qkv, q_scale, k_scale, cos, sin, eps, out, rstd):
    """Normalize, scale and rotate the query and key heads of rows top … end.

    These are the first H + K heads of qkv (T x (H + 2K) x E); out is T x (H + K) x E.
    """
    for t in range(top, end):
        for n in range(H + K):
            x, y = (t * (H + 2 * K) + n) * E, (t * (H + K) + n) * E
            scale = q_scale if n < H else k_scale
            put(
                rstd,
                t * (H + K) + n,
                norm_rope_head(qkv, x, E, scale, cos, sin, t * E, eps, out, y),
            )


@inlined
def norm_rope_rows_backward(
    top,
    end,
    H,
    K,
    E,
    grad_q,
    grad_k,
    grad_v,
    qkv,
    q_scale,
    k_scale,
    cos,
    sin,
    rstd,
    grad_qkv,
    grad_scales,
    at,
):
    """Compute gradients of rows top … end - 1 of qkv, and of both scales over these rows.

    qkv: T x (H + 2K) x E. The gradients of the scales go to 2 x E numbers of grad_scales from `at`
    on.
    """
    half = E // 2
    whole, turned, of_scales = _whole(half), np.empty(E, np.float32), np.zeros(2 * E, np.float32)
    for t in range(top, end):
        turn = t * E
        for n in range(H + K):
            is_k = n >= H
            grad, g = (grad_k, (t * K + n - H) * E) if is_k else (grad_q, (t * H + n) * E)
            scale, of_scale = (k_scale, E) if is_k else (q_scale, 0)
            x, r = (t * (H + 2 * K) + n) * E, get(rstd, t * (H + K) + n)
            for e in range(0, whole, LANES):  # back by the same angle: sines count the other way
                first, second = load(grad, g + e), load(grad, g + half + e)
                less = (
                    multiply(load(sin, turn + e), splat(_f(-1))),
                    multiply(load(sin, turn + half + e), splat(_f(-1))),
                )
                store(
                    turned, e, multiply_add(first, load(cos, turn + e), multiply(second, less[0]))
                )
                store(
                    turned,
                    half + e,
                    multiply_add(second, load(cos, turn + half + e), multiply(first, less[1])),
                )
            for e in range(whole, half):
                one, two = get(grad, g + e), get(grad, g + half + e)
                put(turned, e, one * get(cos, turn + e) - two * get(sin, turn + e))
                put(
                    turned,
                    half + e,
                    two * get(cos, turn + half + e) - one * get(sin, turn + half + e),
                )
            products = splat(_f(0))
            for e in range(0, _whole(E), LANES):
                products = multiply_add(
                    multiply(load(turned, e), load(scale, e)), load(qkv, x + e), products
                )
            inner = total(products)
            for e in range(_whole(E), E):
                inner += get(turned, e) * get(scale, e) * get(qkv, x + e)
            inner *= -r * r / _f(E)
            for e in range(0, _whole(E), LANES):
                here, value = load(turned, e), load(qkv, x + e)
                there = of_scale + e
                store(
                    of_scales,
                    there,
                    multiply_add(multiply(here, value), splat(r), load(of_scales, there)),
                )
                of_x = multiply_add(value, splat(inner), multiply(here, load(scale, e)))
                store(grad_qkv, x + e, multiply(of_x, splat(r)))
            for e in range(_whole(E), E):
                this, that = get(turned, e), get(qkv, x + e)
                put(of_scales, of_scale + e, get(of_scales, of_scale + e) + this * that * r)
                put(grad_qkv, x + e, (this * get(scale, e) + that * inner) * r)
        v, rest = t * K * E, (t * (H + 2 * K) + H + K) * E
        for i in range(0, _whole(K * E), LANES):
            store(grad_qkv, rest + i, load(grad_v, v + i))
        for i in range(_whole(K * E), K * E):
            put(grad_qkv, rest + i, get(grad_v, v + i))
    for e in range(2 * E):
        put(grad_scales, at + e, get(of_scales, e))


@inlined
def swiglu_row_backward(F, grad, grad_at, gate_up, at, out):
    """Compute the gradient of both halves of a row of gate_up, 2F numbers at `at`."""
    one = splat(_f(1))
    for f in range(0, _whole(F), LANES):
        x, g = load(gate_up, at + f), load(grad, grad_at + f)
        sigmoid = divide(one, add(one, exp(multiply(x, splat(_f(-1))))))
        silu = multiply(x, sigmoid)
        slope = add(sigmoid, multiply(silu, add(one, multiply(sigmoid, splat(_f(-1))))))
        store(out, at + F + f, multiply(g, silu))
        store(out, at + f, multiply(multiply(g, load(gate_up, at + F + f)), slope))
    for f in range(_whole(F), F):
        value, of = get(gate_up, at + f), get(grad, grad_at + f)
        share = _f(1) / (_f(1) + exp(-value))
        put(out, at + F + f, of * value * share)
        put(out, at + f, of * get(gate_up, at + F + f) * (share + value * share * (_f(1) - share)))


# ---------------------------------------------------------------------------------------- one step by itself


@compiled
def add_norm_forward(T, D, x, delta, eps, weight, sums, out, rstd):
    """Compute sums = x + delta and out = sums * rstd * weight for all rows.

    x, delta, sums, out: T x D; weight: D; rstd: T. If the address `delta` is 0, x is normalized.
    """
    eps = _f(eps)
    for part in prange(blocks_of(T)):
        top, end = bounds(part, T)
        add_norm_rows(top, end, D, x, delta, eps, weight, sums, out, rstd)


@compiled
def add_norm_backward(T, D, grad, grad_sums, sums, weight, rstd, grad_x, grad_weight):
    """Compute the gradient of x (and delta), T x D, and the partial gradients of the weight.

    The partial gradients are parts(T) x D; the caller adds them.
    """
    for part in prange(blocks_of(T)):
        top, end = bounds(part, T)
        add_norm_rows_backward(
            top, end, D, grad, top * D, grad_sums, sums, weight, rstd, grad_x, grad_weight, part * D
        )


@compiled
def norm_rope_forward(T, H, K, E, qkv, q_scale, k_scale, cos, sin, eps, out, rstd):
    eps = _f(eps)
    for part in prange(blocks_of(T)):
        top, end = bounds(part, T)
        norm_rope_rows(top, end, H, K, E, qkv, q_scale, k_scale, cos, sin, eps, out, rstd)


@compiled
def norm_rope_backward(
    T, H, K, E, grad_q, grad_k, grad_v, qkv, q_scale, k_scale, cos, sin, rstd, grad_qkv, grad_scales
):
    """Compute the gradient of qkv, T x (H + 2K) x E, and partial gradients of both scales.

    The partial gradients are parts(T) x 2 x E; the caller adds them.
    """
    for part in prange(blocks_of(T)):
        top, end = bounds(part, T)
        norm_rope_rows_backward(
            top,
            end,
            H,
            K,
            E,
            grad_q,
            grad_k,
            grad_v,
            qkv,
            q_scale,
            k_scale,
            cos,
            sin,
            rstd,
            grad_qkv,
            grad_scales,
            part * 2 * E,
        )


@compiled
def swiglu_forward(T, F, gate_up, out):
    """Compute out (T x F) = silu(gate) * up, with gate and up the halves of gate_up T x 2F."""
    for t in prange(T):
        swiglu_row(gate_up, 2 * t * F, F, out, t * F)


@compiled
def swiglu_backward(T, F, grad, gate_up, out):
    """Compute the gradient of both halves of gate_up, T x 2F."""
    for t in prange(T):
        swiglu_row_backward(F, grad, t * F, gate_up, 2 * t * F, out)
