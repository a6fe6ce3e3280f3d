"""Matrix products: C[M x N] = A[M x K] B[K x N], either operand in any layout.

    B ─ pack ─► panels of K x 32, which stay in a core's cache while tiles of 8 rows of A go by
    tile: 8 x 32 accumulators in registers, one row of the panel and 8 numbers of A for each k

torch hands fp32 products to MKL, which keeps to AVX2 on AMD processors (half the speed of a core with AVX-512), or to
oneDNN, which compiles code for every new number of tokens. Here a shape costs nothing to be new.
"""

import numpy as np
from numba import prange

from hone.kernels.cpu import compiled, inlined
from hone.kernels.cpu.lanes import get, load, multiply_add, put, splat, store

ROWS, WIDTH = 8, 32  # of a tile
BLOCK_M, BLOCK_K = 64, 256  # rows of a task; depth after which a tile goes back to memory
PANELS = 4  # of a task
_f = np.float32


@inlined
def tile(a, a_at, a_row, a_column, b, b_at, c, c_at, c_row, K, adds):
    """C[8 x 32] = A[8 x K] B[K x 32], B dense, added to what is there if `adds`."""
    p0 = p1 = p2 = p3 = p4 = p5 = p6 = p7 = splat(_f(0))
    q0 = q1 = q2 = q3 = q4 = q5 = q6 = q7 = splat(_f(0))
    if adds:
        p0, q0 = load(c, c_at), load(c, c_at + 16)
        p1, q1 = load(c, c_at + c_row), load(c, c_at + c_row + 16)
        p2, q2 = load(c, c_at + 2 * c_row), load(c, c_at + 2 * c_row + 16)
        p3, q3 = load(c, c_at + 3 * c_row), load(c, c_at + 3 * c_row + 16)
        p4, q4 = load(c, c_at + 4 * c_row), load(c, c_at + 4 * c_row + 16)
        p5, q5 = load(c, c_at + 5 * c_row), load(c, c_at + 5 * c_row + 16)
        p6, q6 = load(c, c_at + 6 * c_row), load(c, c_at + 6 * c_row + 16)
        p7, q7 = load(c, c_at + 7 * c_row), load(c, c_at + 7 * c_row + 16)
    for k in range(K):
        left, right = load(b, b_at + k * WIDTH), load(b, b_at + k * WIDTH + 16)
        i = a_at + k * a_column
        x = get(a, i)
        p0, q0 = multiply_add(x, left, p0), multiply_add(x, right, q0)
        x = get(a, i + a_row)
        p1, q1 = multiply_add(x, left, p1), multiply_add(x, right, q1)
        x = get(a, i + 2 * a_row)
        p2, q2 = multiply_add(x, left, p2), multiply_add(x, right, q2)
        x = get(a, i + 3 * a_row)
        p3, q3 = multiply_add(x, left, p3), multiply_add(x, right, q3)
        x = get(a, i + 4 * a_row)
        p4, q4 = multiply_add(x, left, p4), multiply_add(x, right, q4)
        x = get(a, i + 5 * a_row)
        p5, q5 = multiply_add(x, left, p5), multiply_add(x, right, q5)
        x = get(a, i + 6 * a_row)
        p6, q6 = multiply_add(x, left, p6), multiply_add(x, right, q6)
        x = get(a, i + 7 * a_row)
        p7, q7 = multiply_add(x, left, p7), multiply_add(x, right, q7)
    store(c, c_at, p0)
    store(c, c_at + 16, q0)
    store(c, c_at + c_row, p1)
    store(c, c_at + c_row + 16, q1)
    store(c, c_at + 2 * c_row, p2)
    store(c, c_at + 2 * c_row + 16, q2)
    store(c, c_at + 3 * c_row, p3)
    store(c, c_at + 3 * c_row + 16, q3)
    store(c, c_at + 4 * c_row, p4)
    store(c, c_at + 4 * c_row + 16, q4)
    store(c, c_at + 5 * c_row, p5)
    store(c, c_at + 5 * c_row + 16, q5)
    store(c, c_at + 6 * c_row, p6)
    store(c, c_at + 6 * c_row + 16, q6)
    store(c, c_at + 7 * c_row, p7)
    store(c, c_at + 7 * c_row + 16, q7)


@inlined
def edge_tile(a, a_at, a_row, a_column, b, b_at, c, c_at, c_row, K, adds, rows, columns):
    """The same where only rows x columns of the tile exist."""
    part, whole = np.zeros(ROWS * BLOCK_K, np.float32), np.zeros(ROWS * WIDTH, np.float32)
    for i in range(rows):
        for k in range(K):
            put(part, i * BLOCK_K + k, get(a, a_at + i * a_row + k * a_column))
    if adds:
        for i in range(rows):
            for j in range(columns):
                put(whole, i * WIDTH + j, get(c, c_at + i * c_row + j))
    tile(part, 0, BLOCK_K, 1, b, b_at, whole, 0, WIDTH, K, adds)
    for i in range(rows):
        for j in range(columns):
            put(c, c_at + i * c_row + j, get(whole, i * WIDTH + j))


@inlined
def pack_panel(K, N, first, b, b_row, b_column, packed, at):
    """The 32 columns of B from `first` on as a panel, zeros where there are fewer."""
    columns = min(WIDTH, N - first)
    if b_column == 1 and columns == WIDTH:
        for k in range(K):
            store(packed, at + k * WIDTH, load(b, k * b_row + first))
            store(packed, at + k * WIDTH + 16, load(b, k * b_row + first + 16))
    else:
        for k in range(K):
            for j in range(columns):
                put(packed, at + k * WIDTH + j, get(b, k * b_row + (first + j) * b_column))
            for j in range(columns, WIDTH):
                put(packed, at + k * WIDTH + j, _f(0))


@compiled
def pack(N, K, b, b_row, b_column, packed):
    """B[K x N] as panels: packed (N / 32, rounded up) x K x 32. Addresses."""
    for panel in prange((N + WIDTH - 1) // WIDTH):
        pack_panel(K, N, panel * WIDTH, b, b_row, b_column, packed, panel * K * WIDTH)


@inlined
def multiply_packed(rows, N, K, a, a_row, packed, out, out_row):
    """out[rows x N] = A[rows x K] times a packed B. rows in eights; out has room for N rounded up to 32."""
    for depth in range(0, K, BLOCK_K):
        part = min(BLOCK_K, K - depth)
        for panel in range((N + WIDTH - 1) // WIDTH):
            b_at = (panel * K + depth) * WIDTH
            for m in range(0, rows, ROWS):
                c_at = m * out_row + panel * WIDTH
                tile(a, m * a_row + depth, a_row, 1, packed, b_at, out, c_at, out_row, part, depth > 0)


@compiled
def multiply(M, N, K, a, a_row, a_column, b, b_row, b_column, out):
    """out M x N, dense. Addresses and strides: A[m, k] is a[m * a_row + k * a_column], and B[k, n] alike."""
    panels = (N + WIDTH - 1) // WIDTH
    packed = np.empty(panels * K * WIDTH, np.float32)
    for panel in prange(panels):
        pack_panel(K, N, panel * WIDTH, b, b_row, b_column, packed, panel * K * WIDTH)
    spans = (panels + PANELS - 1) // PANELS
    blocks = (M + BLOCK_M - 1) // BLOCK_M
    for task in prange(blocks * spans):
        top, span = task // spans * BLOCK_M, task % spans
        for depth in range(0, K, BLOCK_K):
            part = min(BLOCK_K, K - depth)
            for panel in range(span * PANELS, min(panels, (span + 1) * PANELS)):
                b_at = (panel * K + depth) * WIDTH
                columns = min(WIDTH, N - panel * WIDTH)
                for m in range(top, min(M, top + BLOCK_M), ROWS):
                    a_at, c_at = m * a_row + depth * a_column, m * N + panel * WIDTH
                    if columns == WIDTH and m + ROWS <= M:
                        tile(a, a_at, a_row, a_column, packed, b_at, out, c_at, N, part, depth > 0)
                    else:
                        rows = min(ROWS, M - m)
                        edge_tile(a, a_at, a_row, a_column, packed, b_at, out, c_at, N, part, depth > 0, rows, columns)
