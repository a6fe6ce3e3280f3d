"""Round merged weights so that changes smaller than their last digit are kept on average.

    w + d, |d| < half a unit in the last place of w:    nearest gives w, so that all of d is lost
    here: up with probability d / unit, else down       the sum over many weights keeps d

An adapter changes each weight a little and thousands of them in one direction. Rounded to nearest in bfloat16, a
young adapter vanishes from the sampler's weights, and the sampler is not the policy that is trained.
"""

import functools

import torch
from torch import Tensor

PERIOD = 4_194_301  # weights after which the noise repeats; a prime, so that columns do not align
CUT_BITS = 16  # bits that float32 has and bfloat16 has not


def dither_(values: Tensor, dtype: torch.dtype) -> None:
    """Round contiguous fp32 values in place to numbers that `dtype` represents exactly.

    The direction depends on the position in the tensor alone, so all processes get the same bits.
    Values that `dtype` represents stay as they are. Does nothing for other types than bfloat16.
    """
    dither_each_(values.unsqueeze(0), dtype)


def dither_each_(values: Tensor, dtype: torch.dtype) -> None:
    """Round each `values[i]` in place as `dither_` does."""
    if dtype != torch.bfloat16:
        return
    for part in values.view(torch.int32).view(len(values), -1).split(PERIOD, 1):
        part.add_(_make_noise(values.device)[: part.shape[1]]).bitwise_and_(-(1 << CUT_BITS))


@functools.lru_cache(maxsize=4)
def _make_noise(device: torch.device) -> Tensor:
    """Return PERIOD pseudo-random numbers from 0 to 2^16 - 1, the same on all devices."""
    x = torch.arange(PERIOD, dtype=torch.int64)
    for factor in (0x9E3779B1, 0x85EBCA77):
        x = x * factor & 0xFFFFFFFF
        x ^= x >> 15
    return (x >> 8 & 0xFFFF).to(torch.int32).to(device)
