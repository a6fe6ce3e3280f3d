"""64-bit fingerprints of tensors, equal on every device, that any single changed bit changes.

    words of an element's size ─ stretches of 2^18 ─► each word times an odd number of its place, summed ─► stretches,
    each times a power of another number, summed ─► 64 bits

Integers wrap, so that the order of the sums does not matter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.kernels import cpu, gpu
from hone.kernels.fingerprint_tables import ODD, WORDS, FingerprintTable, powers

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprints:
    """Fingerprints of tensors at fixed addresses whose values change."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.words = [one.view(-1).view(INTEGERS[one.element_size()]) for one in tensors]
        self.table = _table(self.words)

    def begin(self, numbers: Sequence[int]) -> None:
        """Begin the fingerprints of these tensors, whose values must not change until the next
        call.
        """
        if self.table is not None:
            self.table.add(tuple(numbers))

    def forget(self) -> None:
        """Discard partial fingerprints after a weight update."""
        if self.table is not None:
            self.table.forget()

    def __call__(self) -> list[int]:
        """Return one number from 0 to 2^64 - 1 per tensor, in order, with one synchronization."""
        sums = self.table.sums() if self.table is not None else sums_reference(self.words)
        return [value % 2**64 for value in sums.tolist()]


def _table(words: Sequence[Tensor]) -> FingerprintTable | None:
    """Return the table for these tensors, or None where plain torch computes."""
    if (
        gpu.IS_AVAILABLE
        and words
        and all(one.is_cuda and one.data_ptr() % 16 == 0 for one in words)
    ):
        from hone.kernels.gpu import fingerprints as of_gpu

        return of_gpu.GpuTable(words)
    if (
        cpu.IS_AVAILABLE
        and words
        and all(one.device.type == "cpu" and one.dtype == torch.int32 for one in words)
    ):
        from hone.kernels.cpu import fingerprints as of_cpu

        return of_cpu.CpuTable(words)
    return None


def rehearse(weight: Tensor) -> None:
    """Compile the kernel for weights like this one (`gpu/compiling.py`)."""
    Fingerprints([weight.new_zeros(1)])()


def sums_reference(words: Sequence[Tensor]) -> Tensor:
    """Return the sums of one-dimensional integer tensors by plain torch, as int64."""
    device = words[0].device if words else torch.device("cpu")
    factors = (torch.arange(WORDS, device=device) * ODD) | 1
    found = torch.zeros(len(words), dtype=torch.int64, device=device)
    for i, one in enumerate(words):
        sums = torch.stack([(part * factors[: len(part)]).sum() for part in one.split(WORDS)])
        found[i] = (sums * torch.from_numpy(powers(len(sums)).copy()).to(device)).sum()
    return found
