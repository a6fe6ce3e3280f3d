"""Causal attention over sequences that lie end to end, none of which sees another.

    flat q, k, v (T) ─ pad ─► buckets of similar length (B x H x S x E) ─ sdpa ─► unpad ─► flat (T)

On a GPU in half precision, and on a CPU with the compiled kernels, the flat layout is attended to as it lies.
Elsewhere sequences of similar length share a rectangle, so that padding never more than doubles the attention work
and never touches the linear layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hone.kernels import gpu
from hone.kernels.flat_attention import Sequences, flat_attention, takes
from hone.kernels.gpu_training import heads_attention
from hone.kernels.norm_rope import norm_rope
from hone.kernels.rows import put_rows, take_rows

if TYPE_CHECKING:
    from hone.kernels.gpu.attention import Tiles


class Rotation:
    """Rotary positions of the tokens of a call. Whole tables, P x E, and the rows of the tokens, T x 1 x E.

    The latter only where the positions are given: a kernel may know them.
    """

    def __init__(self, table: tuple[Tensor, Tensor], positions_T: Tensor | None) -> None:
        (self.cos_PE, self.sin_PE), self.positions_T = table, positions_T

    @cached_property
    def cos_T1E(self) -> Tensor:
        return self.cos_PE[self.positions_T].unsqueeze(1)

    @cached_property
    def sin_T1E(self) -> Tensor:
        return self.sin_PE[self.positions_T].unsqueeze(1)


@dataclass(frozen=True)
class Heads:
    """Makes q, k and v of a layer's fused projection T x (H + 2K) x E: head-wise norm, then rotary positions."""

    H: int
    q_scale_E: Tensor | None
    k_scale_E: Tensor | None
    eps: float
    rotation: Rotation

    def __call__(self, qkv_TNE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, normalised and rotated."""
        turn = (self.rotation.cos_T1E, self.rotation.sin_T1E)
        return norm_rope(qkv_TNE, self.q_scale_E, self.k_scale_E, *turn, self.eps, self.H)


def has_training_kernel(qkv_TNE: Tensor, heads: Heads) -> bool:
    """Whether `train_on_gpu` takes this, which may be asked for gradients."""
    return heads.rotation.positions_T is not None and gpu.trains_model(qkv_TNE, qkv_TNE.shape[2])


def train_on_gpu(qkv_TNE: Tensor, heads: Heads, sequences: Sequences, tiles: "Tiles") -> Tensor:
    """Heads and attention in one, with gradients that keep little."""
    rotation = heads.rotation
    assert rotation.positions_T is not None
    return heads_attention(
        qkv_TNE, heads.q_scale_E, heads.k_scale_E, (rotation.cos_PE, rotation.sin_PE), rotation.positions_T, sequences,
        tiles, heads.eps, heads.H,
    )  # fmt: skip


class PackedAttention:
    """Causal attention for sequences of the given lengths, laid end to end in the flat token axis."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = list(lengths)
        self.device = torch.device(device)

    def positions(self) -> Tensor:
        """Position of every flat token inside its own sequence."""
        return torch.from_numpy(np.concatenate([np.arange(n) for n in self.lengths])).to(self.device)

    def __call__(self, layer: int, qkv_TNE: Tensor, heads: Heads) -> Tensor:
        if torch.is_grad_enabled() and has_training_kernel(qkv_TNE, heads):
            return train_on_gpu(qkv_TNE, heads, self.sequences, self.tiles)
        return self.attend(*heads(qkv_TNE))

    def attend(self, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        """Mixed values, T x (H * E)."""
        T = q_THE.shape[0]
        if takes(q_THE):
            return flat_attention(q_THE, k_TKE, v_TKE, self.sequences).reshape(T, -1)
        if q_THE.is_cuda and q_THE.dtype in (torch.bfloat16, torch.float16):
            longest = max(self.lengths)
            boundaries = (self.cu_seqlens, self.cu_seqlens, longest, longest)
            return varlen(q_THE, k_TKE, v_TKE.contiguous(), *boundaries).reshape(T, -1)
        buckets, order = self.buckets
        outs = [bucket.attend(q_THE, k_TKE, v_TKE) for bucket in buckets]
        return outs[0] if order is None else take_rows(torch.cat(outs), order)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each sequence starts, and where the last one ends."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @cached_property
    def sequences(self) -> Sequences:
        """For the compiled loops: no prefixes, each sequence a group of its own."""
        nothing = np.zeros(len(self.lengths), dtype=np.int64)
        rows = np.stack([self.starts[:-1], np.asarray(self.lengths), nothing, nothing], axis=1)
        return Sequences(rows, np.arange(len(rows) + 1))

    @cached_property
    def tiles(self) -> "Tiles":
        from hone.kernels.gpu import attention

        return attention.tiles(self.sequences.rows, self.sequences.groups, self.device)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        return torch.from_numpy(self.starts.astype(np.int32)).to(self.device)

    @cached_property
    def buckets(self) -> tuple[list["_Bucket"], Tensor | None]:
        """Rectangles, and the order that takes their tokens back to the flat axis (None where they lie so)."""
        buckets = [_Bucket(members, self.lengths, self.device) for members in _bucket_by_length(self.lengths)]
        if len(buckets) == 1:
            return buckets, None
        return buckets, torch.cat([bucket.flat for bucket in buckets]).argsort()


class ContinuedAttention:
    """Causal attention of `lengths` tokens each that go on after `before` tokens whose keys and values are given.

    Queries lie end to end; so do keys and values, each sequence's earlier ones and then its own.
    """

    def __init__(self, lengths: list[int], before: list[int], device: torch.device | str = "cpu") -> None:
        self.lengths, self.before, self.device = lengths, before, torch.device(device)
        seen = np.asarray(lengths) + np.asarray(before)
        self.ends = np.cumsum(seen)
        self.own_T = np.concatenate([np.arange(end - n, end) for n, end in zip(lengths, self.ends, strict=True)])

    def attend(self, q_THE: Tensor, k_SKE: Tensor, v_SKE: Tensor) -> Tensor:
        """T x (H * E), for S keys of T queries and all before them. No gradient."""
        T = len(q_THE)
        if takes(q_THE):
            own_T = torch.from_numpy(self.own_T)
            q_SHE = q_THE.new_zeros(len(k_SKE), *q_THE.shape[1:]).index_copy_(0, own_T, q_THE)
            mixed = flat_attention(q_SHE, k_SKE, v_SKE, self.sequences)
            return mixed[own_T].reshape(T, -1)
        if q_THE.is_cuda and q_THE.dtype in (torch.bfloat16, torch.float16):
            return varlen(q_THE, k_SKE, v_SKE, *self.boundaries).reshape(T, -1)
        return self.attend_reference(q_THE, k_SKE, v_SKE)

    @cached_property
    def boundaries(self) -> tuple[Tensor, Tensor, int, int]:
        """Where queries, and keys, of each sequence start, and the most of each."""
        totals = [n + b for n, b in zip(self.lengths, self.before, strict=True)]
        starts = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (self.lengths, totals))
        of_q, of_k = (torch.from_numpy(x).to(self.device) for x in starts)
        return of_q, of_k, max(self.lengths), max(totals)

    def attend_reference(self, q_THE: Tensor, k_SKE: Tensor, v_SKE: Tensor) -> Tensor:
        outs, at = [], 0
        for length, before, end in zip(self.lengths, self.before, self.ends.tolist(), strict=True):
            q = q_THE[at : at + length].transpose(0, 1)[None]
            k, v = (x[end - length - before : end].transpose(0, 1)[None] for x in (k_SKE, v_SKE))
            sees = torch.ones(length, before + length, dtype=torch.bool, device=q.device).tril(before)
            gqa = q.shape[1] != k.shape[1]
            outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=gqa)[0].transpose(0, 1))
            at += length
        return torch.cat(outs).reshape(len(q_THE), -1)

    @cached_property
    def sequences(self) -> Sequences:
        starts = self.ends - np.asarray(self.lengths)
        rows = np.stack([starts, self.lengths, starts - np.asarray(self.before), self.before], axis=1).astype(np.int64)
        return Sequences(rows, np.arange(len(rows) + 1))


def varlen(q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, longest_q: int, longest_k: int) -> Tensor:
    """Flash attention over the flat layout; the last query of a sequence sees all of its keys."""
    out: Tensor
    if torch.is_grad_enabled():
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(q, k, v, of_q, of_k, longest_q, longest_k, window_size=(-1, 0))  # type: ignore[assignment]
    else:  # what varlen_attn calls, without 0.2 ms of the host's in every layer
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, of_q, of_k, longest_q, longest_k, 0.0, False, False, window_size_left=-1, window_size_right=0
        )[0]
    return out


class _Bucket:
    """Sequences of similar length, attended to as one padded rectangle of B x S."""

    def __init__(self, members: list[int], lengths: list[int], device: torch.device) -> None:
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        self.rows, self.width = len(members), max(lengths[i] for i in members)
        spans = [torch.arange(starts[i], starts[i] + lengths[i]) for i in members]
        cells = [torch.arange(lengths[i]) + row * self.width for row, i in enumerate(members)]
        self.flat = torch.cat(spans).to(device)  # which flat tokens, in bucket order
        self.cell = torch.cat(cells).to(device)  # where they stand in the rectangle
        self.is_whole = self.rows == len(lengths)  # every token of the call, in the flat order
        self.is_dense = self.is_whole and len(self.cell) == self.rows * self.width

    def attend(self, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        q, k, v = (self.pad(x).transpose(1, 2) for x in (q_THE, k_TKE, v_TKE))
        gqa = q.shape[1] != k.shape[1]
        out_BHSE = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        out = out_BHSE.transpose(1, 2).reshape(self.rows * self.width, -1)
        return out if self.is_dense else take_rows(out, self.cell)

    def pad(self, x_THE: Tensor) -> Tensor:
        if not self.is_dense:
            x_THE = x_THE if self.is_whole else take_rows(x_THE, self.flat)
            x_THE = put_rows(x_THE, self.cell, self.rows * self.width)
        return x_THE.view(self.rows, self.width, *x_THE.shape[1:])


def _bucket_by_length(lengths: list[int]) -> list[list[int]]:
    """Indices of the sequences in buckets whose longest is at most twice (or 32 tokens over) the shortest."""
    if max(lengths) <= 2 * min(lengths) + 32:
        return [list(range(len(lengths)))]
    buckets: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if buckets and lengths[i] <= 2 * lengths[buckets[-1][0]] + 32:
            buckets[-1].append(i)
        else:
            buckets.append([i])
    return buckets
