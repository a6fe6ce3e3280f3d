"""Losses: pure functions on tensors, with tests whose numbers can be checked by hand.

    logprobs ─ log r = trainer - sampler, per token or sequence mean ─► a term per token (LOSSES) ─┐
                 KL to a reference, entropy, as configured ────────────────────────────────────────┴─► weighted sum

A loss is a function of `Tokens`; its keyword-only parameters are configuration keys. A loss may
need further inputs, such as a teacher's logprobs: `config/loss_config.py` declares the needs of the
built-in losses, `@needs` those of a user's function.

Token weights (`token_weights`) are computed over the whole batch, so the result does not depend on
how the batch is split over micro-batches and ranks.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from hone import plugins
from hone.config.loss_config import KINDS, LossConfig, Need
from hone.models.language_model import LanguageModel
from hone.models.lora import without_lora
from hone.trainer.packing import Packed


def cross_entropy_sum(packed: Packed, model: LanguageModel) -> Tensor:
    """Return the sum of -log p(target), fp32.

    The caller divides it by the number of targets of the whole batch.
    """
    ones_N = torch.ones(len(packed.targets_N), device=packed.targets_N.device)
    return packed.compute_loss(model, ones_N, lambda part, logprobs, entropy: -logprobs.sum())


@torch.no_grad()
def compute_reference_logprobs(
    packed: Packed, model: LanguageModel, reference: LanguageModel | None, temperature_N: Tensor
) -> Tensor:
    """Return the targets' logprobs under the initial model, N.

    `reference` is a copy of the initial model; None if it is `model` without its adapter.
    """
    with nullcontext() if reference else without_lora(model):
        return packed.target_logprobs(reference or model, temperature_N)[0]


@dataclass
class Tokens:
    """Inputs of a loss for N tokens.

    A loss that needs `whole_sequences` gets all target tokens of each sequence; other losses may
    get a slice of the targets. Gradients flow through trainer_logprobs and log_ratio, and through
    entropy if it is needed.
    """

    trainer_logprobs: Tensor
    sampler_logprobs: Tensor
    advantage: Tensor
    log_ratio: Tensor  # trainer - sampler; with ratio_type "sequence" its mean over the sequence
    entropy: Tensor
    sequence: Tensor  # int64, number of the token's sequence
    reference_logprobs: Tensor | None = None  # of the initial model, if needed
    teacher_logprobs: Tensor | None = None  # if the samples have them


# A loss per token, and which tokens have one (others are dropped or clipped).
Term = tuple[Tensor, Tensor]


def mask(t: Tokens, *, mask_ratio_low: float, mask_ratio_high: float, kl_tau: float) -> Term:
    """Return -r A + kl_tau log r (r: importance ratio, A: advantage), 0 for tokens out of bounds.

    A token is out of bounds if r < mask_ratio_low or r > mask_ratio_high. The gradient goes through
    r (IcePop, Ling team 2025).
    """
    keep = (t.log_ratio >= _log_bound(mask_ratio_low)) & (
        t.log_ratio <= _log_bound(mask_ratio_high)
    )
    # Masked before the exponential: an overflowing ratio times 0 would still give NaN gradients.
    kept = torch.where(keep, t.log_ratio, 0.0)
    return torch.where(keep, -kept.exp() * t.advantage + kl_tau * kept, 0.0), keep


def dppo(t: Tokens, *, max_shift: float, kl_tau: float) -> Term:
    """Return -r A + kl_tau (log r)^2 (r: importance ratio, A: advantage), with a trust region.

    The first term is dropped outside of this region, that is, for tokens whose probability has
    already moved by more than max_shift from the sampler's in the direction that A favours.
    """
    shift = (t.trainer_logprobs.exp() - t.sampler_logprobs.exp()).detach()
    keep = torch.where(t.advantage > 0, shift <= max_shift, shift >= -max_shift)
    kept = torch.where(keep, t.log_ratio, 0.0)
    return torch.where(keep, -kept.exp() * t.advantage, 0.0) + kl_tau * t.log_ratio.square(), keep


def ppo(t: Tokens, *, clip_low: float, clip_high: float) -> Term:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al. 2017).

    r is the importance ratio, A the advantage. clip_high > clip_low gives clip-higher (DAPO 2025);
    `ratio_type` "sequence" gives GSPO (Zheng et al. 2025).
    """
    ratio = t.log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * t.advantage, clipped * t.advantage)
    is_free = torch.where(t.advantage > 0, ratio <= 1 + clip_high, ratio >= 1 - clip_low)
    return loss, is_free.detach()


def cispo(t: Tokens, *, ratio_cap: float) -> Term:
    """Return -min(r, cap) A log p, gradient only through log p (MiniMax-M1, 2025)."""
    weight = t.log_ratio.detach().exp()
    return -weight.clamp(max=ratio_cap) * t.advantage * t.trainer_logprobs, weight <= ratio_cap


def tis(t: Tokens, *, ratio_cap: float) -> Term:
    """Return -min(r, cap) A p / detach(p): truncated importance sampling (Yao et al. 2025).

    min(r, cap) is detached, too.
    """
    weight = t.log_ratio.detach().exp()
    one = (t.trainer_logprobs - t.trainer_logprobs.detach()).exp()
    return -weight.clamp(max=ratio_cap) * t.advantage * one, weight <= ratio_cap


def sft(t: Tokens) -> Term:
    """Return -log p of the sampled tokens: cross-entropy on text from the policy or from a teacher."""
    return -t.trainer_logprobs, torch.ones_like(t.log_ratio, dtype=torch.bool)


def opd(t: Tokens, **keys: float) -> Term:
    """Return the on-policy distillation loss: the loss `mask` with an advantage from a teacher.

    The advantage of a token is log p(teacher) - log p(trainer). This lowers the policy's reverse KL
    to the teacher (Agarwal et al. 2024; Thinking Machines 2025).
    """
    assert t.teacher_logprobs is not None
    return mask(replace(t, advantage=t.teacher_logprobs - t.trainer_logprobs.detach()), **keys)


LOSSES: dict[str, Callable[..., Term]] = {
    f.__name__: f for f in (mask, dppo, ppo, cispo, tis, sft, opd)
}


def needs(*names: Need) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that declares the inputs that a user's loss needs (`config/loss_config.py`)."""

    def mark_function(function: Callable[..., Any]) -> Callable[..., Any]:
        function.needs = names  # type: ignore[attr-defined]
        return function

    return mark_function


@dataclass
class Loss:
    """A configured loss: a function with its configuration keys bound, and the inputs it needs."""

    config: LossConfig
    function: Callable[[Tokens], Term]
    needs: frozenset[str]


def make_loss(config: LossConfig, key: str = "trainer.loss") -> Loss:
    """Return a loss by its name or import path.

    Raises ValueError that names the configuration `key`.
    """
    if config.type in KINDS:
        keys = {name: getattr(config, name) for name in config.loss_kind.keys - {"ratio_type"}}
        keys |= {"kl_tau": config.kl_coefficient} if "kl_tau" in keys else {}
        return Loss(config, partial(LOSSES[config.type], **keys), config.required_inputs)
    function = plugins.load_function(config.type, f"{key}.type")
    asked = frozenset(getattr(function, "needs", ()))
    unknown = asked - set(get_args(Need))
    if unknown:
        raise ValueError(
            f"{key}.type {config.type}: @needs({min(unknown)!r}) is not one of {', '.join(get_args(Need))}"
        )
    return Loss(
        config,
        plugins.with_keys(function, config.args, f"{key}.args"),
        config.required_inputs | asked,
    )


@dataclass
class PolicyLoss:
    """Loss of a slice of a batch's tokens, and metrics of each token.

    `total` is the slice's share of the batch's loss; the other fields have one value per token,
    detached.
    """

    total: Tensor
    mismatch_kl: Tensor  # r - log r - 1 (k3, Schulman 2020)
    is_masked: Tensor  # 1.0 for dropped or clipped tokens
    ratio: Tensor
    reference_kl: Tensor | None  # k3 of the trainer against the reference


def policy_loss(
    trainer_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    advantage_N: Tensor,
    sequence_N: Tensor,
    weight_N: Tensor,
    loss: Loss,
    entropy_N: Tensor | None = None,
    reference_logprobs_N: Tensor | None = None,
    teacher_logprobs_N: Tensor | None = None,
) -> PolicyLoss:
    """Return the configured loss, weighted and summed over N tokens, and per-token metrics.

    `sequence_N` is the index of each token's sequence. Raises ValueError if the loss needs a
    teacher's logprobs and there are none.
    """
    config = loss.config
    if "teacher" in loss.needs and teacher_logprobs_N is None:
        raise ValueError(f"trainer.loss.type {config.type}: the samples have no teacher's logprobs")
    log_ratio_N = trainer_logprobs_N - sampler_logprobs_N
    if config.ratio_type == "sequence":
        log_ratio_N = sequence_mean(log_ratio_N, sequence_N)
    entropy_N = torch.zeros_like(trainer_logprobs_N) if entropy_N is None else entropy_N
    tokens = Tokens(
        trainer_logprobs_N,
        sampler_logprobs_N,
        advantage_N,
        log_ratio_N,
        entropy_N,
        sequence_N,
        reference_logprobs_N,
        teacher_logprobs_N,
    )
    loss_N, keep_N = loss.function(tokens)
    reference_kl_N = None
    if reference_logprobs_N is not None:
        away_N = reference_logprobs_N - trainer_logprobs_N
        reference_kl_N = torch.expm1(away_N) - away_N  # k3: exp(d) - d - 1, never negative
        loss_N = loss_N + config.kl_beta * reference_kl_N
        reference_kl_N = reference_kl_N.detach()
    if config.entropy_weight:
        loss_N = loss_N - config.entropy_weight * entropy_N
    # Metrics are computed in fp64: near r = 1 the mismatch is below fp32's resolution.
    log_ratio = log_ratio_N.detach().double().clamp(-20.0, 20.0)
    mismatch_kl = torch.expm1(log_ratio) - log_ratio
    total = (loss_N * weight_N).sum()
    return PolicyLoss(total, mismatch_kl, (~keep_N).float(), log_ratio.exp(), reference_kl_N)


def token_weights(lengths_S: list[int], config: LossConfig) -> list[float]:
    """Return the weight of a token's loss in each sequence of the batch, one number per sequence.

    Args:
        lengths_S: number of tokens with loss in each sequence.
        config: `normalize` selects the weights. "tokens": equal for all tokens (DAPO); "sequences":
            equal for all sequences, divided among the tokens of each (GRPO, Shao et al. 2024);
            "constant": 1 / (sequences x max_length) (Dr. GRPO, Liu et al. 2025).
    """
    count = sum(1 for n in lengths_S if n)
    if config.normalize == "tokens":
        return [1.0 / sum(lengths_S)] * len(lengths_S) if count else [0.0] * len(lengths_S)
    if config.normalize == "sequences":
        return [1.0 / (count * n) if n else 0.0 for n in lengths_S]
    return [1.0 / (count * config.max_length) if n else 0.0 for n in lengths_S]


def sequence_mean(x_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Replace each token's value by the mean over its sequence."""
    count = int(sequence_N.max()) + 1 if len(sequence_N) else 0
    sums = x_N.new_zeros(count).index_add(0, sequence_N, x_N)
    sizes = x_N.new_zeros(count).index_add(0, sequence_N, torch.ones_like(x_N)).clamp(min=1)
    return (sums / sizes)[sequence_N]


def _log_bound(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
