"""Ranks: processes that train one model together under torchrun.

    batch ─ shares of like cost ─► rank 0 … n - 1: forward, backward ─ sum of gradients ─► the same step on all

Each rank has a share of the sequences, and the whole model or a part of every weight
(`sharding.py`). With context parallelism, consecutive ranks receive the same share and divide its
tokens (`context_parallel.py`).

Losses are weighted over the whole batch, so sums over ranks equal the result of one process. Only
the first rank writes files. Ranks exchange only tensors.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Rank of this process and number of processes that train one model.

    Attributes:
        rank: index of this process.
        count: number of processes.
        context: number of consecutive ranks that receive the same share and divide its tokens.
        timeout: seconds to wait for another rank.
    """

    rank: int = 0
    count: int = 1
    context: int = 1
    timeout: float = 1800.0

    @staticmethod
    def join_ranks(timeout: float) -> "Ranks":
        """Join torch.distributed if torchrun started several processes; return the `Ranks`.

        `timeout`: seconds to wait for another rank.
        """
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return Ranks()
        import torch.distributed as dist

        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"  # checkpoints are written from the CPU
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        ranks = Ranks(dist.get_rank(), count, timeout=timeout)
        if not ranks.is_first:
            logging.getLogger("hone").setLevel(logging.ERROR)
        return ranks

    def with_context(self, context: int) -> "Ranks":
        """Return these ranks with groups of `context`. Raises ValueError if they do not divide evenly."""
        if self.count % context:
            found = (
                "is 1 trainer process" if self.count == 1 else f"are {self.count} trainer processes"
            )
            raise ValueError(
                f"context_parallel {context}: there {found}, and their number must be a multiple: "
                f"trainer_gpu_ids of rl, or torchrun --nproc-per-node {context}"
            )
        return replace(self, context=context)

    @property
    def shares(self) -> int:
        """Return the number of shares of the sequences."""
        return self.count // self.context

    @property
    def own_share_index(self) -> int:
        return self.rank // self.context

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.count > 1:
            import torch.distributed as dist

            dist.barrier()

    def any_rank(self, is_so: bool, device: torch.device) -> bool:
        """Return True on all ranks if `is_so` is True on any of them."""
        return bool(self.all_reduce_max(int(is_so), device))

    def leave_ranks(self) -> None:
        if self.count > 1:
            import torch.distributed as dist

            dist.barrier()
            dist.destroy_process_group()

    def own_share(self, items: Sequence[T], costs: Sequence[float]) -> list[T]:
        """Return this rank's balanced share of the items, in order."""
        return [items[i] for i in self.balanced_shares(costs)[0]]

    def balanced_shares(self, costs: Sequence[float]) -> tuple[list[int], float]:
        """Return this rank's item indices, and the total cost of the largest share.

        Items are assigned by decreasing cost, each to the share with the least so far.
        """
        loads = [0.0] * self.shares
        mine = []
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            share = loads.index(min(loads))
            loads[share] += costs[i]
            if share == self.own_share_index:
                mine.append(i)
        return sorted(mine), max(loads)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        if self.count > 1:
            import torch.distributed as dist

            x = x.clone()
            dist.all_reduce(x)
        return x

    def sum_each(self, tensors: list[Tensor]) -> list[Tensor]:
        """Sum each tensor over all ranks, in one message."""
        if self.count == 1:
            return tensors
        flat = self.sum_over_ranks(torch.cat([x.reshape(-1) for x in tensors]))
        parts = flat.split([x.numel() for x in tensors])
        return [part.view_as(x) for part, x in zip(parts, tensors, strict=True)]

    def all_reduce_max(self, number: int, device: torch.device) -> int:
        """Return the maximum over all ranks."""
        if self.count == 1:
            return number
        import torch.distributed as dist

        x = torch.tensor(number, device=device)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return int(x)

    def gather_numbers(self, x_N: Tensor) -> NDArray[np.float64]:
        """Return the numbers of all ranks, concatenated."""
        if self.count == 1:
            return x_N.double().cpu().numpy()
        import torch.distributed as dist

        size = torch.tensor([len(x_N)], device=x_N.device)
        sizes = [torch.empty_like(size) for _ in range(self.count)]
        dist.all_gather(sizes, size)
        lengths = [int(n) for n in sizes]
        padded = x_N.new_zeros(max(lengths), dtype=torch.float64)
        padded[: len(x_N)] = x_N
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded)
        return torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)]).cpu().numpy()


ALONE = Ranks()
