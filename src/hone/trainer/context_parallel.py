"""Context parallelism: neighbouring ranks divide the tokens of each micro-batch among them.

    tokens of rank i ─ norm, qkv ─ all-to-all ─► all tokens of some heads ─ attend ─ all-to-all ─► tokens of rank i

Attention and the gated delta rule compute all tokens for some heads; all other layers compute only a
rank's tokens (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509). Each rank computes the loss of
its own targets; the sum over ranks is the loss of the micro-batch.

Shapes: T tokens of the micro-batch, with padding; t = T / n of a rank; n ranks.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hone.kernels.delta_plan import DeltaHeads
from hone.kernels.rank_exchange import exchange_rows
from hone.models.attention_layouts import Heads, PackedAttention
from hone.models.mixers import Mixer
from hone.trainer.packing import Packed
from hone.trainer.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ContextGroup:
    """Neighbouring ranks that divide the tokens of their micro-batches.

    Attributes:
        count: number of ranks.
        index: position of this rank in the group.
        group: process group of these ranks.
    """

    count: int
    index: int
    group: "ProcessGroup"

    @staticmethod
    def join_group(ranks: Ranks) -> "ContextGroup | None":
        """Return this rank's group; None if each rank computes whole sequences. Collective."""
        if ranks.context == 1:
            return None
        import torch.distributed as dist

        timeout = timedelta(seconds=ranks.timeout)
        group, _ = dist.new_subgroups(group_size=ranks.context, timeout=timeout)
        return ContextGroup(ranks.context, ranks.rank % ranks.context, group)

    def take_own_part(self, packed: Packed) -> Packed:
        """Return this rank's part of a micro-batch: its tokens and targets, with attention over all tokens."""
        whole = packed.attention
        assert isinstance(whole, PackedAttention)
        total = len(packed.tokens_T)
        size = -(-total // self.count)
        first = size * self.index
        padding = size * self.count - total
        attention = DividedAttention(whole.with_padding(padding), self)
        tokens = torch.cat([packed.tokens_T, packed.tokens_T.new_zeros(padding)])
        keep = packed.keep_K
        is_kept_K = (keep >= first) & (keep < first + size)
        row_N = packed.row_N
        is_own_N = is_kept_K if row_N is None else is_kept_K[row_N]
        own = is_own_N.cpu().numpy()
        if row_N is not None:
            row_N = (is_kept_K.cumsum(0) - 1)[row_N[is_own_N]]
        own_keep = keep[is_kept_K] - first
        if not len(own_keep):
            # A row without a target, so that all ranks run the same kernels and collectives.
            own_keep, row_N = own_keep.new_zeros(1), own_keep.new_zeros(0)
        source = np.concatenate([packed.source_T, np.zeros(padding, packed.source_T.dtype)])
        return replace(
            packed,
            attention=attention,
            tokens_T=tokens[first : first + size],
            keep_K=own_keep,
            row_N=row_N,
            targets_N=packed.targets_N[is_own_N],
            sequence_N=packed.sequence_N[is_own_N],
            source_T=source[first : first + size],
            source_N=packed.source_N[own],
        )

    def gather_targets(self, own_N: Tensor, own: Packed, whole: Packed) -> Tensor:
        """Gather one value per target from all ranks, in the order of the micro-batch. Collective."""
        import torch.distributed as dist

        values_N = own_N.new_zeros(len(whole.source_N))
        values_N[_find_places(own, whole)] = own_N
        dist.all_reduce(values_N, group=self.group)
        return values_N

    def complete_targets(self, own_N: Tensor, own: Packed, whole: Packed) -> Tensor:
        """Gather like `gather_targets`; this rank's own values keep their gradients. Collective."""
        gathered_N = self.gather_targets(own_N.detach(), own, whole)
        return gathered_N.index_copy(0, _find_places(own, whole), own_N)

    def gather_tokens(self, x_tMO: Tensor) -> Tensor:
        """Give each rank its part of the middle axis, for all tokens: t x n x … -> T x …."""
        t = len(x_tMO)
        parts = x_tMO.transpose(0, 1).flatten(0, 1)
        return exchange_rows(parts, [t] * self.count, [t] * self.count, self.group)

    def scatter_tokens(self, x_TA: Tensor) -> Tensor:
        """Give each rank its tokens, of all ranks' parts: T x A -> t x (n * A)."""
        t = len(x_TA) // self.count
        parts = exchange_rows(x_TA, [t] * self.count, [t] * self.count, self.group)
        return parts.unflatten(0, (self.count, t)).transpose(0, 1).flatten(1)


def _find_places(own: Packed, whole: Packed) -> Tensor:
    """Return the index of each of a rank's targets among those of the whole micro-batch."""
    places = torch.from_numpy(np.searchsorted(whole.source_N, own.source_N))
    return places.to(own.targets_N.device)


class DividedAttention:
    """Compute attention for a rank's T / n tokens by exchanging tokens for heads.

    `whole` is the attention of all T tokens; it is called with this rank's heads.
    """

    def __init__(self, whole: PackedAttention, context: ContextGroup) -> None:
        self.whole = whole
        self.context = context
        self.sequences = whole.sequences

    def token_positions(self) -> Tensor:
        """Return the positions of all T tokens, which attention needs."""
        return self.whole.token_positions()

    def __call__(self, layer: int, qkv_tNE: Tensor, heads: Heads) -> Tensor:
        n = self.context.count
        parts = qkv_tNE.split([heads.H, *[(qkv_tNE.shape[1] - heads.H) // 2] * 2], 1)
        # Key/value heads that several ranks need are repeated.
        q, k, v = (
            part if part.shape[1] >= n else part.repeat_interleave(n // part.shape[1], 1)
            for part in parts
        )
        by_rank = [x.unflatten(1, (n, x.shape[1] // n)) for x in (q, k, v)]
        qkv_TNE = self.context.gather_tokens(torch.cat(by_rank, 2))
        out_TA = self.whole(layer, qkv_TNE, self._own_heads(heads))
        return self.context.scatter_tokens(out_TA)

    def _own_heads(self, heads: Heads) -> Heads:
        n, index = self.context.count, self.context.index
        options = heads.options
        if options is not None and options.sinks_H is not None:
            options = replace(options, sinks_H=options.sinks_H.chunk(n)[index])
        return replace(heads, H=heads.H // n, options=options)

    def mix_sequences(self, layer: int, x_TD: Tensor, mixer: Mixer) -> Tensor:
        raise TypeError("mixers of transformers' modules see whole sequences")

    def mix_delta(self, layer: int, projected_tO: Tensor, heads: DeltaHeads) -> Tensor:
        n = self.context.count
        mixed, z, b, a = heads.split_projection(projected_tO)
        parts = [
            x.unflatten(1, (n, x.shape[1] // n)) for x in (*heads.split_parts(mixed, 1), z, b, a)
        ]
        projected_TO = self.context.gather_tokens(torch.cat(parts, 2))
        own = heads.take_part(n, self.context.index)
        return self.context.scatter_tokens(self.whole.mix_delta(layer, projected_TO, own))
