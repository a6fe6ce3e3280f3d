"""Sequences into micro-batches: laid end to end without padding, only the positions with a target kept for the head.

    ids   p p p c c c        input    p p p c c           (the last token predicts nothing)
    mask  0 0 0 1 1 1        keep         ^ ^ ^           hidden states whose next token is a target

Samples of a group share their prompt; `pack_shared` lays it down once:

    input    p p p c c | c c | c c c      the last p predicts the first target of every sample
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.kernels.head import Loss, head_logprobs, head_loss
from hone.models.attention import PackedAttention
from hone.models.shared_prompt import SharedPromptAttention
from hone.models.spec import ModelSpec
from hone.models.transformer import Transformer

Ids = Sequence[int]
Mask = Sequence[bool]


@dataclass
class Packed:
    """A micro-batch: T input tokens, N targets in the order of their sequences, K rows that predict them."""

    attention: PackedAttention | SharedPromptAttention
    tokens_T: Tensor
    keep_K: Tensor  # the rows of T that predict a target, each once
    row_N: Tensor | None  # which kept row predicts each target; None where they are one to one
    targets_N: Tensor
    sequence_N: Tensor  # which sequence each target belongs to

    def target_hidden(self, model: Transformer) -> Tensor:
        """Hidden states that predict the targets, N x D; no other position leaves the last block."""
        hidden_KD = model(self.tokens_T, self.attention.positions(), self.attention, self.keep_K)
        if self.row_N is None:
            return hidden_KD
        return F.embedding(self.row_N, hidden_KD)  # its gradient adds up in one order, index_select's on a GPU does not

    def flops(self, spec: ModelSpec) -> float:
        """That the model needs for it, forward: all tokens, those that each attends to, the head for targets."""
        _, lengths, _, before = self.attention.sequences.rows.T
        tokens = len(self.tokens_T)
        context = float((lengths * (before + lengths / 2)).sum()) / tokens
        return tokens * spec.flops_per_token(context, len(self.targets_N) / tokens)

    def target_logprobs(
        self, model: Transformer, temperature_N: Tensor, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of the targets, and the entropies of the distributions they were drawn from, N each."""
        hidden_ND, weight_VD = self.target_hidden(model), model.head_weight_VD
        return head_logprobs(hidden_ND, weight_VD, self.targets_N, temperature_N, entropy_gradient)

    def loss(self, model: Transformer, temperature_N: Tensor, loss: Loss, entropy_gradient: bool = False) -> Tensor:
        """The sum of `loss(part, logprobs, entropies)` over slices of the targets (`kernels/head.py`)."""
        hidden_ND, weight_VD = self.target_hidden(model), model.head_weight_VD
        return head_loss(hidden_ND, weight_VD, self.targets_N, temperature_N, loss, entropy_gradient)


def pack(ids: Sequence[Ids], masks: Sequence[Mask], device: torch.device | str = "cpu") -> Packed:
    """Packs sequences; `masks[i][j]` says that token j of sequence i is a target. A first token never is one."""
    lengths = np.array([len(sequence) for sequence in ids])
    attention = PackedAttention((lengths - 1).tolist(), device)
    flat, ends = flatten(ids, np.int64), np.cumsum(lengths)
    tokens, following = np.delete(flat, ends - 1), np.delete(flat, ends - lengths)
    wanted = np.delete(flatten(masks, bool), ends - lengths)
    keep = np.flatnonzero(wanted)
    sequence = np.searchsorted(attention.starts, keep, side="right") - 1
    tokens_T, keep_K, targets_N, sequence_N = _tensors(device, tokens, keep, following[keep], sequence)
    return Packed(attention, tokens_T, keep_K, None, targets_N, sequence_N)


def flatten(rows: Sequence[Sequence[Any]], dtype: type) -> np.ndarray:
    """Rows end to end: one pass, where an array of each row would cost as much as the rest of packing."""
    return np.fromiter(chain.from_iterable(rows), dtype, sum(map(len, rows)))


def prompt_of(ids: Ids, mask: Mask) -> tuple[int, ...]:
    """What comes before the first target."""
    return tuple(ids[: list(mask).index(True)])


def pack_shared(ids: Sequence[Ids], masks: Sequence[Mask], device: torch.device | str = "cpu") -> Packed:
    """Like `pack`, with the prompt that neighbouring sequences share laid down and computed once.

    Needs a target in every sequence, not as its first token. Same logits and gradients, in fewer tokens.
    """
    prompts: list[tuple[int, ...]] = []
    completions: list[list[int]] = []  # input tokens of each sample beyond the prompt
    tokens: list[int] = []
    rows, targets, sequences = [], [], []
    end_of_prompt = 0
    for i, (sequence, mask) in enumerate(zip(ids, masks, strict=True)):
        prompt = prompt_of(sequence, mask)
        if not prompts or prompts[-1] != prompt:
            prompts.append(prompt)
            completions.append([])
            tokens.extend(prompt)
            end_of_prompt = len(tokens) - 1
        own = np.arange(len(tokens), len(tokens) + len(sequence) - len(prompt) - 1)
        predicting = np.concatenate([[end_of_prompt], own])
        wanted = np.asarray(mask[len(prompt) :], dtype=bool)
        rows.append(predicting[wanted])
        targets.append(np.asarray(sequence[len(prompt) :], dtype=np.int64)[wanted])
        sequences.append(np.full(int(wanted.sum()), i))
        completions[-1].append(len(own))
        tokens.extend(sequence[len(prompt) : -1])
    if max(max(group) for group in completions) == 0:
        return pack(ids, masks, device)  # one-token completions: nothing beyond the prompts
    keep, row = np.unique(np.concatenate(rows), return_inverse=True)
    attention = SharedPromptAttention([len(prompt) for prompt in prompts], completions, device)
    flat = (np.asarray(tokens, dtype=np.int64), keep, row, np.concatenate(targets), np.concatenate(sequences))
    tokens_T, keep_K, row_N, targets_N, sequence_N = _tensors(device, *flat)
    return Packed(attention, tokens_T, keep_K, row_N, targets_N, sequence_N)


def split_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of the sequences in micro-batches of at most `budget` tokens (a longer one stands alone).

    Best fit decreasing: the longest first, each into the fullest micro-batch that has room for it. At most 11/9 of the
    fewest that are possible, plus one; in O(n log n).
    """
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # of each micro-batch, sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(room, (lengths[i], -1))
        if at == len(room):
            groups.append([])
            left, group = budget, len(groups) - 1
        else:
            left, group = room.pop(at)
        groups[group].append(i)
        bisect.insort(room, (left - lengths[i], group))
    return groups


def split_by_prompt(prompts: Sequence[tuple[int, ...]], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Like `split_by_tokens`, with sequences of the same prompt side by side and a shared prompt counted once."""
    first: dict[tuple[int, ...], int] = {}
    for i, prompt in enumerate(prompts):
        first.setdefault(prompt, i)
    groups: list[list[int]] = []
    used, last = budget + 1, None
    for i in sorted(range(len(lengths)), key=lambda i: first[prompts[i]]):
        cost = lengths[i] - (len(prompts[i]) if prompts[i] == last else 0)
        if used + cost > budget:
            groups.append([])
            used, cost = 0, lengths[i]
        groups[-1].append(i)
        used, last = used + cost, prompts[i]
    return groups


def _tensors(device: torch.device | str, *arrays: np.ndarray) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array).to(device) for array in arrays)
