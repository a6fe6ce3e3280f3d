"""Causal attention over the flat token axis: sequences end to end, some continuing a shared prompt.

A sequence is a row (start, length, prefix start, prefix length). Each of its tokens sees the
prefix, and the sequence's tokens up to itself. A prefix and the sequences that share it form a
group. A task (one iteration of the parallel loop) computes one head of one group, so that it adds
to the prefix's gradients without locks. Its work is small matrix products on blocks that stay in
the core's cache:

    keys_EN (transposed, prefix | own, padded to 16)      scores_MN = q_ME keys_EN ─ softmax ─► x values_NE

A task copies the prefix's keys and values once for all sequences of the group. Backward recomputes
the softmax from the saved log-sum-exp, so memory grows linearly with tokens.
"""

import numpy as np
from numba import prange

from hone.kernels.cpu import isa
from hone.kernels.cpu.compiling import compiled, inlined
from hone.kernels.cpu.simd import (
    LANES,
    add,
    exp,
    get,
    largest,
    load,
    maximum,
    multiply,
    multiply_add,
    put,
    splat,
    store,
    tile_of,
    total,
    transpose,
)

ROWS = isa().rows  # of a tile, ROWS x 16
BLOCK = 64 // ROWS * ROWS  # query rows whose scores are held at once
tile, tile_down = tile_of(ROWS, 16 // LANES), tile_of(ROWS, 16 // LANES, 1)
_f = np.float32
_MASKED = _f(-1e30)


@inlined
def copy_rows(x, at, row, count, padded, scale, E, out, out_at):
    """Set out[padded x E] to x[count x E] * scale, followed by rows of zeros."""
    for i in range(count):
        for e in range(0, E, LANES):
            store(out, out_at + i * E + e, multiply(splat(scale), load(x, at + i * row + e)))
    for i in range(count * E, padded * E, LANES):
        store(out, out_at + i, splat(_f(0)))


@inlined
def copy_columns(x, at, row, count, padded, E, out, out_at, N):
    """Write x[count x E] transposed into out[E x N], from column `out_at` on.

    `padded` columns are written; those after the first `count` are zeros.
    """
    whole = E // LANES * LANES if count >= LANES else 0
    for start in range(0, count if whole else 0, LANES):
        # The last vectors may hold some of those before them once more
        i = min(start, count - LANES)
        for e in range(0, whole, LANES):
            transpose(x, at + i * row + e, row, out, out_at + e * N + i, N)
    for i in range(count):
        for e in range(whole, E):
            put(out, out_at + e * N + i, get(x, at + i * row + e))
    for e in range(E):
        for i in range(count, padded):
            put(out, out_at + e * N + i, _f(0))


@inlined
def add_rows(x, at, count, E, out, out_at, row):
    """Add x[count x E] to out, whose rows are `row` floats apart."""
    for i in range(count):
        for e in range(0, E, LANES):
            there = out_at + i * row + e
            store(out, there, add(load(out, there), load(x, at + i * E + e)))


@inlined
def longest(sequences, first, end):
    """Return the most keys, and the most query rows per block, of sequences first … end - 1.

    Keys include the prefix and are padded to a multiple of 16, query rows to a multiple of ROWS.
    """
    keys, most = 16, ROWS
    for s in range(first, end):
        _, length, _, P = sequences[s]
        keys = max(keys, (P + length + 15) // 16 * 16)
        most = max(most, min(BLOCK, (length + ROWS - 1) // ROWS * ROWS))
    return keys, most


@inlined
def score_rows(q, keys, W, first, rows, P, N, E, scores):
    """Compute the causally masked scores[rows x N] of query rows first … first + rows - 1.

    keys: E x W, with P prefix keys first. For every ROWS query rows, only tiles of 16 columns with
    a visible key are written; later keys in these tiles get the score _MASKED.
    """
    for r in range(0, rows, ROWS):
        columns = min(N, (P + first + r + ROWS + 15) // 16 * 16)
        for c in range(0, columns, 16):
            tile(q, r * E, E, 1, keys, c, W, scores, r * N + c, N, E, False)
        for i in range(r, r + ROWS):
            for j in range(P + first + i + 1, columns):
                put(scores, i * N + j, _MASKED)


@compiled
def forward(H, K, E, q, q_row, k, k_row, v, v_row, sequences, groups, out, logsum):
    """Compute outputs `out`, T x H x E, and log-sum-exps `logsum` of scaled scores, T x H.

    Args:
        q, k, v: addresses; `q_row`, `k_row` and `v_row` are the strides between tokens, in floats.
        sequences: S x 4: start, length, prefix start, prefix length of each sequence.
        groups: G + 1 row numbers; group g has rows groups[g] … groups[g + 1] - 1 of `sequences`.
    """
    scale = _f(1) / np.sqrt(_f(E))
    for task in prange((len(groups) - 1) * H):
        group, h = task // H, task % H
        kh = h // (H // K)
        W, most = longest(sequences, groups[group], groups[group + 1])
        keys, values = np.empty(E * W, np.float32), np.empty(W * E, np.float32)
        queries, mixed = np.empty(most * E, np.float32), np.empty(most * E, np.float32)
        # 1 / the sum of a row
        scores, shares = (np.empty(most * W, np.float32), np.empty(most, np.float32))
        held = (0, 0)  # the prefix that is laid out
        for s in range(groups[group], groups[group + 1]):
            start, length, prefix, P = sequences[s]
            N = (P + length + 15) // 16 * 16
            if held != (prefix, P):
                copy_columns(k, prefix * k_row + kh * E, k_row, P, P, E, keys, 0, W)
                copy_rows(v, prefix * v_row + kh * E, v_row, P, P, _f(1), E, values, 0)
            held = (prefix, P)
            copy_columns(k, start * k_row + kh * E, k_row, length, N - P, E, keys, P, W)
            copy_rows(v, start * v_row + kh * E, v_row, length, N - P, _f(1), E, values, P * E)
            for first in range(0, length, BLOCK):
                count = min(BLOCK, length - first)
                rows = (count + ROWS - 1) // ROWS * ROWS
                copy_rows(
                    q, (start + first) * q_row + h * E, q_row, count, rows, scale, E, queries, 0
                )
                score_rows(queries, keys, W, first, rows, P, N, E, scores)
                for r in range(0, rows, ROWS):
                    columns = min(N, (P + first + r + ROWS + 15) // 16 * 16)
                    for i in range(r, r + ROWS):
                        tops, sums = splat(_MASKED), splat(_f(0))
                        for j in range(i * N, i * N + columns, LANES):
                            tops = maximum(tops, load(scores, j))
                        top = largest(tops)
                        for j in range(i * N, i * N + columns, LANES):
                            weights = exp(add(load(scores, j), splat(-top)))
                            store(scores, j, weights)
                            sums = add(sums, weights)
                        whole = total(sums)
                        shares[i] = _f(1) / whole
                        if i < count:
                            put(logsum, (start + first + i) * H + h, top + np.log(whole))
                    for e in range(0, E, 16):
                        tile(scores, r * N, N, 1, values, e, E, mixed, r * E + e, E, columns, False)
                for i in range(count):
                    for e in range(0, E, LANES):
                        store(
                            out,
                            ((start + first + i) * H + h) * E + e,
                            multiply(splat(shares[i]), load(mixed, i * E + e)),
                        )


@compiled
def backward(
    H,
    K,
    E,
    grad,
    out,
    q,
    q_row,
    k,
    k_row,
    v,
    v_row,
    sequences,
    groups,
    logsum,
    grad_q,
    grad_k,
    grad_v,
):
    """Compute the gradients of q (T x H x E), k and v (T x K x E) from `grad`, that of `out`.

    grad, out: T x H x E. The other arguments are those of `forward`.
    """
    repeats, scale = H // K, _f(1) / np.sqrt(_f(E))
    for task in prange((len(groups) - 1) * K):
        group, kh = task // K, task % K
        W, most = longest(sequences, groups[group], groups[group + 1])
        keys, keys_T = np.empty(W * E, np.float32), np.empty(E * W, np.float32)
        values_T, held = np.empty(E * W, np.float32), (0, 0)  # the prefix that is laid out
        # Whole tiles may go past the last key by less than ROWS: there is room for what nobody reads.
        of_keys, of_values = (
            np.empty((W + ROWS) * E, np.float32),
            np.empty((W + ROWS) * E, np.float32),
        )
        queries, grads = np.empty(most * E, np.float32), np.empty(most * E, np.float32)
        of_queries = np.empty(most * E, np.float32)
        scores, slopes = (
            np.empty(most * W + ROWS, np.float32),
            np.empty(most * W + ROWS, np.float32),
        )
        for s in range(groups[group], groups[group + 1]):  # prefixes stand before what adds to them
            start, length, prefix, P = sequences[s]
            for at in range((start * K + kh) * E, ((start + length) * K + kh) * E, K * E):
                for e in range(at, at + E, LANES):
                    store(grad_k, e, splat(_f(0)))
                    store(grad_v, e, splat(_f(0)))
            N = (P + length + 15) // 16 * 16
            if held != (prefix, P):
                copy_rows(k, prefix * k_row + kh * E, k_row, P, P, scale, E, keys, 0)
                copy_columns(k, prefix * k_row + kh * E, k_row, P, P, E, keys_T, 0, W)
                copy_columns(v, prefix * v_row + kh * E, v_row, P, P, E, values_T, 0, W)
            held = (prefix, P)
            copy_rows(k, start * k_row + kh * E, k_row, length, N - P, scale, E, keys, P * E)
            copy_columns(k, start * k_row + kh * E, k_row, length, N - P, E, keys_T, P, W)
            copy_columns(v, start * v_row + kh * E, v_row, length, N - P, E, values_T, P, W)
            for i in range(0, (N + ROWS) * E, LANES):
                store(of_keys, i, splat(_f(0)))
                store(of_values, i, splat(_f(0)))
            for h in range(kh * repeats, (kh + 1) * repeats):
                for first in range(0, length, BLOCK):
                    count = min(BLOCK, length - first)
                    rows = (count + ROWS - 1) // ROWS * ROWS
                    copy_rows(
                        q, (start + first) * q_row + h * E, q_row, count, rows, scale, E, queries, 0
                    )
                    copy_rows(
                        grad, ((start + first) * H + h) * E, H * E, count, rows, _f(1), E, grads, 0
                    )
                    score_rows(queries, keys_T, W, first, rows, P, N, E, scores)
                    for r in range(0, rows, ROWS):
                        columns = min(N, (P + first + r + ROWS + 15) // 16 * 16)
                        for c in range(0, columns, 16):
                            tile(grads, r * E, E, 1, values_T, c, W, slopes, r * N + c, N, E, False)
                        for i in range(r, r + ROWS):
                            inner, top = _f(0), _f(0)
                            if i < count:
                                at = ((start + first + i) * H + h) * E
                                products = splat(_f(0))
                                for e in range(0, E, LANES):
                                    products = multiply_add(
                                        load(grads, i * E + e), load(out, at + e), products
                                    )
                                inner = total(products)
                                top = get(logsum, (start + first + i) * H + h)
                            for j in range(i * N, i * N + columns, LANES):
                                weights = exp(add(load(scores, j), splat(-top)))
                                store(scores, j, weights)
                                store(
                                    slopes,
                                    j,
                                    multiply(weights, add(load(slopes, j), splat(-inner))),
                                )
                            for j in range(i * N + columns, (i + 1) * N, LANES):
                                store(scores, j, splat(_f(0)))
                                store(slopes, j, splat(_f(0)))
                        for e in range(0, E, 16):
                            tile(
                                slopes,
                                r * N,
                                N,
                                1,
                                keys,
                                e,
                                E,
                                of_queries,
                                r * E + e,
                                E,
                                columns,
                                False,
                            )
                    for c in range(0, N, ROWS):
                        # Own keys from c on are seen from row c - P on: whole tiles before it are zeros.
                        skip = max(0, c - P - first) // ROWS * ROWS
                        if skip < rows:
                            for e in range(0, E, 16):
                                a, b = skip * N + c, skip * E + e
                                tile_down(
                                    slopes,
                                    a,
                                    1,
                                    N,
                                    queries,
                                    b,
                                    E,
                                    of_keys,
                                    c * E + e,
                                    E,
                                    rows - skip,
                                    True,
                                )
                                tile_down(
                                    scores,
                                    a,
                                    1,
                                    N,
                                    grads,
                                    b,
                                    E,
                                    of_values,
                                    c * E + e,
                                    E,
                                    rows - skip,
                                    True,
                                )
                    for i in range(count):
                        for e in range(0, E, LANES):
                            store(
                                grad_q,
                                ((start + first + i) * H + h) * E + e,
                                load(of_queries, i * E + e),
                            )
            add_rows(of_keys, 0, P, E, grad_k, (prefix * K + kh) * E, K * E)
            add_rows(of_values, 0, P, E, grad_v, (prefix * K + kh) * E, K * E)
            add_rows(of_keys, P * E, length, E, grad_k, (start * K + kh) * E, K * E)
            add_rows(of_values, P * E, length, E, grad_v, (start * K + kh) * E, K * E)
