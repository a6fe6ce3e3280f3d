"""Device state of running sequences: one slot each, from admission to the end.

A sequence keeps its slot; `active` lists the slots that decode. Decode steps read and write slots
on the device only, so that several steps run before the host reads results (`kernels/row_state.py`
defines the columns).
"""

import math
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.engine.sequence import Sequence
from hone.kernels import row_state as column
from hone.kernels.pinned_memory import started_to_host, to_device

# As on the device (`row_state.PARAMETERS`); the second is the temperature of logprobs.
PARAMETERS = attrgetter(
    "temperature",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class Slots:
    """State of `count` sequences, and one spare slot for padding, whose results nobody reads.

    Args:
        capacity: largest number of generated tokens per sequence.
        pages: largest number of pages per sequence.
        stops: initial number of stop tokens per sequence; `widen_stops` increases it.
    """

    def __init__(
        self, count: int, capacity: int, pages: int, stops: int, device: torch.device
    ) -> None:
        rows = count + 1
        self.count = count
        self.device = device

        def integer_buffer(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        self.state = integer_buffer(rows, column.FIELDS)
        self.state[count, column.DONE] = column.FULL
        self.parameters = torch.ones(rows, column.PARAMETERS, device=device)
        self.table = integer_buffer(rows, pages)
        self.stops = integer_buffer(rows, stops, fill=-1)
        self.tokens = untouched_zeros((rows, capacity), torch.int64, device)
        self.logprobs = untouched_zeros((rows, capacity), torch.float32, device)
        self.active = integer_buffer(rows)
        self.clear_slots()
        self.reader = torch.cuda.Stream() if device.type == "cuda" else None

    def clear_slots(self) -> None:
        """Free all slots."""
        self.free = list(range(self.count - 1, -1, -1))

    def fill_slots(self, sequences: list[Sequence]) -> None:
        """Initialize the slots of these sequences."""
        index = to_device([s.slot for s in sequences], self.device)
        # 0 after the last: the spare page
        most = min(max(len(s.pages) for s in sequences) + 1, self.table.shape[1])
        samplings = [s.request.sampling for s in sequences]
        state = np.zeros((len(sequences), column.FIELDS), dtype=np.int64)
        state[:, column.LENGTH] = [len(s.prompt_ids) for s in sequences]
        state[:, column.MAX] = [s.max_tokens for s in sequences]
        state[:, column.MIN] = np.minimum(
            [each.min_tokens for each in samplings], state[:, column.MAX]
        )
        state[:, column.ADAPTER] = [s.adapter for s in sequences]
        state[:, column.SEED] = [(each.seed + 2**63) % 2**64 - 2**63 for each in samplings]
        parameters = np.array([PARAMETERS(each) for each in samplings], dtype=np.float32)
        is_raw = [each.raw_logprobs or each.temperature < 1e-5 for each in samplings]
        parameters[is_raw, column.LOGPROB_TEMPERATURE] = 1.0
        table = np.zeros((len(sequences), most), dtype=np.int64)
        stops = np.full((len(sequences), self.stops.shape[1]), -1, dtype=np.int64)
        for i, (s, each) in enumerate(zip(sequences, samplings, strict=True)):
            table[i, : len(s.pages)] = s.pages
            own = () if each.ignore_eos else sorted(s.request.stop_ids)
            stops[i, : len(own)] = own
        targets = (self.state, self.parameters, self.table[:, :most], self.stops)
        for target, values in zip(targets, (state, parameters, table, stops), strict=True):
            target.index_copy_(0, index, to_device(values, self.device))

    def take_snapshot(self) -> "Snapshot":
        """Start copying the state to the host, as left by all work launched so far.

        On a CPU nothing is copied.
        """
        (state,), arrival = started_to_host([self.state])
        return Snapshot(state, arrival)

    def widen_stops(self, number: int) -> bool:
        """Ensure space for `number` stop tokens per sequence; return True if `stops` was replaced."""
        if number <= self.stops.shape[1]:
            return False
        wider = torch.full((len(self.stops), 2 * number), -1, dtype=torch.int64, device=self.device)
        wider[:, : self.stops.shape[1]] = self.stops
        self.stops = wider
        return True

    def generated_tokens(
        self, slots: list[int], first: int, end: int, snapshot: "Snapshot"
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return tokens `first` to `end` (exclusive) of these slots and their logprobs.

        Only tokens that the snapshot covers are read. Nothing writes to them any more, so on a GPU
        they are copied while other work runs. Logprobs are rounded to nine digits, which suffice
        for float32 and halve the length of their text.
        """
        wanted = slice(first, end)
        if self.reader is None:
            own = np.array(slots)
            return self.tokens.numpy()[own, wanted].tolist(), nine_digits(
                self.logprobs.numpy()[own, wanted]
            ).tolist()
        with torch.cuda.stream(self.reader):
            assert snapshot.arrival is not None
            self.reader.wait_event(snapshot.arrival)
            index = to_device(slots, self.device)
            (tokens, logprobs), arrival = started_to_host(
                [self.tokens[index, wanted], self.logprobs[index, wanted]]
            )
        assert arrival is not None
        arrival.synchronize()
        # numpy's tolist is three times faster than torch's
        return tokens.numpy().tolist(), nine_digits(logprobs.numpy()).tolist()


class Snapshot(NamedTuple):
    """State of all slots at one moment."""

    state: Tensor
    arrival: "torch.cuda.Event | None"

    def on_host(self) -> NDArray[np.int64]:
        """Wait until the state is on the host, and return it."""
        if self.arrival is not None:
            self.arrival.synchronize()
        state: NDArray[np.int64] = self.state.numpy()
        return state


def nine_digits(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Round float32 numbers to nine significant decimal digits, as float64.

    Converted back to float32, the results equal the given numbers.
    """
    exact = x.astype(np.float64)
    size = np.abs(exact)
    is_usual = (size > 1e-12) & (size < 1e8)
    scale = 10.0 ** (8 - np.floor(np.log10(np.where(is_usual, size, 1.0))))
    found: NDArray[np.float64] = np.where(is_usual, np.rint(exact * scale) / scale, exact)
    return found


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that on a CPU take memory only once they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return (
        torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8))
        .view(dtype)
        .view(shape)
    )
