"""Attention of one new token a sequence over the pages of the cache.

    qkv (raw projection) ─ head norm, rope ─┬─► own pages of the sequence (decode_kernel), new k and v stored ─► out
                                            └─► pages that several sequences share (shared_kernel), read once for
                                                all of them ─► partial sums, which decode_kernel takes up

A block of `decode_kernel` is one sequence and one k/v head; of `shared_kernel` one stretch of shared pages, one k/v
head and up to R sequences. Softmax is online (Milakov & Gimelshein 2018), in base 2.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels import row_state
from hone.kernels.gpu import options, power_of_2
from hone.kernels.gpu.launching import wait

FIELDS, LENGTH, OWN_PAGE = (
    tl.constexpr(row_state.FIELDS),
    tl.constexpr(row_state.LENGTH),
    tl.constexpr(row_state.OWN_PAGE),
)


@triton.jit
def _turned(x, at, e, swap, inside, scale, turn_cos, turn_sin, eps, E: tl.constexpr, NORM: tl.constexpr):
    """Rows of heads at addresses x + at, normalised and rotated, in fp32: rows x E."""
    # .cg: from the L2 cache, where the kernel before this one left it; L1 may hold the layer before.
    value = tl.load(x + at + e, inside, other=0.0, cache_modifier=".cg")
    other = tl.load(x + at + swap, inside, other=0.0, cache_modifier=".cg")
    dtype = value.dtype
    value, other = value.to(tl.float32), other.to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(value * value, axis=1) / E + eps)[:, None]
        value = (value * rstd).to(dtype).to(tl.float32) * tl.load(scale + e).to(tl.float32)
        other = (other * rstd).to(dtype).to(tl.float32) * tl.load(scale + swap).to(tl.float32)
    return value * turn_cos + other * turn_sin


@triton.jit
def _mix(
    q, scale_log2, top, weight, acc, keys, values, pages, first, L, head,
    K: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Takes positions first … L of the cache into running softmaxes of C queries: q E x C, top C, weight C, acc E x C.

    Queries are columns: a sequence has few of them for a k/v head, and a matrix product's columns go down to 8.
    """
    n, e = tl.arange(0, TILE)[:, None], tl.arange(0, E)[None, :]
    for start in tl.range(first, L, TILE, num_stages=STAGES):
        page = tl.load(pages + start // PAGE).to(tl.int64) * PAGE + start % PAGE
        at = (page * K + head) * E + n * (K * E) + e
        seen = n < L - start
        k = tl.load(keys + at, seen, other=0.0)
        scores = tl.where(seen, tl.dot(k, q) * scale_log2, -1e30)
        best = tl.maximum(top, tl.max(scores, axis=0))
        p = tl.exp2(scores - best[None, :])
        shrink = tl.exp2(top - best)
        weight = weight * shrink + tl.sum(p, axis=0)
        v = tl.load(values + at, seen, other=0.0)
        acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * shrink[None, :])
        top = best
    return top, weight, acc


@triton.jit
def decode_kernel(
    qkv, q_scale, k_scale, cos, sin, keys, values, out,
    active, state, table, table_row, parts, part_acc, part_stats, eps, scale_log2,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Stores the new k and v of batch row b and writes its mixed values, out B x (H * E)."""
    G: tl.constexpr = H // K
    b, head = tl.program_id(0), tl.program_id(1)
    c, e = tl.arange(0, C), tl.arange(0, E)[None, :]
    swap = e ^ (E // 2)
    slot = tl.load(active + b)
    L = tl.load(state + slot * FIELDS + LENGTH).to(tl.int32)
    pages = table + slot * table_row
    first = 0
    if PARTS:
        first = tl.load(state + slot * FIELDS + OWN_PAGE).to(tl.int32) * PAGE
    turn_cos, turn_sin = tl.load(cos + L * E + e).to(tl.float32), tl.load(sin + L * E + e).to(tl.float32)
    cell = tl.load(pages + L // PAGE).to(tl.int64) * PAGE + L % PAGE
    if not PARTS:  # else the kernel before is shared_kernel, whose work is not needed until the end
        wait(PDL)

    start = b.to(tl.int64) * ((H + 2 * K) * E)
    one = tl.arange(0, 1)[:, None]
    k_at = start + (H + head) * E + one * 0
    new_k = _turned(qkv, k_at, e, swap, one == 0, k_scale, turn_cos, turn_sin, eps, E, NORM)
    new_v = tl.load(qkv + start + (H + K + head) * E + e, cache_modifier=".cg")
    new_k = new_k.to(new_v.dtype)
    tl.store(keys + (cell * K + head) * E + e, new_k)
    tl.store(values + (cell * K + head) * E + e, new_v)
    q_at = start + (head * G + c)[:, None] * E
    q = _turned(qkv, q_at, e, swap, (c < G)[:, None], q_scale, turn_cos, turn_sin, eps, E, NORM).to(new_v.dtype)

    # The new token itself comes first, out of registers.
    top = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1) * scale_log2
    weight = tl.full((C,), 1.0, tl.float32)
    acc = tl.zeros((E, C), tl.float32) + tl.trans(new_v.to(tl.float32))
    top, weight, acc = _mix(
        tl.trans(q), scale_log2, top, weight, acc, keys, values, pages, first, L, head, K, E, PAGE, TILE, STAGES
    )
    e, inside = tl.arange(0, E)[:, None], (c < G)[None, :]
    if PARTS:
        wait(PDL)
        for s in tl.static_range(PARTS):
            part = tl.load(parts + b * PARTS + s)
            row = ((part // R * K + head) * R + part % R) * G + c
            taken = (c < G) & (part >= 0)
            other_top = tl.load(part_stats + row * 2, taken, other=-1e30, cache_modifier=".cg")
            other_weight = tl.load(part_stats + row * 2 + 1, taken, other=0.0, cache_modifier=".cg")
            other_acc = tl.load(part_acc + row[None, :] * E + e, taken[None, :], other=0.0, cache_modifier=".cg")
            best = tl.maximum(top, other_top)
            mine, theirs = tl.exp2(top - best), tl.exp2(other_top - best)
            acc = acc * mine[None, :] + other_acc * theirs[None, :]
            weight = weight * mine + other_weight * theirs
            top = best
    acc = acc / weight[None, :]
    tl.store(out + b.to(tl.int64) * H * E + (head * G + c)[None, :] * E + e, acc.to(out.dtype.element_ty), inside)


@triton.jit
def shared_kernel(
    qkv, q_scale, cos, sin, keys, values,
    active, state, table, table_row, stretches, members, part_acc, part_stats, eps, scale_log2,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    R: tl.constexpr, GP: tl.constexpr, NORM: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Stretch i: pages stretches[i, 0] … stretches[i, 1] of its members' tables, all full; members[i] R batch rows."""
    G: tl.constexpr = H // K
    C: tl.constexpr = R * GP
    i, head = tl.program_id(0), tl.program_id(1)
    c, e = tl.arange(0, C), tl.arange(0, E)[None, :]
    swap = e ^ (E // 2)
    r, g = c // GP, c % GP
    first, end = tl.load(stretches + i * 2) * PAGE, tl.load(stretches + i * 2 + 1) * PAGE
    if first == end:
        wait(PDL)
        return
    b = tl.load(members + i * R + r)
    inside = (b >= 0) & (g < G)
    b = tl.maximum(b, 0)
    L = tl.load(state + tl.load(active + b) * FIELDS + LENGTH)
    turn = L[:, None] * E + e
    turn_cos, turn_sin = tl.load(cos + turn).to(tl.float32), tl.load(sin + turn).to(tl.float32)
    pages = table + tl.load(active + tl.load(members + i * R)) * table_row
    wait(PDL)
    q_at = b[:, None].to(tl.int64) * ((H + 2 * K) * E) + (head * G + g)[:, None] * E
    q = _turned(qkv, q_at, e, swap, inside[:, None], q_scale, turn_cos, turn_sin, eps, E, NORM)
    q = tl.trans(q.to(qkv.dtype.element_ty))
    top = tl.full((C,), -1e30, tl.float32)
    weight, acc = tl.zeros((C,), tl.float32), tl.zeros((E, C), tl.float32)
    top, weight, acc = _mix(
        q, scale_log2, top, weight, acc, keys, values, pages, first, end, head, K, E, PAGE, TILE, STAGES
    )
    row = ((i * K + head) * R + r) * G + g
    tl.store(part_stats + row * 2, top, inside)
    tl.store(part_stats + row * 2 + 1, weight, inside)
    tl.store(part_acc + row[None, :] * E + tl.arange(0, E)[:, None], acc, inside[None, :])


MEMBERS = 16  # sequences that one block of shared_kernel serves


@dataclass(frozen=True)
class Shared:
    """Which pages are read once for several sequences, and where their partial results go."""

    stretches_I2: Tensor  # pages from … to of the members' tables
    members_IR: Tensor  # batch rows, -1 where there are fewer
    parts_BS: Tensor  # per batch row the results that it takes up: stretch * R + place among its members, or -1
    acc: Tensor
    stats: Tensor

    @staticmethod
    def empty(stretches: int, rows: int, parts: int, H: int, E: int, device: torch.device) -> "Shared":
        def integers(*shape: int, fill: int) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        return Shared(
            integers(stretches, 2, fill=0), integers(stretches, MEMBERS, fill=-1), integers(rows, parts, fill=-1),
            *(torch.empty(stretches * MEMBERS * H, n, device=device) for n in (E, 2)),
        )  # fmt: skip


def block_shape(blocks: int, is_wide: bool, is_shared: bool) -> tuple[int, int, int]:
    """Tokens of a tile, warps and stages of decode_kernel, as measured (benchmarks/RESULTS.md)."""
    if is_wide:
        return 64, 4, 3
    if is_shared:
        return 16, 1, 2
    return (16, 1, 1) if blocks >= 2048 else (32, 1, 1)


def decode(
    qkv: Tensor, q_scale: Tensor | None, k_scale: Tensor | None, cos: Tensor, sin: Tensor, eps: float, H: int,
    keys: Tensor, values: Tensor, active: Tensor, state: Tensor, table: Tensor, shared: Shared | None, is_wide: bool,
) -> Tensor:  # fmt: skip
    """Mixed values B x (H * E) of one new token a row, whose keys and values go into the cache: pages x PAGE x K x E.

    is_wide: several warps a block, for few sequences or long ones.
    """
    B, N, E = qkv.shape
    K, PAGE = (N - H) // 2, keys.shape[1]
    qkv = qkv.contiguous()
    out = qkv.new_empty(B, H * E)
    norm = q_scale is not None
    q_scale, k_scale = (q_scale, k_scale) if norm else (qkv, qkv)
    rows, scale = (active, state, table, table.shape[1]), math.log2(math.e) / math.sqrt(E)
    sizes = {"H": H, "K": K, "E": E, "PAGE": PAGE, "R": MEMBERS, "NORM": norm}
    width = power_of_2(H // K)
    if shared is not None:
        shared_kernel[(len(shared.stretches_I2), K)](
            qkv, q_scale, cos, sin, keys, values, *rows, shared.stretches_I2, shared.members_IR, shared.acc,
            shared.stats, eps, scale, **sizes, TILE=min(64, PAGE), GP=width, STAGES=2, **options(4),
        )  # fmt: skip
        results, parts = (shared.parts_BS, shared.acc, shared.stats), shared.parts_BS.shape[1]
    else:
        results, parts = (qkv, qkv, qkv), 0
    tile, warps, stages = block_shape(B * K, is_wide, shared is not None)
    decode_kernel[(B, K)](
        qkv, q_scale, k_scale, cos, sin, keys, values, out, *rows, *results, eps, scale, **sizes, TILE=min(tile, PAGE),
        C=max(8, width), PARTS=parts, STAGES=stages, **options(warps),
    )  # fmt: skip
    return out
