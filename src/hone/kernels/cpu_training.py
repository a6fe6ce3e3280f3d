"""Compute each half of a transformer block on a CPU in one compiled call forward and one backward.

    x ─ add, norm, qkv, heads, attention ─► mixed                            mix
    x, mixed ─ out, add, norm, gate_up, swiglu, down ─► delta                feed

Results have the same bits as those of the separate operations. In a small model, these operations
take less time than the Python code that calls them. The kernels are in `kernels/cpu/block.py`.
"""

from typing import Any

import torch
from torch import Tensor

from hone.kernels.flat_attention import Sequences


def mix(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    norm_D: Tensor,
    weight_OD: Tensor,
    q_scale_E: Tensor,
    k_scale_E: Tensor,
    cos_T1E: Tensor,
    sin_T1E: Tensor,
    sequences: Sequences,
    eps: float,
    H: int,
) -> tuple[Tensor, Tensor]:
    """Return x + delta, and the attention output of the normalized sum, T x (H * E)."""
    inputs = (
        x_TD,
        delta_TD,
        norm_D,
        weight_OD,
        q_scale_E,
        k_scale_E,
        cos_T1E,
        sin_T1E,
        sequences,
        eps,
        H,
    )
    total, mixed = _Mix.apply(*inputs)  # type: ignore[no-untyped-call]
    return total, mixed


def feed(
    x_TD: Tensor,
    mixed_TA: Tensor,
    out_DA: Tensor,
    norm_D: Tensor,
    gate_up_GD: Tensor,
    down_DF: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return x + out(mixed), and the feed-forward output of the normalized sum, T x D each."""
    total, delta = _Feed.apply(x_TD, mixed_TA, out_DA, norm_D, gate_up_GD, down_DF, eps)  # type: ignore[no-untyped-call]
    return total, delta


def _addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if x is None else x.data_ptr() for x in tensors]


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        norm: Tensor,
        weight: Tensor,
        q_scale: Tensor,
        k_scale: Tensor,
        cos: Tensor,
        sin: Tensor,
        sequences: Sequences,
        eps: float,
        H: int,
    ) -> Any:
        from hone.kernels.cpu import block

        x = x.contiguous()
        delta = None if delta is None else delta.contiguous()
        (T, D) = x.shape
        E = len(q_scale)
        K = (len(weight) // E - H) // 2
        ctx.sizes = (T, D, H, K, E)
        ctx.sequences = (sequences.rows, sequences.groups)
        total = x if delta is None else torch.empty_like(x)
        normed = torch.empty_like(x)
        rstd = x.new_empty(T)
        qkv = x.new_empty(T, len(weight))
        heads = x.new_empty(T, (H + K) * E)
        heads_rstd = x.new_empty(T, H + K)
        mixed = x.new_empty(T, H * E)
        logsum = x.new_empty(T, H)
        block.mix_forward(
            *ctx.sizes,
            eps,
            *_addresses(x, delta, norm, weight, q_scale, k_scale, cos, sin),
            *ctx.sequences,
            *_addresses(total, normed, rstd, qkv, heads, heads_rstd, mixed, logsum),
        )
        ctx.save_for_backward(
            total,
            norm,
            rstd,
            normed,
            weight,
            qkv,
            q_scale,
            k_scale,
            cos,
            sin,
            heads,
            heads_rstd,
            mixed,
            logsum,
        )
        ctx.has_delta = delta is not None
        ctx.set_materialize_grads(False)
        return total, mixed

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad_mixed: Tensor) -> Any:
        from hone.kernels.cpu import block, row_kernels

        total, _, _, _, weight, qkv, *_ = saved = ctx.saved_tensors
        T, D, H, K, E = ctx.sizes
        of_q, of_k, of_v = (total.new_empty(T, n * E) for n in (H, K, K))
        of_qkv, of_x, of_weight = (torch.empty_like(like) for like in (qkv, total, weight))
        of_norm = total.new_empty(row_kernels.parts(T), D)
        of_scales = total.new_empty(row_kernels.parts(T), 2, E)
        grads = (None if grad_total is None else grad_total.contiguous(), grad_mixed.contiguous())
        block.mix_backward(
            *ctx.sizes,
            torch.get_num_threads(),
            *_addresses(*grads, *saved),
            *ctx.sequences,
            *_addresses(of_q, of_k, of_v, of_qkv, of_x, of_norm, of_scales, of_weight),
        )
        of_delta = of_x if ctx.has_delta else None
        return (
            of_x,
            of_delta,
            row_kernels.added_up(of_norm),
            of_weight,
            *row_kernels.added_up(of_scales),
            *[None] * 5,
        )


class _Feed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mixed: Tensor,
        out: Tensor,
        norm: Tensor,
        gate_up: Tensor,
        down: Tensor,
        eps: float,
    ) -> Any:
        from hone.kernels.cpu import block

        x = x.contiguous()
        mixed = mixed.contiguous()
        ctx.sizes = (*x.shape, mixed.shape[1], down.shape[1])
        T, _, _, F = ctx.sizes
        total, normed, delta = (torch.empty_like(x) for _ in range(3))
        rstd = x.new_empty(T)
        hidden = x.new_empty(T, 2 * F)
        active = x.new_empty(T, F)
        inputs = _addresses(x, mixed, out, norm, gate_up, down)
        block.feed_forward(
            *ctx.sizes, eps, *inputs, *_addresses(total, normed, rstd, hidden, active, delta)
        )
        ctx.save_for_backward(mixed, out, norm, total, normed, rstd, gate_up, hidden, active, down)
        ctx.set_materialize_grads(False)
        return total, delta

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad: Tensor) -> Any:
        from hone.kernels.cpu import block, row_kernels

        mixed, out, norm, total, _, _, gate_up, hidden, _, down = saved = ctx.saved_tensors
        like = (hidden, total, mixed, out, gate_up, down)
        of_hidden, of_x, of_mixed, of_out, of_gate_up, of_down = map(torch.empty_like, like)
        of_norm = norm.new_empty(row_kernels.parts(len(total)), len(norm))
        grads = (None if grad_total is None else grad_total.contiguous(), grad.contiguous())
        results = (of_hidden, of_x, of_mixed, of_out, of_norm, of_gate_up, of_down)
        block.feed_backward(
            *ctx.sizes, torch.get_num_threads(), *_addresses(*grads, *saved, *results)
        )
        return of_x, of_mixed, of_out, row_kernels.added_up(of_norm), of_gate_up, of_down, None
