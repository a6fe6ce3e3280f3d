"""Muon (Jordan et al. 2024): update matrices by their orthogonalized momentum.

    gradient ─ Nesterov momentum ─► update ─ five Newton-Schulz steps ─► O, near-orthogonal
    O ─► W - lr 0.2 sqrt(max(M, N)) O

The size of an update does not depend on the size of the gradient. The factor 0.2 sqrt(max(M, N))
makes the updates of an (M x N) matrix as large as AdamW's, so that both optimizers use one learning
rate (Moonlight, Liu et al. 2025).
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hone.kernels.orthogonal import orthogonal
from hone.models.expert_parallel import take_local_part
from hone.trainer.sharding import as_part_of, gather_whole, part_of

MUON_MOMENTUM = 0.95
AT_ONCE = 16  # parameters per step, since their updates are in memory together


def step_muon(
    weights: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    lr: float,
    weight_decay: float,
    splits: Sequence[Callable[[Tensor], list[Tensor]]],
) -> None:
    """Update parameters in place with Muon and decoupled weight decay.

    If weights and momenta are sharded, `grads` are this rank's shards, and the call is collective.

    Args:
        splits: for each parameter, a function that splits the parameter's update into its stacked
            matrices, such as q, k and v. Each matrix is orthogonalized separately.
    """
    matrices = []
    for weight, grad, momentum, split in zip(weights, grads, momenta, splits, strict=True):
        take_local_part(momentum).lerp_(grad, 1 - MUON_MOMENTUM)
        update = gather_whole(
            as_part_of(grad.lerp(take_local_part(momentum), MUON_MOMENTUM), weight)
        )
        matrices.append(split(update))
    moves = iter(orthogonal([matrix for parts in matrices for matrix in parts]))
    for weight, parts in zip(weights, matrices, strict=True):
        move = torch.cat([next(moves) * (0.2 * math.sqrt(max(part.shape))) for part in parts])
        take_local_part(weight).mul_(1 - lr * weight_decay)
        take_local_part(weight).add_(part_of(move, weight), alpha=-lr)
