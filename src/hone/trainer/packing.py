"""Sequences into micro-batches: laid end to end without padding, only the positions with a target kept for the head.

ids   p p p c c c        input    p p p c c           (the last token predicts nothing)
mask  0 0 0 1 1 1        predict      ^ ^ ^           hidden states whose next token is a target
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.models.attention import PackedAttention
from hone.models.transformer import Transformer


@dataclass
class Packed:
    """A micro-batch of S sequences: T input tokens, N targets."""

    attention: PackedAttention
    tokens_T: Tensor
    predict_N: Tensor  # index into T of the position that predicts each target
    targets_N: Tensor
    sequence_N: Tensor  # which sequence each target belongs to

    def target_logits(self, model: Transformer) -> Tensor:
        """Logits of the positions that have a target, N x V; no other position leaves the last block."""
        return model.logits(model(self.tokens_T, self.attention.positions(), self.attention, self.predict_N))


def pack(ids: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], device: torch.device | str = "cpu") -> Packed:
    """Packs sequences; `masks[i][j]` says that token j of sequence i is a target. A first token never is one."""
    lengths = [len(sequence) - 1 for sequence in ids]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.concatenate([np.asarray(sequence[:-1], dtype=np.int64) for sequence in ids])
    following = np.concatenate([np.asarray(sequence[1:], dtype=np.int64) for sequence in ids])
    wanted = np.concatenate([np.asarray(mask[1:], dtype=bool) for mask in masks])
    predict = np.flatnonzero(wanted)
    sequence = np.searchsorted(starts, predict, side="right") - 1
    tensors = (torch.from_numpy(x).to(device) for x in (tokens, predict, following[predict], sequence))
    return Packed(PackedAttention(lengths, device), *tensors)


def split_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of the sequences in micro-batches of at most `budget` tokens (a longer one stands alone).

    Sorted by length, so that each micro-batch holds sequences of similar length.
    """
    groups: list[list[int]] = []
    used = budget + 1
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if used + lengths[i] > budget:
            groups.append([])
            used = 0
        groups[-1].append(i)
        used += lengths[i]
    return groups
