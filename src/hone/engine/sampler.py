"""Drawing tokens: pure functions on logits and uniform numbers.

The draw of a request's i-th token depends on (seed, i) alone: a counter-based generator, so the same request
gives the same tokens whatever else runs beside it.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.kernels import cpu

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(seeds: list[int], count: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), len(seeds) x count: splitmix64 (Steele et al. 2014) of seed and counter."""
    seeds_R1 = _mix(np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64))[:, None]
    counters_1C = np.arange(1, count + 1, dtype=np.uint64)[None, :]
    with np.errstate(over="ignore"):
        bits = _mix(seeds_R1 + counters_1C * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def sample(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row and its sampler logprob, log-softmax(logits / T) in fp32.

    Temperature 0 (below 1e-5, where logits / T overflows) takes the most likely token and reports its logprob
    at T = 1. Otherwise the token is the first whose cumulative probability exceeds the uniform number.
    """
    if not cpu.takes(logits_BV):
        return sample_reference(logits_BV, temperature_B, uniform_B)
    from hone.kernels.cpu import decode

    tokens_B, logprobs_B = torch.empty_like(temperature_B, dtype=torch.int64), torch.empty_like(temperature_B)
    tensors = (logits_BV.contiguous(), temperature_B.contiguous(), uniform_B.contiguous(), tokens_B, logprobs_B)
    decode.sample(*logits_BV.shape, *(t.data_ptr() for t in tensors))
    return tokens_B, logprobs_B


def sample_reference(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    greedy_B = temperature_B < 1e-5
    scale_B1 = torch.where(greedy_B, 1.0, temperature_B)[:, None]
    logprobs_BV = torch.log_softmax(logits_BV.float() / scale_B1, dim=-1)
    cdf_BV = logprobs_BV.double().exp_().cumsum(dim=-1)
    target_B1 = uniform_B.double()[:, None] * cdf_BV[:, -1:]
    drawn_B1 = torch.searchsorted(cdf_BV, target_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    tokens_B1 = torch.where(greedy_B[:, None], logprobs_BV.argmax(dim=-1, keepdim=True), drawn_B1)
    return tokens_B1.squeeze(1), logprobs_BV.gather(1, tokens_B1).squeeze(1)
