"""Losses of a training session: sums over targets, as in Tinker's API.

x is the trainer's log-probability of a target at temperature 1, q the sampler's (`logprobs`), A the
advantage, w the weight, r = exp(x - q):

    cross_entropy         -sum w x
    importance_sampling   -sum r A
    ppo                   -sum min(r A, clamp(r, low, high) A)
    cispo                 -sum sg(clamp(r, low, high)) A x              sg: no gradient
    dro                   -sum (x A - beta/2 (x - q)^2)
    gspo                  ppo with r = exp(mean of x - q over a sequence); target t has its gradient through x_t
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

CLIP_LOW, CLIP_HIGH = 0.8, 1.2  # bounds of the ratio
DRO_BETA = 0.05


@dataclass(frozen=True)
class Targets:
    """The N targets of a micro-batch, or a slice of them.

    Attributes:
        given: inputs of the loss by name, N numbers each.
        sequence: int64, number of each target's datum.
    """

    given: Mapping[str, Tensor]
    sequence: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.given[name]

    def select_slice(self, part: slice) -> "Targets":
        return Targets({k: v[part] for k, v in self.given.items()}, self.sequence[part])


def cross_entropy(x: Tensor, t: Targets) -> Tensor:
    return -(t["weights"] * x).sum()


def importance_sampling(x: Tensor, t: Targets) -> Tensor:
    return -((x - t["logprobs"]).exp() * t["advantages"]).sum()


def ppo(
    x: Tensor,
    t: Targets,
    *,
    clip_low_threshold: float = CLIP_LOW,
    clip_high_threshold: float = CLIP_HIGH,
) -> Tensor:
    ratio = (x - t["logprobs"]).exp()
    return _clipped_sum(ratio, t["advantages"], clip_low_threshold, clip_high_threshold)


def cispo(
    x: Tensor,
    t: Targets,
    *,
    clip_low_threshold: float = CLIP_LOW,
    clip_high_threshold: float = CLIP_HIGH,
) -> Tensor:
    ratio = (x - t["logprobs"]).detach().exp().clamp(clip_low_threshold, clip_high_threshold)
    return -(ratio * t["advantages"] * x).sum()


def dro(x: Tensor, t: Targets, *, beta: float = DRO_BETA) -> Tensor:
    return -(x * t["advantages"] - beta / 2 * (x - t["logprobs"]).square()).sum()


def gspo(
    x: Tensor,
    t: Targets,
    *,
    clip_low_threshold: float = CLIP_LOW,
    clip_high_threshold: float = CLIP_HIGH,
) -> Tensor:
    counted = t["sequence_ratio_mask"]
    sums = x.new_zeros(int(t.sequence.max()) + 1)
    total = sums.index_add(0, t.sequence, ((x - t["logprobs"]) * counted).detach())
    count = sums.index_add(0, t.sequence, counted).clamp(min=1)
    ratio = (total / count)[t.sequence].exp() * (x - x.detach()).exp()
    return _clipped_sum(ratio, t["advantages"], clip_low_threshold, clip_high_threshold)


def _clipped_sum(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


LossFunction = Callable[..., Tensor]
LOSSES: dict[str, LossFunction] = {
    f.__name__: f for f in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo)
}
# Inputs that a loss needs; `weights` have a default.
NEEDED = {
    "cross_entropy": (),
    "gspo": ("logprobs", "advantages", "sequence_ratio_mask"),
} | dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), ("logprobs", "advantages"))
WHOLE_SEQUENCES = {"gspo"}  # losses in which the targets of a datum depend on each other


def check_loss(name: str, settings: Mapping[str, float]) -> None:
    """Raise ValueError if there is no such loss, or if it has no such setting."""
    if name not in LOSSES:
        raise ValueError(f"loss {name!r} is not one of {', '.join(LOSSES)}")
    parameters = inspect.signature(LOSSES[name]).parameters.values()
    known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(
            f"loss {name} has no setting {unknown[0]!r}; it has {', '.join(known) or 'none'}"
        )
