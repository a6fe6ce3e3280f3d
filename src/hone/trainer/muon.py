"""Muon (Jordan et al. 2024): a matrix moves by its momentum, made orthogonal, whatever the size of its gradient.

gradient ─ Nesterov momentum ─► update ─ five Newton-Schulz steps ─► O, near-orthogonal ─► W - lr 0.2 sqrt(max(M, N)) O

The factor gives updates the size that AdamW's have, so that both share one learning rate (Moonlight, Liu et al. 2025).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hone.trainer.sharding import as_part_of, local, part_of, whole

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic whose iteration takes singular values near 1


def orthogonal(x_MN: Tensor, steps: int = 5) -> Tensor:
    """The nearest orthogonal matrix, roughly: U V^T of x = U S V^T, singular values between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    is_tall = x_MN.shape[0] > x_MN.shape[1]
    y = (x_MN.t() if is_tall else x_MN).bfloat16()
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = y @ y.t()
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.t() if is_tall else y


def step(
    weight: Tensor, grad: Tensor, momentum: Tensor, lr: float, weight_decay: float,
    split: Callable[[Tensor], list[Tensor]],
) -> None:  # fmt: skip
    """Moves a parameter that `split` cuts into the matrices stacked in it, each by itself.

    A weight and momentum that are split over ranks are taken with this rank's part of the gradient; collective then.
    """
    local(momentum).lerp_(grad, 1 - MOMENTUM)
    update = whole(as_part_of(grad.lerp(local(momentum), MOMENTUM), weight))
    moves = [orthogonal(part).to(update.dtype) * (0.2 * math.sqrt(max(part.shape))) for part in split(update)]
    local(weight).mul_(1 - lr * weight_decay)
    local(weight).add_(part_of(torch.cat(moves), weight), alpha=-lr)
