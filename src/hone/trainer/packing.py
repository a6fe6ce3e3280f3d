"""Pack sequences into micro-batches, end to end and without padding.

The head computes only the positions whose next token is a target.

    ids   p p p c c c        input    p p p c c           (the last token predicts nothing)
    mask  0 0 0 1 1 1        keep         ^ ^ ^           hidden states whose next token is a target

Samples of a group share their prompt; `pack_shared` computes it once:

    input    p p p c c | c c | c c c      the last p predicts the first target of every sample
"""

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hone.kernels.flat_attention import Sequences
from hone.kernels.head import Loss, head_logprobs, head_loss
from hone.kernels.pinned_memory import to_device
from hone.kernels.row_gather import take_rows
from hone.models.attention_layouts import PackedAttention
from hone.models.language_model import LanguageModel
from hone.models.layers import Attention
from hone.models.spec import ModelSpec
from hone.trainer.ranks import Ranks

Ids = Sequence[int] | NDArray[np.int64]
Mask = Sequence[bool] | NDArray[np.bool_]


class SequenceAttention(Attention, Protocol):
    """Attention that knows the sequences of a micro-batch."""

    sequences: Sequences

    def token_positions(self) -> Tensor:
        """Return each token's position in its sequence."""
        ...


class SmallPasses(Protocol):
    """What computes passes whose kernels take the host longer to launch than a GPU to run."""

    def takes_pass(self, packed: "Packed") -> bool:
        """Return True if it is to compute the hidden states of these tokens."""
        ...

    def compute_hidden(self, packed: "Packed") -> Tensor:
        """Return the hidden states of all tokens, T x D, and perhaps of padding behind them."""
        ...


@dataclass
class Packed:
    """A micro-batch: T input tokens, N target tokens, and the K inputs that predict the targets.

    With context parallelism this is one rank's part of a micro-batch; its attention covers the
    tokens of all ranks. Targets are in the order of their sequences. K < N if one input, the end of
    a shared prompt, predicts a target of several sequences.
    """

    attention: SequenceAttention
    tokens_T: Tensor
    keep_K: Tensor  # the rows of T that predict a target, each once
    row_N: Tensor | None  # kept row that predicts each target; None if they correspond one to one
    targets_N: Tensor
    sequence_N: Tensor  # sequence number of each target
    source_T: np.ndarray  # index of each input token in all sequences end to end
    source_N: np.ndarray  # likewise of each target
    count: int  # number of sequences
    graphs: SmallPasses | None = None

    def target_hidden(self, model: LanguageModel) -> Tensor:
        """Return the hidden states that predict the targets, N x D.

        The last block computes only the inputs that predict a target.
        """
        if self.graphs is not None and self.graphs.takes_pass(self):
            hidden_KD = take_rows(self.graphs.compute_hidden(self), self.keep_K)
        else:
            positions_T = self.attention.token_positions()
            hidden_KD = model(self.tokens_T, positions_T, self.attention, self.keep_K)
        if self.row_N is None:
            return hidden_KD
        # Its gradient is summed in a fixed order; index_select's on a GPU is not.
        return F.embedding(self.row_N, hidden_KD)

    def of_targets(self, values: Sequence[Sequence[float] | NDArray[np.float64]]) -> Tensor:
        """Select the values of the N targets from per-sequence values of all tokens.

        The copy to a GPU does not synchronize.
        """
        return to_device(flatten_rows(values, np.float32)[self.source_N], self.tokens_T.device)

    def count_flops(self, spec: ModelSpec) -> float:
        """Return the forward FLOPs: all tokens, their attention, and the head for targets."""
        _, lengths, _, before = self.attention.sequences.rows.T
        context = float((lengths * (before + lengths / 2)).sum()) / max(int(lengths.sum()), 1)
        head = len(self.targets_N) / max(len(self.tokens_T), 1)
        return len(self.tokens_T) * spec.flops_per_token(context, head)

    def target_logprobs(
        self, model: LanguageModel, temperature_N: Tensor, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs of the targets, and entropies of their distributions, N each."""
        hidden_ND, weight_VD = model.head_inputs(self.target_hidden(model))
        inputs = (hidden_ND, weight_VD, self.targets_N, temperature_N)
        return head_logprobs(*inputs, entropy_gradient, model.spec.logit_cap)

    def compute_loss(
        self,
        model: LanguageModel,
        temperature_N: Tensor,
        loss: Loss,
        entropy_gradient: bool = False,
    ) -> Tensor:
        """Return the sum of `loss(part, logprobs, entropies)` over slices of the targets.

        `part` is the slice; logprobs and entropies are those of its targets. See `kernels/head.py`.
        """
        hidden_ND, weight_VD = model.head_inputs(self.target_hidden(model))
        inputs = (hidden_ND, weight_VD, self.targets_N, temperature_N)
        return head_loss(*inputs, loss, entropy_gradient, model.spec.logit_cap)


def pack_sequences(
    ids: Sequence[Ids], masks: Sequence[Mask], device: torch.device | str = "cpu"
) -> Packed:
    """Pack sequences; `masks[i][j]` marks token j of sequence i as a target.

    The first token of a sequence is never a target.
    """
    lengths = np.array([len(sequence) for sequence in ids])
    attention = PackedAttention((lengths - 1).tolist(), device)
    flat = flatten_rows(ids, np.int64)
    ends = np.cumsum(lengths)
    source = np.delete(np.arange(len(flat)), ends - 1)
    tokens = flat[source]
    following = np.delete(flat, ends - lengths)
    keep = np.flatnonzero(np.delete(flatten_rows(masks, bool), ends - lengths))
    sequence = np.repeat(np.arange(len(lengths)), lengths - 1)[keep]
    tokens_T, keep_K, targets_N, sequence_N = _to_tensors(
        device, tokens, keep, following[keep], sequence
    )
    places = (source, source[keep] + 1)
    return Packed(attention, tokens_T, keep_K, None, targets_N, sequence_N, *places, len(lengths))


def flatten_rows(rows: Sequence[Any], dtype: type) -> np.ndarray:
    """Concatenate rows into one array; lists are read in a single pass, for speed."""
    if rows and isinstance(rows[0], np.ndarray):
        return np.concatenate(rows).astype(dtype, copy=False)
    return np.fromiter(chain.from_iterable(rows), dtype, sum(map(len, rows)))


def prompt_of(ids: Ids, mask: Mask) -> tuple[int, ...]:
    """Return the tokens before the first target; empty if no token is a target."""
    return tuple(np.asarray(ids[: int(np.argmax(mask))]).tolist())


def pack_shared(
    ids: Sequence[Ids], masks: Sequence[Mask], device: torch.device | str = "cpu"
) -> Packed:
    """Pack sequences like `pack_sequences`, but compute a prompt shared by neighbours only once.

    Neighbours are consecutive sequences. Every sequence needs a target that is not its first token.
    Logits and gradients equal those of `pack_sequences`, with fewer input tokens.
    """
    lengths = np.array([len(sequence) for sequence in ids])
    starts = np.cumsum(lengths) - lengths
    # Tokens that an earlier sequence has computed, and which one.
    shared = np.zeros_like(lengths)
    leader = np.arange(len(lengths))
    prompts: list[int] = []
    completions: list[list[int]] = []  # input tokens after the prompt
    for prompt, run in groupby(range(len(ids)), key=lambda i: prompt_of(ids[i], masks[i])):
        first, *others = run
        if others:
            shared[others], leader[others] = len(prompt), first
            prompts.append(len(prompt))
            completions.append([len(ids[i]) - 1 - len(prompt) for i in (first, *others)])
        else:
            prompts.append(len(ids[first]) - 1)
            completions.append([])
    if max(map(max, filter(None, completions)), default=0) == 0:
        # Nothing is shared, or only prompts remain.
        return pack_sequences(ids, masks, device)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    at = np.arange(len(sequence)) - starts[sequence]
    is_input = (at >= shared[sequence]) & (at < lengths[sequence] - 1)
    flat = flatten_rows(ids, np.int64)
    target = np.flatnonzero(flatten_rows(masks, bool) & (at > 0))
    before = target - 1
    of = sequence[target]
    row_of_input = np.cumsum(is_input) - 1
    rows = row_of_input[np.where(at[before] < shared[of], starts[leader[of]] + at[before], before)]
    is_kept = np.zeros(is_input.sum(), dtype=bool)
    is_kept[rows] = True
    attention = PackedAttention(prompts, device, completions)
    source = np.flatnonzero(is_input)
    tokens_T, keep_K, row_N, targets_N, sequence_N = _to_tensors(
        device,
        flat[source],
        np.flatnonzero(is_kept),
        (np.cumsum(is_kept) - 1)[rows],
        flat[target],
        of,
    )
    places = (source, target)
    return Packed(attention, tokens_T, keep_K, row_N, targets_N, sequence_N, *places, len(lengths))


def split_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Divide sequences into evenly filled micro-batches of at most `budget` tokens.

    Returns the indices of the sequences of each micro-batch. A sequence longer than `budget` has a
    micro-batch of its own. Best-fit decreasing bin packing: sequences are placed in order of
    decreasing length, each in the fullest micro-batch that it fits into. The number of
    micro-batches is at most 11/9 of the smallest possible, plus one.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])

    def split_by_budget(budget: int) -> list[list[int]]:
        groups: list[list[int]] = []
        room: list[tuple[int, int]] = []  # free tokens of each micro-batch, sorted
        for i in longest_first:
            at = bisect.bisect_left(room, (lengths[i], -1))
            if at == len(room):
                groups.append([])
                left = budget
                group = len(groups) - 1
            else:
                left, group = room.pop(at)
            groups[group].append(i)
            bisect.insort(room, (left - lengths[i], group))
        return groups

    return _split_evenly(split_by_budget, budget)


def split_by_prompt(
    prompts: Sequence[tuple[int, ...]], lengths: Sequence[int], budget: int
) -> list[list[int]]:
    """Divide sequences into micro-batches of at most `budget` tokens, grouped by prompt.

    Sequences with equal prompts are adjacent; the tokens of their prompt count once per
    micro-batch.
    """
    first: dict[tuple[int, ...], int] = {}
    group = [first.setdefault(prompt, i) for i, prompt in enumerate(prompts)]
    side_by_side = sorted(range(len(lengths)), key=group.__getitem__)

    def split_by_budget(budget: int) -> list[list[int]]:
        parts: list[list[int]] = []
        used = budget + 1
        last = -1
        for i in side_by_side:
            cost = lengths[i] - (len(prompts[i]) if group[i] == last else 0)
            if used + cost > budget:
                parts.append([])
                used = 0
                cost = lengths[i]
            parts[-1].append(i)
            used = used + cost
            last = group[i]
        return parts

    return _split_evenly(split_by_budget, budget)


def share_by_prompt(
    ranks: Ranks, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int]
) -> list[int]:
    """Return the indices of this rank's sequences.

    Sequences with equal prompts stay together unless this gives the busiest rank more work.
    """
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        groups[prompt].append(i)
    best = list(range(len(lengths)))
    least = math.inf
    pieces = 1
    while ranks.shares > 1 and pieces < 2 * max(map(len, groups.values()), default=0):
        parts = [
            group[k::pieces] for group in groups.values() for k in range(min(pieces, len(group)))
        ]
        costs = [
            sum(lengths[i] - len(prompts[i]) for i in part) + len(prompts[part[0]])
            for part in parts
        ]
        mine, most = ranks.balanced_shares(costs)
        if most < least:
            best = sorted(i for k in mine for i in parts[k])
            least = most
        pieces *= 2
    return best


def _split_evenly(split: Callable[[int], list[list[int]]], budget: int) -> list[list[int]]:
    """Call `split` with the smallest budget that gives as few micro-batches as `budget` gives.

    This leaves no micro-batch nearly empty.
    """
    parts = split(budget)
    least = 1
    most = budget
    while least < most:
        middle = (least + most) // 2
        found = split(middle)
        if len(found) <= len(parts):
            parts = found
            most = middle
        else:
            least = middle + 1
    return parts


def _to_tensors(device: torch.device | str, *arrays: np.ndarray) -> tuple[Tensor, ...]:
    return tuple(to_device(array, torch.device(device)) for array in arrays)
