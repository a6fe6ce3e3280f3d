"""Compute y = x W^T + b with gradients, by torch's matrix products or Hone's kernels.

On a CPU the compiled matrix products are used where they are faster (`cpu/products.py`). On a GPU
with exact numerics, matrix products sum in one fixed order (`numerics.py`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.kernels import cpu, gpu, numerics

# Few tokens are not worth packing large weights for. Small ones (4 MB) are always multiplied by the compiled product: a
# row of it does not depend on its neighbours, so a token's numbers are the same to the bit in any batch.
FEW_TOKENS = 32
LARGE_WEIGHT = 2**20
# Numbers of a tile of torch's; with as many as a GPU has multiprocessors it does not cut the inner
# size
WAVE = 128 * 128


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + b, T x O."""
    if is_ordered(x_TI):
        out_TO: Tensor = _Ordered.apply(x_TI, weight_OI)  # type: ignore[no-untyped-call]
        return out_TO if bias_O is None else out_TO + bias_O
    if gpu.is_short(x_TI, weight_OI):
        from hone.kernels.gpu import products

        return products.short(x_TI, weight_OI, bias_O)
    if not is_multiplied_here(x_TI, weight_OI):
        return F.linear(x_TI, weight_OI, bias_O)
    if torch.is_grad_enabled() and (x_TI.requires_grad or weight_OI.requires_grad):
        out: Tensor = _Linear.apply(x_TI, weight_OI, bias_O)  # type: ignore[no-untyped-call]
        return out
    return _forward(x_TI, weight_OI, bias_O)


def is_multiplied_here(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Return True if the compiled CPU kernel supports x W^T and is preferred to torch's product."""
    is_worth_it = len(x_TI) >= FEW_TOKENS or weight_OI.numel() <= LARGE_WEIGHT
    return is_worth_it and cpu.takes(x_TI) and x_TI.dim() == 2


def linear_parts(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return the projection, T x O, or parts (S x T x O) of it that the caller must sum.

    Parts let a product of few tokens occupy the whole GPU.
    """
    splits, width = gpu.splits(x_TI, weight_OI)
    if splits == 1 or is_ordered(x_TI):
        return linear(x_TI, weight_OI, bias_O)
    from hone.kernels.gpu import products

    return products.parts(x_TI, weight_OI, bias_O, splits, width)


def few_linear(
    normed: gpu.Scaled, weight_OI: Tensor, bias_O: Tensor | None, is_swiglu: bool = False
) -> Tensor:
    """Return x W^T + b, T x O, of a normalized x.

    With `is_swiglu`, return silu(gate) * up of the two halves, T x O / 2. Only for inputs that
    `gpu.is_few` accepts.
    """
    from hone.kernels.gpu import few_row_products

    return few_row_products.few(normed, weight_OI, bias_O, is_swiglu)


def few_linear_onto(
    stream_TO: Tensor,
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    norm_O: Tensor | None,
    eps: float,
) -> tuple[Tensor, gpu.Scaled | None]:
    """Return stream + x W^T + b, and its unfinished norm (`gpu.Scaled`) with weight `norm_O`.

    If `norm_O` is None, no norm is returned. Only for inputs that `gpu.is_few` accepts.
    """
    from hone.kernels.gpu import few_row_products

    return few_row_products.few_onto(stream_TO, x_TI, weight_OI, bias_O, norm_O, eps)


def exact_logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """Return logits (T x V) in at least fp32, without gradient.

    On a GPU, half-precision inputs give the fp32 sums of the matrix product, unrounded.
    """
    if is_ordered(hidden_TD):
        return ordered(hidden_TD, weight_VD, torch.float32)
    if hidden_TD.is_cuda and hidden_TD.dtype != torch.float32:
        return torch.mm(hidden_TD, weight_VD.t(), out_dtype=torch.float32)
    logits_TV = linear(hidden_TD, weight_VD)
    return logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))


def half_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute `linear` in half precision on a GPU, without autograd.

    For fused steps that compute their own gradients.
    """
    if not is_ordered(x_TI):
        return F.linear(x_TI, weight_OI, bias_O)
    out_TO = ordered(x_TI, weight_OI, x_TI.dtype)
    return out_TO if bias_O is None else out_TO + bias_O


def is_ordered(x_TI: Tensor) -> bool:
    """Return True if exact numerics require matrix products with x to sum in one fixed order."""
    return (
        numerics.keeps_order("products")
        and gpu.IS_AVAILABLE
        and x_TI.is_cuda
        and x_TI.dtype in gpu.HALF
    )


def ordered(x_TI: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x W^T, with each number summed in one piece from first to last.

    torch does this if the result fills the GPU; smaller results use Hone's kernel.
    """
    rows = len(x_TI)
    if rows * len(weight_OI) >= WAVE * gpu.processors() or x_TI.shape[1] % 16:
        return (
            F.linear(x_TI, weight_OI)
            if dtype == x_TI.dtype
            else torch.mm(x_TI, weight_OI.t(), out_dtype=dtype)
        )
    from hone.kernels.gpu import products

    return products.in_order(x_TI, weight_OI, dtype)


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return a @ b; either may be a transposed view."""
    from hone.kernels.cpu import products

    M = len(a_MK)
    N = b_KN.shape[1]
    K = len(b_KN)
    out = a_MK.new_empty(M, N)
    b = b_KN.data_ptr()
    threads = torch.get_num_threads()
    (a_row, a_column) = a_MK.stride()
    (b_row, b_column) = b_KN.stride()
    if a_row == 1 and a_column > 1 and b_column == 1:
        products.multiply_transposed(
            M, N, K, a_MK.data_ptr(), a_column, b, b_row, threads, out.data_ptr()
        )
    else:
        # The kernel knows that step when it is compiled
        a_MK = a_MK if a_column == 1 else a_MK.contiguous()
        products.multiply(
            M, N, K, a_MK.data_ptr(), a_MK.stride(0), b, b_row, b_column, out.data_ptr()
        )
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


class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return ordered(x, weight, x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return grad @ weight if needs_x else None, grad.t() @ x if needs_weight else None
