"""Fingerprints of all weights in one launch: memory is read once."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.kernels.fingerprints import ODD, WORDS, powers

BLOCK = 4096
TYPES = {torch.uint8: tl.uint8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}


@triton.jit
def fingerprint_kernel(stretches, found, odd, WORD: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """One stretch of one tensor. stretches P x 4: address of its first word, how many words there are, by what its sum
    is multiplied, and the number of its tensor, in whose place of `found` it is added up."""
    row = stretches + 4 * tl.program_id(0)
    words = tl.multiple_of(tl.load(row).to(tl.pointer_type(WORD)), 16)
    count = tl.load(row + 1)
    place = tl.arange(0, BLOCK)
    factor = place.to(tl.int64) * odd
    step = BLOCK * odd
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(0, WORDS, BLOCK):
        word = tl.load(words + first + place, first + place < count, other=0).to(tl.int64)
        total += word * (factor | 1)
        factor += step
    tl.atomic_add(found + tl.load(row + 3), tl.sum(total) * tl.load(row + 2))


def sums(words: Sequence[Tensor]) -> Tensor:
    """What `fingerprints_reference` gives, as int64 on the device."""
    device = words[0].device
    found = torch.zeros(len(words), dtype=torch.int64, device=device)
    for dtype in {one.dtype for one in words}:
        rows = []
        for number, one in enumerate(words):
            if one.dtype == dtype and len(one):
                first = np.arange(0, len(one), WORDS)
                row = np.empty((len(first), 4), dtype=np.int64)
                row[:, 0] = one.data_ptr() + first * one.element_size()
                row[:, 1] = np.minimum(len(one) - first, WORDS)
                row[:, 2], row[:, 3] = powers(len(first)), number
                rows.append(row)
        if rows:
            stretches = torch.from_numpy(np.concatenate(rows)).to(device)
            fingerprint_kernel[(len(stretches),)](
                stretches, found, ODD, WORD=TYPES[dtype], WORDS=WORDS, BLOCK=BLOCK, num_warps=8
            )
    return found
