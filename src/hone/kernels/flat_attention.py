"""Causal attention on a CPU over sequences laid end to end on one token axis.

It needs no padding and no gathering (`cpu/attention.py`). A sequence is a row (start, length,
prefix start, prefix length) of a table; each token sees the prefix, and the sequence's tokens up to
itself. A prefix and the sequences that share it have adjacent rows and form a group.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.kernels import cpu


@dataclass
class Sequences:
    """Table of the sequences on one token axis, in groups that share a prefix.

    Attributes:
        rows: int64, S x 4: start, length, prefix start, prefix length.
        groups: int64, G + 1; group g has the rows groups[g] to groups[g + 1] - 1.
    """

    rows: NDArray[np.int64]
    groups: NDArray[np.int64]


def takes(q_THE: Tensor) -> bool:
    """Return True if the compiled loops support q: fp32 on a CPU, head size a multiple of 16."""
    return cpu.takes(q_THE) and takes_heads(q_THE.shape[-1])


def takes_heads(head_size: int) -> bool:
    return head_size % 16 == 0


def flat_attention(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, sequences: Sequences) -> Tensor:
    """Return attention outputs (T x H x E), for tensors that `takes` accepts."""
    if torch.is_grad_enabled() and (
        q_THE.requires_grad or k_TKE.requires_grad or v_TKE.requires_grad
    ):
        out: Tensor = _FlatAttention.apply(q_THE, k_TKE, v_TKE, sequences)  # type: ignore[no-untyped-call]
        return out
    return _forward(q_THE, k_TKE, v_TKE, sequences)[0]


def _forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    from hone.kernels.cpu import attention

    T, H, E = q.shape
    q, k, v = (_dense_heads(x) for x in (q, k, v))
    out = q.new_empty(T, H, E)
    logsum = q.new_empty(T, H)
    table = (sequences.rows, sequences.groups)
    attention.forward(
        H, k.shape[1], E, *addresses(q, k, v), *table, out.data_ptr(), logsum.data_ptr()
    )
    return out, logsum


def addresses(*tensors: Tensor) -> list[int]:
    """Return each tensor's address and its stride between tokens, in one flat list."""
    return [value for x in tensors for value in (x.data_ptr(), x.stride(0))]


def _dense_heads(x: Tensor) -> Tensor:
    """Return x with the heads of a token contiguous; tokens may be further apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


class _FlatAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sequences):  # type: ignore[no-untyped-def]
        out, logsum = _forward(q, k, v, sequences)
        ctx.save_for_backward(q, k, v, out, logsum)
        ctx.sequences = sequences
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        from hone.kernels.cpu import attention

        q, k, v, out, logsum = ctx.saved_tensors
        q, k, v = (_dense_heads(x) for x in (q, k, v))
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        grad = grad.contiguous()
        table = (ctx.sequences.rows, ctx.sequences.groups)
        H, E = q.shape[1:]
        attention.backward(
            H,
            k.shape[1],
            E,
            grad.data_ptr(),
            out.data_ptr(),
            *addresses(q, k, v),
            *table,
            logsum.data_ptr(),
            *(x.data_ptr() for x in grads),
        )
        return *grads, None
