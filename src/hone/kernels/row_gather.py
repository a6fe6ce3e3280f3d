"""Gather and scatter rows by an index without repeats.

The gradient of either operation is therefore a plain copy of rows, without accumulation.
"""

import torch
from torch import Tensor


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index]; the index has no repeats."""
    out: Tensor = _Take.apply(x, index)  # type: ignore[no-untyped-call]
    return out


def put_rows(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """Scatter the rows of x into zeros with `rows` rows, at positions `index` (no duplicates)."""
    out: Tensor = _Put.apply(x, index, rows)  # type: ignore[no-untyped-call]
    return out


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index, rows):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(index)
        return x.new_zeros(rows, *x.shape[1:]).index_copy_(0, index, x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None
