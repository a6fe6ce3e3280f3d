"""All layers of a decode step in one call. A task is a block of rows that goes through the whole model in the cache of
a core: no thread waits for another, and there is one call a step instead of some 60.

    newest tokens ─ embed ─► x ─┬─ norm ─ qkv ─ heads ─ pages ─ out ─┬─ norm ─ gate_up ─ swiglu ─ down ─┬─ … ─ norm ─►
                                └────────────────────────────────────┴──────────────────────────────────┘

The parts are those of the kernels that go layer by layer, so the numbers are the same to the bit.
"""

import numpy as np
from numba import prange

from hone.kernels.cpu import compiled, inlined
from hone.kernels.cpu.decode import attend_row
from hone.kernels.cpu.lanes import get, get_integer, put
from hone.kernels.cpu.products import ROWS, WIDTH, multiply_packed
from hone.kernels.cpu.rows import norm_rope_head, norm_row, swiglu_row
from hone.kernels.row_state import FIELDS, LAST, LENGTH

_f = np.float32
# Columns of the table of addresses, a row a layer. 0 where the model has no such thing.
ATTENTION_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, OUT_BIAS = range(7)
MLP_NORM, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS, KEYS, VALUES = range(7, 14)
ADDRESSES = 14


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


@compiled
def hidden(
    B, BLOCK, D, H, K, E, F, layers, addresses, embed, cos, sin, eps, norm, PAGE, active, state, table, table_row, out
):
    """Final hidden states B x D of the newest token of each active row; its keys and values go into the cache.

    addresses: layers x ADDRESSES, weights packed (`products.pack`). cos, sin: whole tables, positions x E.
    """
    eps, N = _f(eps), (H + 2 * K) * E
    for block in prange((B + BLOCK - 1) // BLOCK):
        top = block * BLOCK
        rows = min(BLOCK, B - top)
        whole = (rows + ROWS - 1) // ROWS * ROWS
        x, normed = np.zeros(whole * D, np.float32), np.zeros(whole * D, np.float32)
        wide, delta = np.empty(whole * _padded(max(N, 2 * F)), np.float32), np.empty(whole * _padded(D), np.float32)
        inner, turned = np.zeros(whole * max(H * E, F), np.float32), np.empty((H + K) * E, np.float32)
        for m in range(rows):
            token = get_integer(state, get_integer(active, top + m) * FIELDS + LAST)
            for d in range(D):
                put(x, m * D + d, get(embed, token * D + d))
        for layer in range(layers):
            a = layer * ADDRESSES
            for m in range(rows):
                norm_row(x, m * D, D, eps, get_integer(addresses, a + ATTENTION_NORM), normed, m * D)
            row = _padded(N)
            multiply_packed(whole, N, D, normed, D, get_integer(addresses, a + QKV), wide, row)
            _add_bias(wide, row, rows, N, get_integer(addresses, a + QKV_BIAS))
            for m in range(rows):
                slot = get_integer(active, top + m)
                position = get_integer(state, slot * FIELDS + LENGTH)
                for n in range(H + K):
                    scale = get_integer(addresses, a + (Q_NORM if n < H else K_NORM))
                    norm_rope_head(wide, m * row + n * E, E, scale, cos, sin, position * E, eps, turned, n * E)
                attend_row(
                    H, K, E, turned, 0, turned, H * E, wide, m * row + (H + K) * E, get_integer(addresses, a + KEYS),
                    get_integer(addresses, a + VALUES), PAGE, position, table, slot * table_row, inner, m * H * E,
                )  # fmt: skip
            row = _padded(D)
            multiply_packed(whole, D, H * E, inner, H * E, get_integer(addresses, a + OUT), delta, row)
            _add_bias(delta, row, rows, D, get_integer(addresses, a + OUT_BIAS))
            _add(x, D, delta, row, rows)
            for m in range(rows):
                norm_row(x, m * D, D, eps, get_integer(addresses, a + MLP_NORM), normed, m * D)
            row = _padded(2 * F)
            multiply_packed(whole, 2 * F, D, normed, D, get_integer(addresses, a + GATE_UP), wide, row)
            _add_bias(wide, row, rows, 2 * F, get_integer(addresses, a + GATE_UP_BIAS))
            for m in range(rows):
                swiglu_row(wide, m * row, F, inner, m * F)
            row = _padded(D)
            multiply_packed(whole, D, F, inner, F, get_integer(addresses, a + DOWN), delta, row)
            _add_bias(delta, row, rows, D, get_integer(addresses, a + DOWN_BIAS))
            _add(x, D, delta, row, rows)
        for m in range(rows):
            norm_row(x, m * D, D, eps, norm, out, (top + m) * D)
