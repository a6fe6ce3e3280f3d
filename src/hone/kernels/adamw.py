"""One AdamW step (Loshchilov & Hutter 2019), with moments optionally in bfloat16.

    gradient, moments, fp32 master ─► moments, master, and the weight in its own type

A second moment changes by about a thousandth of its value per step, which is less than bfloat16
resolves: rounded to nearest, it would not move. Moments in bfloat16 are therefore rounded
stochastically, which is correct on average. The same seed gives the same rounding.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.kernels import gpu
from hone.kernels.pinned_memory import brought


@dataclass(frozen=True)
class Change:
    """Parameters of one optimizer step, common to all weights.

    Attributes:
        scale: factor of the gradients, from clipping.
        lr: learning rate.
        step: number of the step, from 1.
    """

    scale: float
    lr: float
    betas: tuple[float, float]
    step: int
    eps: float = 1e-8

    @property
    def corrections(self) -> tuple[float, float]:
        """Return the bias corrections: divisors of the first moment and of sqrt(second moment)."""
        return 1 - self.betas[0] ** self.step, math.sqrt(1 - self.betas[1] ** self.step)


def takes(tensor: Tensor) -> bool:
    """Return True if the single-pass GPU kernel can update this tensor.

    It may be on a GPU or in pinned host memory.
    """
    there = gpu.IS_AVAILABLE and (
        tensor.is_cuda or (torch.cuda.is_available() and tensor.is_pinned())
    )
    return there and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


class AdamW:
    """In-place AdamW over weights, fp32 masters and both moments.

    All tensors must stay at their addresses. Masters and moments may be on another device than the
    weights.

    Args:
        tensors: four lists with one tensor per weight: weights, masters (of an fp32 weight, the
            weight itself), first moments, second moments.
        decays: weight decay of each weight.
    """

    def __init__(self, tensors: list[list[Tensor]], decays: list[float]) -> None:
        self.tensors = tensors
        self.decays = decays
        self.table = None
        if all(takes(one) for column in tensors for one in column):
            from hone.kernels.gpu import optimizer

            self.table = optimizer.OptimizerTable(tensors, decays)

    def step(self, grads: list[Tensor], change: Change) -> None:
        if self.table is not None:
            numbers = (change.scale, change.lr, change.betas, change.corrections, change.eps)
            return self.table.step(grads, *numbers, seed=change.step * len(grads))
        each = zip(*self.tensors, grads, self.decays, strict=True)
        for i, (weight, master, first, second, grad, decay) in enumerate(each):
            seed = change.step * len(grads) + i
            adamw_reference(weight, master, first, second, grad, decay, change, seed)

    def rehearse(self) -> None:
        """Compile the GPU kernel with dummy steps: gradients in the weights' dtype and in fp32."""
        if self.table is not None:
            device = self.tensors[0][0].device
            count = self.table.fewest
            ones = [column[0].flatten()[:count].to(device, copy=True) for column in self.tensors]
            ones[0] = ones[0] if self.table.has_weight else ones[1]
            for dtype in {ones[0].dtype, torch.float32}:
                AdamW([[x] for x in ones], [0.0]).step(
                    [ones[0].to(dtype)], Change(1.0, 0.0, (0.9, 0.999), 1)
                )


def adamw_reference(
    weight: Tensor,
    master: Tensor,
    first: Tensor,
    second: Tensor,
    grad: Tensor,
    decay: float,
    change: Change,
    seed: int,
) -> None:
    (beta1, beta2) = change.betas
    (of_first, of_second) = change.corrections
    grad = grad.float() * change.scale
    with brought([master, first, second], weight.device) as (master, first, second):
        m = first.float().lerp_(grad, 1 - beta1)
        v = second.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        master.mul_(1 - change.lr * decay)
        master.addcdiv_(m, v.sqrt().div_(of_second).add_(change.eps), value=-change.lr / of_first)
        generator = torch.Generator(master.device).manual_seed(seed)
        for moment, exact in ((first, m), (second, v)):
            moment.copy_(exact if moment.dtype == torch.float32 else _at_random(exact, generator))
        if weight.data_ptr() != master.data_ptr():
            weight.copy_(master)


def _at_random(x: Tensor, generator: torch.Generator) -> Tensor:
    """Round x to bfloat16 stochastically."""
    draws = torch.randint(
        0, 2**16, x.shape, dtype=torch.int32, generator=generator, device=x.device
    )
    return ((x.view(torch.int32) + draws) & -(2**16)).view(torch.float32)
