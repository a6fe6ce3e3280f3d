"""Prefill: compute chunks of prompts, concatenated, in one pass.

    chunks ─ tokens, positions, cells ─┬─ one by one ──────────┬─► hidden states of the kept rows
                                          └─ as one CUDA graph ───┘

A chunk is a range of tokens of one prompt. To launch the kernels of
a pass one by one, the host needs as long as an H200 needs to compute about 4,000 tokens of a 0.6B
model. So on a GPU a pass over whole prompts is captured as a graph when its rounded shape occurs
for the second time. If the graph of a larger pass exists, that graph is used instead until its
padding has cost as much as launching one pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.engine.cache import KVCache
from hone.engine.delta_states import CapturedDelta, DeltaChunk, DeltaMixing, PrefillDelta
from hone.engine.mixer_states import PrefillMixing
from hone.kernels import gpu
from hone.kernels.cuda_graphs import Captured
from hone.kernels.delta_plan import DeltaHeads
from hone.kernels.pinned_memory import copy_to_device, to_device
from hone.models.adapters import Adapters
from hone.models.attention_layouts import (
    AttentionOptions,
    ContinuedAttention,
    Heads,
    PackedAttention,
    flash_varlen,
)
from hone.models.eight_bit import count_weights
from hone.models.language_model import LanguageModel
from hone.models.mixers import Mixer

# FLOP of a pass: longer ones hide their launches, and their graphs would hold memory.
WORTH_A_GRAPH = 2e13
# Reading and writing the state of a prompt takes as long as computing this many tokens.
STATE_TOKENS = 16
Mix = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, AttentionOptions | None], Tensor]


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `start` to `end` (exclusive) of a prompt, computed in one pass.

    The tokens before `start` are in the cache.
    """

    ids: list[int]
    pages: list[int]
    start: int
    end: int
    adapter: int = 0
    delta: DeltaChunk | None = None  # for models with the gated delta rule


class Prefill:
    """Prefill passes of an engine. `captured` holds their CUDA graphs, or is None."""

    def __init__(
        self,
        model: LanguageModel,
        cache: KVCache,
        adapters: Adapters,
        captured: Captured | None,
        max_rows: int,
    ) -> None:
        self.model = model
        self.cache = cache
        self.adapters = adapters
        self.device = cache.device
        self.captured = captured
        self.spare_row = max_rows  # of states, for passes that warm up
        self.most_tokens = WORTH_A_GRAPH / (2 * count_weights(model.blocks))
        self.inputs: dict[Shape, _Inputs] = {}  # of graphs
        self.seen: set[Shape] = set()

    def run_chunks(self, chunks: list[PrefillChunk], kept: list[int]) -> Tensor:
        """Compute keys and values of the chunks; return hidden states of the tokens `kept`.

        `kept` holds token indices over all chunks, concatenated.
        """
        size = self.cache.pool.size
        lengths = [s.end - s.start for s in chunks]
        before = [s.start for s in chunks]
        positions, cells = _token_places(chunks, before, size)
        tokens = np.array(
            list(chain.from_iterable(s.ids[s.start : s.end] for s in chunks)), dtype=np.int64
        )
        numbers = [s.adapter for s in chunks]
        is_plain = not any(before) and not any(numbers)
        states = [s.delta or DeltaChunk(self.spare_row, True) for s in chunks]
        if self.captured is not None and is_plain and len(tokens) <= self.most_tokens:
            has_snapshots = any(state.snapshot_row is not None for state in states)
            wanted = Shape.from_lengths(lengths, has_snapshots)
            shape = self._choose_graph(self.captured, wanted)
            if shape is not None:
                inputs = self.inputs[shape]
                inputs.fill_inputs(tokens, positions, cells, kept, lengths)
                if inputs.deltas is not None:
                    inputs.deltas.fill_tables(states, lengths)
                hidden_ND: Tensor = self.captured.replay(shape)
                return hidden_ND[: len(kept)]
        tokens_T, positions_T, cells_T, kept_P = (
            to_device(x, self.device) for x in (tokens, positions, cells, kept or [0])
        )
        attention = PrefillAttention(
            self.cache, positions_T, cells_T, self._build_attention(chunks, lengths, before)
        )
        if self.cache.mixers is not None:
            _, every = _token_places(chunks, [0] * len(chunks), size)
            of_each = np.split(every, np.cumsum([s.end for s in chunks])[:-1])
            attention.mixing = PrefillMixing(
                self.cache.mixers, of_each, lengths, numbers, self.adapters
            )
        if self.cache.deltas is not None:
            attention.deltas = PrefillDelta(self.cache.deltas, states, lengths)
        which_T = to_device(np.repeat(numbers, lengths), self.device) if any(numbers) else None
        with self.adapters.used_by(which_T, kept_P):
            hidden_PD: Tensor = self.model(tokens_T, positions_T, attention, kept_P)
        self.cache.note_routing(self.model, cells_T, kept_P)
        return hidden_PD

    def capture_graph(self, shape: "Shape") -> None:
        """Capture the CUDA graph of this shape; `captured` must not be None."""
        assert self.captured is not None
        inputs = self.inputs[shape] = _Inputs(shape, self.device)  # inputs of empty prompts
        if self.cache.deltas is not None:
            sizes = (shape.tokens, shape.prompts, shape.has_snapshots, self.spare_row)
            inputs.deltas = CapturedDelta(self.cache.deltas, *sizes)
        attention = PrefillAttention(
            self.cache, inputs.positions_T, inputs.cells_T, inputs.attend_graph
        )
        attention.deltas = inputs.deltas

        # Local names, to avoid a reference cycle through the graph
        model = self.model
        cache = self.cache

        def forward() -> Tensor:
            hidden_ND: Tensor = model(inputs.tokens_T, inputs.positions_T, attention, inputs.kept_N)
            cache.note_routing(model, inputs.cells_T, inputs.kept_N)
            return hidden_ND

        self.captured.capture(shape, forward)

    def _choose_graph(self, captured: Captured, shape: "Shape") -> "Shape | None":
        """Return the shape of the graph to use, this one or a larger one, or None for no graph.

        Captures the graph of this shape once that is worthwhile.
        """
        if shape in captured:
            return shape
        others = captured if captured.stand_in else ()
        larger = min(
            (s for s in others if isinstance(s, Shape) and s.has_room_for(shape)), default=None
        )
        if larger is not None:
            if captured.may_stand_in(shape, self._count_padding(larger, shape), self.most_tokens):
                return larger
        elif shape not in self.seen:
            self.seen.add(shape)
            return None
        self.capture_graph(shape)
        return shape

    def _count_padding(self, larger: "Shape", shape: "Shape") -> int:
        """Return the work that graph `larger` wastes on a pass of another shape, in tokens."""
        of_prompt = 0 if self.cache.deltas is None else STATE_TOKENS
        prompts = larger.prompts - shape.prompts
        return larger.tokens - shape.tokens + of_prompt * prompts

    def _build_attention(
        self, chunks: list[PrefillChunk], lengths: list[int], before: list[int]
    ) -> Mix:
        """Build the attention of the chunks over themselves and their cached prefixes."""
        if not any(before):
            fresh = PackedAttention(lengths, self.device)
            return lambda q, k, v, keys, values, options: fresh.attend(q, k, v, options)
        _, cells = _token_places(chunks, [0] * len(chunks), self.cache.pool.size)
        seen = to_device(cells, self.device)
        continued = ContinuedAttention(lengths, before, self.device)
        return lambda q, k, v, keys, values, options: continued.attend(
            q, keys[seen], values[seen], options
        )


class Shape(NamedTuple):
    """Rounded shape of a pass: tokens, prompts, and the longest prompt.

    `has_snapshots`: states are kept before the ends of prompts (models with the gated delta rule).
    """

    tokens: int
    prompts: int
    longest: int
    has_snapshots: bool = False

    def has_room_for(self, other: "Shape") -> bool:
        return all(own >= wanted for own, wanted in zip(self, other, strict=True))

    @staticmethod
    def from_lengths(lengths: list[int], has_snapshots: bool = False) -> "Shape":
        tokens = max(sum(lengths), 64)
        step = max(gpu.power_of_2(tokens) // (8 if tokens <= 4096 else 16), 16)
        prompts, longest = gpu.power_of_2(len(lengths)), gpu.power_of_2(max(lengths))
        return Shape(-(-tokens // step) * step, prompts, longest, has_snapshots)


class _Inputs:
    """Input tensors of a captured pass.

    Padding tokens belong to no prompt and write to a spare page.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.deltas: CapturedDelta | None = None  # of models with the gated delta rule
        self.inputs = torch.zeros(
            3 * shape.tokens + shape.prompts, dtype=torch.int64, device=device
        )
        self.ends = torch.zeros(shape.prompts + 1, dtype=torch.int32, device=device)
        sizes = [shape.tokens] * 3 + [shape.prompts]
        self.tokens_T, self.positions_T, self.cells_T, self.kept_N = self.inputs.split(sizes)

    def attend_graph(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions | None,
    ) -> Tensor:
        longest = self.shape.longest
        if options is not None:
            q, options = options.reduce_to_plain(q, longest)
        return flash_varlen(q, k, v, self.ends, self.ends, longest, longest, options).flatten(1)

    def fill_inputs(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        cells: NDArray[np.int64],
        kept: list[int],
        lengths: list[int],
    ) -> None:
        T = self.shape.tokens
        P = self.shape.prompts
        inputs = np.zeros(3 * T + P, dtype=np.int64)
        for i, values in enumerate((tokens, positions, cells, np.array(kept, dtype=np.int64))):
            inputs[i * T : i * T + len(values)] = values
        ends = np.full(P + 1, len(tokens), dtype=np.int32)
        ends[: len(lengths) + 1] = [0, *np.cumsum(lengths)]
        for target, source in ((self.inputs, inputs), (self.ends, ends)):
            copy_to_device(target, torch.from_numpy(source))


def _token_places(
    chunks: list[PrefillChunk], starts: list[int], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the position and the cache cell of each token of the chunks, end to end.

    Args:
        starts: first token to include, for each chunk.
        size: tokens per page.
    """
    lengths = np.array([s.end - start for s, start in zip(chunks, starts, strict=True)])
    pages = [s.pages[: -(-s.end // size)] for s in chunks]
    before_T = np.repeat(np.cumsum(lengths) - lengths - starts, lengths)
    positions = np.arange(lengths.sum()) - before_T
    counts = np.array([len(p) for p in pages])
    first_T = np.repeat(np.cumsum(counts) - counts, lengths)
    cells = (
        np.array(list(chain.from_iterable(pages)))[first_T + positions // size] * size
        + positions % size
    )
    return positions, cells


class PrefillAttention:
    """Attention of concatenated prompt chunks; it also writes keys and values to the cache.

    `mix(q, k, v, keys, values, options)` computes the outputs. `q`, `k` and `v` belong to the tokens of the
    chunks; `keys` and `values` are all cache cells of a layer, cells x K x E.
    """

    def __init__(self, cache: KVCache, positions_T: Tensor, cells_T: Tensor, mix: Mix) -> None:
        self.cache = cache
        self.positions_T = positions_T
        self.cells_T = cells_T
        self.mix = mix
        self.mixing: PrefillMixing | None = None  # of models with other mixers than attention
        # Of models with the gated delta rule
        self.deltas: DeltaMixing | None = None

    def mix_sequences(self, layer: int, x_TD: Tensor, mixer: Mixer) -> Tensor:
        """Return the outputs of a mixer, T x D, for the chunks' tokens."""
        assert self.mixing is not None
        return self.mixing.mix_sequences(layer, x_TD, mixer)

    def mix_delta(self, layer: int, projected_TO: Tensor, heads: DeltaHeads) -> Tensor:
        """Return the outputs of the gated delta rule, T x VF, for the chunks' tokens."""
        assert self.deltas is not None
        return self.deltas.mix_delta(layer, projected_TO, heads)

    def __call__(self, layer: int, qkv_TNE: Tensor, heads: Heads) -> Tensor:
        keys, values = (x.flatten(0, 1) for x in self.cache.layers[layer])
        has_kernel = gpu.takes(qkv_TNE) and gpu.takes_heads(qkv_TNE.shape[2]) and heads.is_plain
        if heads.rotation is not None and has_kernel:
            from hone.kernels.gpu import row_kernels

            tables = (heads.rotation.cos_PE, heads.rotation.sin_PE, self.positions_T)
            q, k, v = row_kernels.heads(
                qkv_TNE,
                heads.q_scale_E,
                heads.k_scale_E,
                *tables,
                self.cells_T,
                keys,
                values,
                heads.eps,
                heads.H,
            )
        else:
            q, k, v = heads(qkv_TNE)
            keys.index_copy_(0, self.cells_T, k)
            values.index_copy_(0, self.cells_T, v)
        return self.mix(q, k, v, keys, values, heads.options)
