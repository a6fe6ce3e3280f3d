"""64-bit fingerprints of tensors: equal on every device, and changed by any single changed bit.

A tensor is read as words of its element size, in stretches of 2^18 words. Each word is multiplied
by an odd number that depends on its place in the stretch, and the products are summed. Each
stretch's sum is multiplied by a power of a constant, and the results are summed.

    words of an element's size ─ stretches of 2^18 ─► each word times an odd number of its place, summed ─► stretches,
    each times a power of another number, summed ─► 64 bits

Integers wrap, so the order of the sums does not matter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.kernels import cpu, gpu
from hone.kernels.fingerprint_tables import ODD, WORDS, FingerprintTable, powers

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprints:
    """Fingerprints of tensors that stay at their addresses while their values change."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.words = [one.view(-1).view(INTEGERS[one.element_size()]) for one in tensors]
        self.table = _table(self.words)

    def begin(self, numbers: Sequence[int]) -> None:
        """Begin to compute the fingerprints of the tensors with these indices, on a GPU.

        The values of these tensors must not change until the Fingerprints object is next called. On
        a CPU this does nothing.
        """
        if self.table is not None:
            self.table.add(tuple(numbers))

    def forget(self) -> None:
        """Discard fingerprints begun with `begin`; call this when values change again."""
        if self.table is not None:
            self.table.forget()

    def __call__(self) -> list[int]:
        """Return each tensor's fingerprint, 0 to 2^64 - 1; synchronizes the device once."""
        sums = self.table.sums() if self.table is not None else sums_reference(self.words)
        return [value % 2**64 for value in sums.tolist()]


def _table(words: Sequence[Tensor]) -> FingerprintTable | None:
    """Return a table for these words, or None if no kernel supports them."""
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
    """Compile the fingerprint kernel for tensors of this weight's dtype and device."""
    Fingerprints([weight.new_zeros(1)])()


def sums_reference(words: Sequence[Tensor]) -> Tensor:
    """Compute the fingerprint sums of 1-D integer tensors with plain torch, as int64."""
    device = words[0].device if words else torch.device("cpu")
    factors = (torch.arange(WORDS, device=device) * ODD) | 1
    found = torch.zeros(len(words), dtype=torch.int64, device=device)
    for i, one in enumerate(words):
        sums = torch.stack([(part * factors[: len(part)]).sum() for part in one.split(WORDS)])
        found[i] = (sums * torch.from_numpy(powers(len(sums)).copy()).to(device)).sum()
    return found
