"""The numbers that learning depends on: pure functions on tensors, pinned by tests that can be checked by hand."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.kernels.logprobs import target_logprobs


def cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Sum of -log p(target), in fp32; divide by the number of targets of the whole batch."""
    return -target_logprobs(logits_NV, targets_N, logits_NV.new_ones(len(targets_N)))[0].sum()


@dataclass
class PolicyLoss:
    """`total` is to be divided by the number of loss tokens of the whole batch; the rest is per token, detached."""

    total: Tensor
    mismatch_kl: Tensor  # r - log r - 1 (k3, Schulman 2020)
    is_masked: Tensor  # 1.0 where the ratio was out of bounds
    ratio: Tensor


def policy_loss(
    trainer_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    advantage_N: Tensor,
    sequence_N: Tensor,
    *,
    mask_ratio_low: float = 0.125,
    mask_ratio_high: float = 8.0,
    ratio_type: str = "token",
    kl_tau: float = 0.0,
) -> PolicyLoss:
    """Importance-weighted policy gradient with a two-sided token mask (IcePop; PRIME-RL, late 2025).

    r = exp(trainer logprob - sampler logprob). Tokens with r outside [low, high] are dropped, not clipped;
    the others contribute -r * A + kl_tau * log r, and the gradient flows through r. With ratio_type
    "sequence", log r is the mean over the tokens of a sequence (GSPO, Zheng et al. 2025).
    """
    log_ratio_N = trainer_logprobs_N - sampler_logprobs_N
    if ratio_type == "sequence":
        count = int(sequence_N.max()) + 1 if len(sequence_N) else 0
        sums = log_ratio_N.new_zeros(count).index_add(0, sequence_N, log_ratio_N)
        sizes = log_ratio_N.new_zeros(count).index_add(0, sequence_N, torch.ones_like(log_ratio_N)).clamp(min=1)
        log_ratio_N = (sums / sizes)[sequence_N]
    keep_N = (log_ratio_N >= _log(mask_ratio_low)) & (log_ratio_N <= _log(mask_ratio_high))
    # Masked before the exponential: where a dropped ratio overflows, even 0 x its gradient would be NaN.
    kept_N = torch.where(keep_N, log_ratio_N, 0.0)
    loss_N = -kept_N.exp() * advantage_N
    if kl_tau:
        loss_N = loss_N + kl_tau * kept_N
    # For the records, in fp64: near r = 1 the mismatch is far below what fp32 tells from 0.
    log_ratio = log_ratio_N.detach().double().clamp(-20.0, 20.0)
    mismatch_kl = torch.expm1(log_ratio) - log_ratio
    return PolicyLoss(torch.where(keep_N, loss_N, 0.0).sum(), mismatch_kl, (~keep_N).float(), log_ratio.exp())


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
