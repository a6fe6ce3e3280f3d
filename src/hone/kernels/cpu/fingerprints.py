"""Compute fingerprint sums of tensors on a CPU, at nearly memory bandwidth.

A parallel task sums one stretch of up to 2^18 words of a tensor (`kernels/fingerprints.py`).
"""

from collections.abc import Sequence

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hone.kernels.cpu.compiling import compiled
from hone.kernels.cpu.simd import get_integer, put_integer, words
from hone.kernels.fingerprint_tables import (
    ADDRESS,
    COLUMNS,
    COUNT,
    ODD,
    POWER,
    TENSOR,
    FingerprintTable,
    stretches,
)


@compiled
def sums(count, table, odd, found):
    """Compute the weighted sum of each stretch's 32-bit words; integers wrap.

    Word i of a stretch is multiplied by (i * odd) | 1, and the sum by the factor in column POWER of
    `table`, which has one row per stretch (`fingerprint_tables.stretches`). The results go to
    `found`.
    """
    for task in prange(count):
        row, factor, total = task * COLUMNS, np.int64(0), np.int64(0)
        stretch = words(get_integer(table, row + ADDRESS), get_integer(table, row + COUNT))
        for i in range(len(stretch)):
            total += np.int64(stretch[i]) * (factor | np.int64(1))
            factor += odd
        put_integer(found, task, total * get_integer(table, row + POWER))


class CpuTable(FingerprintTable):
    """Fingerprint table of 32-bit words on a CPU; computes nothing before `sums` is called."""

    def __init__(self, words: Sequence[Tensor]) -> None:
        self.stretches, self.tensors = stretches(words, range(len(words))), len(words)

    def sums(self) -> Tensor:
        found, of_each = np.empty(len(self.stretches), np.int64), np.zeros(self.tensors, np.int64)
        sums(len(found), self.stretches.ctypes.data, ODD, found.ctypes.data)
        np.add.at(of_each, self.stretches[:, TENSOR], found)
        return torch.from_numpy(of_each)
