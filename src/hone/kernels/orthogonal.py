"""Orthogonalize matrices by Newton-Schulz steps for Muon: compiled on a CPU, batched on a GPU."""

import torch
from torch import Tensor

from hone.kernels import cpu

# Of the quintic whose iteration takes singular values near 1 (Jordan 2024)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
AT_ONCE = 2**26  # numbers of matrices that a GPU is given together


def orthogonal(matrices: list[Tensor]) -> list[Tensor]:
    """Return approximately U V^T of each matrix x = U S V^T, with singular values from 0.7 to 1.2."""
    if not all(cpu.takes(x_MN) for x_MN in matrices):
        return _side_by_side(matrices)
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


def _side_by_side(matrices: list[Tensor]) -> list[Tensor]:
    """Orthogonalize matrices in batches of one shape, to keep a GPU busy."""
    of_shape: dict[torch.Size, list[int]] = {}
    for i, x_MN in enumerate(matrices):
        of_shape.setdefault(x_MN.shape, []).append(i)
    found: dict[int, Tensor] = {}
    for shape, which in of_shape.items():
        size = max(1, AT_ONCE // shape.numel())
        for some in (which[at : at + size] for at in range(0, len(which), size)):
            found |= zip(some, orthogonal_reference([matrices[i] for i in some]), strict=True)
    return [found[i] for i in range(len(matrices))]


def orthogonal_reference(matrices: list[Tensor]) -> Tensor:
    """Orthogonalize matrices of one shape, B x M x N, in bfloat16 on GPUs."""
    a, b, c = COEFFICIENTS
    dtype = matrices[0].dtype
    is_tall = matrices[0].shape[0] > matrices[0].shape[1]
    x_BMN = torch.stack([x_MN.to(torch.bfloat16 if x_MN.is_cuda else dtype) for x_MN in matrices])
    y = x_BMN.mT if is_tall else x_BMN
    y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y.mT if is_tall else y).to(dtype)
