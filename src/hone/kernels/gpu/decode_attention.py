"""Decode attention that reads each sequence's pages separately, through shared memory.

A thread block handles one k/v head of one sequence, or of a part of the sequence. It requests the
first tiles of keys and values while the QKV projection still runs, since only the newest token
depends on that projection. Each warp handles its own tokens of a tile, so warps exchange nothing
until all tiles are processed:

    cache ────────► STAGES tiles in shared memory ─┐
    wait ──► qkv ─► norm, rope ─► queries ─────────┴─► softmax per warp ─► shared memory ─► summed ─► out
                      └─► newest key and value ─► cache, and added to the warps' results

Written in Gluon, a Triton language in which a kernel states which thread holds which tensor
elements.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language import debug_barrier

from hone.kernels import gpu, row_state
from hone.kernels.attention_form import PLAIN_FORM, AttentionForm
from hone.kernels.gpu import options, power_of_2
from hone.kernels.gpu.launching import let_next_start, set_memory_share, wait_only
from hone.kernels.gpu.row_kernels import head_scales

FIELDS, LENGTH = gl.constexpr(row_state.FIELDS), gl.constexpr(row_state.LENGTH)
LOG2_E = gl.constexpr(math.log2(math.e))
VECTOR = gl.constexpr(8)  # numbers that a thread fetches at once
FEWEST = gl.constexpr(8)  # columns of a product on the chip
FEW, MANY = 4, 8  # blocks a multiprocessor
MOST_QUERIES = 16  # of a k/v head, for blocks of several warps
FEWEST_STAGES = 2  # of blocks of several warps


@gluon.jit
def _ask(
    keys,
    values,
    to_keys,
    to_values,
    pages,
    first,
    end,
    head,
    K: gl.constexpr,
    E: gl.constexpr,
    PAGE: gl.constexpr,
    WARPS: gl.constexpr,
    TOKENS: gl.constexpr,
):
    """Start to load a tile of keys and values into shared memory, zeros from position `end` on."""
    gl.static_assert(PAGE % TOKENS == 0, "what a warp has of a tile lies in one page")
    LANES: gl.constexpr = min(E // VECTOR, 32)
    of_copies: gl.constexpr = gl.BlockedLayout(
        [1, 1, VECTOR], [1, 32 // LANES, LANES], [WARPS, 1, 1], [2, 1, 0]
    )
    w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, of_copies)))[:, None, None]
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, of_copies)))[None, :, None]
    e = gl.arange(0, E, gl.SliceLayout(0, gl.SliceLayout(1, of_copies)))[None, None, :]
    first += w * TOKENS
    page = gl.load(pages + first // PAGE, first < end, other=0).to(gl.int64)
    cell, at = ((page * PAGE + first % PAGE) * K + head) * E, t * (K * E) + e
    async_copy.async_copy_global_to_shared(to_keys, (keys + cell) + at, t < end - first)
    async_copy.async_copy_global_to_shared(to_values, (values + cell) + at, t < end - first)


@gluon.jit
def _repeated(x, times: gl.constexpr):
    """Repeat all rows of x `times` times; `times` is a power of 2."""
    if times > 1:
        twice = gl.reshape(gl.permute(gl.join(x, x), [2, 0, 1]), [2 * x.shape[0], x.shape[1]])
        rows = _repeated(twice, times // 2)
    else:
        rows = x
    return rows


@gluon.jit
def _first_rows(x, C: gl.constexpr):
    """Return the first C rows of x, which has C or 2C rows in its middle dimension."""
    if x.shape[1] > C:
        rows, _ = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, C, x.shape[2]]), [0, 2, 3, 1]))
    else:
        rows = x
    return rows


@gluon.jit
def _turned(half, other_half, own, other, eps, E: gl.constexpr, NORM: gl.constexpr):
    """Normalize heads (rows of E) and apply rotary positions: half * own + other_half * other.

    `other_half` is `half` with the halves of each row swapped. `own` and `other` are cosines and
    signed sines, multiplied by the norm scales.
    """
    x, y = half.to(gl.float32), other_half.to(gl.float32)
    if NORM:
        rstd = gl.rsqrt(gl.sum(x * x, axis=1) / E + eps)[:, None]
        x, y = (x * rstd).to(half.dtype).to(gl.float32), (y * rstd).to(half.dtype).to(gl.float32)
    return (x * own + y * other).to(half.dtype)


@gluon.jit
def _capped(scores, CAP: gl.constexpr):
    """Return CAP * tanh(scores / CAP) of scores in base 2; CAP 0: the scores."""
    if CAP != 0.0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); of scores in base 2, exp(2 x) = 2^(2 scores / CAP).
        tanh = 1.0 - 2.0 / (gl.exp2(scores * (2.0 / CAP)) + 1.0)
        scores = tanh * (CAP * LOG2_E)
    return scores


@gluon.jit
def alone_kernel(
    qkv,
    q_scale,
    k_scale,
    cos,
    sin,
    eps,
    keys,
    values,
    out,
    active,
    state,
    table,
    table_row,
    part_acc,
    part_stats,
    arrived,
    scale_log2,
    sinks,
    H: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
    PAGE: gl.constexpr,
    WARPS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    C: gl.constexpr,
    PARTS: gl.constexpr,
    NORM: gl.constexpr,
    ROT: gl.constexpr,
    OFFSET: gl.constexpr,
    WINDOW: gl.constexpr,
    CAP: gl.constexpr,
    GROWTH: gl.constexpr,
    GROWTH_LENGTH: gl.constexpr,
    SINKS: gl.constexpr,
    SHARE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute batch row b's attention output for its new token; store the token's k and v.

    out: B x (H * E). A block handles one of PARTS stretches of the sequence; the last stretch
    includes the new token. C: the number of queries per k/v head, rounded up to a power of 2.
    `arrived` counts the finished blocks of a sequence and k/v head; the last block adds the partial
    results and resets the count to 0. ROT: rotated numbers of a head. OFFSET, WINDOW, CAP, GROWTH:
    see `AttentionForm` (`kernels/decode.py`); 0: none. SINKS: `sinks` has a logit per head that joins
    the softmax. SHARE: see `set_memory_share`.
    """
    G: gl.constexpr = H // K
    # Queries are rows on the left side of q k, whose rows are 16 at least, and columns on the right side of v p.
    COLUMNS: gl.constexpr = max(C, FEWEST)
    ROWS: gl.constexpr = max(C, 2 * FEWEST)
    TILE: gl.constexpr = WARPS * TOKENS
    dtype: gl.constexpr = out.dtype.element_ty
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    of_left: gl.constexpr = gl.DotOperandLayout(0, of_sums, 2)
    of_right: gl.constexpr = gl.DotOperandLayout(1, of_sums, 2)
    let_next_start(PDL)
    head, b, part = gl.program_id(0), gl.program_id(1).to(gl.int64), gl.program_id(2)
    is_newest = part == PARTS - 1
    slot = gl.load(active + b)
    position = gl.load(state + slot * FIELDS + LENGTH)
    L, pages = position.to(gl.int32), table + slot * table_row  # tokens in the cache, and where
    seen_from = L * 0  # the first token that the new one sees
    origin = seen_from  # where the first tile begins
    if WINDOW:
        seen_from = gl.maximum(L + 1 - WINDOW, 0)
        origin = seen_from // TOKENS * TOKENS
    size = gl.cdiv(gl.cdiv(L - origin, TILE), PARTS) * TILE
    start = gl.minimum(origin + part * size, L)
    end = gl.minimum(origin + (part + 1) * size, L)
    if GROWTH != 0.0:
        times = (position // GROWTH_LENGTH).to(gl.float32)
        # Rounded as in training, which multiplies the queries.
        growth = (1.0 + GROWTH * gl.log(1.0 + times)).to(dtype).to(gl.float32)
        scale_log2 = scale_log2 * growth
    # Pieces of 16 bytes, turned against each other so that those below each other lie in different banks.
    SHORT: gl.constexpr = max(1, 64 // E)
    in_tiles: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, SHORT, 8 // SHORT, [2, 1, 0])
    tiles_k = gl.allocate_shared_memory(dtype, [STAGES, WARPS, TOKENS, E], in_tiles)
    tiles_v = gl.allocate_shared_memory(dtype, [STAGES, WARPS, TOKENS, E], in_tiles)
    for s in gl.static_range(STAGES):
        to_k, to_v = tiles_k.index(s), tiles_v.index(s)
        _ask(
            keys, values, to_k, to_v, pages, start + s * TILE, end, head, K, E, PAGE, WARPS, TOKENS
        )
        async_copy.commit_group()
    LANES: gl.constexpr = min(E // VECTOR, 32)
    of_heads: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    c = gl.arange(0, C, gl.SliceLayout(1, of_heads))[:, None]
    e = gl.arange(0, E, gl.SliceLayout(0, of_heads))[None, :]
    if ROT == E:
        swapped = (e + E // 2) % E
        own = gl.load(cos + position * E + e).to(gl.float32)
        other = gl.load(sin + position * E + e).to(gl.float32)
    else:
        swapped = gl.where(e < ROT, (e + ROT // 2) % ROT, e)
        own = gl.load(cos + position * ROT + e, e < ROT, other=1.0).to(gl.float32)
        other = gl.load(sin + position * ROT + e, e < ROT, other=0.0).to(gl.float32)
    own_k, other_k = own, other
    if NORM:
        own_k, other_k = (
            own * (gl.load(k_scale + e).to(gl.float32) + OFFSET),
            other * (gl.load(k_scale + swapped).to(gl.float32) + OFFSET),
        )
        own, other = (
            own * (gl.load(q_scale + e).to(gl.float32) + OFFSET),
            other * (gl.load(q_scale + swapped).to(gl.float32) + OFFSET),
        )
    cell = ((gl.load(pages + L // PAGE).to(gl.int64) * PAGE + L % PAGE) * K + head) * E + e
    # What the warps have of a number comes together in one thread.
    LINE: gl.constexpr = min(E, 32)
    of_parts: gl.constexpr = gl.BlockedLayout(
        [WARPS, 1, C], [1, LINE, 32 // LINE], [1, WARPS, 1], [2, 1, 0]
    )
    of_out: gl.constexpr = gl.SliceLayout(0, of_parts)
    e_1 = gl.arange(0, E, gl.SliceLayout(1, of_out))[:, None]
    c_1 = gl.arange(0, C, gl.SliceLayout(0, of_out))
    wait_only(PDL)
    of_q, of_k = qkv + (b * (H + 2 * K) + head * G + c) * E, qkv + (b * (H + 2 * K) + H + head) * E
    q, q_other = gl.load(of_q + e, c < G, other=0.0), gl.load(of_q + swapped, c < G, other=0.0)
    k, k_other, v = gl.load(of_k + e), gl.load(of_k + swapped), gl.load(of_k + K * E + e)
    newest_v = gl.load(of_k + K * E + e_1).to(gl.float32)
    q = _turned(q, q_other, own, other, eps, E, NORM)
    k = _turned(k, k_other, own_k, other_k, eps, E, NORM)
    in_queries: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, SHORT, 8 // SHORT, [1, 0])
    queries = gl.allocate_shared_memory(dtype, [ROWS, E], in_queries)
    # Nothing comes of the other rows
    queries.slice(0, COLUMNS, 0).store(_repeated(q, COLUMNS // C))
    in_line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    score = _capped(gl.sum(q.to(gl.float32) * k.to(gl.float32), axis=1) * scale_log2, CAP)
    score = gl.where(is_newest, score, -1e30)
    newest_top = gl.allocate_shared_memory(gl.float32, [C], in_line, score)
    gl.store(keys + cell, k, is_newest)
    gl.store(values + cell, v, is_newest)

    q_1RE = queries.load(gl.SliceLayout(0, of_left))[None, :, :]
    q_WRE, _ = gl.broadcast(q_1RE, gl.zeros([WARPS, ROWS, E], dtype, of_left))
    of_columns: gl.constexpr = gl.SliceLayout(1, of_sums)
    top = gl.full([WARPS, COLUMNS], -1e30, gl.float32, of_columns)
    weight = gl.zeros([WARPS, COLUMNS], gl.float32, of_columns)
    acc = gl.zeros([WARPS, E, COLUMNS], gl.float32, of_sums)
    w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, of_sums)))[:, None, None]
    n = (
        w * TOKENS
        + gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, of_sums)))[None, None, :]
    )
    for i in range(gl.cdiv(end - start, TILE)):
        first, to_k, to_v = start + i * TILE, tiles_k.index(i % STAGES), tiles_v.index(i % STAGES)
        async_copy.wait_group(STAGES - 1)
        k_WET = to_k.permute([0, 2, 1]).load(of_right)
        products = mma_v2(q_WRE, k_WET, gl.zeros([WARPS, ROWS, TOKENS], gl.float32, of_sums))
        is_seen = first + n < end
        if WINDOW:
            is_seen = is_seen & (first + n >= seen_from)
        scores = _capped(products * scale_log2, CAP)
        scores = _first_rows(gl.where(is_seen, scores, float("-inf")), COLUMNS)
        tile_top = gl.max(scores, axis=2)
        best = gl.maximum(gl.convert_layout(top, tile_top.type.layout), tile_top)
        p = gl.exp2(scores - best[:, :, None])
        best = gl.convert_layout(best, of_columns)
        shrink = gl.exp2(top - best)
        top, weight = best, weight * shrink + gl.convert_layout(gl.sum(p, axis=2), of_columns)
        # Threads have these weights already where the right side of the product wants them.
        p = gl.convert_layout(gl.permute(p.to(dtype), [0, 2, 1]), of_right, assert_trivial=True)
        v_WET = to_v.permute([0, 2, 1]).load(of_left)
        acc = mma_v2(v_WET, p, acc * shrink[:, None, :])
        if first + STAGES * TILE < end:
            _ask(
                keys,
                values,
                to_k,
                to_v,
                pages,
                first + STAGES * TILE,
                end,
                head,
                K,
                E,
                PAGE,
                WARPS,
                TOKENS,
            )
        async_copy.commit_group()
    async_copy.wait_group(0)

    in_order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tops = gl.allocate_shared_memory(gl.float32, [WARPS, COLUMNS], in_order, top)
    weights = gl.allocate_shared_memory(gl.float32, [WARPS, COLUMNS], in_order, weight)
    in_sums: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [WARPS, E, COLUMNS], in_sums, acc)
    of_stats: gl.constexpr = gl.SliceLayout(1, of_parts)
    top_C = newest_top.load(gl.SliceLayout(0, of_stats))
    best_C, weight_C, acc_EC = _together(
        tops.slice(0, C, 1).load(of_stats),
        weights.slice(0, C, 1).load(of_stats),
        sums.slice(0, C, 2).load(of_parts),
        gl.convert_layout(top_C, gl.SliceLayout(0, of_out), True),
        1.0,
        newest_v,
    )
    if SINKS:
        sink_C = gl.load(sinks + head * G + c_1, c_1 < G, other=0.0).to(gl.float32) * LOG2_E
        sink_C = gl.where(is_newest, sink_C, -1e30)
        higher_C = gl.maximum(best_C, sink_C)
        shrink_C = gl.exp2(best_C - higher_C)
        weight_C = weight_C * shrink_C + gl.exp2(sink_C - higher_C)
        acc_EC = acc_EC * shrink_C[None, :]
        best_C = higher_C
    at_out, inside = out + (b * H + head * G + c_1[None, :]) * E + e_1, (c_1 < G)[None, :]
    if PARTS == 1:
        gl.store(at_out, (acc_EC / weight_C[None, :]).to(dtype), inside)
    else:
        mine = b * K + head
        put = (mine * PARTS + part) * C + c_1
        gl.store(part_acc + put[None, :] * E + e_1, acc_EC)
        gl.store(part_stats + put * 2, best_C)
        gl.store(part_stats + put * 2 + 1, weight_C)
        debug_barrier()  # all threads have put their numbers; Gluon's own has another name in each version
        if gl.atomic_add(arrived + mine, 1) == PARTS - 1:
            gl.store(arrived + mine, 0)
            found = -1e30, 0.0, 0.0
            for first_part in gl.static_range(0, PARTS, WARPS):
                p_2 = first_part + gl.arange(0, WARPS, gl.SliceLayout(1, of_stats))[:, None]
                p_3 = (
                    first_part
                    + gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, of_parts)))[
                        :, None, None
                    ]
                )
                row_2 = (mine * PARTS + p_2) * C + gl.arange(0, C, gl.SliceLayout(0, of_stats))[
                    None, :
                ]
                c_3 = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, of_parts)))[None, None, :]
                e_3 = gl.arange(0, E, gl.SliceLayout(0, gl.SliceLayout(2, of_parts)))[None, :, None]
                at = part_acc + ((mine * PARTS + p_3) * C + c_3) * E + e_3
                # Not from the L1 cache, which does not know what others have written.
                tops_PC = gl.load(
                    part_stats + row_2 * 2, p_2 < PARTS, other=-1e30, cache_modifier=".cg"
                )
                weights_PC = gl.load(
                    part_stats + row_2 * 2 + 1, p_2 < PARTS, other=0.0, cache_modifier=".cg"
                )
                sums_PEC = gl.load(at, p_3 < PARTS, other=0.0, cache_modifier=".cg")
                found = _together(tops_PC, weights_PC, sums_PEC, found[0], found[1], found[2])
            gl.store(at_out, (found[2] / found[1][None, :]).to(dtype), inside)


@gluon.jit
def _together(tops_PC, weights_PC, sums_PEC, top_C, weight_C, acc_EC):
    """Merge P partial softmax results with one more: top_C, weight_C, acc_EC.

    tops and weights are P x C, sums (P x E x C).
    """
    of_tops: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, sums_PEC.type.layout))
    best_C = gl.maximum(gl.convert_layout(gl.max(tops_PC, axis=0), of_tops, True), top_C)
    in_stats: gl.constexpr = gl.SliceLayout(0, tops_PC.type.layout)
    share_PC = gl.exp2(tops_PC - gl.convert_layout(best_C, in_stats, True)[None, :])
    shrink_C = gl.exp2(top_C - best_C)
    weight_C = weight_C * shrink_C + gl.convert_layout(
        gl.sum(weights_PC * share_PC, axis=0), of_tops, True
    )
    acc_EC = acc_EC * shrink_C[None, :] + gl.sum(sums_PEC * share_PC[:, None, :], axis=0)
    return best_C, weight_C, acc_EC


class Blocks(NamedTuple):
    """Tile sizes of alone_kernel; each warp handles TOKENS tokens of a tile."""

    WARPS: int
    STAGES: int
    maxnreg: int | None = None
    TOKENS: int = 16


TALL = Blocks(4, 2, TOKENS=32)  # for one block a multiprocessor, of sequences that are few or long


def matters_length(*shape: int) -> bool:
    """Return True if long sequences have other tile sizes than short ones.

    `shape`: the arguments of `blocks_of` but the last.
    """
    return blocks_of(*shape, False) != blocks_of(*shape, True)


def blocks_of(
    blocks: int, rows: int, width: int, queries: int, head_size: int, is_long: bool
) -> Blocks:
    """Return the fastest measured tile sizes of alone_kernel (benchmarks/kernels/tiles.py).

    Args:
        blocks: thread blocks of the launch.
        rows: number of sequences.
        width: hidden size of the model.
        queries: query heads per k/v head.
        head_size: size of a head.
        is_long: True for long sequences, for which some launches use other tile sizes.
    """
    per_processor = blocks / gpu.processors()
    if queries > MOST_QUERIES:
        cut = Blocks(1, 2)  # the sums of several warps would not fit into shared memory
    elif (
        per_processor <= 1
        and (is_long or rows <= gpu.FUSED_TOKENS)
        and _fitting(TALL, head_size) == TALL
    ):
        cut = TALL
    elif per_processor <= (2 if width <= gpu.NARROW_WIDTH else 1):
        cut = Blocks(4, 3 if rows <= gpu.FUSED_TOKENS else 2)
    elif per_processor <= (MANY if is_long else FEW):
        cut = Blocks(2, 3)
    else:
        # Larger heads would not fit into so few registers
        cut = Blocks(1, 2, 144 if head_size <= 128 else None)
    return _fitting(cut, head_size)


def _fitting(cut: Blocks, head_size: int) -> Blocks:
    """Return `cut` with as many warps and pipeline stages as fit into shared memory.

    Large heads get fewer warps rather than a single stage, which would load nothing ahead.
    """
    while True:
        stages = gpu.stages_of(cut.STAGES, 2 * cut.WARPS * cut.TOKENS, head_size)
        if stages >= FEWEST_STAGES or cut.WARPS == 1:
            return cut._replace(STAGES=stages)
        cut = cut._replace(WARPS=cut.WARPS // 2)


@dataclass(frozen=True)
class Divided:
    """Division of each sequence among several blocks.

    Attributes:
        parts: blocks per sequence and k/v head.
        arrived: number of finished blocks for each sequence and k/v head; 0 between launches.
    """

    parts: int
    arrived: Tensor


def attend_alone(
    qkv: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    H: int,
    keys: Tensor,
    values: Tensor,
    active: Tensor,
    state: Tensor,
    table: Tensor,
    divided: Divided | None,
    is_long: bool,
    width: int,
    form: AttentionForm = PLAIN_FORM,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute `decode` (`gpu/decode.py`) without shared pages: read each sequence's pages
    separately.
    """
    B, N, E = qkv.shape
    K, PAGE = (N - H) // 2, keys.shape[1]
    out, C = qkv.new_empty(B, H * E), power_of_2(H // K)
    scales, is_normed = head_scales(qkv, q_scale, k_scale)
    parts, results = 1, (out, out, out)
    if divided is not None:
        parts = divided.parts
        results = (
            *(torch.empty(B * K * parts * C, n, device=out.device) for n in (E, 2)),
            divided.arrived,
        )
    cut, share = blocks_of(K * B * parts, B, width, C, E, is_long), gpu.memory_share(width, B)
    kernel = alone_kernel[(K, B, parts)](
        qkv.contiguous(),
        *scales,
        cos,
        sin,
        eps,
        keys,
        values,
        out,
        active,
        state,
        table,
        table.shape[1],
        *results,
        form.scale_log2(E),
        out if sinks_H is None else sinks_H,
        H=H,
        K=K,
        E=E,
        PAGE=PAGE,
        C=C,
        PARTS=parts,
        NORM=is_normed,
        ROT=cos.shape[1],
        **form.constants(),
        SINKS=sinks_H is not None,
        SHARE=share,
        **cut._asdict(),
        **options(cut.WARPS),
    )
    set_memory_share(kernel, share)
    return out
