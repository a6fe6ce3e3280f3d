"""Matrix products: C[M x N] = A[M x K] B[K x N]; B in any layout, A by rows or transposed.

    B ─ pack ─► panels of K x WIDTH; a panel stays in a core's cache while tiles of A's rows use it
    tile: ROWS x WIDTH accumulators in registers, one row of the panel and ROWS numbers of A for each k

For gradients of weights, A is transposed and K counts tokens. Each task (one iteration of the
parallel loop) then packs the rows of A and the columns of B that it needs, piece by piece along K.

ROWS x WIDTH is 8 x 32 with AVX-512, 6 x 16 with AVX2, 8 x 8 with NEON.

torch computes fp32 matrix products with MKL, which uses only AVX2 on AMD processors (half the speed
of a core with AVX-512), or with oneDNN, which compiles code for every new number of tokens. The
kernels of this module run new shapes without compiling.
"""

import numpy as np
from numba import prange

from hone.kernels.cpu import isa
from hone.kernels.cpu.compiling import compiled, inlined
from hone.kernels.cpu.simd import LANES, get, load, prefetch, put, store, tile_of, transpose

ROWS, WIDTH = isa().rows, isa().vectors * LANES  # of a tile
# Rows of a task; depth after which a tile goes back to memory
BLOCK_M, BLOCK_K = (64 // ROWS * ROWS, 256)
PANELS = 4  # of a task
BLOCK_T = 384 // ROWS * ROWS  # rows of a task whose A is transposed, at most
STRETCH = 128  # of K that is packed at once where A is transposed
ROOM = STRETCH * ROWS + LANES  # of a tile's rows of A, and for the end of the last vector
SPAN = -(-ROWS // LANES) * LANES  # of whole vectors that hold a tile's rows
LINE = 16  # numbers of a cache line
_f = np.float32
tile = tile_of(ROWS, isa().vectors)


@inlined
def edge_tile(a, a_at, a_row, b, b_at, c, c_at, c_row, K, adds, rows, columns):
    """Compute a tile with fewer than ROWS rows or WIDTH columns."""
    part, whole = np.zeros(ROWS * BLOCK_K, np.float32), np.zeros(ROWS * WIDTH, np.float32)
    for i in range(rows):
        for k in range(K):
            put(part, i * BLOCK_K + k, get(a, a_at + i * a_row + k))
    if adds:
        for i in range(rows):
            for j in range(columns):
                put(whole, i * WIDTH + j, get(c, c_at + i * c_row + j))
    tile(part, 0, BLOCK_K, 1, b, b_at, WIDTH, whole, 0, WIDTH, K, adds)
    for i in range(rows):
        for j in range(columns):
            put(c, c_at + i * c_row + j, get(whole, i * WIDTH + j))


@inlined
def pack_panel(K, N, first, b, b_row, b_column, b_at, packed, at):
    """Pack WIDTH columns of B, from column `first` on, into a zero-padded panel of K rows.

    B[k, n] is b[b_at + k * b_row + n * b_column].
    """
    columns = min(WIDTH, N - first)
    if b_column == 1 and columns == WIDTH:
        for k in range(K):
            for j in range(0, WIDTH, LANES):
                store(packed, at + k * WIDTH + j, load(b, b_at + k * b_row + first + j))
    else:
        whole = K // LANES * LANES if b_row == 1 and columns == WIDTH else 0
        for j in range(0, WIDTH, LANES):
            for k in range(0, whole, LANES):
                transpose(
                    b,
                    b_at + k + (first + j) * b_column,
                    b_column,
                    packed,
                    at + k * WIDTH + j,
                    WIDTH,
                )
        for k in range(whole, K):
            for j in range(columns):
                put(packed, at + k * WIDTH + j, get(b, b_at + k * b_row + (first + j) * b_column))
            for j in range(columns, WIDTH):
                put(packed, at + k * WIDTH + j, _f(0))


@compiled
def pack(N, K, b, b_row, b_column, packed):
    """Pack B[K x N] into panels; `packed` has (N / WIDTH, rounded up) x K x WIDTH floats."""
    for panel in prange((N + WIDTH - 1) // WIDTH):
        pack_panel(K, N, panel * WIDTH, b, b_row, b_column, 0, packed, panel * K * WIDTH)


@inlined
def packed_panels(N, K, b, b_row, b_column):
    """Return B[K x N] as panels in new memory."""
    panels = np.empty((N + WIDTH - 1) // WIDTH * K * WIDTH, np.float32)
    pack(N, K, b, b_row, b_column, np.int64(panels.ctypes.data))
    return panels


@inlined
def multiply_rows(top, end, first, last, N, K, a, a_row, packed, out, out_first):
    """Multiply rows top … end - 1 of A by panels first … last - 1 of a packed B.

    `out` has N columns; its first row is row `out_first` of the result.
    """
    for depth in range(0, K, BLOCK_K):
        part = min(BLOCK_K, K - depth)
        for panel in range(first, last):
            b_at = (panel * K + depth) * WIDTH
            columns = min(WIDTH, N - panel * WIDTH)
            for m in range(top, end, ROWS):
                a_at, c_at = m * a_row + depth, (m - out_first) * N + panel * WIDTH
                if columns == WIDTH and m + ROWS <= end:
                    tile(a, a_at, a_row, 1, packed, b_at, WIDTH, out, c_at, N, part, depth > 0)
                else:
                    rows = min(ROWS, end - m)
                    edge_tile(
                        a, a_at, a_row, packed, b_at, out, c_at, N, part, depth > 0, rows, columns
                    )


@inlined
def multiply_packed(rows, K, a, a_row, packed, out, out_row):
    """Multiply A[rows x K] by a packed B, without partial tiles.

    `rows` is a multiple of ROWS, `out_row` of WIDTH. `out` is rows x out_row.
    """
    multiply_rows(0, rows, 0, out_row // WIDTH, out_row, K, a, a_row, packed, out, 0)


@compiled
def multiply(M, N, K, a, a_row, b, b_row, b_column, out):
    """Compute the dense product out = A B, M x N.

    A[m, k] is a[m * a_row + k], B[k, n] is b[k * b_row + n * b_column].
    """
    panels, packed = (N + WIDTH - 1) // WIDTH, packed_panels(N, K, b, b_row, b_column)
    spans = (panels + PANELS - 1) // PANELS
    blocks = (M + BLOCK_M - 1) // BLOCK_M
    for task in prange(blocks * spans):
        top, first = task // spans * BLOCK_M, task % spans * PANELS
        end, last = min(M, top + BLOCK_M), min(panels, first + PANELS)
        multiply_rows(top, end, first, last, N, K, a, a_row, packed, out, 0)


@inlined
def pack_rows(a, at, a_column, rows, held, K, packed):
    """Pack `rows` rows and K columns of a transposed A into tiles of K x ROWS.

    A[m, k] is a[at + m + k * a_column]. Tiles are ROOM floats apart. A has `held` rows from `at`
    on; whole vectors are loaded only within these rows.
    """
    for first in range(0, rows, ROWS):
        here, there = at + first, first // ROWS * ROOM
        for _ in range(K):
            # Whole vectors: what they hold beside the tile is written over next
            if first + SPAN <= held:
                for i in range(0, ROWS, LANES):
                    store(packed, there + i, load(a, here + i))
            else:
                for i in range(min(ROWS, held - first)):
                    put(packed, there + i, get(a, here + i))
            here, there = here + a_column, there + ROWS


@inlined
def ask_for(a, at, a_column, b, b_at, b_row, lines, of_A, of_row, row, line):
    """Prefetch the next `lines` cache lines of A and B to be packed; return where to continue.

    For each k there are `of_row` cache lines: `of_A` of A, then those of B. Prefetching starts at k
    = `row`, cache line `line`, and the next (row, line) is returned.
    """
    for _ in range(lines):
        if line < of_A:
            prefetch(a, at + row * a_column + line * LINE)
        else:
            prefetch(b, b_at + row * b_row + (line - of_A) * LINE)
        line += 1
        if line == of_row:
            row, line = row + 1, 0
    return row, line


@inlined
def shares_of(M, N, threads):
    """Return the numbers of row blocks and column spans of the output with the least packing.

    Each pair of a block and a span is a task. A block has up to BLOCK_T rows.
    """
    best = 1
    for d in range(2, threads + 1):
        if threads % d == 0 and M / d + N * d / threads < M / best + N * best / threads:
            best = d
    return -(-M // (best * BLOCK_T)) * best, threads // best


@compiled
def multiply_transposed(M, N, K, a, a_column, b, b_row, threads, out):
    """Compute out = A B, M x N, for a transposed A, with the same bits as `multiply`.

    A[m, k] is a[m + k * a_column], B[k, n] is b[k * b_row + n]. A task packs A and B for STRETCH
    values of k at a time. While it multiplies them, it prefetches A and B for the next STRETCH
    values.
    """
    blocks, spans = shares_of(M, N, threads)
    panels = (N + WIDTH - 1) // WIDTH
    width, height = (panels + spans - 1) // spans, (M + blocks * ROWS - 1) // (blocks * ROWS) * ROWS
    for task in prange(blocks * spans):
        top, first = task // spans * height, task % spans * width
        rows, columns = min(M - top, height), min(panels - first, width) * WIDTH
        packed, panel_of_B = (
            np.zeros(height // ROWS * ROOM, np.float32),
            np.empty(STRETCH * WIDTH, np.float32),
        )
        sums = np.empty(height * width * WIDTH, np.float32)  # in whole tiles
        of_A = (rows + LINE - 1) // LINE
        of_row = of_A + columns // LINE
        tiles = max(1, columns // WIDTH * ((rows + ROWS - 1) // ROWS))
        lines = (of_row * STRETCH + tiles - 1) // tiles
        for depth in range(0, K, STRETCH):
            part = min(STRETCH, K - depth)
            pack_rows(a, top + depth * a_column, a_column, rows, M - top, part, packed)
            row, line = depth + STRETCH, 0
            for left in range(0, columns, WIDTH):
                pack_panel(part, N, first * WIDTH + left, b, b_row, 1, depth * b_row, panel_of_B, 0)
                for m in range(0, rows, ROWS):
                    if row < min(K, depth + 2 * STRETCH):
                        row, line = ask_for(
                            a,
                            top,
                            a_column,
                            b,
                            first * WIDTH,
                            b_row,
                            lines,
                            of_A,
                            of_row,
                            row,
                            line,
                        )
                    a_at, c_at = m // ROWS * ROOM, m * columns + left
                    tile(
                        packed,
                        a_at,
                        1,
                        ROWS,
                        panel_of_B,
                        0,
                        WIDTH,
                        sums,
                        c_at,
                        columns,
                        part,
                        depth > 0,
                    )
        for m in range(rows):
            for n in range(min(columns, N - first * WIDTH)):
                put(out, (top + m) * N + first * WIDTH + n, get(sums, m * columns + n))
