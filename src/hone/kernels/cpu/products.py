"""Matrix products: C[M x N] = A[M x K] B[K x N], either operand in any layout.

    B ─ pack ─► panels of K x WIDTH, which stay in a core's cache while tiles of ROWS rows of A go by
    tile: ROWS x WIDTH accumulators in registers, one row of the panel and ROWS numbers of A for each k

ROWS x WIDTH is 8 x 32 with AVX-512, 6 x 16 with AVX2, 8 x 8 with NEON.

torch hands fp32 products to MKL, which keeps to AVX2 on AMD processors (half the speed of a core with AVX-512), or to
oneDNN, which compiles code for every new number of tokens. Here a shape costs nothing to be new.
"""

import numpy as np
from numba import prange

from hone.kernels.cpu import compiled, inlined, isa
from hone.kernels.cpu.lanes import LANES, get, load, put, store, tile_of

ROWS, WIDTH = isa().rows, isa().vectors * LANES  # of a tile
BLOCK_M, BLOCK_K = 64 // ROWS * ROWS, 256  # rows of a task; depth after which a tile goes back to memory
PANELS = 4  # of a task
_f = np.float32
tile = tile_of(ROWS, isa().vectors)


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
    tile(part, 0, BLOCK_K, 1, b, b_at, WIDTH, whole, 0, WIDTH, K, adds)
    for i in range(rows):
        for j in range(columns):
            put(c, c_at + i * c_row + j, get(whole, i * WIDTH + j))


@inlined
def pack_panel(K, N, first, b, b_row, b_column, packed, at):
    """The WIDTH columns of B from `first` on as a panel, zeros where there are fewer."""
    columns = min(WIDTH, N - first)
    if b_column == 1 and columns == WIDTH:
        for k in range(K):
            for j in range(0, WIDTH, LANES):
                store(packed, at + k * WIDTH + j, load(b, k * b_row + first + j))
    else:
        for k in range(K):
            for j in range(columns):
                put(packed, at + k * WIDTH + j, get(b, k * b_row + (first + j) * b_column))
            for j in range(columns, WIDTH):
                put(packed, at + k * WIDTH + j, _f(0))


@compiled
def pack(N, K, b, b_row, b_column, packed):
    """B[K x N] as panels: packed (N / WIDTH, rounded up) x K x WIDTH. Addresses."""
    for panel in prange((N + WIDTH - 1) // WIDTH):
        pack_panel(K, N, panel * WIDTH, b, b_row, b_column, packed, panel * K * WIDTH)


@inlined
def multiply_packed(rows, N, K, a, a_row, packed, out, out_row):
    """out[rows x N] = A[rows x K] times a packed B. rows in whole tiles; out has room for N in whole panels."""
    for depth in range(0, K, BLOCK_K):
        part = min(BLOCK_K, K - depth)
        for panel in range((N + WIDTH - 1) // WIDTH):
            b_at = (panel * K + depth) * WIDTH
            for m in range(0, rows, ROWS):
                c_at = m * out_row + panel * WIDTH
                tile(a, m * a_row + depth, a_row, 1, packed, b_at, WIDTH, out, c_at, out_row, part, depth > 0)


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
                        tile(a, a_at, a_row, a_column, packed, b_at, WIDTH, out, c_at, N, part, depth > 0)
                    else:
                        rows = min(ROWS, M - m)
                        edge_tile(a, a_at, a_row, a_column, packed, b_at, out, c_at, N, part, depth > 0, rows, columns)
