"""Sums of words for fingerprints (`kernels/fingerprints.py`): a thread a stretch, about as fast as memory is read."""

from typing import Any

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from hone.kernels.cpu.compiling import compiled
from hone.kernels.cpu.lanes import get_integer, put_integer, words

ADDRESS, COUNT, POWER, TENSOR = range(4)  # of a row of `stretches`
COLUMNS = 4


@compiled
def sums(count, table, odd, found):
    """Of each stretch of words of 32 bits: of word i times (i * odd) | 1, times the stretch's power; all wrap."""
    for task in prange(count):
        row, factor, total = task * COLUMNS, np.int64(0), np.int64(0)
        stretch = words(get_integer(table, row + ADDRESS), get_integer(table, row + COUNT))
        for i in range(len(stretch)):
            total += np.int64(stretch[i]) * (factor | np.int64(1))
            factor += odd
        put_integer(found, task, total * get_integer(table, row + POWER))


class Table:
    """Where the words of so many tensors stand, which stay there: rows of `stretches`."""

    def __init__(self, stretches: NDArray[np.int64], tensors: int, odd: int) -> None:
        self.stretches, self.tensors, self.odd = stretches, tensors, odd

    def forget(self) -> None:
        """Nothing is computed before `sums`."""

    def add(self, numbers: Any) -> None:
        """Nothing, as in `forget`."""

    def sums(self) -> Tensor:
        """What `sums_reference` gives."""
        found, of_each = np.empty(len(self.stretches), np.int64), np.zeros(self.tensors, np.int64)
        sums(len(found), self.stretches.ctypes.data, self.odd, found.ctypes.data)
        np.add.at(of_each, self.stretches[:, TENSOR], found)
        return torch.from_numpy(of_each)
