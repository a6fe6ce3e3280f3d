"""Matrices made orthogonal by Newton-Schulz steps, as Muon moves weights: on the CPU by compiled code, many at once."""

import torch
from torch import Tensor

from hone.kernels import cpu

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic whose iteration takes singular values near 1 (Jordan 2024)
STEPS = 5


def orthogonal(matrices: list[Tensor]) -> list[Tensor]:
    """The nearest orthogonal matrix of each, roughly: U V^T of x = U S V^T, singular values between 0.7 and 1.2."""
    if not all(cpu.takes(x_MN) for x_MN in matrices):
        return [orthogonal_reference(x_MN) for x_MN in matrices]
    from hone.kernels.cpu import orthogonal as kernel

    out = [x_MN.clone(memory_format=torch.contiguous_format) for x_MN in matrices]
    table = torch.tensor([_row(x_MN) for x_MN in out])
    a, b, c = COEFFICIENTS
    kernel.orthogonal(len(out), table.data_ptr(), STEPS, a, b, c)
    return out


def _row(x_MN: Tensor) -> list[int]:
    sides = sorted(zip(x_MN.shape, x_MN.stride(), strict=True), key=lambda side: side[0])
    (short, step_short), (long, step_long) = sides
    return [x_MN.data_ptr(), short, long, step_short, step_long]


def orthogonal_reference(x_MN: Tensor) -> Tensor:
    """One matrix. In bfloat16 on GPUs, which multiply it faster."""
    a, b, c = COEFFICIENTS
    is_tall = x_MN.shape[0] > x_MN.shape[1]
    y = (x_MN.t() if is_tall else x_MN).to(torch.bfloat16 if x_MN.is_cuda else x_MN.dtype)
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = y @ y.t()
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y.t() if is_tall else y).to(x_MN.dtype)
