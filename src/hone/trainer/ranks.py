"""The processes that train one model together, under torchrun: each holds all of it and takes a share of the sequences.

    batch ─ shares of like cost ─► rank 0 … n - 1: forward, backward ─ sum of gradients ─► the same step on all

Losses are weighted over the whole batch, so sums over ranks are what one process would have. The first rank alone
writes. Nothing but tensors travels between them.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    count: int = 1

    @staticmethod
    def join(timeout: float) -> "Ranks":
        """Meets the others that torchrun has started; the only one without it. `timeout`: seconds that one may wait
        for another."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return Ranks()
        import torch.distributed as dist

        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout))
        ranks = Ranks(dist.get_rank(), count)
        if not ranks.is_first:
            logging.getLogger("hone").setLevel(logging.ERROR)
        return ranks

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Until all have come here."""
        if self.count > 1:
            import torch.distributed as dist

            dist.barrier()

    def leave(self) -> None:
        if self.count > 1:
            import torch.distributed as dist

            dist.barrier()
            dist.destroy_process_group()

    def share(self, items: Sequence[T], costs: Sequence[float]) -> list[T]:
        """This rank's part of the items, in their order: the costliest first, each to the rank that has least to do."""
        loads = [0.0] * self.count
        mine = []
        for i in sorted(range(len(items)), key=lambda i: -costs[i]):
            rank = loads.index(min(loads))
            loads[rank] += costs[i]
            if rank == self.rank:
                mine.append(i)
        return [items[i] for i in sorted(mine)]

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, on each."""
        if self.count > 1:
            import torch.distributed as dist

            x = x.clone()
            dist.all_reduce(x)
        return x

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replaces the gradients by their sum over all ranks."""
        if self.count == 1:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = self.sum(torch.cat([grad.reshape(-1).float() for grad in grads]))
        for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = total.view_as(parameter).to(parameter.dtype)

    def gather(self, x_N: Tensor) -> NDArray[np.float64]:
        """The numbers of all ranks, end to end."""
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
