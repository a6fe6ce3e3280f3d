"""y = x W^T + b, and its gradients, on the CPU by the compiled products where they are faster (`cpu/products.py`)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.kernels import cpu

# Few tokens are not worth packing large weights for. Small ones (4 MB) are always multiplied by the compiled product: a
# row of it does not depend on its neighbours, so a token's numbers are the same to the bit in any batch.
# Without AVX-512 the tiles do not fit the registers.
FEW_TOKENS, LARGE_WEIGHT = 32, 2**20
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """T x I to T x O."""
    is_worth_it = len(x_TI) >= FEW_TOKENS or weight_OI.numel() <= LARGE_WEIGHT
    if not (HAS_AVX512 and is_worth_it and cpu.takes(x_TI) and x_TI.dim() == 2):
        return linear_reference(x_TI, weight_OI, bias_O)
    if torch.is_grad_enabled() and (x_TI.requires_grad or weight_OI.requires_grad):
        out: Tensor = _Linear.apply(x_TI, weight_OI, bias_O)  # type: ignore[no-untyped-call]
        return out
    return _forward(x_TI, weight_OI, bias_O)


def linear_reference(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return F.linear(x_TI, weight_OI, bias_O)


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a @ b; either may be a transposed view."""
    from hone.kernels.cpu import products

    M, N, K = len(a_MK), b_KN.shape[1], len(b_KN)
    out = a_MK.new_empty(M, N)
    products.multiply(
        M, N, K, a_MK.data_ptr(), *a_MK.stride(), b_KN.data_ptr(), *b_KN.stride(), out.data_ptr()
    )  # fmt: skip
    return out


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = product(x, weight.t())
    return out if bias is None else out.add_(bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _forward(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        return (
            product(grad, weight) if needs_x else None,
            product(grad.t(), x) if needs_weight else None,
            grad.sum(dim=0) if ctx.has_bias else None,
        )
