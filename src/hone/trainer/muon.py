"""Muon (Jordan et al. 2024): a matrix moves by its momentum, made orthogonal, whatever the size of its gradient.

gradient ─ Nesterov momentum ─► update ─ five Newton-Schulz steps ─► O, near-orthogonal ─► W - lr 0.2 sqrt(max(M, N)) O

The factor gives updates the size that AdamW's have, so that both share one learning rate (Moonlight, Liu et al. 2025).
"""

import math

import torch
from torch import Tensor

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


def step(weights: list[Tensor], grad: Tensor, momentum: Tensor, lr: float, weight_decay: float) -> None:
    """Moves the matrices that, stacked by rows, are one parameter with this gradient and momentum."""
    momentum.lerp_(grad, 1 - MOMENTUM)
    update = grad.lerp(momentum, MOMENTUM)
    for weight, part in zip(weights, update.split([len(w) for w in weights]), strict=True):
        weight.mul_(1 - lr * weight_decay)
        weight.add_(orthogonal(part), alpha=-lr * 0.2 * math.sqrt(max(weight.shape)))
