"""SwiGLU on a fused projection: silu(gate) * up (Shazeer 2020)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.kernels import cpu, gpu
from hone.kernels.linear import is_ordered, linear


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, T x F, of gate_up T x 2F.

    Only the input is kept for backward; the gradient of both halves is one tensor.
    """
    if torch.is_grad_enabled() and gate_up.requires_grad:
        out: Tensor = _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
        return out
    return _forward(gate_up)


def linear_swiglu(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return silu(gate) * up, T x F, of the projection x W^T + b, T x 2F."""
    if gpu.is_short(x_TI, weight_OI) and not is_ordered(x_TI):
        from hone.kernels.gpu import products

        return products.short(x_TI, weight_OI, bias_O, is_swiglu=True)
    return swiglu(linear(x_TI, weight_OI, bias_O))


def geglu(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, T x F, of gate_up T x 2F, with gelu in its tanh form."""
    if gpu.takes(gate_up):
        from hone.kernels.gpu import row_kernels

        return row_kernels.swiglu(gate_up, is_gelu=True)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _forward(gate_up: Tensor) -> Tensor:
    if gpu.takes(gate_up):
        from hone.kernels.gpu import row_kernels as gpu_rows

        return gpu_rows.swiglu(gate_up)
    if not cpu.takes(gate_up):
        return swiglu_reference(gate_up)
    from hone.kernels.cpu import row_kernels

    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    row_kernels.swiglu_forward(*out.shape, gate_up.data_ptr(), out.data_ptr())
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate_up)
        return _forward(gate_up)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (gate_up,) = ctx.saved_tensors
        if cpu.takes(gate_up):
            from hone.kernels.cpu import row_kernels

            gate_up = gate_up.contiguous()
            grad = grad.contiguous()
            out = torch.empty_like(gate_up)
            row_kernels.swiglu_backward(
                *grad.shape, grad.data_ptr(), gate_up.data_ptr(), out.data_ptr()
            )
            return out
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        torch.mul(grad, silu, out=grad_up)
        # d silu = sigmoid + silu * (1 - sigmoid)
        slope = torch.addcmul(sigmoid, silu, 1 - sigmoid)
        torch.mul(slope.mul_(up), grad, out=grad_gate)
        return out
