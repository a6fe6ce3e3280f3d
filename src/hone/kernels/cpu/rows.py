"""Norms, rotary positions and SwiGLU: a row's work in one pass over it."""

import numpy as np
from numba import prange

from hone.kernels.cpu import compiled, inlined
from hone.kernels.cpu.lanes import LANES, add, divide, exp, get, load, multiply, put, splat, store

CHUNKS = 16  # gradients of weights are summed in this many parts, so that they do not depend on the thread count
_f = np.float32


@inlined
def norm_row(x, at, D, eps, weight, out, out_at):
    """out = x * rstd * weight of the D numbers from `at` on; returns rstd."""
    squares = _f(0)
    for i in range(at, at + D):
        squares += get(x, i) * get(x, i)
    r = _f(1) / np.sqrt(squares / _f(D) + eps)
    for d in range(D):
        put(out, out_at + d, get(x, at + d) * r * get(weight, d))
    return r


@inlined
def norm_rope_head(x, at, E, scale, cos, sin, turn, eps, out, out_at):
    """One head normalised, scaled and rotated; returns its rstd. scale 0: rotated only."""
    half, r = E // 2, _f(1)
    if scale != 0:
        squares = _f(0)
        for i in range(at, at + E):
            squares += get(x, i) * get(x, i)
        r = _f(1) / np.sqrt(squares / _f(E) + eps)
        for e in range(half):
            first = get(x, at + e) * r * get(scale, e)
            second = get(x, at + half + e) * r * get(scale, half + e)
            put(out, out_at + e, first * get(cos, turn + e) + second * get(sin, turn + e))
            put(out, out_at + half + e, second * get(cos, turn + half + e) + first * get(sin, turn + half + e))
    else:
        for e in range(half):
            first, second = get(x, at + e), get(x, at + half + e)
            put(out, out_at + e, first * get(cos, turn + e) + second * get(sin, turn + e))
            put(out, out_at + half + e, second * get(cos, turn + half + e) + first * get(sin, turn + half + e))
    return r


@inlined
def swiglu_row(gate_up, at, F, out, out_at):
    """silu of F numbers from `at` on, times the F behind them."""
    whole = F // LANES * LANES
    for f in range(0, whole, LANES):
        x = load(gate_up, at + f)
        silu = divide(x, add(splat(_f(1)), exp(multiply(x, splat(_f(-1))))))
        store(out, out_at + f, multiply(silu, load(gate_up, at + F + f)))
    for f in range(whole, F):
        x = get(gate_up, at + f)
        put(out, out_at + f, x / (_f(1) + exp(-x)) * get(gate_up, at + F + f))


@compiled
def add_norm_forward(T, D, x, delta, eps, weight, total, out, rstd):
    """total = x + delta (delta 0: no delta, no total), out = total * rstd * weight; T x D, weight D, rstd T."""
    eps = _f(eps)
    for t in prange(T):
        row = t * D
        if delta != 0:
            for i in range(row, row + D):
                put(total, i, get(x, i) + get(delta, i))
        put(rstd, t, norm_row(total if delta != 0 else x, row, D, eps, weight, out, row))


@compiled
def add_norm_backward(T, D, grad, grad_total, total, weight, rstd, grad_x, grad_weight):
    """Gradient of x (and of delta) T x D, of weight in parts CHUNKS x D. grad_total may be 0: none."""
    for chunk in prange(CHUNKS):
        of_weight = np.zeros(D, np.float32)
        for t in range(chunk * T // CHUNKS, (chunk + 1) * T // CHUNKS):
            row, r = t * D, get(rstd, t)
            inner = _f(0)
            for d in range(D):
                inner += get(grad, row + d) * get(weight, d) * get(total, row + d)
            inner *= r * r / _f(D)
            for d in range(D):
                g, x = get(grad, row + d), get(total, row + d)
                of_x = (g * get(weight, d) - x * inner) * r
                put(of_weight, d, get(of_weight, d) + g * x * r)
                put(grad_x, row + d, of_x + get(grad_total, row + d) if grad_total != 0 else of_x)
        for d in range(D):
            put(grad_weight, chunk * D + d, get(of_weight, d))


@compiled
def norm_rope_forward(T, H, K, E, qkv, q_scale, k_scale, cos, sin, eps, out, rstd):
    """The first H + K heads of qkv T x (H + 2K) x E normalised, scaled and rotated: out T x (H + K) x E."""
    eps = _f(eps)
    for t in prange(T):
        for n in range(H + K):
            x, y = (t * (H + 2 * K) + n) * E, (t * (H + K) + n) * E
            scale = q_scale if n < H else k_scale
            put(rstd, t * (H + K) + n, norm_rope_head(qkv, x, E, scale, cos, sin, t * E, eps, out, y))


@compiled
def norm_rope_backward(
    T, H, K, E, grad_q, grad_k, grad_v, qkv, q_scale, k_scale, cos, sin, rstd, grad_qkv, grad_scales
):
    """Gradient of qkv T x (H + 2K) x E and, in parts, of both scales: CHUNKS x 2 x E."""
    half = E // 2
    for chunk in prange(CHUNKS):
        turned, of_scales = np.empty(E, np.float32), np.zeros(2 * E, np.float32)
        for t in range(chunk * T // CHUNKS, (chunk + 1) * T // CHUNKS):
            turn = t * E
            for n in range(H + K):
                is_k = n >= H
                grad, g = (grad_k, (t * K + n - H) * E) if is_k else (grad_q, (t * H + n) * E)
                scale, of_scale = (k_scale, E) if is_k else (q_scale, 0)
                x, r = (t * (H + 2 * K) + n) * E, get(rstd, t * (H + K) + n)
                for e in range(half):
                    first, second = get(grad, g + e), get(grad, g + half + e)
                    put(turned, e, first * get(cos, turn + e) - second * get(sin, turn + e))
                    put(turned, half + e, second * get(cos, turn + half + e) - first * get(sin, turn + half + e))
                inner = _f(0)
                for e in range(E):
                    inner += get(turned, e) * get(scale, e) * get(qkv, x + e)
                inner *= r * r / _f(E)
                for e in range(E):
                    here, value = get(turned, e), get(qkv, x + e)
                    put(of_scales, of_scale + e, get(of_scales, of_scale + e) + here * value * r)
                    put(grad_qkv, x + e, (here * get(scale, e) - value * inner) * r)
            v, rest = t * K * E, (t * (H + 2 * K) + H + K) * E
            for i in range(K * E):
                put(grad_qkv, rest + i, get(grad_v, v + i))
        for e in range(2 * E):
            put(grad_scales, chunk * 2 * E + e, get(of_scales, e))


@compiled
def swiglu_forward(T, F, gate_up, out):
    """silu of the first half of gate_up T x 2F times the second: out T x F."""
    for t in prange(T):
        swiglu_row(gate_up, 2 * t * F, F, out, t * F)


@compiled
def swiglu_backward(T, F, grad, gate_up, out):
    """Gradient of both halves of gate_up, T x 2F."""
    for t in prange(T):
        gate, up, row = 2 * t * F, (2 * t + 1) * F, t * F
        for f in range(F):
            x, g = get(gate_up, gate + f), get(grad, row + f)
            sigmoid = _f(1) / (_f(1) + exp(-x))
            silu = x * sigmoid
            put(out, up + f, g * silu)
            put(out, gate + f, g * get(gate_up, up + f) * (sigmoid + silu * (_f(1) - sigmoid)))
