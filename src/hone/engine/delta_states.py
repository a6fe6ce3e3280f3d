"""States of layers with the gated delta rule: a row per slot, and snapshots at the ends of prefixes.

    rows:   0 … slots - 1   running sequences     slots   padding     then   snapshots

A state depends on all earlier tokens, so it cannot be stored in pages. The engine keeps a snapshot
at a prompt's last page boundary; requests that begin with the same pages continue there.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hone.engine.pages import PagePool
from hone.engine.slots import untouched_zeros
from hone.engine.state_rows import count_state_rows
from hone.kernels import delta_rule
from hone.kernels.delta_plan import DeltaHeads, DeltaPlan, DeltaState, PlanTables
from hone.kernels.delta_shape import CHUNK_TOKENS
from hone.kernels.flat_attention import Sequences
from hone.kernels.pinned_memory import copy_to_device, to_device
from hone.models.spec import ModelSpec


class DeltaStates:
    """States of all layers, by row.

    Attributes:
        layers: the states of each layer with the gated delta rule.
    """

    def __init__(
        self,
        spec: ModelSpec,
        pool: PagePool,
        dtype: torch.dtype,
        device: torch.device,
        sequences: int,
    ) -> None:
        shapes = [spec.delta_shape(layer) for layer in range(spec.num_hidden_layers)]
        shape = next(one for one in shapes if one is not None)
        self.pool = pool
        self.device = device
        rows = count_state_rows(sequences)
        columns = (spec.delta_layers, rows, shape.conv_width - 1, shape.channels)
        matrices = (spec.delta_layers, rows, *shape.matrix_sizes)
        self.columns = untouched_zeros(columns, dtype, device)
        self.matrices = untouched_zeros(matrices, torch.float32, device)
        self.layers = [DeltaState(*x) for x in zip(self.columns, self.matrices, strict=True)]
        self.snapshot_rows = range(sequences + 1, rows)
        self.clear_snapshots()

    def clear_snapshots(self) -> None:
        self.unused = list(self.snapshot_rows)
        # Row of each snapshot, by the chain of pages that ends there; least recently used first.
        self.snapshots: OrderedDict[int, int] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return self.columns.nbytes + self.matrices.nbytes

    def copy_rows(self, source: list[int], target: list[int]) -> None:
        """Copy the states of rows `source` to rows `target`."""
        here, there = (to_device(rows, self.device) for rows in (source, target))
        for state in self.layers:
            for x in state.tensors:
                x.index_copy_(0, there, x.index_select(0, here))

    def boundary_of(self, prompt_tokens: int) -> int:
        """Return the number of tokens after which a prompt's state is kept, 0 for none."""
        return (prompt_tokens - 1) // self.pool.size * self.pool.size

    def trim_prefix(self, pages: list[int]) -> list[int]:
        """Return the longest part of a cached prefix, given by its pages, that ends at a snapshot."""
        for count in range(len(pages), 0, -1):
            if self._chain_of(pages[count - 1]) in self.snapshots:
                return pages[:count]
        return []

    def restore_prefix(self, pages: list[int], slot: int) -> None:
        """Give a slot the state after these pages, which `trim_prefix` returned."""
        chain = self._chain_of(pages[-1])
        self.snapshots.move_to_end(chain)
        self.copy_rows([self.snapshots[chain]], [slot])

    def take_row(self, chain: int | None) -> int | None:
        """Reserve a row for the state after a chain of pages.

        Evicts the least recently used snapshot if no row is unused. None if the pages are not
        cached, have a snapshot already, or no row is left.
        """
        if chain is None or chain in self.snapshots or not (self.unused or self.snapshots):
            return None
        return self.unused.pop() if self.unused else self.snapshots.popitem(last=False)[1]

    def keep_snapshot(self, chain: int | None, row: int) -> None:
        """Register the state in a row, from `take_row`, as that after a chain of pages.

        Frees the row instead if the pages are no longer cached, or have a snapshot by now.
        """
        if chain is None or chain in self.snapshots:
            self.unused.append(row)
        else:
            self.snapshots[chain] = row

    def _chain_of(self, page: int) -> int:
        chain = self.pool.chain_of(page)
        return -1 if chain is None else chain


@dataclass(frozen=True)
class DeltaChunk:
    """Rows of states that a prefill chunk reads and writes.

    Attributes:
        slot: row of the sequence.
        is_first: the chunk starts its prompt, from zeros.
        snapshot_row: row of the snapshot; None: none.
        until: number of the chunk's tokens before the snapshot; ignored without one.
    """

    slot: int
    is_first: bool
    snapshot_row: int | None = None
    until: int = 0

    def count_first_tokens(self, length: int) -> int:
        """Return the tokens of a chunk of `length` before its snapshot, or all without one."""
        return length if self.snapshot_row is None else self.until


class DeltaMixing(Protocol):
    """The gated delta rule in a prefill pass."""

    def mix_delta(self, layer: int, projected_TO: Tensor, heads: DeltaHeads) -> Tensor:
        """Return the outputs of the pass's tokens, T x VF, and keep the states after them."""
        ...


class PrefillDelta:
    """The gated delta rule in a prefill pass over chunks of prompts."""

    def __init__(self, states: DeltaStates, chunks: list[DeltaChunk], lengths: list[int]) -> None:
        self.states = states
        cuts = [x.count_first_tokens(n) for x, n in zip(chunks, lengths, strict=True)]
        ends = np.cumsum(lengths)
        rows = []
        for cut, length, start in zip(cuts, lengths, ends - lengths, strict=True):
            rows.append((start, cut, 0, 0))
            if cut < length:
                rows.append((start + cut, length - cut, start, cut))
        self.plan = DeltaPlan(
            Sequences(np.array(rows, dtype=np.int64), np.arange(len(rows) + 1)), states.device
        )
        is_cut = [cut < length for cut, length in zip(cuts, lengths, strict=True)]
        whole = [i for i, cut in enumerate(is_cut) if not cut]
        parts = [i for i, cut in enumerate(is_cut) if cut]

        def on_device(values: list[int]) -> Tensor:
            return to_device(values, states.device)

        self.continues = not all(chunk.is_first for chunk in chunks)
        self.is_first_N = on_device([int(chunk.is_first) for chunk in chunks])
        self.slots_N = on_device([chunk.slot for chunk in chunks])
        self.whole = on_device(whole), on_device([chunks[i].slot for i in whole])
        self.part_slots = on_device([chunks[i].slot for i in parts])
        kept = [i for i, chunk in enumerate(chunks) if chunk.snapshot_row is not None]
        rows_kept = [row for chunk in chunks if (row := chunk.snapshot_row) is not None]
        self.snapshots = on_device(kept), on_device(rows_kept)

    def mix_delta(self, layer: int, projected_TO: Tensor, heads: DeltaHeads) -> Tensor:
        """Return the outputs of the chunks' tokens, and keep the states after them."""
        store = self.states.layers[layer]
        before = self._states_before(store) if self.continues else None
        out_TG, first, rest = delta_rule.run_plan(projected_TO, heads, self.plan, before)
        for index, target in (self.whole, self.snapshots):
            for kept, found in zip(store.tensors, first.tensors, strict=True):
                kept.index_copy_(0, target, found.index_select(0, index).to(kept.dtype))
        if rest is not None:
            for kept, found in zip(store.tensors, rest.tensors, strict=True):
                kept.index_copy_(0, self.part_slots, found.to(kept.dtype))
        return out_TG

    def _states_before(self, store: DeltaState) -> DeltaState:
        before = store.select(self.slots_N)
        is_first = self.is_first_N.bool()
        return DeltaState(
            *(x.masked_fill(is_first.view(-1, *[1] * (x.dim() - 1)), 0.0) for x in before.tensors)
        )


class CapturedDelta:
    """The gated delta rule in a captured pass over whole prompts; `fill_tables` describes a pass.

    Args:
        prompts: the most prompts of a pass, of `tokens` tokens in all.
        has_snapshots: True if a pass may keep snapshots.
        spare_row: row of states that unused prompts of a pass write to.
    """

    def __init__(
        self, states: DeltaStates, tokens: int, prompts: int, has_snapshots: bool, spare_row: int
    ) -> None:
        assert states.pool.size <= CHUNK_TOKENS  # what follows a snapshot is one chunk
        self.states = states
        self.spare_row = spare_row
        self.plan = PlanTables(tokens, prompts, has_snapshots, states.device)
        # Rows that receive the states after prompts, and the snapshots.
        self.rows_2N = torch.zeros(2, prompts, dtype=torch.int64, device=states.device)
        self.fill_tables([], [])

    def fill_tables(self, chunks: list[DeltaChunk], lengths: list[int]) -> None:
        """Describe the chunks of a pass, each the start of a prompt."""
        cuts = [x.count_first_tokens(n) for x, n in zip(chunks, lengths, strict=True)]
        self.plan.fill_tables(lengths, cuts)
        rows_2N = torch.full(self.rows_2N.shape, self.spare_row)
        for i, chunk in enumerate(chunks):
            rows_2N[0, i] = chunk.slot
            if chunk.snapshot_row is not None:
                rows_2N[1, i] = chunk.snapshot_row
        copy_to_device(self.rows_2N, rows_2N)

    def mix_delta(self, layer: int, projected_TO: Tensor, heads: DeltaHeads) -> Tensor:
        """Return the outputs of the chunks' tokens, and keep the states after them."""
        from hone.kernels.gpu.delta_kernels import run_plan

        store = self.states.layers[layer]
        out_TG, first, rest = run_plan(projected_TO, heads, self.plan, None)
        found = [(first if rest is None else rest, self.rows_2N[0])]
        if rest is not None:  # a prompt's continuation is empty if it has no snapshot
            found.append((first, self.rows_2N[1]))
        for state, rows_N in found:
            for kept, x in zip(store.tensors, state.tensors, strict=True):
                kept.index_copy_(0, rows_N, x[: len(rows_N)].to(kept.dtype))
        return out_TG
