"""States of mixers (`models/mixers.py`) in the engine: found by the cache cell of the last token.

The inputs of every mixer are kept per token, in pages like keys and values. They are what prefixes
share, copy and reuse; a state is derived from them. The states after the newest tokens are kept too,
so that a decode step computes one token; a state that is not kept is computed again from the inputs.
"""

from collections import OrderedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.engine.pages import PagePool
from hone.engine.slots import untouched_zeros
from hone.kernels import row_state
from hone.kernels.decode import DecodeRows
from hone.models.adapters import Adapters
from hone.models.mixers import Mixer, MixerState
from hone.models.spec import ModelSpec

SPARE_STATES = 64  # states kept beside two for each sequence that decodes
Cells = NDArray[np.int64]


class MixerStates:
    """Inputs of the mixers by cell, and the states after some of these cells."""

    def __init__(
        self, spec: ModelSpec, pool: PagePool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pool = pool
        shape = (spec.mixer_layers, pool.pages * pool.size, spec.hidden_size)
        self.inputs = untouched_zeros(shape, dtype, device)
        # By cell and mixer: a state of several sequences, and the row in it.
        self.states: OrderedDict[int, dict[int, tuple[MixerState, int]]] = OrderedDict()
        self.latest: dict[int, tuple[list[int], MixerState]] = {}  # of the last decode step

    def copy_pages(self, source: list[int], target: list[int], tokens: int | None) -> None:
        """Give the cells of pages `target` the states of those of `source`."""
        size = self.pool.size
        for here, there in zip(source, target, strict=True):
            for offset in range(size if tokens is None else tokens):
                self.states.pop(there * size + offset, None)
                found = self.states.get(here * size + offset)
                if found is not None:
                    self.states[there * size + offset] = dict(found)
        self.latest.clear()

    def write_inputs(self, layer: int, cells: list[int], x_TD: Tensor) -> None:
        """Store the inputs of tokens; states after what the cells held before are forgotten."""
        at = torch.tensor(cells, device=self.inputs.device)
        self.inputs[layer].index_copy_(0, at, x_TD)
        if layer == 0:
            for cell in cells:
                self.states.pop(cell, None)

    def find_state(self, layer: int, cells: Cells, mixer: Mixer) -> MixerState | None:
        """Return the state after the tokens in these cells, a sequence's first; None: no tokens."""
        if not len(cells):
            return None
        last = int(cells[-1])
        kept = self.states.get(last, {}).get(layer)
        if kept is not None:
            self.states.move_to_end(last)
            state, row = kept
            return state.row(row)
        at = torch.from_numpy(cells).to(self.inputs.device)
        _, state = mixer(self.inputs[layer, at][None], None)
        self.keep_states(layer, [last], state)
        return state

    def keep_states(self, layer: int, cells: list[int], state: MixerState) -> None:
        """Keep a state of several sequences, by the cell of the last token of each."""
        for row, cell in enumerate(cells):
            self.states.setdefault(cell, {})[layer] = (state, row)

    def evict_states(self, kept: int) -> None:
        while len(self.states) > max(0, kept):
            self.states.popitem(last=False)


class PrefillMixing:
    """Mixers of a prefill pass over chunks of prompts.

    Args:
        cells: cells of each chunk's sequence, from its first token to the chunk's last.
        lengths: tokens of each chunk.
        numbers: adapter of each chunk, 0 for none.
    """

    def __init__(
        self,
        states: MixerStates,
        cells: list[Cells],
        lengths: list[int],
        numbers: list[int],
        adapters: Adapters,
    ) -> None:
        self.states = states
        self.cells = cells
        self.lengths = lengths
        self.numbers = numbers
        self.adapters = adapters

    def mix_sequences(self, layer: int, x_TD: Tensor, mixer: Mixer) -> Tensor:
        """Return the outputs of the chunks' tokens, T x D."""
        own = [cells[-n:] for cells, n in zip(self.cells, self.lengths, strict=True)]
        self.states.write_inputs(layer, np.concatenate(own).tolist(), x_TD)
        outputs = []
        parts = x_TD.split(self.lengths)
        for part, cells, number in zip(parts, self.cells, self.numbers, strict=True):
            adapted = _with_adapter(mixer, self.adapters, number)
            before = self.states.find_state(layer, cells[: len(cells) - len(part)], adapted)
            y_1LD, after = adapted(part[None], before)
            self.states.keep_states(layer, [int(cells[-1])], after)
            outputs.append(y_1LD[0])
        return torch.cat(outputs)


class DecodeMixing:
    """Mixers of a decode step: one new token per sequence."""

    def __init__(self, states: MixerStates, rows: DecodeRows, adapters: Adapters) -> None:
        self.states = states
        self.adapters = adapters
        state = rows.state[rows.active_B]
        self.numbers = state[:, row_state.ADAPTER].tolist()
        self.pages = rows.table[rows.active_B].cpu().numpy()
        self.lengths = state[:, row_state.LENGTH].tolist()  # tokens before the new one
        self.before = [self._cell(i, n - 1) for i, n in enumerate(self.lengths)]
        self.newest = [self._cell(i, n) for i, n in enumerate(self.lengths)]

    def _cell(self, row: int, position: int) -> int:
        size = self.states.pool.size
        return int(self.pages[row, position // size]) * size + position % size

    def mix_sequences(self, layer: int, x_BD: Tensor, mixer: Mixer) -> Tensor:
        """Return the outputs of the new tokens, B x D."""
        states = self.states
        before = self._find_before(layer, mixer)
        states.write_inputs(layer, self.newest, x_BD)
        y_B1D, after = mixer(x_BD[:, None], before)
        states.keep_states(layer, self.newest, after)
        states.latest[layer] = (self.newest, after)
        if layer == 0:
            states.evict_states(2 * len(x_BD) + SPARE_STATES)
        return y_B1D[:, 0]

    def _find_before(self, layer: int, mixer: Mixer) -> MixerState:
        cells, latest = self.states.latest.get(layer, ([], None))
        if latest is not None and cells == self.before and self._are_kept(layer, latest):
            return latest
        found = []
        for row, (length, number) in enumerate(zip(self.lengths, self.numbers, strict=True)):
            cells_L = np.array([self._cell(row, i) for i in range(length)])
            adapted = _with_adapter(mixer, self.adapters, number)
            state = self.states.find_state(layer, cells_L, adapted)
            assert state is not None, "a sequence begins with a token of its prompt"
            found.append(state)
        return MixerState.stack(found)

    def _are_kept(self, layer: int, latest: MixerState) -> bool:
        """Return True if the last step's states are still those of their cells."""
        kept = (self.states.states.get(cell, {}).get(layer) for cell in self.before)
        return all(one is not None and one[0] is latest for one in kept)


def _with_adapter(mixer: Mixer, adapters: Adapters, number: int) -> Mixer:
    """Return a mixer of one sequence that uses the adapter of this number, 0 for none."""

    def mix(x_1LD: Tensor, before: MixerState | None) -> tuple[Tensor, MixerState]:
        which_L = torch.full(x_1LD.shape[1:2], number, device=x_1LD.device)
        with adapters.used_by(which_L if adapters.loaded else None):
            return mixer(x_1LD, before)

    return mix
