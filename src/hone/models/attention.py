"""Causal attention over sequences that lie end to end, none of which sees another.

    flat q, k, v (T) ─ pad ─► buckets of similar length (B x H x S x E) ─ sdpa ─► unpad ─► flat (T)

On a GPU in half precision, and on a CPU with the compiled kernels, the flat layout is attended to as it lies.
Elsewhere sequences of similar length share a rectangle, so that padding never more than doubles the attention work
and never touches the linear layers.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hone.kernels.flat_attention import Sequences, flat_attention, takes
from hone.kernels.rows import put_rows, take_rows


class PackedAttention:
    """Causal attention for sequences of the given lengths, laid end to end in the flat token axis."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = list(lengths)
        self.device = torch.device(device)

    def positions(self) -> Tensor:
        """Position of every flat token inside its own sequence."""
        return torch.from_numpy(np.concatenate([np.arange(n) for n in self.lengths])).to(self.device)

    def __call__(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        T = q_THE.shape[0]
        if takes(q_THE):
            return flat_attention(q_THE, k_TKE, v_TKE, self.sequences).reshape(T, -1)
        if q_THE.is_cuda and q_THE.dtype in (torch.bfloat16, torch.float16):
            from torch.nn.attention.varlen import varlen_attn

            longest = max(self.lengths)
            out: Tensor = varlen_attn(  # type: ignore[assignment]
                q_THE,
                k_TKE,
                v_TKE.contiguous(),
                self.cu_seqlens,
                self.cu_seqlens,
                longest,
                longest,
                window_size=(-1, 0),
            )
            return out.reshape(T, -1)
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
    def cu_seqlens(self) -> Tensor:
        return torch.from_numpy(self.starts.astype(np.int32)).to(self.device)

    @cached_property
    def buckets(self) -> tuple[list["_Bucket"], Tensor | None]:
        """Rectangles, and the order that takes their tokens back to the flat axis (None where they lie so)."""
        buckets = [_Bucket(members, self.lengths, self.device) for members in _bucket_by_length(self.lengths)]
        if len(buckets) == 1:
            return buckets, None
        return buckets, torch.cat([bucket.flat for bucket in buckets]).argsort()


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
