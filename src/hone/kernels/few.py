"""Layers of a decode step of few sequences on a GPU: what stands around a product is done by the product's kernel.

    x * weight ─ qkv, / rms(x) ─► attention ─ out, + x, * weight ─► gate_up, / rms(x), SwiGLU ─ down, + x, * weight ─►

The time between kernels is what counts there. `gpu.is_few` says whether a product is done so.
"""

from torch import Tensor

from hone.kernels.gpu import Scaled


def few_linear(normed: Scaled, weight_OI: Tensor, bias_O: Tensor | None, is_swiglu: bool = False) -> Tensor:
    """The projection of a norm, T x O; with `is_swiglu` silu(g) * u, where that is g and u side by side."""
    from hone.kernels.gpu import products

    return products.few(normed, weight_OI, bias_O, is_swiglu)


def few_linear_onto(
    stream_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, norm_O: Tensor | None, eps: float
) -> tuple[Tensor, Scaled | None]:
    """stream + x W^T + b, and the norm of that where the weight of one is given."""
    from hone.kernels.gpu import products

    return products.few_onto(stream_TO, x_TI, weight_OI, bias_O, norm_O, eps)
