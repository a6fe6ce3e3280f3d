"""All-to-all exchange of rows among ranks, with gradients."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def exchange_rows(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: "ProcessGroup | None"
) -> Tensor:
    """Send consecutive rows to each rank of a group; return the rows received, by rank. Collective.

    The backward pass sends gradients in the opposite direction.

    Args:
        x: rows for rank 0, then those for rank 1, and so on.
        sent: number of rows for each rank.
        received: number of rows from each rank.
        group: None: all ranks.
    """
    out: Tensor = _Exchange.apply(x, sent, received, group)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: Any
    ) -> Tensor:
        import torch.distributed as dist

        ctx.exchange = (sent, received, group)
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        sent, received, group = ctx.exchange
        back: Tensor = _Exchange.apply(grad, received, sent, group)  # type: ignore[no-untyped-call]
        return back, None, None, None
