"""Expert parallelism: each rank holds some experts of every block and computes the tokens routed to them.

    x ─ rows for the experts of rank i ─ all-to-all ─► products of this rank's experts ─ all-to-all ─► weighted sum

Weights of experts are sharded by rows, a whole number of experts for each rank, and are never
gathered for a pass.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.kernels.expert_products import ExpertWeights, multiply_experts, order_pairs
from hone.kernels.rank_exchange import exchange_rows
from hone.kernels.row_gather import put_rows


@dataclass(frozen=True)
class ExpertRanks:
    """Ranks among which the experts of a model are divided, in order.

    Attributes:
        count: number of ranks.
    """

    count: int

    def multiply_experts(
        self, x_TD: Tensor, experts: ExpertWeights, weight_TK: Tensor, expert_TK: Tensor
    ) -> Tensor:
        """Compute `multiply_experts` with the experts divided among all ranks. Collective.

        The host waits once, for the row counts.

        Args:
            experts: this rank's experts.
            expert_TK: indices among all experts.
        """
        T, K = expert_TK.shape
        own = experts.count
        pairs_M, counts_E = order_pairs(expert_TK, own * self.count)
        pairs_M = pairs_M.long()
        to_rank_RE = counts_E.view(self.count, own).contiguous()
        from_rank_RE = self._exchange_counts(to_rank_RE)
        sent, received = torch.stack([to_rank_RE.sum(1), from_rank_RE.sum(1)]).tolist()
        # F.embedding sums its gradient in a fixed order; indexing on a GPU does not.
        rows_ND = exchange_rows(F.embedding(pairs_M // K, x_TD), sent, received, None)
        numbers = torch.arange(own, device=x_TD.device).repeat(self.count)
        count = sum(received)
        expert_N = numbers.repeat_interleave(from_rank_RE.flatten(), output_size=count)
        if count == 0:
            # A row of zeros, so that this rank's backward pass has the exchanges too.
            rows_ND, expert_N = F.pad(rows_ND, (0, 0, 0, 1)), F.pad(expert_N, (0, 1))
        ones_N1 = weight_TK.new_ones(len(rows_ND), 1)
        out_ND = multiply_experts(rows_ND, experts, ones_N1, expert_N[:, None])
        back_MD = exchange_rows(out_ND[:count], received, sent, None)
        out_TKD = put_rows(back_MD, pairs_M, T * K).view(T, K, -1)
        return (out_TKD * weight_TK.to(x_TD.dtype)[:, :, None]).sum(1)

    def _exchange_counts(self, to_rank_RE: Tensor) -> Tensor:
        import torch.distributed as dist

        from_rank_RE = torch.empty_like(to_rank_RE)
        dist.all_to_all_single(from_rank_RE, to_rank_RE)
        return from_rank_RE


def take_local_part(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor, with gradients; all of it if it is not sharded."""
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part
