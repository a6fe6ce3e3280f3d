"""Residual addition and RMS norm as one operation: total = x + delta, out = total / rms(total) * weight."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.kernels import cpu, gpu


def add_norm(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return x + delta, the new residual stream, and its RMS norm.

    delta is T x D, or S x T x D, S parts to be summed. If it is None, the sum is x itself. `offset`
    is added to the weight, in float32.
    """
    if gpu.takes(x_TD):
        from hone.kernels.gpu import row_kernels

        return row_kernels.add_branch(x_TD, delta_TD, None, 1.0, weight_D, offset, eps)
    if gpu.trains(x_TD) and (delta_TD is None or delta_TD.dim() == 2):
        total, out = _OnGpu.apply(x_TD, delta_TD, weight_D, eps, offset)  # type: ignore[no-untyped-call]
        return total, out
    if offset:
        total = x_TD if delta_TD is None else x_TD + delta_TD
        return total, offset_norm_reference(total, weight_D, offset, eps)
    if not cpu.takes(x_TD):
        return add_norm_reference(x_TD, delta_TD, weight_D, eps)
    inputs = (x_TD, weight_D) if delta_TD is None else (x_TD, weight_D, delta_TD)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        total, out = _AddNorm.apply(x_TD, delta_TD, weight_D, eps)  # type: ignore[no-untyped-call]
        return total, out
    total, out, _ = _forward(x_TD, delta_TD, weight_D, eps)
    return total, out


def add_norm_reference(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if delta_TD is not None and delta_TD.dim() == 3:
        delta_TD = delta_TD.float().sum(dim=0).to(x_TD.dtype)
    total = x_TD if delta_TD is None else x_TD + delta_TD
    return total, F.rms_norm(total, total.shape[-1:], weight_D, eps)


def offset_norm(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    """Return x / rms(x) * (weight + offset) over the last dimension, computed in float32."""
    if gpu.trains(x):
        rows = x.reshape(-1, x.shape[-1])
        normed: Tensor = _OnGpu.apply(rows, None, weight, eps, offset)[1]  # type: ignore[no-untyped-call]
        return normed.view(x.shape)
    return offset_norm_reference(x, weight, offset, eps)


def offset_norm_reference(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    scale = weight.float() + offset
    return F.rms_norm(x.float(), scale.shape, scale, eps).to(x.dtype)


def normalize_projections(qkv_TO: Tensor, q_scale: Tensor, k_scale: Tensor, eps: float) -> Tensor:
    """Return q, k and v side by side as given, with q and k normalized over their whole widths.

    The widths are those of the scales. Without gradients on a GPU the input is overwritten.
    """
    if gpu.takes(qkv_TO):
        from hone.kernels.gpu import row_kernels

        return row_kernels.normalize_projections(qkv_TO, q_scale, k_scale, eps)
    q, k = len(q_scale), len(k_scale)
    q_TO, k_TO, v_TO = qkv_TO.split([q, k, qkv_TO.shape[1] - q - k], 1)
    normed = (offset_norm(q_TO, q_scale, 0.0, eps), offset_norm(k_TO, k_scale, 0.0, eps))
    return torch.cat([*normed, v_TO], 1)


def _forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    from hone.kernels.cpu import row_kernels

    x = x.contiguous()
    total = x
    out = torch.empty_like(x)
    rstd = x.new_empty(len(x))
    if delta is not None:
        delta = delta.contiguous()
        total = torch.empty_like(x)
    row_kernels.add_norm_forward(
        *x.shape,
        x.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        eps,
        weight.data_ptr(),
        total.data_ptr(),
        out.data_ptr(),
        rstd.data_ptr(),
    )
    return total, out, rstd


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, weight, eps):  # type: ignore[no-untyped-def]
        total, out, rstd = _forward(x, delta, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.has_delta = delta is not None
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx, grad_total, grad):  # type: ignore[no-untyped-def]
        from hone.kernels.cpu import row_kernels

        total, weight, rstd = ctx.saved_tensors
        if grad is None:
            return grad_total, grad_total if ctx.has_delta else None, None, None
        grad_x = torch.empty_like(total)
        parts = weight.new_empty(row_kernels.parts(len(total)), len(weight))
        grad = grad.contiguous()
        grad_total = None if grad_total is None else grad_total.contiguous()
        row_kernels.add_norm_backward(
            *total.shape,
            grad.data_ptr(),
            0 if grad_total is None else grad_total.data_ptr(),
            total.data_ptr(),
            weight.data_ptr(),
            rstd.data_ptr(),
            grad_x.data_ptr(),
            parts.data_ptr(),
        )
        return grad_x, grad_x if ctx.has_delta else None, row_kernels.added_up(parts), None


class _OnGpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, delta, weight, eps, offset):  # type: ignore[no-untyped-def]
        from hone.kernels.gpu import row_kernels

        total, out = row_kernels.add_branch(x, delta, None, 1.0, weight, offset, eps)
        ctx.save_for_backward(total, weight)
        ctx.sizes = eps, offset
        ctx.has_delta = delta is not None
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx, grad_total, grad):  # type: ignore[no-untyped-def]
        from hone.kernels.gpu import training_kernels

        total, weight = ctx.saved_tensors
        eps, offset = ctx.sizes
        if grad is None:
            return grad_total, grad_total if ctx.has_delta else None, None, None, None
        grad_total = None if grad_total is None else grad_total.contiguous()
        _, of_x, of_weight = training_kernels.norm_backward(
            total, weight, grad.contiguous(), grad_total, eps, False, offset
        )
        return of_x, of_x if ctx.has_delta else None, of_weight, None, None
