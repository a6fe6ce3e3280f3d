"""Compute the word sums of tensor fingerprints on a GPU, reading memory once.

A tensor can be summed as soon as its values are final, while other tensors still change.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels import fingerprint_tables as of_words

BLOCK = 1024  # words that a program adds up at a time; it fetches four times as many before it does
TYPES = {torch.uint8: tl.uint8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}
ADDRESS, COUNT = tl.constexpr(of_words.ADDRESS), tl.constexpr(of_words.COUNT)
POWER, TENSOR = tl.constexpr(of_words.POWER), tl.constexpr(of_words.TENSOR)
COLUMNS = tl.constexpr(of_words.COLUMNS)


@triton.jit
def weighed(word, factor):
    return word.to(tl.int64) * (factor | 1)


@triton.jit
def fingerprint_kernel(
    stretches, found, odd, WORD: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add one stretch's sum to the entry of its tensor in `found`.

    `stretches` has the rows of `kernels/fingerprint_tables.py`.
    """
    row = stretches + COLUMNS * tl.program_id(0)
    words = tl.multiple_of(tl.load(row + ADDRESS).to(tl.pointer_type(WORD)), 16) + tl.arange(
        0, BLOCK
    )
    count = tl.load(row + COUNT)
    factor = tl.arange(0, BLOCK).to(tl.int64) * odd
    step = BLOCK * odd
    total = tl.zeros([BLOCK], tl.int64)
    if count == WORDS:  # without a mask, so that a thread fetches 16 bytes at once
        for first in range(0, WORDS, 4 * BLOCK):
            word0 = tl.load(words + first)
            word1 = tl.load(words + first + BLOCK)
            word2 = tl.load(words + first + 2 * BLOCK)
            word3 = tl.load(words + first + 3 * BLOCK)
            total += weighed(word0, factor)
            total += weighed(word1, factor + step)
            total += weighed(word2, factor + 2 * step)
            total += weighed(word3, factor + 3 * step)
            factor += 4 * step
    else:
        for first in range(0, WORDS, BLOCK):
            total += weighed(
                tl.load(words + first, first + tl.arange(0, BLOCK) < count, other=0), factor
            )
            factor += step
    tl.atomic_add(found + tl.load(row + TENSOR), tl.sum(total) * tl.load(row + POWER))


class GpuTable(of_words.FingerprintTable):
    def __init__(self, words: Sequence[Tensor]) -> None:
        self.words = words
        self._stretches: dict[tuple[int, ...], list[tuple[torch.dtype, Tensor]]] = {}
        self.forget()

    def forget(self) -> None:
        self._left = set(range(len(self.words)))
        self._found = torch.zeros(len(self.words), dtype=torch.int64, device=self.words[0].device)

    def add(self, numbers: tuple[int, ...]) -> None:
        if numbers not in self._stretches:
            self._stretches[numbers] = list(self._stretches_of(numbers))
        assert self._left.issuperset(numbers), "a tensor is added up twice"
        self._left.difference_update(numbers)
        with torch.cuda.device_of(self._found):
            for dtype, stretches in self._stretches[numbers]:
                fingerprint_kernel[(len(stretches),)](
                    stretches,
                    self._found,
                    of_words.ODD,
                    WORD=TYPES[dtype],
                    WORDS=of_words.WORDS,
                    BLOCK=BLOCK,
                    num_warps=4,
                )

    def sums(self) -> Tensor:
        if self._left:
            self.add(tuple(sorted(self._left)))
        found = self._found
        self.forget()
        return found

    def _stretches_of(self, numbers: tuple[int, ...]) -> Iterator[tuple[torch.dtype, Tensor]]:
        for dtype in {self.words[number].dtype for number in numbers}:
            rows = of_words.stretches(
                self.words, [one for one in numbers if self.words[one].dtype == dtype]
            )
            if len(rows):
                yield dtype, torch.from_numpy(rows).to(self.words[0].device)
