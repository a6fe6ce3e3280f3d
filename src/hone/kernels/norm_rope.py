"""Queries and keys in one operation: head-wise RMS norm (Qwen3), then rotary positions.

    y = x / rms(x) * scale,   out = y * cos + swap(y) * sin

swap exchanges the halves of a head; the first half of sin is negated.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.kernels import cpu


def norm_rope(
    qkv_TNE: Tensor,
    q_scale_E: Tensor | None,
    k_scale_E: Tensor | None,
    cos_T1E: Tensor,
    sin_T1E: Tensor,
    eps: float,
    H: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (T x H x E), k and v (T x K x E) of a fused projection with N = H + 2K heads.

    With scales, q and k are normalized over E and scaled. They are then rotated to their positions;
    v is unchanged. The caller passes `sin_T1E` with its first half negated.
    """
    K = (qkv_TNE.shape[1] - H) // 2
    if q_scale_E is None or k_scale_E is None:
        qk, v = qkv_TNE.split([H + K, K], dim=1)
        q, k = rotate(qk, cos_T1E, sin_T1E).split([H, K], dim=1)
        return q, k, v
    needs_grad = torch.is_grad_enabled() and any(
        x.requires_grad for x in (qkv_TNE, q_scale_E, k_scale_E)
    )
    if cpu.takes(qkv_TNE):
        if needs_grad:
            q, k, v = _Compiled.apply(qkv_TNE, q_scale_E, k_scale_E, cos_T1E, sin_T1E, eps, H)  # type: ignore[no-untyped-call]
        else:
            q, k, v, _ = _forward(qkv_TNE, q_scale_E, k_scale_E, cos_T1E, sin_T1E, eps, H)
        return q, k, v
    qk, v = qkv_TNE.split([H + K, K], dim=1)
    # q and k in one pass, each head with the scale of its kind.
    scale_NE = torch.cat([q_scale_E.expand(H, -1), k_scale_E.expand(K, -1)])
    inputs = (qk, scale_NE, cos_T1E, sin_T1E, eps)
    out = _NormRope.apply(*inputs) if needs_grad else _rotated(*inputs)  # type: ignore[no-untyped-call]
    q, k = out.split([H, K], dim=1)
    return q, k, v


def norm_rope_reference(
    qkv_TNE: Tensor,
    q_scale_E: Tensor,
    k_scale_E: Tensor,
    cos_T1E: Tensor,
    sin_T1E: Tensor,
    eps: float,
    H: int,
) -> tuple[Tensor, Tensor, Tensor]:
    K = (qkv_TNE.shape[1] - H) // 2
    q, k, v = qkv_TNE.split([H, K, K], dim=1)
    return (
        _rotated(q, q_scale_E, cos_T1E, sin_T1E, eps),
        _rotated(k, k_scale_E, cos_T1E, sin_T1E, eps),
        v,
    )


def _rotated(x_TNE: Tensor, scale: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, eps: float) -> Tensor:
    return rotate(F.rms_norm(x_TNE, x_TNE.shape[-1:], None, eps) * scale, cos_T1E, sin_T1E)


def rotate(x_TNE: Tensor, cos_T1E: Tensor, sin_T1E: Tensor) -> Tensor:
    first, second = x_TNE.chunk(2, dim=-1)
    return torch.addcmul(x_TNE * cos_T1E, torch.cat([second, first], dim=-1), sin_T1E)


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, cos, sin, eps):  # type: ignore[no-untyped-def]
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps).to(x.dtype)
        unit = x * rstd
        ctx.save_for_backward(unit, rstd, scale, cos, sin)
        return rotate(unit * scale, cos, sin)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        unit, rstd, scale, cos, sin = ctx.saved_tensors
        grad = rotate(grad, cos, -sin)  # the rotation back
        grad_scale = (grad * unit).sum(dim=0)
        grad = grad * scale
        inner = (grad * unit).mean(dim=-1, keepdim=True)
        return torch.addcmul(grad, unit, inner, value=-1).mul_(rstd), grad_scale, None, None, None


def _forward(
    qkv: Tensor, q_scale: Tensor, k_scale: Tensor, cos: Tensor, sin: Tensor, eps: float, H: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from hone.kernels.cpu import row_kernels

    qkv = qkv.contiguous()
    T, N, E = qkv.shape
    K = (N - H) // 2
    out = qkv.new_empty(T, H + K, E)
    rstd = qkv.new_empty(T, H + K)
    inputs = (
        qkv.data_ptr(),
        q_scale.data_ptr(),
        k_scale.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
    )
    row_kernels.norm_rope_forward(T, H, K, E, *inputs, eps, out.data_ptr(), rstd.data_ptr())
    return out[:, :H], out[:, H:], qkv[:, H + K :], rstd


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, q_scale, k_scale, cos, sin, eps, H):  # type: ignore[no-untyped-def]
        qkv = qkv.contiguous()
        q, k, v, rstd = _forward(qkv, q_scale, k_scale, cos, sin, eps, H)
        ctx.save_for_backward(qkv, q_scale, k_scale, cos, sin, rstd)
        ctx.H = H
        return q, k, v

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        from hone.kernels.cpu import row_kernels

        qkv, q_scale, k_scale, cos, sin, rstd = ctx.saved_tensors
        out = torch.empty_like(qkv)
        parts = qkv.new_empty(row_kernels.parts(len(qkv)), 2, qkv.shape[-1])
        T, N, E = qkv.shape
        tensors = (
            *(grad.contiguous() for grad in grads),
            qkv,
            q_scale,
            k_scale,
            cos,
            sin,
            rstd,
            out,
            parts,
        )
        row_kernels.norm_rope_backward(
            T, ctx.H, (N - ctx.H) // 2, E, *(t.data_ptr() for t in tensors)
        )
        grad_q_scale, grad_k_scale = row_kernels.added_up(parts)
        return out, grad_q_scale, grad_k_scale, None, None, None, None
