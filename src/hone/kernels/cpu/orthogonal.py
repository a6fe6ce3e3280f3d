"""Muon's Newton-Schulz steps over many small matrices. One thread has a matrix to itself, in the cache of its core: the
products are over in less time than it takes to wake another.

    y [M x N], M <= N, of norm 1 ─► gram = y y^T ─► p = b gram + c gram gram ─► y = a y + p y ─► …
"""

import math

import numpy as np
from numba import prange

from hone.kernels.cpu import compiled
from hone.kernels.cpu.lanes import get, get_integer, put
from hone.kernels.cpu.products import ROWS, WIDTH, multiply_packed, pack_panel

_f = np.float32
ADDRESS, SHORT, LONG, STEP_SHORT, STEP_LONG = range(5)  # of a matrix: the strides along its sides
COLUMNS = 5


@compiled
def orthogonal(count, table, steps, a, b, c):
    """In place. `table`: a row of integers each."""
    for task in prange(count):
        x = get_integer(table, task * COLUMNS + ADDRESS)
        M, N = get_integer(table, task * COLUMNS + SHORT), get_integer(table, task * COLUMNS + LONG)
        x_row, x_column = (
            get_integer(table, task * COLUMNS + STEP_SHORT),
            get_integer(table, task * COLUMNS + STEP_LONG),
        )
        rows = (M + ROWS - 1) // ROWS * ROWS
        narrow, wide = (M + WIDTH - 1) // WIDTH * WIDTH, (N + WIDTH - 1) // WIDTH * WIDTH
        y, next_y = np.zeros(rows * wide, np.float32), np.zeros(rows * wide, np.float32)
        gram, square = np.zeros(rows * narrow, np.float32), np.zeros(rows * narrow, np.float32)
        packed = np.empty(max(narrow * N, wide * M), np.float32)
        squares = _f(0)
        for m in range(M):
            for n in range(N):
                value = get(x, m * x_row + n * x_column)
                y[m * wide + n] = value
                squares += value * value
        scale = _f(1) / max(_f(math.sqrt(squares)), _f(1e-7))
        for i in range(rows * wide):
            y[i] *= scale
        for _ in range(steps):
            for panel in range(narrow // WIDTH):
                pack_panel(N, M, panel * WIDTH, y, 1, wide, packed, panel * N * WIDTH)
            multiply_packed(rows, M, N, y, wide, packed, gram, narrow)
            for panel in range(narrow // WIDTH):
                pack_panel(M, M, panel * WIDTH, gram, narrow, 1, packed, panel * M * WIDTH)
            multiply_packed(rows, M, M, gram, narrow, packed, square, narrow)
            for i in range(rows * narrow):
                square[i] = b * gram[i] + c * square[i]
            for panel in range(wide // WIDTH):
                pack_panel(M, N, panel * WIDTH, y, wide, 1, packed, panel * M * WIDTH)
            multiply_packed(rows, N, M, square, narrow, packed, next_y, wide)
            for i in range(rows * wide):
                y[i] = a * y[i] + next_y[i]
        for m in range(M):
            for n in range(N):
                put(x, m * x_row + n * x_column, y[m * wide + n])
