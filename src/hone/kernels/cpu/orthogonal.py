"""Orthogonalize many small matrices for Muon by Newton-Schulz steps, one thread per matrix.

A matrix stays in its core's cache. Multiplying two such matrices takes less time than waking
another thread.

    y [M x N], M <= N, of norm 1 ─► gram = y y^T ─► p = b gram + c gram gram ─► y = a y + p y ─► …
"""

import math

import numpy as np
from numba import prange

from hone.kernels.cpu.compiling import compiled, inlined
from hone.kernels.cpu.products import ROWS, WIDTH, multiply_packed, pack_panel
from hone.kernels.cpu.simd import LANES, get, get_integer, load, multiply_add, put, splat, total

_f = np.float32
ADDRESS, SHORT, LONG, STEP_SHORT, STEP_LONG = range(5)  # of a matrix: the strides along its sides
COLUMNS = 5


@inlined
def orthogonal_one(x, M, N, x_row, x_column, steps, a, b, c):
    """Orthogonalize one M x N matrix, M <= N, in place.

    A function separate from the parallel loop: threads share none of its variables.
    """
    rows = (M + ROWS - 1) // ROWS * ROWS
    narrow, wide = (M + WIDTH - 1) // WIDTH * WIDTH, (N + WIDTH - 1) // WIDTH * WIDTH
    y, next_y = np.zeros(rows * wide, np.float32), np.zeros(rows * wide, np.float32)
    gram, square = np.zeros(rows * narrow, np.float32), np.zeros(rows * narrow, np.float32)
    packed = np.empty(max(narrow * N, wide * M), np.float32)
    for m in range(M):
        for n in range(N):
            y[m * wide + n] = get(x, m * x_row + n * x_column)
    # Summed by itself and by lanes: beside the copy the order of the sum would depend on where in memory both lie.
    squares = splat(_f(0))
    for i in range(0, rows * wide, LANES):
        squares = multiply_add(load(y, i), load(y, i), squares)
    scale = _f(1) / max(_f(math.sqrt(total(squares))), _f(1e-7))
    for i in range(rows * wide):
        y[i] *= scale
    for _ in range(steps):
        for panel in range(narrow // WIDTH):
            pack_panel(N, M, panel * WIDTH, y, 1, wide, 0, packed, panel * N * WIDTH)
        multiply_packed(rows, N, y, wide, packed, gram, narrow)
        for panel in range(narrow // WIDTH):
            pack_panel(M, M, panel * WIDTH, gram, narrow, 1, 0, packed, panel * M * WIDTH)
        multiply_packed(rows, M, gram, narrow, packed, square, narrow)
        for i in range(rows * narrow):
            square[i] = b * gram[i] + c * square[i]
        for panel in range(wide // WIDTH):
            pack_panel(M, N, panel * WIDTH, y, wide, 1, 0, packed, panel * M * WIDTH)
        multiply_packed(rows, M, square, narrow, packed, next_y, wide)
        for i in range(rows * wide):
            y[i] = a * y[i] + next_y[i]
    for m in range(M):
        for n in range(N):
            put(x, m * x_row + n * x_column, y[m * wide + n])


@compiled
def orthogonal(count, table, steps, a, b, c):
    """Orthogonalize `count` matrices in place.

    `table` has one row of five int64s per matrix: address, shorter side, longer side, and the
    stride along each.
    """
    for task in prange(count):
        row = task * COLUMNS
        orthogonal_one(
            get_integer(table, row + ADDRESS),
            get_integer(table, row + SHORT),
            get_integer(table, row + LONG),
            get_integer(table, row + STEP_SHORT),
            get_integer(table, row + STEP_LONG),
            steps,
            a,
            b,
            c,
        )
