"""Gather and scatter rows by an index, with gradients that do not depend on timing.

Without repeats in the index, the gradient of either operation is a plain copy of rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index]; the index has no repeats."""
    out: Tensor = _Take.apply(x, index)  # type: ignore[no-untyped-call]
    return out


def put_rows(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """Scatter the rows of x into zeros with `rows` rows, at positions `index` (no duplicates)."""
    out: Tensor = _Put.apply(x, index, rows)  # type: ignore[no-untyped-call]
    return out


def repeat_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index] for an index of any shape, which may repeat rows.

    Gradients of rows that are gathered several times are added in a fixed order.
    """
    return F.embedding(index, x.flatten(1)).unflatten(-1, x.shape[1:])


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
