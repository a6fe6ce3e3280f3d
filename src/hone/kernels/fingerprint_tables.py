"""Tables of the memory of tensors, from which a CPU or a GPU computes fingerprints.

Each row of a table describes one stretch: up to WORDS consecutive words of one tensor. A word has
the size of the tensor's elements (`fingerprints.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

WORDS = 2**18  # of a tensor, in a stretch: a CPU keeps them in its cache
ODD, MIX = -7046029254386353131, 6364136223846793005  # 64-bit multipliers of well-spread bits
# Columns of a row of `stretches`: the address of the first word, how many words there are, by what their sum is
# multiplied, and the number of their tensor.
ADDRESS, COUNT, POWER, TENSOR = range(4)
COLUMNS = 4


class FingerprintTable(ABC):
    """Memory addresses of tensors' elements, computed once and read for every fingerprint."""

    def forget(self) -> None:  # noqa: B027 - nothing to do where `add` does nothing
        """Discard partial sums."""

    def add(self, numbers: tuple[int, ...]) -> None:  # noqa: B027
        """Mark the tensors with these indices as final; a GPU then begins to sum their words.

        Pass each tensor at most once before `sums` is called.
        """

    @abstractmethod
    def sums(self) -> Tensor:
        """Return the fingerprint sum of each tensor, int64, on the tensors' device.

        The sums equal those of `fingerprints.sums_reference`.
        """


def stretches(words: Sequence[Tensor], numbers: Iterable[int]) -> NDArray[np.int64]:
    """Return one row per stretch of up to WORDS words of the tensors with indices `numbers`.

    Columns: address, word count, factor of the sum (`powers`), index of the tensor.
    """
    rows = [np.empty((0, COLUMNS), dtype=np.int64)]
    for number in numbers:
        one = words[number]
        first = np.arange(0, len(one), WORDS)
        row = np.empty((len(first), COLUMNS), dtype=np.int64)
        row[:, ADDRESS] = one.data_ptr() + first * one.element_size()
        row[:, COUNT] = np.minimum(len(one) - first, WORDS)
        row[:, POWER], row[:, TENSOR] = powers(len(first)), number
        rows.append(row)
    return np.concatenate(rows)


@lru_cache(maxsize=256)
def powers(count: int) -> NDArray[np.int64]:
    """Return MIX^(count - 1), …, MIX, 1 modulo 2^64: factors of a tensor's stretch sums."""
    found = []
    power = 1
    for _ in range(count):
        found.append(power)
        power = power * MIX % 2**64
    return np.array(found[::-1], dtype=np.uint64).view(np.int64)
