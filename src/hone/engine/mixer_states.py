"""Cache of mixer states (`models/mixers.py`), keyed by the cache cell of a sequence's last token.

The inputs of every mixer are kept per token, in pages like keys and values. They are what prefixes
share, copy and reuse; a state is derived from them. The states after the newest tokens are kept too,
so that a decode step computes one token; a state that is not kept is computed again from the inputs.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

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

SPARE_STATES = 64  # states kept beside two for each sequence that may decode
Cells = NDArray[np.int64]


def kept_states(sequences: int) -> int:
    """Return how many states a cache keeps for so many sequences that decode at once."""
    return 2 * sequences + SPARE_STATES


class MixerStates:
    """Inputs of the mixers by cell, and the states after some of these cells."""

    def __init__(
        self, spec: ModelSpec, pool: PagePool, dtype: torch.dtype, device: torch.device, kept: int
    ) -> None:
        """Keep the states of at most `kept` cells."""
        self.pool = pool
        self.kept = kept
        self.layers = spec.mixer_layers
        shape = (spec.mixer_layers, pool.pages * pool.size, spec.hidden_size)
        self.inputs = untouched_zeros(shape, dtype, device)
        # By cell and mixer: a state of several sequences, and the row in it.
        self.states: OrderedDict[int, dict[int, tuple[MixerState, int]]] = OrderedDict()

    def copy_pages(self, source: list[int], target: list[int], tokens: int | None) -> None:
        """Give the cells of pages `target` the states of those of `source`."""
        size = self.pool.size
        for here, there in zip(source, target, strict=True):
            if here == there:
                continue
            for offset in range(size if tokens is None else tokens):
                self.states.pop(there * size + offset, None)
                found = self.states.get(here * size + offset)
                if found is not None:
                    self.states[there * size + offset] = dict(found)

    def write_inputs(self, layer: int, cells: list[int], x_TD: Tensor) -> None:
        """Store the inputs of tokens and drop the states of their cells."""
        at = torch.tensor(cells, device=self.inputs.device)
        self.inputs[layer].index_copy_(0, at, x_TD)
        if layer == 0:
            for cell in cells:
                self.states.pop(cell, None)

    def find_state(
        self, layer: int, last: int, list_cells: Callable[[], Cells], mixer: Mixer
    ) -> MixerState:
        """Return a sequence's state after the token in cell `last`; compute it if it is not kept.

        `list_cells` returns the cells of the sequence's tokens up to that one.
        """
        found = self.states.get(last, {}).get(layer)
        if found is not None:
            self.states.move_to_end(last)
            state, row = found
            return state.row(row)
        at = torch.from_numpy(list_cells()).to(self.inputs.device)
        _, state = mixer(self.inputs[layer, at][None], None)
        self.keep_states(layer, [last], state)
        return state

    def find_whole(self, layer: int, cells: list[int]) -> MixerState | None:
        """Return the kept state whose rows are those after these cells, in this order, if there is one."""
        found = [self.states.get(cell, {}).get(layer) for cell in cells]
        if found[0] is None or found[0][0].sequence_count != len(cells):
            return None
        state = found[0][0]
        rows = range(len(cells))
        is_whole = all(
            one is not None and one[0] is state and one[1] == row
            for one, row in zip(found, rows, strict=True)
        )
        return state if is_whole else None

    def keep_states(self, layer: int, cells: list[int], state: MixerState) -> None:
        """Keep a state of several sequences, by the cell of the last token of each."""
        for row, cell in enumerate(cells):
            self.states.setdefault(cell, {})[layer] = (state, row)

    def evict_states(self, layer: int) -> None:
        """Drop the least recently used states after a pass's last mixer."""
        while layer == self.layers - 1 and len(self.states) > self.kept:
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
        own = [every[-n:] for every, n in zip(cells, lengths, strict=True)]
        self.own: list[int] = np.concatenate(own).tolist()

    def mix_sequences(self, layer: int, x_TD: Tensor, mixer: Mixer) -> Tensor:
        """Return the outputs of the chunks' tokens, T x D."""
        self.states.write_inputs(layer, self.own, x_TD)
        outputs = []
        parts = x_TD.split(self.lengths)
        for part, cells, number in zip(parts, self.cells, self.numbers, strict=True):
            adapted = _with_adapter(mixer, self.adapters, number)
            earlier = cells[: len(cells) - len(part)]
            before = None
            if len(earlier):
                list_cells = partial(np.asarray, earlier)
                before = self.states.find_state(layer, int(earlier[-1]), list_cells, adapted)
            y_1LD, after = adapted(part[None], before)
            self.states.keep_states(layer, [int(cells[-1])], after)
            outputs.append(y_1LD[0])
        self.states.evict_states(layer)
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
        states.evict_states(layer)
        return y_B1D[:, 0]

    def _find_before(self, layer: int, mixer: Mixer) -> MixerState:
        whole = self.states.find_whole(layer, self.before)
        if whole is not None:
            return whole
        found = []
        for row, cell in enumerate(self.before):
            adapted = _with_adapter(mixer, self.adapters, self.numbers[row])
            list_cells = partial(self._cells_before, row)
            found.append(self.states.find_state(layer, cell, list_cells, adapted))
        return MixerState.stack(found)

    def _cells_before(self, row: int) -> Cells:
        """Return the cells of a sequence's tokens before the new one."""
        size = self.states.pool.size
        cells = self.pages[row][:, None] * size + np.arange(size)
        earlier: Cells = cells.reshape(-1)[: self.lengths[row]]
        return earlier


def _with_adapter(mixer: Mixer, adapters: Adapters, number: int) -> Mixer:
    """Return a mixer of one sequence that uses the adapter of this number, 0 for none."""

    def mix(x_1LD: Tensor, before: MixerState | None) -> tuple[Tensor, MixerState]:
        which_L = torch.full(x_1LD.shape[1:2], number, device=x_1LD.device)
        with adapters.used_by(which_L if adapters.loaded else None):
            return mixer(x_1LD, before)

    return mix
