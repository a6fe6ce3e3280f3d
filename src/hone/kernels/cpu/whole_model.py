"""Run all layers of a small model in one compiled call, instead of about 60.

A task (one iteration of the parallel loop) computes all layers for a block of tokens in the cache
of one core, so that no thread waits for another.

    tokens ─ embed ─► x ─┬─ norm ─ qkv ─ heads ─ pages ─ out ─┬─ norm ─ gate_up ─ swiglu ─ down ─┬─ … ─ norm ─ head ─►
                         └────────────────────────────────────┴──────────────────────────────────┘

The tokens of a task are the newest tokens of some sequences, or parts of prompts in order: a token
sees the keys and values that its own block and earlier blocks have written to the KV cache ("pages"
in the diagram: attention over this cache).

One call may compute several decode steps. A task then decodes a few of its sequences at a time: it
samples their next tokens and runs the model on those tokens. When a sequence is done, the task's
next sequence replaces it. The data of a few sequences stays in a core's cache from step to step;
the data of all sequences would not. Norms, matrix products, rotary positions and sampling use the
functions of the layer-by-layer kernels.
"""

import numpy as np
from numba import prange

from hone.kernels.cpu.compiling import compiled, inlined
from hone.kernels.cpu.decode import cell_of, draw_row, mix_row
from hone.kernels.cpu.products import ROWS, WIDTH, multiply_packed
from hone.kernels.cpu.row_kernels import norm_rope_head, norm_row, swiglu_row
from hone.kernels.cpu.simd import get, get_integer, put, put_integer
from hone.kernels.row_state import DONE, FIELDS, LAST, LENGTH

_f = np.float32
# Columns of the table of addresses, a row a layer. 0 where the model has no such thing.
ATTENTION_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, OUT_BIAS = range(7)
MLP_NORM, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS, KEYS, VALUES = range(7, 14)
ADDRESSES = 14
# Columns of the table of tokens: where its sequence's pages stand in `table`, the row of the result or -1.
TOKEN, POSITION, PAGES, RESULT = range(4)
COLUMNS = 4
BLOCK = -(-64 // ROWS) * ROWS  # tokens that are worked on at once


@inlined
def _padded(n):
    return (n + WIDTH - 1) // WIDTH * WIDTH


@inlined
def _add_bias(x, row, rows, N, bias):
    if bias != 0:
        for m in range(rows):
            for n in range(N):
                put(x, m * row + n, get(x, m * row + n) + get(bias, n))


@inlined
def _add(x, D, delta, row, rows):
    for m in range(rows):
        for d in range(D):
            put(x, m * D + d, get(x, m * D + d) + get(delta, m * row + d))


@inlined
def _go_on(count, own, left, most, following, end, steps, active, state, table_row, tokens, first):
    """Put the newest tokens of continuing sequences into the token table from `first` on.

    A finished sequence is replaced by the next unfinished one of `active`, up to index `end`.

    Args:
        count: number of current sequences.
        own: their rows of `state`.
        left: steps left for each.
        most: largest number of sequences at a time.
        following: index in `active` of the next sequence.

    Returns:
        The number of tokens, and the new `following`.
    """
    kept = 0
    for i in range(count):
        if left[i] > 0 and get_integer(state, own[i] * FIELDS + DONE) == 0:
            own[kept], left[kept] = own[i], left[i]
            kept += 1
    while kept < most and following < end:
        row = get_integer(active, following)
        if get_integer(state, row * FIELDS + DONE) == 0:
            own[kept], left[kept] = row, steps
            kept += 1
        following += 1
    for i in range(kept):
        at, row = (first + i) * COLUMNS, own[i]
        put_integer(tokens, at + TOKEN, get_integer(state, row * FIELDS + LAST))
        put_integer(tokens, at + POSITION, get_integer(state, row * FIELDS + LENGTH))
        put_integer(tokens, at + PAGES, row * table_row)
        put_integer(tokens, at + RESULT, row)
        left[i] -= 1
    return kept, following


@inlined
def _block(
    rows,
    top,
    tokens,
    D,
    H,
    K,
    E,
    F,
    V,
    layers,
    addresses,
    embed,
    cos,
    sin,
    eps,
    norm,
    head,
    PAGE,
    table,
    results,
    x,
    normed,
    wide,
    inner,
    delta,
    query,
):
    """Run `rows` rows of `tokens`, from `top` on, through all layers; return how many get logits.

    A token gets logits if its column RESULT of `tokens` is not negative. These tokens have the
    first rows of `wide`, each with V logits padded to a multiple of WIDTH, and the first entries of
    `results`, with their RESULT. x, normed, inner, delta and query are scratch memory.
    """
    N, width, whole = (H + 2 * K) * E, K * E, (rows + ROWS - 1) // ROWS * ROWS
    for m in range(rows):
        token = get_integer(tokens, (top + m) * COLUMNS + TOKEN)
        results[m] = get_integer(tokens, (top + m) * COLUMNS + RESULT)
        for d in range(D):
            put(x, m * D + d, get(embed, token * D + d))
    for layer in range(layers):
        a = layer * ADDRESSES
        keys, values = get_integer(addresses, a + KEYS), get_integer(addresses, a + VALUES)
        for m in range(rows):
            norm_row(x, m * D, D, eps, get_integer(addresses, a + ATTENTION_NORM), normed, m * D)
        row = _padded(N)
        multiply_packed(whole, D, normed, D, get_integer(addresses, a + QKV), wide, row)
        _add_bias(wide, row, rows, N, get_integer(addresses, a + QKV_BIAS))
        for m in range(rows):
            position = get_integer(tokens, (top + m) * COLUMNS + POSITION)
            cell = (
                cell_of(position, PAGE, table, get_integer(tokens, (top + m) * COLUMNS + PAGES))
                * width
            )
            for n in range(K):
                scale, there = get_integer(addresses, a + K_NORM), cell + n * E
                norm_rope_head(
                    wide, m * row + (H + n) * E, E, scale, cos, sin, position * E, eps, keys, there
                )
            for d in range(width):
                put(values, cell + d, get(wide, m * row + (H + K) * E + d))
        kept = (
            0  # after its keys and values, the last layer has to do with nothing but what is wanted
        )
        for m in range(rows):
            if layer < layers - 1 or results[m] >= 0:
                position = get_integer(tokens, (top + m) * COLUMNS + POSITION)
                for n in range(H):
                    scale = get_integer(addresses, a + Q_NORM)
                    norm_rope_head(
                        wide, m * row + n * E, E, scale, cos, sin, position * E, eps, query, n * E
                    )
                pages = get_integer(tokens, (top + m) * COLUMNS + PAGES)
                next_pages = get_integer(tokens, (top + min(m + 1, rows - 1)) * COLUMNS + PAGES)
                mix_row(
                    H,
                    K,
                    E,
                    query,
                    0,
                    keys,
                    values,
                    PAGE,
                    position + 1,
                    table,
                    pages,
                    next_pages,
                    inner,
                    kept * H * E,
                )
                if kept < m:
                    results[kept] = results[m]
                    for d in range(D):
                        put(x, kept * D + d, get(x, m * D + d))
                kept += 1
        rows, whole = kept, (kept + ROWS - 1) // ROWS * ROWS
        row = _padded(D)
        multiply_packed(whole, H * E, inner, H * E, get_integer(addresses, a + OUT), delta, row)
        _add_bias(delta, row, rows, D, get_integer(addresses, a + OUT_BIAS))
        _add(x, D, delta, row, rows)
        for m in range(rows):
            norm_row(x, m * D, D, eps, get_integer(addresses, a + MLP_NORM), normed, m * D)
        row = _padded(2 * F)
        multiply_packed(whole, D, normed, D, get_integer(addresses, a + GATE_UP), wide, row)
        _add_bias(wide, row, rows, 2 * F, get_integer(addresses, a + GATE_UP_BIAS))
        for m in range(rows):
            swiglu_row(wide, m * row, F, inner, m * F)
        row = _padded(D)
        multiply_packed(whole, F, inner, F, get_integer(addresses, a + DOWN), delta, row)
        _add_bias(delta, row, rows, D, get_integer(addresses, a + DOWN_BIAS))
        _add(x, D, delta, row, rows)
    for m in range(rows):
        norm_row(x, m * D, D, eps, norm, normed, m * D)
    row = _padded(V)
    multiply_packed(whole, D, normed, D, head, wide, row)
    return rows


@compiled
def run(
    tasks,
    firsts,
    tokens,
    D,
    H,
    K,
    E,
    F,
    V,
    layers,
    addresses,
    embed,
    cos,
    sin,
    eps,
    norm,
    head,
    PAGE,
    table,
    out,
    steps,
    window,
    active,
    state,
    table_row,
    parameters,
    stops,
    num_stops,
    drawn,
    logprobs,
    capacity,
):
    """Run all tasks: write keys and values to the cache, and compute logits or decode steps.

    If `steps` is 0, compute logits of `tokens` into `out` (rows x V). Otherwise run up to `steps`
    decode steps of each sequence of `active`; a task decodes `window` of its sequences at a time,
    and `tokens` is scratch memory.

    Args:
        firsts: task i has tokens firsts[i] … firsts[i + 1] - 1; if `steps` > 0, these are indices into `active`.
        tokens: int64 rows: token id, position, where in `table` the page numbers begin, row of the
            logits in `out` (-1: none).
        addresses: layers x ADDRESSES; weight matrices are packed (`products.pack`), as is `head`.
        cos, sin: tables for all positions, positions x E.

    The arguments from `active` on are those of `decode.draw`; its `tokens` are `drawn`.
    """
    eps, N, padded = _f(eps), (H + 2 * K) * E, _padded(V)
    for task in prange(tasks):
        first, end = get_integer(firsts, task), get_integer(firsts, task + 1)
        at_once = min(BLOCK if steps == 0 else window, end - first)
        most = (at_once + ROWS - 1) // ROWS * ROWS
        x, normed = np.zeros(most * D, np.float32), np.zeros(most * D, np.float32)
        wide = np.empty(most * _padded(max(N, 2 * F, V)), np.float32)
        inner, delta = (
            np.zeros(most * max(H * E, F), np.float32),
            np.empty(most * _padded(D), np.float32),
        )
        query, results, weights = (
            np.empty(H * E, np.float32),
            np.empty(most, np.int64),
            np.empty(V, np.float32),
        )
        own, left, rows, top, following = (
            np.empty(most, np.int64),
            np.empty(most, np.int64),
            0,
            first,
            first,
        )
        while True:
            if steps == 0:
                top += rows
                rows = min(at_once, end - top)
            else:
                rows, following = _go_on(
                    rows,
                    own,
                    left,
                    at_once,
                    following,
                    end,
                    steps,
                    active,
                    state,
                    table_row,
                    tokens,
                    first,
                )
            if rows == 0:
                break
            wanted = _block(
                rows,
                top,
                tokens,
                D,
                H,
                K,
                E,
                F,
                V,
                layers,
                addresses,
                embed,
                cos,
                sin,
                eps,
                norm,
                head,
                PAGE,
                table,
                results,
                x,
                normed,
                wide,
                inner,
                delta,
                query,
            )
            for m in range(wanted):
                if steps == 0:
                    for v in range(V):
                        put(out, results[m] * V + v, get(wide, m * padded + v))
                else:
                    draw_row(
                        results[m],
                        V,
                        wide,
                        m * padded,
                        wide,
                        m * padded,
                        0,
                        parameters,
                        state,
                        stops,
                        num_stops,
                        drawn,
                        logprobs,
                        capacity,
                        1,
                        weights,
                    )
