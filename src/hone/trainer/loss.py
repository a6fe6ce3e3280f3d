"""The numbers that learning depends on: pure functions on tensors, pinned by tests that can be checked by hand.

    logprobs ─ log r = trainer - sampler, a token's or its sequence's mean ─► a term a token (LOSSES) ─┐
                 KL to a reference, entropy, as configured ────────────────────────────────────────────┴─► weighted sum

Which tokens weigh how much (`token_weights`) is decided over the whole batch, so the result does not depend on how the
batch is split over micro-batches and ranks.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.config.loss import LossConfig
from hone.models.transformer import Transformer
from hone.trainer.packing import Packed


def cross_entropy_sum(packed: Packed, model: Transformer) -> Tensor:
    """Sum of -log p(target), in fp32; divide by the number of targets of the whole batch."""
    ones_N = torch.ones(len(packed.targets_N), device=packed.targets_N.device)
    return packed.loss(model, ones_N, lambda part, logprobs, entropy: -logprobs.sum())


@dataclass
class Tokens:
    """What a loss sees of N tokens. Gradients flow through the trainer's logprobs, log_ratio and entropy."""

    trainer_logprobs: Tensor
    sampler_logprobs: Tensor
    advantage: Tensor
    log_ratio: Tensor  # trainer - sampler; with ratio_type "sequence" the mean over the token's sequence
    entropy: Tensor
    reference_logprobs: Tensor | None = None  # of the model that training started from
    teacher_logprobs: Tensor | None = None


Term = tuple[Tensor, Tensor]  # a loss a token, and which tokens have one (the others are dropped or clipped)


def mask(t: Tokens, c: LossConfig) -> Term:
    """-r A, gradient through r; tokens with r outside [low, high] are dropped (IcePop, Ling team 2025; PRIME-RL)."""
    keep = (t.log_ratio >= _log(c.mask_ratio_low)) & (t.log_ratio <= _log(c.mask_ratio_high))
    # Masked before the exponential: where a dropped ratio overflows, even 0 x its gradient would be NaN.
    kept = torch.where(keep, t.log_ratio, 0.0)
    return torch.where(keep, -kept.exp() * t.advantage + c.tau * kept, 0.0), keep


def dppo(t: Tokens, c: LossConfig) -> Term:
    """-r A + tau (log r)^2; dropped where the probability has already moved by more than max_shift to A's side."""
    shift = (t.trainer_logprobs.exp() - t.sampler_logprobs.exp()).detach()
    keep = torch.where(t.advantage > 0, shift <= c.max_shift, shift >= -c.max_shift)
    kept = torch.where(keep, t.log_ratio, 0.0)
    return torch.where(keep, -kept.exp() * t.advantage, 0.0) + c.tau * t.log_ratio.square(), keep


def ppo(t: Tokens, c: LossConfig) -> Term:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al. 2017; clip-higher: DAPO, Yu et al. 2025).

    With ratio_type "sequence" it is GSPO (Zheng et al. 2025).
    """
    ratio = t.log_ratio.exp()
    clipped = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
    loss = -torch.minimum(ratio * t.advantage, clipped * t.advantage)
    is_free = torch.where(t.advantage > 0, ratio <= 1 + c.clip_high, ratio >= 1 - c.clip_low)
    return loss, is_free.detach()


def cispo(t: Tokens, c: LossConfig) -> Term:
    """-min(r, cap) A log p, gradient through log p alone (MiniMax-M1, 2025)."""
    weight = t.log_ratio.detach().exp()
    return -weight.clamp(max=c.ratio_cap) * t.advantage * t.trainer_logprobs, weight <= c.ratio_cap


def tis(t: Tokens, c: LossConfig) -> Term:
    """-min(r, cap) A p / p', where p' is p without gradient: truncated importance sampling (Yao et al. 2025)."""
    weight = t.log_ratio.detach().exp()
    one = (t.trainer_logprobs - t.trainer_logprobs.detach()).exp()
    return -weight.clamp(max=c.ratio_cap) * t.advantage * one, weight <= c.ratio_cap


def sft(t: Tokens, c: LossConfig) -> Term:
    """-log p: the sampled text, a teacher's for example, is learnt as it stands."""
    return -t.trainer_logprobs, torch.ones_like(t.log_ratio, dtype=torch.bool)


def opd(t: Tokens, c: LossConfig) -> Term:
    """On-policy distillation: each token's advantage is log p(teacher) - log p(trainer), so that the reverse KL to the
    teacher falls (Agarwal et al. 2024; Thinking Machines 2025). Out-of-bounds ratios are dropped as in `mask`."""
    if t.teacher_logprobs is None:
        raise ValueError("trainer.loss.type opd: the samples have no teacher's logprobs")
    advantage = t.teacher_logprobs - t.trainer_logprobs.detach()
    return mask(Tokens(**{**vars(t), "advantage": advantage}), c)


LOSSES: dict[str, Callable[[Tokens, LossConfig], Term]] = {
    f.__name__: f for f in (mask, dppo, ppo, cispo, tis, sft, opd)
}


def loss_function(name: str) -> Callable[[Tokens, LossConfig], Term]:
    """A loss by its name, or a user's own by import path, `package.module:function`. Raises ValueError."""
    if name in LOSSES:
        return LOSSES[name]
    module, _, attribute = name.partition(":")
    try:
        function: Callable[[Tokens, LossConfig], Term] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"trainer.loss.type {name}: cannot be imported: {error}") from None
    return function


@dataclass
class PolicyLoss:
    """`total` is this part's share of the loss of the whole batch; the rest is per token, detached."""

    total: Tensor
    mismatch_kl: Tensor  # r - log r - 1 (k3, Schulman 2020)
    is_masked: Tensor  # 1.0 where a token was dropped or clipped
    ratio: Tensor
    reference_kl: Tensor | None  # k3 of the trainer against the reference


def policy_loss(
    trainer_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    advantage_N: Tensor,
    sequence_N: Tensor,
    weight_N: Tensor,
    config: LossConfig,
    entropy_N: Tensor | None = None,
    reference_logprobs_N: Tensor | None = None,
    teacher_logprobs_N: Tensor | None = None,
) -> PolicyLoss:
    """The weighted sum of the configured loss over these tokens, whole sequences (`sequence_N` from 0 on)."""
    log_ratio_N = trainer_logprobs_N - sampler_logprobs_N
    if config.ratio_type == "sequence":
        log_ratio_N = sequence_mean(log_ratio_N, sequence_N)
    entropy_N = torch.zeros_like(trainer_logprobs_N) if entropy_N is None else entropy_N
    tokens = Tokens(
        trainer_logprobs_N, sampler_logprobs_N, advantage_N, log_ratio_N, entropy_N, reference_logprobs_N,
        teacher_logprobs_N,
    )  # fmt: skip
    loss_N, keep_N = loss_function(config.type)(tokens, config)
    reference_kl_N = None
    if reference_logprobs_N is not None:
        away_N = reference_logprobs_N - trainer_logprobs_N
        reference_kl_N = torch.expm1(away_N) - away_N  # k3: exp(d) - d - 1, never negative
        loss_N = loss_N + config.kl_beta * reference_kl_N
        reference_kl_N = reference_kl_N.detach()
    if config.entropy_weight:
        loss_N = loss_N - config.entropy_weight * entropy_N
    # For the records, in fp64: near r = 1 the mismatch is far below what fp32 tells from 0.
    log_ratio = log_ratio_N.detach().double().clamp(-20.0, 20.0)
    mismatch_kl = torch.expm1(log_ratio) - log_ratio
    total = (loss_N * weight_N).sum()
    return PolicyLoss(total, mismatch_kl, (~keep_N).float(), log_ratio.exp(), reference_kl_N)


def token_weights(lengths_S: list[int], config: LossConfig) -> list[float]:
    """What a token of each sequence of the whole batch weighs; lengths in tokens with loss.

    tokens: all tokens of the batch the same (DAPO). sequences: all sequences the same, a token one share of its own
    (GRPO, Shao et al. 2024). constant: 1 / (sequences x max_length), whatever their length (Dr. GRPO, Liu et al. 2025).
    """
    count = sum(1 for n in lengths_S if n)
    if config.normalize == "tokens":
        return [1.0 / sum(lengths_S)] * len(lengths_S) if count else [0.0] * len(lengths_S)
    if config.normalize == "sequences":
        return [1.0 / (count * n) if n else 0.0 for n in lengths_S]
    return [1.0 / (count * config.max_length) if n else 0.0 for n in lengths_S]


def sequence_mean(x_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Each token's value replaced by the mean over its sequence."""
    count = int(sequence_N.max()) + 1 if len(sequence_N) else 0
    sums = x_N.new_zeros(count).index_add(0, sequence_N, x_N)
    sizes = x_N.new_zeros(count).index_add(0, sequence_N, torch.ones_like(x_N)).clamp(min=1)
    return (sums / sizes)[sequence_N]


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
