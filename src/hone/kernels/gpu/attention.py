"""Flash attention (Dao 2023) with gradients, for grouped-query heads and concatenated sequences.

    forward      a tile of queries ─ over the keys before it ─► out, log of the sum of exponentials (base 2)
    backward     a tile of keys    ─ over the queries after it, of all heads that share it ─► dk, dv
                 a tile of queries ─ over the keys before it ─► dq

Sums have a fixed order: the same step gives the same bits. A tile belongs to one sequence; tiles
with most work come first. Several sequences may continue one earlier prefix (`tiles`): their
queries see the prefix's keys, and the prefix's keys receive gradients from the queries of all these
sequences. If a tile of keys has so many queries that one program would run longer than all other
programs, the queries are divided among several programs, whose partial gradients are added
afterwards. Shapes: T tokens, H query heads, K key/value heads, E head size.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from hone.kernels.pinned_memory import to_device

TILE = 64
KEYS = 32  # that a query takes up at once
FIELDS = tl.constexpr(6)  # of a tile
LOG2_E = 1.4426950408889634
# A program has no more than a 64th of the queries that all tiles of keys see, or 512
SHARES, LEAST = (64, 512)


@dataclass(frozen=True)
class Tiles:
    """Tables of the tiles that attention kernels process: int32 rows, those with most work first.

    A sequence that belongs to a group also sees the keys of the group's prefix.

    Attributes:
        of_queries: tiles of queries.
        of_keys: tiles of keys, each with a range of queries; a tile with many queries has several rows.
        of_sums: tiles of keys whose gradients are computed in parts and added afterwards.
        parts: number of these partial gradients.
        has_prefixes: True if any sequence has a prefix.
    """

    of_queries: Tensor  # start, length of the sequence, index of the tile, start and length of the prefix, 0
    of_keys: Tensor  # start, index of the tile, keys of the sequence, from and to which query, part or -1 for all of it
    of_sums: Tensor  # start, index of the tile, keys of the sequence, first part, behind its last part, 0
    parts: int
    has_prefixes: bool


class TilePlan(NamedTuple):
    """The tables of `Tiles`, on the host."""

    of_queries: NDArray[np.int32]
    of_keys: NDArray[np.int32]
    of_sums: NDArray[np.int32]
    parts: int
    has_prefixes: bool


def tiles(rows: NDArray[np.int64], groups: NDArray[np.int64], device: torch.device) -> Tiles:
    """Divide sequences into tiles (`plan_tiles`), and copy the tables to the device."""
    *tables, parts, has_prefixes = plan_tiles(rows, groups)
    return Tiles(*(to_device(table, device) for table in tables), parts, has_prefixes)


def plan_tiles(rows: NDArray[np.int64], groups: NDArray[np.int64]) -> TilePlan:
    """Divide sequences into tiles for the attention kernels.

    Args:
        rows: S x 4: start, length, prefix start, prefix length of each sequence.
        groups: G + 1: the first row of each group, then S. The first sequence of a group is the
            prefix of the other sequences.
    """
    starts, lengths, prefixes, prefix_lengths = rows.T
    ends = starts + lengths
    seen_until = ends.copy()
    seen_until[groups[:-1]] = ends[groups[1:] - 1]
    counts = -(-lengths // TILE)
    sequence = np.repeat(np.arange(len(rows)), counts)
    index = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    start, length, nothing = starts[sequence], lengths[sequence], np.zeros_like(index)
    of_queries = np.stack(
        [start, length, index, prefixes[sequence], prefix_lengths[sequence], nothing], axis=1
    )

    first, end = index * TILE, (seen_until - starts)[sequence]
    most = max(LEAST, -(-int((end - first).sum()) // (SHARES * TILE)) * TILE)
    pieces = -(-(end - first) // most)
    tile = np.repeat(np.arange(len(index)), pieces)
    first = (
        first[tile] + (np.arange(len(tile)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    )
    end = np.minimum(end[tile], first + most)
    is_part = pieces[tile] > 1
    part = np.where(is_part, np.cumsum(is_part) - 1, -1)
    of_keys = np.stack([start[tile], index[tile], length[tile], first, end, part], axis=1)
    split = np.flatnonzero(pieces > 1)
    behind = np.cumsum(pieces[split])
    of_sums = np.stack(
        [start[split], index[split], length[split], behind - pieces[split], behind, nothing[split]],
        axis=1,
    )

    def by_work(table: NDArray[np.int64], work: NDArray[np.int64]) -> NDArray[np.int32]:
        return table[np.argsort(-work, kind="stable")].astype(np.int32)

    return TilePlan(
        by_work(of_queries, index * TILE + prefix_lengths[sequence]),
        by_work(of_keys, end - first),
        by_work(of_sums, behind),
        int(is_part.sum()),
        bool(prefix_lengths.any()),
    )


@triton.jit
def attend(logits, scale, v_NE, top, size, sum_ME):
    """Add one tile of keys to a running softmax; return its state (top, size, sum_ME).

    The state is the highest logit, the sum of exponentials and the weighted sum of values. `scale`
    turns logits into base 2.
    """
    higher = tl.maximum(top, tl.max(logits, axis=1) * scale)
    p = tl.exp2(tl.fma(logits, scale, -higher[:, None]))
    kept = tl.exp2(top - higher)
    size = size * kept + tl.sum(p, axis=1)
    sum_ME = tl.dot(p.to(v_NE.dtype), v_NE, sum_ME * kept[:, None])
    return higher, size, sum_ME


# The number of tokens differs from step to step, and Triton would compile once more for the first that 16 divides.
@triton.jit(do_not_specialize=["T"])
def forward_kernel(
    q,
    k,
    v,
    out,
    logsum,
    tiles,
    scale,
    T,
    q_row,
    k_row,
    v_row,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PREFIX: tl.constexpr,
):
    """Compute the attention output of a tile of M queries of head h.

    `scale` turns logits into base 2; *_row are strides between tokens. Keys come N at a time from
    position 0 on, first the prefix's, so that a query's result has the same bits as in decoding
    (`ordered_kernel` in decode.py).
    """
    h = tl.program_id(1)
    tile = tiles + tl.program_id(0) * FIELDS
    start, length, index = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    e = tl.arange(0, E)[None, :]
    m, n = index * M + tl.arange(0, M), tl.arange(0, N)
    first = start.to(tl.int64)
    q_ME = tl.load(q + (first + m)[:, None] * q_row + h * E + e, (m < length)[:, None], other=0.0)
    keys = k + (first + n)[:, None] * k_row + h // GROUP * E + e
    values = v + (first + n)[:, None] * v_row + h // GROUP * E + e
    top = tl.full([M], -1e30, dtype=tl.float32)
    size = tl.zeros([M], dtype=tl.float32)
    sum_ME = tl.zeros([M, E], dtype=tl.float32)
    own = 0  # from which of its own tokens on tiles hold no key of the prefix
    if PREFIX:
        before = tl.load(tile + 4)
        own = (N - before % N) % N
        away = tl.load(tile + 3) - start  # of the prefix, from the sequence
        whole = before // N * N
        for at in range(0, whole, N):
            k_NE = tl.load(keys + (away + at) * k_row)
            v_NE = tl.load(values + (away + at) * v_row)
            top, size, sum_ME = attend(tl.dot(q_ME, tl.trans(k_NE)), scale, v_NE, top, size, sum_ME)
        # The end of the prefix, and as many of the sequence's tokens as make a tile
        if whole < before:
            place = whole + n - before
            inside = (place < length)[:, None]
            there = (whole + tl.where(place < 0, away, -before))[:, None]
            k_NE = tl.load(keys + there * k_row, inside, other=0.0)
            v_NE = tl.load(values + there * v_row, inside, other=0.0)
            logits = tl.where(m[:, None] >= place[None, :], tl.dot(q_ME, tl.trans(k_NE)), -1e30)
            top, size, sum_ME = attend(logits, scale, v_NE, top, size, sum_ME)
    seen_by_all = own + tl.maximum(index * M + 1 - own, 0) // N * N
    for at in range(own, seen_by_all, N):  # keys that all queries of the tile see
        k_NE = tl.load(keys + at * k_row)
        v_NE = tl.load(values + at * v_row)
        top, size, sum_ME = attend(tl.dot(q_ME, tl.trans(k_NE)), scale, v_NE, top, size, sum_ME)
    for at in range(seen_by_all, tl.minimum(index * M + M, length), N):
        inside = (at + n < length)[:, None]
        k_NE = tl.load(keys + at * k_row, inside, other=0.0)
        v_NE = tl.load(values + at * v_row, inside, other=0.0)
        logits = tl.where(m[:, None] >= at + n[None, :], tl.dot(q_ME, tl.trans(k_NE)), -1e30)
        top, size, sum_ME = attend(logits, scale, v_NE, top, size, sum_ME)
    result = (sum_ME / size[:, None]).to(out.dtype.element_ty)
    tl.store(out + ((first + m)[:, None] * H + h) * E + e, result, (m < length)[:, None])
    tl.store(logsum + h.to(tl.int64) * T + first + m, top + tl.log2(size), m < length)


@triton.jit(do_not_specialize=["T"])
def inner_kernel(out, grad, inner, T, H: tl.constexpr, E: tl.constexpr, N: tl.constexpr):
    """Compute inner (H x T): the inner product of out and grad for each head of token t."""
    t = tl.program_id(0).to(tl.int64)
    n, e = tl.arange(0, N), tl.arange(0, E)[None, :]
    row = (t * H + n)[:, None] * E + e
    x = tl.load(out + row, (n < H)[:, None], other=0.0).to(tl.float32)
    y = tl.load(grad + row, (n < H)[:, None], other=0.0).to(tl.float32)
    tl.store(inner + n.to(tl.int64) * T + t, tl.sum(x * y, axis=1), n < H)


@triton.jit(do_not_specialize=["T"])
def keys_backward_kernel(
    q,
    k,
    v,
    grad,
    logsum,
    inner,
    dk,
    dv,
    parts,
    tiles,
    scale,
    root,
    T,
    q_row,
    k_row,
    v_row,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Compute dk and dv of N keys of key/value head h, over the tile's queries, M at a time."""
    h = tl.program_id(1)
    tile = tiles + tl.program_id(0) * FIELDS
    start, index, start_at, end = (
        tl.load(tile),
        tl.load(tile + 1),
        tl.load(tile + 3),
        tl.load(tile + 4),
    )
    e = tl.arange(0, E)[None, :]
    m, n = tl.arange(0, M), index * N + tl.arange(0, N)
    first, is_key = start.to(tl.int64), (n < tl.load(tile + 2))[:, None]
    k_NE = tl.load(k + (first + n)[:, None] * k_row + h * E + e, is_key, other=0.0)
    v_NE = tl.load(v + (first + n)[:, None] * v_row + h * E + e, is_key, other=0.0)
    dk_NE, dv_NE = tl.zeros([N, E], dtype=tl.float32), tl.zeros([N, E], dtype=tl.float32)
    for head in range(h * GROUP, h * GROUP + GROUP):
        queries = q + (first + m)[:, None] * q_row + head * E + e
        grads = grad + ((first + m)[:, None] * H + head) * E + e
        scalars = head * T.to(tl.int64) + first + m
        for at in range(start_at, end, M):  # queries past the end are 0, and so is what they give
            inside = at + m < end
            q_ME = tl.load(queries + at * q_row, inside[:, None], other=0.0)
            lse = tl.load(logsum + scalars + at, inside, other=0.0)
            logits_NM = tl.dot(k_NE, tl.trans(q_ME)) * scale
            p_NM = tl.where(at + m[None, :] >= n[:, None], tl.exp2(logits_NM - lse[None, :]), 0.0)
            g_ME = tl.load(grads + at * H * E, inside[:, None], other=0.0)
            dv_NE = tl.dot(p_NM.to(g_ME.dtype), g_ME, dv_NE)
            of = tl.load(inner + scalars + at, inside, other=0.0)
            ds_NM = p_NM * (tl.dot(v_NE, tl.trans(g_ME)) - of[None, :])
            dk_NE = tl.dot(ds_NM.to(q_ME.dtype), q_ME, dk_NE)
    part = tl.load(tile + 5)
    if part < 0:
        row = ((first + n)[:, None] * (H // GROUP) + h) * E + e
        tl.store(dk + row, (dk_NE * root).to(dk.dtype.element_ty), is_key)
        tl.store(dv + row, dv_NE.to(dv.dtype.element_ty), is_key)
    else:
        cell = (
            parts
            + (part * (H // GROUP) + h).to(tl.int64) * 2 * N * E
            + tl.arange(0, N)[:, None] * E
            + e
        )
        tl.store(cell, dk_NE)
        tl.store(cell + N * E, dv_NE)


@triton.jit
def sum_parts_kernel(parts, dk, dv, tiles, root, K: tl.constexpr, E: tl.constexpr, N: tl.constexpr):
    """Add the parts of dk and dv that several programs computed for N keys of head h."""
    h = tl.program_id(1)
    tile = tiles + tl.program_id(0) * FIELDS
    e, n = tl.arange(0, E)[None, :], tl.arange(0, N)[:, None]
    dk_NE, dv_NE = tl.zeros([N, E], dtype=tl.float32), tl.zeros([N, E], dtype=tl.float32)
    for part in range(tl.load(tile + 3), tl.load(tile + 4)):
        cell = parts + (part * K + h).to(tl.int64) * 2 * N * E + n * E + e
        dk_NE += tl.load(cell)
        dv_NE += tl.load(cell + N * E)
    n += tl.load(tile + 1) * N
    row, is_key = ((tl.load(tile).to(tl.int64) + n) * K + h) * E + e, n < tl.load(tile + 2)
    tl.store(dk + row, (dk_NE * root).to(dk.dtype.element_ty), is_key)
    tl.store(dv + row, dv_NE.to(dv.dtype.element_ty), is_key)


@triton.jit(do_not_specialize=["T"])
def queries_backward_kernel(
    q,
    k,
    v,
    grad,
    logsum,
    inner,
    dq,
    tiles,
    scale,
    root,
    T,
    q_row,
    k_row,
    v_row,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PREFIX: tl.constexpr,
):
    """Compute dq of M queries of head h, from the keys that each query sees, N at a time."""
    h = tl.program_id(1)
    tile = tiles + tl.program_id(0) * FIELDS
    start, length, index = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    e = tl.arange(0, E)[None, :]
    m, n = index * M + tl.arange(0, M), tl.arange(0, N)
    first = start.to(tl.int64)
    inside_m = m < length
    q_ME = tl.load(q + (first + m)[:, None] * q_row + h * E + e, inside_m[:, None], other=0.0)
    g_ME = tl.load(grad + ((first + m)[:, None] * H + h) * E + e, inside_m[:, None], other=0.0)
    lse = tl.load(logsum + h.to(tl.int64) * T + first + m, inside_m, other=0.0)
    of = tl.load(inner + h.to(tl.int64) * T + first + m, inside_m, other=0.0)
    keys = k + (first + n)[:, None] * k_row + h // GROUP * E + e
    values = v + (first + n)[:, None] * v_row + h // GROUP * E + e
    dq_ME = tl.zeros([M, E], dtype=tl.float32)
    if PREFIX:
        before = tl.load(tile + 4)
        away = tl.load(tile + 3) - start
        for at in range(0, before, N):  # keys past its end are 0, and so is what they give
            inside = (at + n < before)[:, None]
            k_NE = tl.load(keys + (away + at) * k_row, inside, other=0.0)
            p = tl.exp2(tl.dot(q_ME, tl.trans(k_NE)) * scale - lse[:, None])
            v_NE = tl.load(values + (away + at) * v_row, inside, other=0.0)
            ds = p * (tl.dot(g_ME, tl.trans(v_NE)) - of[:, None])
            dq_ME = tl.dot(ds.to(k_NE.dtype), k_NE, dq_ME)
    # As fast as two loops, of which one needs no mask
    for at in range(0, tl.minimum(index * M + M, length), N):
        inside = (at + n < length)[:, None]
        k_NE = tl.load(keys + at * k_row, inside, other=0.0)
        logits = tl.dot(q_ME, tl.trans(k_NE)) * scale
        p = tl.where(m[:, None] >= at + n[None, :], tl.exp2(logits - lse[:, None]), 0.0)
        v_NE = tl.load(values + at * v_row, inside, other=0.0)
        ds = p * (tl.dot(g_ME, tl.trans(v_NE)) - of[:, None])
        dq_ME = tl.dot(ds.to(k_NE.dtype), k_NE, dq_ME)
    tl.store(
        dq + ((first + m)[:, None] * H + h) * E + e,
        (dq_ME * root).to(dq.dtype.element_ty),
        inside_m[:, None],
    )


def forward(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return attention outputs (T x H x E), and log-sum-exps (base 2) H x T.

    q: T x H x E; k, v: T x K x E; tokens may be strided.
    """
    T, H, E = q.shape
    out, logsum = q.new_empty(T, H, E), q.new_empty(H, T, dtype=torch.float32)
    forward_kernel[(len(tiles.of_queries), H)](
        q,
        k,
        v,
        out,
        logsum,
        tiles.of_queries,
        LOG2_E / E**0.5,
        T,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        H=H,
        GROUP=H // k.shape[1],
        E=E,
        M=TILE,
        N=KEYS,
        PREFIX=tiles.has_prefixes,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=False,
    )
    return out, logsum


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsum: Tensor, grad: Tensor, tiles: Tiles
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `grad` is the gradient of `out`, contiguous."""
    T, H, E = q.shape
    K = k.shape[1]
    inner = torch.empty_like(logsum)
    inner_kernel[(T,)](out, grad, inner, T, H=H, E=E, N=triton.next_power_of_2(H), num_warps=4)
    dq, dk, dv = q.new_empty(T, H, E), k.new_empty(T, K, E), k.new_empty(T, K, E)
    root = 1 / E**0.5
    rest = (LOG2_E * root, root, T, q.stride(0), k.stride(0), v.stride(0))
    sizes = {"H": H, "GROUP": H // K, "E": E}
    parts = q.new_empty(tiles.parts, K, 2, TILE, E, dtype=torch.float32)
    keys_backward_kernel[(len(tiles.of_keys), K)](
        q,
        k,
        v,
        grad,
        logsum,
        inner,
        dk,
        dv,
        parts,
        tiles.of_keys,
        *rest,
        **sizes,
        M=32,
        N=TILE,
        num_warps=4,
        num_stages=2,
    )
    if tiles.parts:
        sum_parts_kernel[(len(tiles.of_sums), K)](
            parts, dk, dv, tiles.of_sums, root, K=K, E=E, N=TILE, num_warps=4
        )
    queries_backward_kernel[(len(tiles.of_queries), H)](
        q,
        k,
        v,
        grad,
        logsum,
        inner,
        dq,
        tiles.of_queries,
        *rest,
        **sizes,
        M=TILE,
        N=64,
        PREFIX=tiles.has_prefixes,
        num_warps=4,
        num_stages=2,
    )
    return dq, dk, dv
