"""Head-wise RMS norm, then rotary positions: what Qwen3 does to queries and keys, as one operation.

y = x / rms(x) * scale,   out = y * cos + swap(y) * sin       swap exchanges the halves; sin has -, + signs
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_rope(x_THE: Tensor, scale_HE: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, eps: float) -> Tensor:
    """Normalises each head over E, scales it, rotates it to its position. `sin`'s first half is negated."""
    if not (torch.is_grad_enabled() and x_THE.requires_grad):
        return norm_rope_reference(x_THE, scale_HE, cos_T1E, sin_T1E, eps)
    out: Tensor = _NormRope.apply(x_THE, scale_HE, cos_T1E, sin_T1E, eps)  # type: ignore[no-untyped-call]
    return out


def norm_rope_reference(x_THE: Tensor, scale_HE: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, eps: float) -> Tensor:
    return rotate(F.rms_norm(x_THE, x_THE.shape[-1:], None, eps) * scale_HE, cos_T1E, sin_T1E)


def rotate(x_THE: Tensor, cos_T1E: Tensor, sin_T1E: Tensor) -> Tensor:
    first, second = x_THE.chunk(2, dim=-1)
    return torch.addcmul(x_THE * cos_T1E, torch.cat([second, first], dim=-1), sin_T1E)


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
