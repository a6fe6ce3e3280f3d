"""Read weights in MXFP4: numbers of 4 bits, 32 of which share a scale of 8 bits (OCP microscaling 1.0).

A weight NAME of R x C numbers is stored as NAME_blocks, uint8 R x C / 32 x 16, two numbers to a byte,
the first in the low bits; and NAME_scales, uint8 R x C / 32, exponents of 2 with a bias of 127.
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
GROUP_SIZE = 32  # numbers that share a scale
EXPONENT_BIAS = 127
# E2M1: sign, two bits of exponent, one of mantissa.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def has_packed_weights(wanted: Iterable[str], stored: Collection[str]) -> bool:
    """Return True if files have one of the wanted tensors in MXFP4."""
    return any(name + BLOCKS in stored for name in wanted)


def list_packed_parts(name: str, weight_EIO: Tensor) -> dict[str, Tensor]:
    """Return meta tensors with the names and shapes under which files store a packed weight.

    The weight is experts x inputs x outputs; the stored rows are outputs. Raises ValueError for a
    weight that MXFP4 cannot store.
    """
    if weight_EIO.dim() != 3 or weight_EIO.shape[1] % GROUP_SIZE:
        shape = tuple(weight_EIO.shape)
        raise ValueError(
            f"{name} of shape {shape} is stored in MXFP4, which is for experts whose inputs are a "
            f"multiple of {GROUP_SIZE}"
        )
    E, inputs, outputs = weight_EIO.shape
    groups = (E, outputs, inputs // GROUP_SIZE)
    return {
        name + BLOCKS: torch.empty(*groups, GROUP_SIZE // 2, dtype=torch.uint8, device="meta"),
        name + SCALES: torch.empty(groups, dtype=torch.uint8, device="meta"),
    }


def unpack_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a weight, R x C, from its blocks and scales."""
    values = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], dtype=torch.float32)
    low, high = (values[half.long()] for half in (blocks & 15, blocks >> 4))
    numbers = torch.stack([low, high], -1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - EXPONENT_BIAS
    return torch.ldexp(numbers, exponents).flatten(-2).to(dtype)
