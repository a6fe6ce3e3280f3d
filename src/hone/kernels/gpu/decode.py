"""Decode attention: one new token per sequence over the pages of the cache.

    qkv ─┬─ norm, rope, the new token, own pages of a sequence (alone_kernel) ─────────────────► out
         └─ newest_heads ─► shared pages (shared_kernel) ─► remaining pages (decode_kernel) ─────► out

The upper path is for batches without shared pages, the lower path for batches in which sequences
share pages; `newest_heads` applies norm and rope and stores the new token's k and v. A block of
`alone_kernel` and `decode_kernel` handles one sequence and one k/v head. A block of `shared_kernel`
handles one stretch of shared pages, one k/v head and up to MEMBERS sequences, reading the pages
once, and writes partial results that `decode_kernel` adds. Where few long sequences decode,
`alone_kernel` divides each sequence among several blocks by its current length; the last block to
finish adds the partial results. Softmax is online (Milakov & Gimelshein 2018), in base 2.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels import numerics, row_state
from hone.kernels.attention_form import PLAIN_FORM, AttentionForm
from hone.kernels.gpu import options, power_of_2
from hone.kernels.gpu.attention import KEYS, attend
from hone.kernels.gpu.decode_attention import Divided, attend_alone
from hone.kernels.gpu.launching import wait
from hone.kernels.gpu.row_kernels import newest_heads

FIELDS, LENGTH, OWN_PAGE = (
    tl.constexpr(row_state.FIELDS),
    tl.constexpr(row_state.LENGTH),
    tl.constexpr(row_state.OWN_PAGE),
)
MEMBERS = 16  # sequences that one block of shared_kernel serves


@triton.jit
def _mix(
    q,
    scale_log2,
    keys,
    values,
    pages,
    first,
    L,
    head,
    top,
    weight,
    acc,
    K: tl.constexpr,
    E: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add positions first … L to the running softmax attention of C queries; return its state.

    The state is top C (highest score), weight C (sum of exponentials) and acc (E x C) (not yet
    divided by weight). Queries are columns (q is E x C), since a k/v head has few queries per
    sequence and a tensor-core product needs at least 16 rows but only 8 columns.
    """
    n, e = tl.arange(0, TILE)[:, None], tl.arange(0, E)[None, :]
    for start in tl.range(first, L, TILE, num_stages=STAGES):
        page = tl.load(pages + start // PAGE).to(tl.int64) * PAGE + start % PAGE
        at = (page * K + head) * E + n * (K * E) + e
        seen = n < L - start
        k = tl.load(keys + at, seen, other=0.0)
        scores = tl.where(seen, tl.dot(k, q) * scale_log2, -1e30)
        best = tl.maximum(top, tl.max(scores, axis=0))
        p, shrink = tl.exp2(scores - best[None, :]), tl.exp2(top - best)
        top, weight = best, weight * shrink + tl.sum(p, axis=0)
        v = tl.load(values + at, seen, other=0.0)
        acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * shrink[None, :])
    return top, weight, acc


@triton.jit
def _nothing(C: tl.constexpr, E: tl.constexpr):
    """Return the initial state (top, weight, acc) of a running softmax."""
    return (
        tl.full((C,), -1e30, tl.float32),
        tl.zeros((C,), tl.float32),
        tl.zeros((E, C), tl.float32),
    )


@triton.jit
def _put_part(part_acc, part_stats, row, top, weight, acc, inside, E: tl.constexpr):
    """Write the running softmax state of C queries to rows `row` of the partial results."""
    tl.store(part_stats + row * 2, top, inside)
    tl.store(part_stats + row * 2 + 1, weight, inside)
    tl.store(part_acc + row[None, :] * E + tl.arange(0, E)[:, None], acc, inside[None, :])


@triton.jit
def _with_parts(
    part_acc,
    part_stats,
    rows,
    taken,
    top,
    weight,
    acc,
    PARTS: tl.constexpr,
    E: tl.constexpr,
):
    """Add partial results to the running softmax state of C queries; return the state.

    `rows` (PARTS x C) are the rows of the partial results; results where `taken` (PARTS x C) is
    False are left out.
    """
    s, e = tl.arange(0, PARTS), tl.arange(0, E)[:, None]
    # Not from the L1 cache, which does not know what others have written.
    other_top = tl.load(part_stats + rows * 2, taken, other=-1e30, cache_modifier=".cg")
    other_weight = tl.load(part_stats + rows * 2 + 1, taken, other=0.0, cache_modifier=".cg")
    best = tl.maximum(top, tl.max(other_top, axis=0))
    mine, theirs = tl.exp2(top - best), tl.exp2(other_top - best[None, :])
    weight = weight * mine + tl.sum(other_weight * theirs, axis=0)
    acc *= mine[None, :]
    for n in tl.static_range(PARTS):  # their loads do not wait for each other
        row = tl.sum(tl.where((s == n)[:, None] & taken, rows, 0), axis=0)
        share = tl.sum(tl.where((s == n)[:, None], theirs, 0.0), axis=0)
        there = tl.max(tl.where((s == n)[:, None], taken.to(tl.int32), 0), axis=0) > 0
        found = tl.load(
            part_acc + row[None, :] * E + e, there[None, :], other=0.0, cache_modifier=".cg"
        )
        acc += found * share[None, :]
    return best, weight, acc


@triton.jit
def decode_kernel(
    q,
    keys,
    values,
    out,
    active,
    state,
    table,
    table_row,
    part_acc,
    part_stats,
    parts,
    scale_log2,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the attention output of batch row b, from its own pages and PARTS partial results.

    `shared_kernel` computed the partial results. out: B x (H * E).
    """
    G: tl.constexpr = H // K
    # Heads of a sequence lie side by side, and run so
    head, b = (tl.program_id(0), tl.program_id(1).to(tl.int64))
    c, e = tl.arange(0, C), tl.arange(0, E)[:, None]
    slot = tl.load(active + b)
    L = tl.load(state + slot * FIELDS + LENGTH).to(tl.int32) + 1
    first = tl.load(state + slot * FIELDS + OWN_PAGE).to(tl.int32) * PAGE
    # The kernel before made the partial results: it has waited for the one that wrote q.
    at = (b * H + head * G + c)[None, :] * E + e
    inside = (c < G)[None, :]
    columns = tl.load(q + at, inside, other=0.0, cache_modifier=".cg")
    top, weight, acc = _nothing(C, E)
    top, weight, acc = _mix(
        columns,
        scale_log2,
        keys,
        values,
        table + slot * table_row,
        first,
        L,
        head,
        top,
        weight,
        acc,
        K,
        E,
        PAGE,
        TILE,
        STAGES,
    )
    part = tl.load(parts + b * PARTS + tl.arange(0, PARTS))
    rows = ((part // R * K + head) * R + part % R)[:, None] * G + c[None, :]
    wait(PDL)
    top, weight, acc = _with_parts(
        part_acc, part_stats, rows, (part >= 0)[:, None] & inside, top, weight, acc, PARTS, E
    )
    tl.store(out + at, (acc / weight[None, :]).to(out.dtype.element_ty), inside)


@triton.jit
def shared_kernel(
    q,
    keys,
    values,
    active,
    table,
    table_row,
    stretches,
    members,
    part_acc,
    part_stats,
    scale_log2,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    R: tl.constexpr,
    GP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute partial attention results of one stretch of shared pages for several batch rows.

    Batch rows members[i] (-1: none) share stretch i: the pages stretches[i, 0] to stretches[i, 1]
    (exclusive) of their page tables.
    """
    G: tl.constexpr = H // K
    C: tl.constexpr = R * GP
    head, i = tl.program_id(0), tl.program_id(1)
    c, e = tl.arange(0, C), tl.arange(0, E)[:, None]
    r, g = c // GP, c % GP
    first, end = (
        tl.load(stretches + i * 2).to(tl.int32) * PAGE,
        tl.load(stretches + i * 2 + 1).to(tl.int32) * PAGE,
    )
    b = tl.load(members + i * R + r)
    inside = (b >= 0) & (g < G)
    leader = tl.maximum(tl.load(members + i * R), 0)
    pages = table + tl.load(active + leader) * table_row
    wait(PDL)
    if first == end:
        return
    columns = tl.load(
        q + ((tl.maximum(b, 0) * H + head * G + g) * E)[None, :] + e, inside[None, :], other=0.0
    )
    top, weight, acc = _nothing(C, E)
    top, weight, acc = _mix(
        columns,
        scale_log2,
        keys,
        values,
        pages,
        first,
        end,
        head,
        top,
        weight,
        acc,
        K,
        E,
        PAGE,
        TILE,
        STAGES,
    )
    row = ((i * K + head) * R + r) * G + g
    _put_part(part_acc, part_stats, row, top, weight, acc, inside, E)


@triton.jit
def ordered_kernel(
    q,
    keys,
    values,
    out,
    active,
    state,
    table,
    table_row,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the attention output of batch row b, summing in the same order as training.

    The order is that of `forward_kernel` (`attention.py`). The queries of a k/v head are rows of a
    tile of M. One warp computes this tile, as each of the four warps of `forward_kernel` computes
    its own rows.
    """
    G: tl.constexpr = H // K
    head, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    m, n, e = tl.arange(0, M), tl.arange(0, N), tl.arange(0, E)[None, :]
    slot = tl.load(active + b)
    length = tl.load(state + slot * FIELDS + LENGTH).to(tl.int32) + 1
    pages = table + slot * table_row
    at_q = (b * H + head * G + m)[:, None] * E + e
    wait(PDL)
    q_ME = tl.load(q + at_q, (m < G)[:, None], other=0.0)
    top = tl.full([M], -1e30, dtype=tl.float32)
    size = tl.zeros([M], dtype=tl.float32)
    sum_ME = tl.zeros([M, E], dtype=tl.float32)
    for at in tl.range(0, length, N, num_stages=STAGES):
        cell = tl.load(pages + at // PAGE).to(tl.int64) * PAGE + at % PAGE
        there = ((cell + n) * K + head)[:, None] * E + e
        seen = at + n < length
        k_NE = tl.load(keys + there, seen[:, None], other=0.0)
        v_NE = tl.load(values + there, seen[:, None], other=0.0)
        logits = tl.where(seen[None, :], tl.dot(q_ME, tl.trans(k_NE)), -1e30)
        top, size, sum_ME = attend(logits, scale, v_NE, top, size, sum_ME)
    result = (sum_ME / size[:, None]).to(out.dtype.element_ty)
    tl.store(out + at_q, result, (m < G)[:, None])


@dataclass(frozen=True)
class Shared:
    """Pages that are read once for several sequences, and buffers for their partial results."""

    stretches_I2: Tensor  # pages from … to of the members' tables
    members_IR: Tensor  # batch rows, -1 where there are fewer
    parts_BS: Tensor  # per batch row the results that it takes up: stretch * R + place among its members, or -1
    acc: Tensor
    stats: Tensor

    @staticmethod
    def empty(
        stretches: int, rows: int, parts: int, H: int, E: int, device: torch.device
    ) -> "Shared":
        def integers(*shape: int, fill: int) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        return Shared(
            integers(stretches, 2, fill=0),
            integers(stretches, MEMBERS, fill=-1),
            integers(rows, parts, fill=-1),
            *(torch.empty(stretches * MEMBERS * H, n, device=device) for n in (E, 2)),
        )


def decode(
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
    shared: Shared | None,
    divided: Divided | None,
    is_long: bool,
    width: int,
    form: AttentionForm = PLAIN_FORM,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the attention outputs of one new token per row; write its k and v to the cache.

    Outputs are B x (H * E).

    Args:
        qkv: B x (H + 2K) x E, the projection before norm and rotary positions.
        keys, values: pages x PAGE x K x E.
        active, state, table: see `DecodeRows` (`kernels/decode.py`).
        shared: pages that several sequences share, if any.
        divided: given if several blocks read one sequence and no pages are shared.
        is_long: use tile sizes for long sequences.
        width: hidden size of the model.
        form: of the attention; with shared pages and in exact numerics only the scale may differ
            from the plain form.
        sinks_H: logit per head that joins the softmax; not with shared pages or exact numerics.
    """
    is_exact = numerics.keeps_order("attention")
    if shared is None and not is_exact:
        return attend_alone(
            qkv,
            q_scale,
            k_scale,
            cos,
            sin,
            eps,
            H,
            keys,
            values,
            active,
            state,
            table,
            divided,
            is_long,
            width,
            form,
            sinks_H,
        )
    assert sinks_H is None
    assert form == AttentionForm(scale=form.scale) and cos.shape[1] == qkv.shape[2]
    B, N, E = qkv.shape
    K, PAGE = (N - H) // 2, keys.shape[1]
    out = qkv.new_empty(B, H * E)
    scale = form.scale_log2(E)
    sizes, queries = {"H": H, "K": K, "E": E, "PAGE": PAGE}, power_of_2(H // K)
    where = (active, state, table, table.shape[1])
    q = newest_heads(qkv, q_scale, k_scale, cos, sin, active, state, table, keys, values, eps, H)
    if is_exact:
        ordered_kernel[(K, B)](
            q,
            keys,
            values,
            out,
            *where,
            scale,
            H=H,
            K=K,
            E=E,
            PAGE=PAGE,
            M=max(16, queries),
            N=KEYS,
            STAGES=3,
            enable_fp_fusion=False,
            **options(1),
        )
        return out
    shared_kernel[(K, len(shared.stretches_I2))](
        q,
        keys,
        values,
        active,
        table,
        table.shape[1],
        shared.stretches_I2,
        shared.members_IR,
        shared.acc,
        shared.stats,
        scale,
        **sizes,
        R=MEMBERS,
        TILE=min(64, PAGE),
        GP=queries,
        STAGES=2,
        **options(4),
    )
    decode_kernel[(K, B)](
        q,
        keys,
        values,
        out,
        *where,
        shared.acc,
        shared.stats,
        shared.parts_BS,
        scale,
        **sizes,
        R=MEMBERS,
        TILE=min(16, PAGE),
        C=max(8, queries),
        STAGES=2,
        PARTS=shared.parts_BS.shape[1],
        maxnreg=144,
        **options(1),
    )
    return out
