"""64 bits of each of many tensors that any one changed bit of it changes, alike on every device.

    words of an element's size ─ stretches of 2^18 ─► each word times an odd number of its place, summed ─► stretches,
    each times a power of another number, summed ─► 64 bits

Integers wrap, so that the order of the sums does not matter.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.kernels import cpu, gpu

WORDS = 2**18  # of a tensor, in a stretch: a CPU keeps them in its cache
ODD, MIX = -7046029254386353131, 6364136223846793005  # 64-bit multipliers of well-spread bits
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Table(Protocol):
    """Where the words of tensors stand, which stay there: found out once, read every time."""

    def forget(self) -> None:
        """Nothing has been added up."""

    def add(self, numbers: tuple[int, ...]) -> None:
        """The words of these tensors may be added up, once until `sums`."""

    def sums(self) -> Tensor:
        """What `sums_reference` gives, as int64 on the device."""


class Fingerprints:
    """Of tensors that stay where they are while their values change."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.words = [one.view(-1).view(INTEGERS[one.element_size()]) for one in tensors]
        self.table = _table(self.words)

    def begin(self, numbers: Sequence[int]) -> None:
        """Of these tensors, each once, whose values stay until the next call: a GPU computes theirs already."""
        if self.table is not None:
            self.table.add(tuple(numbers))

    def forget(self) -> None:
        """All that was begun, since values change."""
        if self.table is not None:
            self.table.forget()

    def __call__(self) -> list[int]:
        """From 0 to 2^64 - 1, one a tensor, in their order; the device is waited for once."""
        sums = self.table.sums() if self.table is not None else sums_reference(self.words)
        return [value % 2**64 for value in sums.tolist()]


def _table(words: Sequence[Tensor]) -> Table | None:
    """None where plain torch adds up."""
    if gpu.IS_AVAILABLE and words and all(one.is_cuda and one.data_ptr() % 16 == 0 for one in words):
        from hone.kernels.gpu import fingerprints as of_gpu

        return of_gpu.Table(words, stretches, WORDS, ODD)
    if cpu.IS_AVAILABLE and words and all(one.device.type == "cpu" and one.dtype == torch.int32 for one in words):
        from hone.kernels.cpu import fingerprints as of_cpu

        return of_cpu.Table(stretches(words, range(len(words))), len(words), ODD)
    return None


def stretches(words: Sequence[Tensor], numbers: Iterable[int]) -> NDArray[np.int64]:
    """Of the tensors with these numbers, a row for each stretch: the address of its first word, how many words there
    are, by what its sum is multiplied, and the number of its tensor."""
    rows = [np.empty((0, 4), dtype=np.int64)]
    for number in numbers:
        one = words[number]
        first = np.arange(0, len(one), WORDS)
        row = np.empty((len(first), 4), dtype=np.int64)
        row[:, 0] = one.data_ptr() + first * one.element_size()
        row[:, 1] = np.minimum(len(one) - first, WORDS)
        row[:, 2], row[:, 3] = powers(len(first)), number
        rows.append(row)
    return np.concatenate(rows)


def rehearse(weight: Tensor) -> None:
    """For the kernel to be compiled (`gpu/compiling.py`) that weights like this one take."""
    Fingerprints([weight.new_zeros(1)])()


def sums_reference(words: Sequence[Tensor]) -> Tensor:
    """The same by torch, of tensors of integers in one dimension, as int64."""
    device = words[0].device if words else torch.device("cpu")
    factors = (torch.arange(WORDS, device=device) * ODD) | 1
    found = torch.zeros(len(words), dtype=torch.int64, device=device)
    for i, one in enumerate(words):
        sums = torch.stack([(part * factors[: len(part)]).sum() for part in one.split(WORDS)])
        found[i] = (sums * torch.from_numpy(powers(len(sums)).copy()).to(device)).sum()
    return found


@lru_cache(maxsize=256)
def powers(count: int) -> NDArray[np.int64]:
    """MIX to the power of count - 1, …, 1, 0, modulo 2^64: what the sums of stretches are multiplied by."""
    found, power = [], 1
    for _ in range(count):
        found.append(power)
        power = power * MIX % 2**64
    return np.array(found[::-1], dtype=np.uint64).view(np.int64)
