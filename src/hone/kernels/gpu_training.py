"""Fused operations of a transformer block in training on a GPU; backward recomputes most
activations.

    x ─ add, norm, linear ─► qkv ─ heads, flash attention ─► mixed ─ linear ─►       norm_linear, heads_attention
      ─ add, norm, linear ─► gate_up ─ swiglu, linear ─►                             norm_linear, swiglu_linear

Kept between forward and backward are the sums x + delta, qkv, attention's output, and gate_up: 28
KiB per token and layer at Qwen3-0.6B's shape, instead of 44 KiB for all activations. The backward
kernels recompute the rest. Implemented in `kernels/gpu/training_kernels.py` and `attention.py`;
tests compare with `tests/twins.py`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hone.kernels.flat_attention import Sequences
from hone.kernels.linear import half_linear

if TYPE_CHECKING:
    from hone.kernels.gpu.attention import Tiles


def norm_linear(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    scale_D: Tensor,
    eps: float,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    a_RD: Tensor | None = None,
    b_OR: Tensor | None = None,
    whole_OD: Tensor | None = None,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return x + delta, and the projection of the normalized sum, T x O.

    `offset` is added to the norm's scale. The projection is by weight, or by weight + b a if the
    low-rank factors a and b are given. `whole`, if given, is weight + b a: the projection is then
    one matrix product instead of three.
    """
    total, out = _NormLinear.apply(
        x_TD, delta_TD, scale_D, (eps, offset), weight_OD, bias_O, a_RD, b_OR, whole_OD
    )  # type: ignore[no-untyped-call]
    return total, out


def whole_linear(
    whole_OI: Tensor,
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    a_RI: Tensor | None = None,
    b_OR: Tensor | None = None,
) -> Tensor:
    """Return x projected by `whole` = weight + b a, T x O; gradients go to weight, a and b."""
    out: Tensor = _WholeLinear.apply(x_TI, weight_OI, bias_O, a_RI, b_OR, whole_OI)  # type: ignore[no-untyped-call]
    return out


def swiglu_linear(
    gate_up_T2F: Tensor,
    weight_OF: Tensor,
    bias_O: Tensor | None,
    a_RF: Tensor | None = None,
    b_OR: Tensor | None = None,
    whole_OF: Tensor | None = None,
) -> Tensor:
    """Project silu(gate) * up to T x O; a, b and `whole` are as in `norm_linear`."""
    out: Tensor = _SwiGLULinear.apply(gate_up_T2F, weight_OF, bias_O, a_RF, b_OR, whole_OF)  # type: ignore[no-untyped-call]
    return out


def heads_attention(
    qkv_TNE: Tensor,
    q_scale_E: Tensor | None,
    k_scale_E: Tensor | None,
    table: tuple[Tensor, Tensor],
    positions_T: Tensor,
    sequences: Sequences,
    tiles: "Tiles",
    eps: float,
    H: int,
) -> Tensor:
    """Return causal attention outputs, T x (H * E), of a QKV projection.

    The projection has N = H + 2K heads. Queries and keys are normalized if there are scales, and
    rotated by the rows `positions_T` of `table`, which holds cos and sin, each P x E. `tiles`
    divides the sequences, which may continue prefixes, for the kernels
    (`kernels/gpu/attention.py`).
    """
    inputs = (qkv_TNE, q_scale_E, k_scale_E, *table, positions_T, tiles, eps, H)
    out: Tensor = _HeadsAttention.apply(*inputs)  # type: ignore[no-untyped-call]
    return out.flatten(1)


class _LowRankLinear:
    """Linear layer W x + b (+ B A x) inside a fused step.

    Its input is not kept, but recomputed for the weights' gradients. `whole`: W + B A, which gives
    the result in one product.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        whole: Tensor | None = None,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.a = a
        self.b = b
        self.whole = whole

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the result, and A x if it was computed."""
        if self.whole is not None:
            return half_linear(x, self.whole, self.bias), None
        out = half_linear(x, self.weight, self.bias)
        if self.a is None or self.b is None:
            return out, None
        h = x @ self.a.t()
        return out.addmm_(h, self.b.t()), h

    def of_input(self, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of x and of A x."""
        if self.a is None or self.b is None:
            return grad @ self.weight, None
        of_h = grad @ self.b
        if self.whole is not None:
            return grad @ self.whole, of_h
        return (grad @ self.weight).addmm_(of_h, self.a), of_h

    def of_weights(
        self,
        needs: Sequence[bool],
        grad: Tensor,
        x: Tensor | None,
        h: Tensor | None,
        of_h: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of W, b, A and B; None where `needs` is False.

        h: A x, or None to compute it here; of_h: the gradient of A x.
        """
        if h is None and self.a is not None and needs[3] and x is not None:
            h = x @ self.a.t()
        return (
            grad.t() @ x if needs[0] and x is not None else None,
            grad.sum(dim=0) if needs[1] else None,
            of_h.t() @ x if needs[2] and of_h is not None and x is not None else None,
            grad.t() @ h if needs[3] and h is not None else None,
        )


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        scale: Tensor,
        of_norm: tuple[float, float],
        weight: Tensor,
        bias: Any,
        a: Any,
        b: Any,
        whole: Any,
    ) -> Any:
        from hone.kernels.gpu import row_kernels

        eps, offset = of_norm
        total, normed = row_kernels.add_branch(x, delta, None, 1.0, scale, offset, eps)
        out, h = _LowRankLinear(weight, bias, a, b, whole).forward(normed)
        ctx.save_for_backward(total, scale, weight, bias, a, b, whole, h)
        ctx.of_norm = of_norm
        ctx.has_delta = delta is not None
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad: Tensor) -> Any:
        from hone.kernels.gpu import training_kernels

        total, scale, *parts, h = ctx.saved_tensors
        linear = _LowRankLinear(*parts)
        needs = ctx.needs_input_grad[4:]
        grad = grad.contiguous()
        grad_total = None if grad_total is None else grad_total.contiguous()
        of_normed, of_h = linear.of_input(grad)
        needs_normed = needs[0] or needs[2] or needs[3]
        normed, out, of_scale = training_kernels.norm_backward(
            total, scale, of_normed, grad_total, ctx.of_norm[0], needs_normed, ctx.of_norm[1]
        )
        of_weights = linear.of_weights(needs, grad, normed, h, of_h)
        return out, out if ctx.has_delta else None, of_scale, None, *of_weights, None


class _WholeLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Any, a: Any, b: Any, whole: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, a, b, whole)
        return _LowRankLinear(weight, bias, a, b, whole).forward(x)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *parts = ctx.saved_tensors
        linear = _LowRankLinear(*parts)
        grad = grad.contiguous()
        of_x, of_h = linear.of_input(grad)
        return of_x, *linear.of_weights(ctx.needs_input_grad[1:], grad, x, None, of_h), None


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, weight: Tensor, bias: Any, a: Any, b: Any, whole: Any
    ) -> Any:
        from hone.kernels.gpu import row_kernels

        out, h = _LowRankLinear(weight, bias, a, b, whole).forward(row_kernels.swiglu(gate_up))
        ctx.save_for_backward(gate_up, weight, bias, a, b, whole, h)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        from hone.kernels.gpu import training_kernels

        gate_up, *parts, h = ctx.saved_tensors
        linear = _LowRankLinear(*parts)
        needs = ctx.needs_input_grad[1:]
        grad = grad.contiguous()
        of_act, of_h = linear.of_input(grad)
        act, out = training_kernels.swiglu_backward(
            gate_up, of_act, needs[0] or needs[2] or needs[3]
        )
        return out, *linear.of_weights(needs, grad, act, h, of_h), None


class _HeadsAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_scale: Any,
        k_scale: Any,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        tiles: "Tiles",
        eps: float,
        H: int,
    ) -> Any:
        from hone.kernels.gpu import attention, training_kernels

        q, k = training_kernels.rotate_heads(qkv, q_scale, k_scale, cos, sin, positions, eps, H)
        out, logsum = attention.forward(q, k, qkv[:, H + k.shape[1] :], tiles)
        ctx.save_for_backward(qkv, q_scale, k_scale, cos, sin, positions, out, logsum)
        ctx.tiles = tiles
        ctx.eps = eps
        ctx.H = H
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        from hone.kernels.gpu import attention, training_kernels

        qkv, q_scale, k_scale, cos, sin, positions, out, logsum = ctx.saved_tensors
        q, k = training_kernels.rotate_heads(
            qkv, q_scale, k_scale, cos, sin, positions, ctx.eps, ctx.H
        )
        v = qkv[:, ctx.H + k.shape[1] :]
        dq, dk, dv = attention.backward(q, k, v, out, logsum, grad.contiguous(), ctx.tiles)
        found = training_kernels.rotate_heads_backward(
            qkv, q_scale, k_scale, cos, sin, positions, dq, dk, dv, ctx.eps
        )
        return *found, None, None, None, None, None, None
