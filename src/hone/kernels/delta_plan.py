"""Weights, states and tables of a layer with the gated delta rule (`delta_rule.py`).

Shapes as there: T tokens, N sequences, M chunks, V value heads, E key size, F value size, C channels.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hone.kernels.delta_shape import CHUNK_TOKENS, DeltaShape
from hone.kernels.flat_attention import Sequences
from hone.kernels.pinned_memory import copy_to_device, to_device
from hone.kernels.row_gather import repeat_rows

SHORT_CHUNK = 16  # on a CPU in sequences of up to SHORT_TOKENS
SHORT_TOKENS = 512
NORM_EPS = 1e-6  # of the norms of q and k


@dataclass(frozen=True)
class DeltaHeads:
    """Weights and sizes of one layer.

    Attributes:
        conv_C1W: weight of the convolution, the newest token's last.
        decay_V: logarithm of each head's decay rate.
        bias_V: added to `a` before softplus.
        norm_F: scale of the norm of the outputs.
        eps: of that norm.
    """

    shape: DeltaShape
    conv_C1W: Tensor
    decay_V: Tensor
    bias_V: Tensor
    norm_F: Tensor
    eps: float

    def split_projection(self, projected_TO: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k and v side by side (T x C), z (T x VF), b and a (T x V)."""
        parts = projected_TO.split(self.shape.projection_rows, 1)
        return parts[0], parts[1], parts[2], parts[3]

    def split_parts(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Split dimension `dim`, which has the channels of q, k and v, into these three."""
        keys = self.shape.key_heads * self.shape.key_size
        q, k, v = x.split([keys, keys, self.shape.outputs], dim)
        return q, k, v

    def take_part(self, count: int, index: int) -> "DeltaHeads":
        """Return part `index` of the heads, divided into `count` equal parts."""
        shape = self.shape
        own = replace(
            shape, key_heads=shape.key_heads // count, value_heads=shape.value_heads // count
        )
        conv_C1W = torch.cat([x.chunk(count)[index] for x in self.split_parts(self.conv_C1W, 0)])
        decay_V, bias_V = (x.chunk(count)[index] for x in (self.decay_V, self.bias_V))
        return DeltaHeads(own, conv_C1W, decay_V, bias_V, self.norm_F, self.eps)

    def split_channels(self, mixed_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k (T x K x E) and v (T x V x F)."""
        shape = self.shape
        q, k, v = self.split_parts(mixed_TC, 1)
        of_key, of_value = (shape.key_heads, shape.key_size), (shape.value_heads, shape.value_size)
        return q.unflatten(1, of_key), k.unflatten(1, of_key), v.unflatten(1, of_value)

    def compute_gates(self, b_TV: Tensor, a_TV: Tensor) -> tuple[Tensor, Tensor]:
        """Return g, the logarithm of the decay, and beta, both T x V in float32."""
        g_TV = -self.decay_V.float().exp() * F.softplus(a_TV.float() + self.bias_V.float())
        return g_TV, b_TV.float().sigmoid()

    def normalize_outputs(self, o_TVF: Tensor, z_TG: Tensor) -> Tensor:
        """Return norm(o) * silu(z), T x VF, in the dtype of z."""
        normed = F.rms_norm(o_TVF.float(), o_TVF.shape[-1:], self.norm_F.float(), self.eps)
        return (normed.flatten(1) * F.silu(z_TG.float())).to(z_TG.dtype)


@dataclass(frozen=True)
class DeltaState:
    """State of a layer after the tokens of N sequences.

    Attributes:
        columns_NWC: the last W - 1 inputs of the convolution, oldest first.
        matrices_NVEF: S of each value head, float32.
    """

    columns_NWC: Tensor
    matrices_NVEF: Tensor

    def select(self, index_M: Tensor) -> "DeltaState":
        """Return the states of sequences `index_M`, which may repeat."""
        return DeltaState(*(repeat_rows(x, index_M) for x in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.columns_NWC, self.matrices_NVEF

    @staticmethod
    def zeros(count: int, shape: DeltaShape, like: Tensor) -> "DeltaState":
        """Return the state of `count` sequences before their first token."""
        columns = like.new_zeros(count, shape.conv_width - 1, shape.channels)
        matrices = like.new_zeros(count, *shape.matrix_sizes, dtype=torch.float32)
        return DeltaState(columns, matrices)


class Segments:
    """Sequences of the given lengths, end to end, with the tables that their computation reads.

    Args:
        first: place of the first token in the tables that GPU kernels read.
    """

    def __init__(self, lengths: NDArray[np.int64], device: torch.device, first: int = 0) -> None:
        self.lengths = lengths
        self.device = device
        self.first = first
        self.count = len(self.lengths)
        self.tokens = int(self.lengths.sum())
        self.ends = np.cumsum(self.lengths)

    @cached_property
    def boundaries(self) -> Tensor:
        """Return the places where sequences begin, and the end, N + 1."""
        return to_device(self.first + np.concatenate([[0], self.ends]), self.device)

    @cached_property
    def chunk_table(self) -> Tensor:
        """Return first token, tokens, sequence and number in its sequence of each chunk, int32."""
        counts = -(-self.lengths // CHUNK_TOKENS)
        owner_M = np.repeat(np.arange(self.count), counts)
        number_M = np.arange(len(owner_M)) - (np.cumsum(counts) - counts)[owner_M]
        before_M = number_M * CHUNK_TOKENS
        first_M = self.first + (self.ends - self.lengths)[owner_M] + before_M
        tokens_M = np.minimum(CHUNK_TOKENS, self.lengths[owner_M] - before_M)
        table = np.stack([first_M, tokens_M, owner_M, number_M], 1)
        return to_device(table.astype(np.int32), self.device)

    @cached_property
    def sequence_table(self) -> Tensor:
        """Return the first chunk and the number of chunks of each sequence, int32."""
        counts = -(-self.lengths // CHUNK_TOKENS)
        table = np.stack([np.cumsum(counts) - counts, counts], 1)
        return to_device(table.astype(np.int32), self.device)

    def convolution_cells(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return where tokens, first columns and last columns stand with columns before each sequence.

        T, N x (width - 1) and N x (width - 1) rows of a table of T + N (width - 1).
        """
        more = width - 1
        owner_T = np.repeat(np.arange(self.count), self.lengths)
        own_T = np.arange(self.tokens) + (owner_T + 1) * more
        ends = self.ends + (np.arange(self.count) + 1) * more
        first = (ends - self.lengths - more)[:, None] + np.arange(more)
        last = (ends - more)[:, None] + np.arange(more)
        own, before, after = (to_device(x, self.device) for x in (own_T, first, last))
        return own, before, after

    @cached_property
    def chunks(self) -> "Chunks":
        return Chunks(self)


class Chunks:
    """Chunks of `size` tokens, ordered by their number in their sequence.

    The first chunks of all sequences come first, then the second ones; longer sequences come before
    shorter ones.

    Attributes:
        size: tokens of a chunk; the last of a sequence may have fewer.
        cell_T: place of each token among all chunks' tokens.
        running: how many sequences have a first chunk, a second one, and so on.
        order_N: the sequences, longest first.
        place_N: place of each sequence in that order.
    """

    def __init__(self, segments: Segments) -> None:
        is_short = segments.lengths.max(initial=0) <= SHORT_TOKENS
        self.size = SHORT_CHUNK if is_short else CHUNK_TOKENS
        counts = -(-segments.lengths // self.size)
        order = np.argsort(-counts, kind="stable")
        place = np.argsort(order, kind="stable")
        most = int(counts.max(initial=0))
        self.running = [int((counts > c).sum()) for c in range(most)]
        first = np.concatenate([[0], np.cumsum(self.running)]).astype(np.int64)
        owner_T = np.repeat(np.arange(segments.count), segments.lengths)
        starts = segments.ends - segments.lengths
        offset_T = np.arange(segments.tokens) - starts[owner_T]
        chunk_T = first[offset_T // self.size] + place[owner_T]
        cell_T = chunk_T * self.size + offset_T % self.size
        self.count = int(first[-1])
        tables = (cell_T, order, place)
        self.cell_T, self.order_N, self.place_N = (to_device(x, segments.device) for x in tables)


class DeltaPlan:
    """Order in which sequences are computed: those without a prefix first, then their continuations.

    `sequences` may have groups that share a prefix, such as the completions of a prompt.

    Attributes:
        first: the sequences without a prefix.
        rest: their continuations; None: there are none.
        order_T: place of each token on the flat axis, in the order of computation.
        is_in_order: that order is the flat axis's.
        parents_N: index in `first` of each sequence of `rest`, never decreasing.
    """

    def __init__(self, sequences: Sequences, device: torch.device) -> None:
        rows = sequences.rows[sequences.rows[:, 1] > 0]
        first, rest = rows[rows[:, 3] == 0], rows[rows[:, 3] > 0]
        self.first = Segments(first[:, 1], device)
        self.rest = Segments(rest[:, 1], device, self.first.tokens) if len(rest) else None
        spans = [
            np.arange(start, start + n)
            for part in (first, rest)
            for start, n in part[:, :2].tolist()
        ]
        places = np.concatenate([np.zeros(0, np.int64), *spans])
        self.is_in_order = bool((places == np.arange(len(places))).all())
        self._parents = np.searchsorted(first[:, 0], rest[:, 2])
        self.order_T, self.parents_N = (to_device(x, device) for x in (places, self._parents))

    @staticmethod
    def for_lengths(lengths: NDArray[np.int64], device: torch.device) -> "DeltaPlan":
        """Return the plan of sequences without prefixes, end to end."""
        nothing = np.zeros_like(lengths)
        rows = np.stack([np.cumsum(lengths) - lengths, lengths, nothing, nothing], 1)
        return DeltaPlan(Sequences(rows, np.arange(len(rows) + 1)), device)

    @cached_property
    def children_PN(self) -> Tensor:
        """Return 1 where a sequence of `rest` (N) continues one of `first` (P), else 0, float32."""
        is_child = np.arange(self.first.count)[:, None] == self._parents
        return to_device(is_child.astype(np.float32), self.order_T.device)


class LevelTables(Protocol):
    """Tables of sequences that GPU kernels read: those of `Segments`, or of fixed size."""

    @property
    def count(self) -> int: ...

    @property
    def boundaries(self) -> Tensor: ...

    @property
    def chunk_table(self) -> Tensor: ...

    @property
    def sequence_table(self) -> Tensor: ...


class ForwardPlan(Protocol):
    """What a forward pass reads of a `DeltaPlan`."""

    @property
    def first(self) -> LevelTables: ...

    @property
    def rest(self) -> LevelTables | None: ...

    @property
    def order_T(self) -> Tensor: ...

    @property
    def is_in_order(self) -> bool: ...

    @property
    def parents_N(self) -> Tensor: ...


@dataclass(frozen=True)
class SegmentTables:
    """Tables of `count` sequences, some of which may be empty, at fixed addresses."""

    count: int
    boundaries: Tensor
    chunk_table: Tensor
    sequence_table: Tensor


class AlignedTables:
    """Flat tables of fixed sizes in one tensor, filled by one copy.

    Each begins at a multiple of 16 bytes, as tensors of their own do: for others Triton would
    compile its kernels again.
    """

    def __init__(self, sizes: list[int], dtype: torch.dtype, device: torch.device | str) -> None:
        self.sizes = sizes
        self.whole = torch.zeros(sum(map(_align, sizes)), dtype=dtype, device=device)
        self.tables = self._split(self.whole)

    def _split(self, whole: Tensor) -> list[Tensor]:
        parts = whole.split([_align(size) for size in self.sizes])
        return [part[:size] for part, size in zip(parts, self.sizes, strict=True)]

    def fill_tables(self, values: list[Tensor]) -> None:
        """Fill each table with these CPU tensors; zeros follow those that are shorter."""
        host = torch.zeros(self.whole.shape, dtype=self.whole.dtype)
        for table, one in zip(self._split(host), values, strict=True):
            table[: one.numel()] = one.flatten()
        copy_to_device(self.whole, host)


def _align(size: int) -> int:
    return -(-size // 4) * 4


class PlanTables:
    """Tables of a `DeltaPlan` for passes without gradients, to change between replays of a graph.

    There are `prompts` sequences of `tokens` tokens in all. Unused tokens form one more sequence,
    so that every output row is written. With `has_rest`, each prompt has a continuation of up to
    CHUNK_TOKENS tokens, which may be empty.

    Attributes:
        first, rest, order_T, is_in_order, parents_N: as those of `DeltaPlan`.
    """

    def __init__(
        self, tokens: int, prompts: int, has_rest: bool, device: torch.device | str
    ) -> None:
        # A sequence's last chunk may be almost empty.
        chunks = [tokens // CHUNK_TOKENS + prompts + 2, prompts][: 1 + has_rest]
        counts = [prompts + 1, prompts][: 1 + has_rest]
        small = [4 * count for count in chunks] + [2 * count for count in counts]
        large = [count + 1 for count in counts] + [tokens]
        self._small = AlignedTables(small, torch.int32, device)
        self._large = AlignedTables(large, torch.int64, device)
        *boundaries, self.order_T = self._large.tables
        levels = [
            SegmentTables(count, ends, chunk_table.view(-1, 4), sequence_table.view(-1, 2))
            for count, ends, chunk_table, sequence_table in zip(
                counts,
                boundaries,
                self._small.tables[: len(counts)],
                self._small.tables[len(counts) :],
                strict=True,
            )
        ]
        self.prompts = prompts
        self.first = levels[0]
        self.rest = levels[1] if has_rest else None
        self.is_in_order = not has_rest
        self.parents_N = torch.arange(prompts, device=device)

    def fill_tables(self, lengths: list[int], cuts: list[int]) -> None:
        """Describe a pass: the tokens of each prompt, and those before its continuation."""
        total, tokens = sum(lengths), len(self.order_T)
        every = np.zeros((2, self.prompts), np.int64)
        every[:, : len(lengths)] = cuts, lengths
        before, whole = every
        cpu = torch.device("cpu")
        segments = [Segments(np.append(before, tokens - total), cpu)]
        order = np.arange(tokens)
        if self.rest is not None:
            segments.append(Segments(whole - before, cpu, segments[0].tokens))
            own = order[:total]
            offsets = own - np.repeat(np.cumsum(whole) - whole, whole)
            is_first = offsets < np.repeat(before, whole)
            order = np.concatenate([own[is_first], order[total:], own[~is_first]])
        small = [*(one.chunk_table for one in segments), *(one.sequence_table for one in segments)]
        self._small.fill_tables(small)
        self._large.fill_tables([*(one.boundaries for one in segments), torch.from_numpy(order)])
