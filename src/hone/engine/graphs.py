"""Decode steps as CUDA graphs: one launch per step instead of up to 280.

The host checks results only after several steps. A graph is captured on its first use, for a number
of rows (decoding sequences, padded with an unused slot), a kind of sampling, adapters or none, and
a way to read the cache: with or without shared pages, with sequences whole or split into parts,
with tile sizes for long or for short sequences.

A server's requests arrive one by one, so any number of rows may occur for a few steps. A graph with
more rows is then used instead (except with shared pages), until its unused rows have cost as much
as a capture. Some sizes are captured at the start (`warm_up.py`). All that changes between replays
(active slots, pages, lengths) is in tensors at fixed addresses, as are the weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hone.engine.decoder import Decoder
from hone.engine.sequence import Sequence
from hone.kernels import gpu, numerics
from hone.kernels import row_state as column
from hone.kernels.cuda_graphs import Captured
from hone.kernels.decode import DecodeRows
from hone.kernels.pinned_memory import to_device

if TYPE_CHECKING:
    from hone.kernels.gpu.decode import Shared

WORTH_SHARING = 4096  # tokens per step that sharing must save to pay for the group kernel
ENOUGH_BLOCKS = 100  # thread blocks below which stretches of shared pages are halved
# Number of parts per sequence: the first of these that gives no more blocks than multiprocessors,
# with at least MIN_PART_TOKENS tokens each; else one.
PARTS = (32, 16, 8, 4, 2)
MIN_PART_TOKENS = 96  # tokens of a part at least
MOST_PARTS = 32  # stretches of one shared prompt
PAYS_FOR_GRAPH = (
    32  # unused decode steps (steps x share of unused rows) that cost as much as a capture
)
REVIEW_STEPS = 64  # steps after which sequence lengths may favour another way to read the cache
LONG_SEQUENCE_TOKENS = 384  # longest sequence in tokens from which larger blocks are faster


class Key(NamedTuple):
    rows: int
    kind: int
    has_adapters: bool
    stretches: int  # capacity for stretches of shared pages; 0: every sequence reads its own
    parts: int  # parts per sequence; 0: one
    is_long: bool

    def is_like(self, other: Key) -> bool:
        """Return True if the keys differ in nothing but rows."""
        return self[1:] == other[1:]


def pad_rows(rows: int) -> int:
    """Round a number of rows up to a power of 2, above 16 to a multiple of 8, 16 or 32."""
    if rows <= 16:
        return gpu.power_of_2(rows)
    step = 8 if rows <= 64 else 16 if rows <= 256 else 32
    return -(-rows // step) * step


class DecodeGraphs:
    """Captured decode steps. `most_rows` is the largest number of sequences that decode at once."""

    def __init__(self, decoder: Decoder, captured: Captured, most_rows: int) -> None:
        self.decoder = decoder
        self.captured = captured
        self.most_rows = most_rows
        self.slots = decoder.slots
        spec = decoder.model.spec
        self.heads = spec.num_key_value_heads
        self.can_share = spec.shares_pages
        self.shared: dict[tuple[int, int], Shared] = {}
        self.arrived = torch.zeros(
            (most_rows + 1) * self.heads, dtype=torch.int32, device=self.slots.device
        )
        self.key: Key | None = None
        self.looks_again: float = 0  # engine step at which to choose again

    def set_batch(
        self, sequences: list[Sequence], kind: int, has_adapters: bool, step: int
    ) -> None:
        """Set the sequences that decode from now on, and choose how attention reads the cache.

        The best choice depends on sequence lengths, so call this again at step `looks_again`.

        Args:
            sequences: the sequences in the active slots, in order.
            kind: kind of sampling (`TokenSampler`).
            has_adapters: True if a request uses a LoRA adapter.
            step: decode steps of the engine so far.
        """
        # Valid for the middle of the steps until the next choice.
        lengths = [len(s.prompt_ids) + step - s.first_step + REVIEW_STEPS / 2 for s in sequences]
        B = pad_rows(len(sequences))
        plan = self._shared_ranges(sequences)
        taken: dict[int, int] = defaultdict(int)
        for _, _, members in plan:
            for row in members:
                taken[row] += 1
        parts = (
            gpu.power_of_2(max(taken.values()))
            if taken
            else self._choose_parts(B, sum(lengths) / len(lengths))
        )
        stretches = gpu.power_of_2(len(plan)) if plan else 0
        self.looks_again = math.inf if plan else step + REVIEW_STEPS
        is_long = not plan and self.is_long(B, max(lengths), parts)
        self.key = Key(min(B, self.most_rows), kind, has_adapters, stretches, parts, is_long)
        if stretches:
            self._write_plan(self.key, plan, sequences)

    def run_steps(self, steps: int) -> Tensor | None:
        """Run `steps` decode steps; return the last step's logits if the sampling kind needs them."""
        assert self.key is not None
        logits: Tensor | None = self.captured.replay(self._choose_graph(self.key, steps), steps)
        return logits

    def _choose_graph(self, key: Key, steps: int) -> Key:
        """Return the key of the graph to run: this key, captured if needed, or one with more rows."""
        if key in self.captured:
            return key
        larger = [
            k.rows
            for k in self.captured
            if isinstance(k, Key) and k.rows > key.rows and key.is_like(k)
        ]
        if larger and not key.stretches:
            spare = steps * (1 - key.rows / min(larger))
            if self.captured.may_stand_in(key, spare, PAYS_FOR_GRAPH):
                return key._replace(rows=min(larger))
        self.capture_graph(key)
        return key

    def _shared_ranges(self, sequences: list[Sequence]) -> list[tuple[int, int, list[int]]]:
        """Return (first, end, rows) for each range of pages that several batch rows share.

        Rows with the same prompt share its full pages. The list is empty if sharing would save
        little.
        """
        from hone.kernels.gpu.decode import MEMBERS

        # Each sequence reads all of its tokens.
        if numerics.keeps_order("attention") or not self.can_share:
            return []
        size = self.decoder.cache.pool.size
        heads = self.heads
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row, sequence in enumerate(sequences):
            full = len(sequence.prompt_ids) // size
            if full:
                groups[full, sequence.pages[full - 1]].append(row)
        shared = {key: rows for key, rows in groups.items() if len(rows) > 1}
        if sum(full * size * (len(rows) - 1) for (full, _), rows in shared.items()) < WORTH_SHARING:
            return []
        crowds = [
            (full, rows[i : i + MEMBERS])
            for (full, _), rows in shared.items()
            for i in range(0, len(rows), MEMBERS)
        ]
        length = max([8, *(gpu.power_of_2(-(-full // MOST_PARTS)) for full, _ in crowds)])
        while length > 1 and sum(-(-full // length) for full, _ in crowds) * heads < ENOUGH_BLOCKS:
            length //= 2
        return [
            (at, min(at + length, full), rows)
            for full, rows in crowds
            for at in range(0, full, length)
        ]

    def is_long(self, rows: int, longest: float, parts: int) -> bool:
        """Return True if attention should use the tile sizes for long sequences.

        They are used only without shared pages and with undivided sequences. The longest sequence
        decides, since a step takes as long as that sequence's thread block.
        """
        from hone.kernels.gpu.decode_attention import matters_length

        spec = self.decoder.model.spec
        queries = spec.num_attention_heads // self.heads
        shape = rows * self.heads, rows, spec.hidden_size, queries, spec.head_dim
        return parts == 0 and longest > LONG_SEQUENCE_TOKENS and matters_length(*shape)

    def _choose_parts(self, rows: int, mean: float) -> int:
        """Return into how many parts attention splits each sequence; 0 for no split.

        With few sequences, parts occupy multiprocessors that would be idle. `mean` is the mean
        length.
        """
        if numerics.keeps_order("attention"):
            return 0
        most = min(gpu.processors() / (rows * self.heads), mean / MIN_PART_TOKENS)
        return next((parts for parts in PARTS if parts <= most), 0)

    def shared_by(self, key: Key) -> Shared | None:
        """Return the buffers that graphs with this key use for shared pages; None if they share
        none.
        """
        from hone.kernels.gpu.decode import Shared

        if not key.stretches:
            return None
        if (key.stretches, key.parts) not in self.shared:
            spec = self.decoder.model.spec
            rows = self.most_rows + 1
            self.shared[key.stretches, key.parts] = Shared.empty(
                key.stretches,
                rows,
                key.parts,
                spec.num_attention_heads,
                spec.head_dim,
                self.slots.device,
            )
        return self.shared[key.stretches, key.parts]

    def rows_by(self, key: Key) -> DecodeRows:
        """Return the slot states and page table that attention reads in graphs with this key."""
        from hone.kernels.gpu.decode_attention import Divided

        slots = self.slots
        divided = Divided(key.parts, self.arrived) if key.parts and not key.stretches else None
        return DecodeRows(
            slots.active, slots.state, slots.table, self.shared_by(key), divided, key.is_long
        )

    def _write_plan(
        self, key: Key, plan: list[tuple[int, int, list[int]]], sequences: list[Sequence]
    ) -> None:
        """Write to the device which rows share which pages (`_shared_ranges`)."""
        from hone.kernels.gpu.decode import MEMBERS

        device = self.slots.device
        shared = self.shared_by(key)
        assert shared is not None
        stretches = [[0, 0] for _ in range(key.stretches)]
        members = [[-1] * MEMBERS for _ in range(key.stretches)]
        parts = [[-1] * key.parts for _ in range(len(shared.parts_BS))]
        own = [0] * len(sequences)
        for i, (first, end, rows) in enumerate(plan):
            stretches[i] = [first, end]
            members[i][: len(rows)] = rows
            for place, row in enumerate(rows):
                parts[row][parts[row].index(-1)] = i * MEMBERS + place
                own[row] = max(own[row], end)
        shared.stretches_I2.copy_(to_device(stretches, device))
        shared.members_IR.copy_(to_device(members, device))
        shared.parts_BS.copy_(to_device(parts, device))
        slots = to_device([s.slot for s in sequences], device)
        self.slots.state[slots, column.OWN_PAGE] = to_device(own, device)

    def capture_graph(self, key: Key) -> None:
        """Capture the graph of this key; its rows use the spare slot, so that no sequence changes."""
        # Local names, to avoid a reference cycle through the graph.
        slots = self.slots
        decoder = self.decoder
        rows = self.rows_by(key)
        active = slots.active.clone()
        slots.active.fill_(slots.count)  # set up with the spare slot only
        self.captured.capture(
            key, lambda: decoder.decode_step(key.rows, key.kind, key.has_adapters, rows)
        )
        slots.active.copy_(active)
