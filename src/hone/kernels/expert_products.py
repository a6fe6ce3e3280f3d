"""The feed-forward part of a mixture of experts: products of each expert's rows with its weight.

    x ─ rows of each expert ─ gate and up ─ SwiGLU ─ down ─ times the pair's weight ─ sum over K ─► T x D

A pair is a token and one of its K experts; M = T x K. Tensors with M rows hold the pairs in the
order of their experts. On a GPU, Triton kernels gather the rows and find the experts on the device
(`kernels/gpu/expert_kernels.py`); otherwise torch multiplies expert by expert.

Shapes: T tokens, D hidden, E experts, K experts per token, F feed-forward of one expert.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.kernels import gpu
from hone.kernels.gating import ClampedGating
from hone.kernels.swiglu import swiglu

if TYPE_CHECKING:
    from hone.kernels.gpu.expert_kernels import ExpertRows

# What an adapter adds to a grouped product: of M rows and the numbers of rows per expert, M rows.
Delta = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of a layer's experts.

    Attributes:
        gate_up: E x 2F x D, gates above ups; with `gating` they alternate.
        down: E x D x F.
        gate_up_bias: E x 2F, in the order of `gate_up`.
        down_bias: E x D.
        is_input_major: gate_up is E x D x 2F, down is E x F x D.
        gating: how gates and ups are combined; None: silu(gate) * up.
        gate_up_delta: adapter of gate and up.
        down_delta: adapter of down.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    is_input_major: bool = False
    gating: ClampedGating | None = None
    gate_up_delta: Delta | None = None
    down_delta: Delta | None = None

    @property
    def count(self) -> int:
        return len(self.gate_up)


def order_pairs(expert_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the pairs ordered by expert (M), and the number of pairs of each expert (E).

    Both int32, without a wait of the host.
    """
    sorted_M, order_M = expert_TK.flatten().sort(stable=True)
    marks = torch.arange(experts + 1, device=expert_TK.device, dtype=sorted_M.dtype)
    ends = torch.searchsorted(sorted_M, marks)
    return order_M.to(torch.int32), ends.diff().to(torch.int32)


def multiply_experts(
    x_TD: Tensor, experts: ExpertWeights, weight_TK: Tensor, expert_TK: Tensor
) -> Tensor:
    """Return the experts' outputs, times their weights and summed, T x D.

    Args:
        x_TD: inputs.
        weight_TK: fp32, weights of a token's experts.
        expert_TK: the experts of each token.
    """
    K = expert_TK.shape[1]
    pairs_M, counts_E = order_pairs(expert_TK, experts.count)
    token_M = pairs_M // K
    gate_up_delta, down_delta = experts.gate_up_delta, experts.down_delta

    def gather_rows() -> Tensor:
        # F.embedding sums its gradient in a fixed order; indexing on a GPU does not.
        return F.embedding(token_M, x_TD)

    if gpu.has_kernels(x_TD):
        from hone.kernels.gpu.expert_kernels import ExpertRows

        rows = ExpertRows(counts_E, pairs_M, 0, len(x_TD), K)
        added = None if gate_up_delta is None else gate_up_delta(gather_rows(), counts_E)
        form = (rows, experts.is_input_major)
        gate_up = (experts.gate_up, experts.gate_up_bias, added, *form, experts.gating)
        hidden_MF = _GateUp.apply(x_TD, *gate_up)  # type: ignore[no-untyped-call]
        added = None if down_delta is None else down_delta(hidden_MF, counts_E)
        down = (experts.down, experts.down_bias, weight_TK, added, *form)
        out: Tensor = _Down.apply(hidden_MF, *down)  # type: ignore[no-untyped-call]
        return out
    x_MD = gather_rows()
    weights = (experts.gate_up, experts.down)
    if experts.is_input_major:
        weights = (experts.gate_up.transpose(1, 2), experts.down.transpose(1, 2))
    gate_up_M2F = multiply_groups(x_MD, weights[0], counts_E)
    if experts.gate_up_bias is not None:
        gate_up_M2F = gate_up_M2F + _repeat_bias(experts.gate_up_bias, counts_E, len(x_MD))
    if gate_up_delta is not None:
        gate_up_M2F = gate_up_M2F + gate_up_delta(x_MD, counts_E)
    gate = swiglu if experts.gating is None else experts.gating.apply
    hidden_MF = gate(gate_up_M2F)
    out_MD = multiply_groups(hidden_MF, weights[1], counts_E)
    if experts.down_bias is not None:
        out_MD = out_MD + _repeat_bias(experts.down_bias, counts_E, len(x_MD))
    if down_delta is not None:
        out_MD = out_MD + down_delta(hidden_MF, counts_E)
    out_TKD = F.embedding(pairs_M.argsort(), out_MD).view(*expert_TK.shape, -1)
    return (out_TKD * weight_TK.to(x_TD.dtype)[:, :, None]).sum(1)


def _repeat_expert_indices(counts_E: Tensor, rows: int) -> Tensor:
    """Return the expert of each of M rows that are ordered by expert."""
    numbers_E = torch.arange(len(counts_E), device=counts_E.device)
    return numbers_E.repeat_interleave(counts_E, output_size=rows)


def _repeat_bias(bias_EO: Tensor, counts_E: Tensor, rows: int) -> Tensor:
    """Return the bias of each row's expert, M x O; gradients are summed in a fixed order."""
    return F.embedding(_repeat_expert_indices(counts_E, rows), bias_EO)


def multiply_groups(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Multiply each group of consecutive rows of x, counts_E[e] of them, by the weight of its expert."""
    if x_MI.is_cuda and x_MI.dtype == torch.bfloat16:
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=ends_E)
    parts = x_MI.split(counts_E.tolist())
    return torch.cat(
        [F.linear(part, weight_EOI[e]) for e, part in enumerate(parts) if len(part)]
        or [weight_EOI.new_empty(0, weight_EOI.shape[1])]
    )


def decode_experts(
    x_TD: Tensor,
    router_ED: Tensor,
    router_bias_E: Tensor | None,
    experts: ExpertWeights,
    experts_per_token: int,
    normalizes: bool,
) -> tuple[Tensor, Tensor]:
    """Return parts (K x T x D) of the outputs that the caller must sum, and the experts, T x K.

    For tensors that `gpu.takes`: without gradients, without adapters, and without a wait of the
    host.
    """
    from hone.kernels.gpu import expert_kernels as kernels

    weight_TK, expert_TK, rows = kernels.route_tokens(
        x_TD, router_ED, router_bias_E, experts_per_token, normalizes
    )
    hidden_MF, *_ = kernels.multiply_grouped(
        x_TD,
        experts.gate_up,
        rows,
        kernels.TOKEN.value,
        kernels.PAIR.value,
        by_columns=experts.is_input_major,
        is_swiglu=True,
        bias=experts.gate_up_bias,
        gating=experts.gating,
    )
    parts_KTD, *_ = kernels.multiply_grouped(
        hidden_MF,
        experts.down,
        rows,
        kernels.PAIR.value,
        kernels.PART.value,
        by_columns=experts.is_input_major,
        bias=experts.down_bias,
        scales=weight_TK,
    )
    return parts_KTD, expert_TK


def _compute_weight_gradient(
    grad_MO: Tensor, x_MI: Tensor, counts_E: Tensor, is_input_major: bool
) -> Tensor:
    """Return the gradient of each expert's weight, E x O x I, or E x I x O if `is_input_major`."""
    if is_input_major:
        grad_MO, x_MI = x_MI, grad_MO
    if grad_MO.is_cuda:
        return F.grouped_mm(grad_MO.t(), x_MI, offs=counts_E.cumsum(0, dtype=torch.int32))
    counts = counts_E.tolist()
    pairs = zip(grad_MO.split(counts), x_MI.split(counts), strict=True)
    return torch.stack([grad.t() @ x for grad, x in pairs])


def _compute_bias_gradient(grad_MO: Tensor, counts_E: Tensor) -> Tensor:
    """Return the gradient of each expert's bias, E x O, summed in a fixed order."""
    owner_M = _repeat_expert_indices(counts_E, len(grad_MO))
    found: Tensor = torch.ops.aten.embedding_dense_backward(
        grad_MO, owner_M, len(counts_E), -1, False
    )
    return found


class _GateUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Any,
        added: Any,
        rows: "ExpertRows",
        is_input_major: bool,
        gating: ClampedGating | None,
    ) -> Tensor:
        from hone.kernels.gpu import expert_kernels as kernels

        hidden, gate_up, _ = kernels.multiply_grouped(
            x,
            weight,
            rows,
            kernels.TOKEN.value,
            kernels.PLACE.value,
            by_columns=is_input_major,
            is_swiglu=True,
            keeps=True,
            bias=bias,
            added=added,
            gating=gating,
        )
        ctx.save_for_backward(x, weight, gate_up)
        ctx.rows = rows
        ctx.is_input_major = is_input_major
        ctx.gating = gating
        return hidden

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        from hone.kernels.gpu import expert_kernels as kernels
        from hone.kernels.gpu import training_kernels

        x, weight, gate_up = ctx.saved_tensors
        rows = ctx.rows
        needs_x, needs_weight, needs_bias, needs_added, *_ = ctx.needs_input_grad
        grad = grad.contiguous()
        if ctx.gating is None:
            _, of_gate_up = training_kernels.swiglu_backward(gate_up, grad, False)
        else:
            of_gate_up = kernels.clamped_gating_backward(gate_up, grad, ctx.gating)
        of_x = of_weight = None
        if needs_x:
            parts, *_ = kernels.multiply_grouped(
                of_gate_up,
                weight,
                rows,
                kernels.PLACE.value,
                kernels.PART.value,
                by_columns=not ctx.is_input_major,
            )
            of_x = parts.sum(0)
        if needs_weight:
            x_MD = x[rows.token_M]
            of_weight = _compute_weight_gradient(
                of_gate_up, x_MD, rows.counts_E, ctx.is_input_major
            )
        of_bias = _compute_bias_gradient(of_gate_up, rows.counts_E) if needs_bias else None
        of_added = of_gate_up if needs_added else None
        return of_x, of_weight, of_bias, of_added, None, None, None


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Any,
        scales: Tensor,
        added: Any,
        rows: "ExpertRows",
        is_input_major: bool,
    ) -> Tensor:
        from hone.kernels.gpu import expert_kernels as kernels

        parts, *_ = kernels.multiply_grouped(
            hidden,
            weight,
            rows,
            kernels.PLACE.value,
            kernels.PART.value,
            by_columns=is_input_major,
            bias=bias,
            added=added,
            scales=scales,
        )
        ctx.save_for_backward(hidden, weight, bias, scales, added)
        ctx.rows = rows
        ctx.is_input_major = is_input_major
        return parts.sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        from hone.kernels.gpu import expert_kernels as kernels

        hidden, weight, bias, scales, added = ctx.saved_tensors
        rows = ctx.rows
        grad = grad.contiguous()
        of_hidden, _, of_scales = kernels.multiply_grouped(
            grad,
            weight,
            rows,
            kernels.TOKEN.value,
            kernels.PLACE.value,
            by_columns=not ctx.is_input_major,
            scales=scales,
            factors=hidden,
        )
        assert of_scales is not None
        _, needs_weight, needs_bias, _, needs_added, *_ = ctx.needs_input_grad
        of_weight = of_bias = of_added = None
        if needs_weight or added is not None or bias is not None:
            grad_MD = grad[rows.token_M]
            terms = [] if added is None else [added]
            if bias is not None:
                terms.append(_repeat_bias(bias, rows.counts_E, len(grad_MD)))
            for term_MD in terms:
                own = (grad_MD.float() * term_MD).sum(1)
                of_scales = of_scales.index_add(0, rows.pairs_M, own)
            scales_M1 = scales.flatten()[rows.pairs_M, None].to(grad.dtype)
            of_added = grad_MD * scales_M1 if needs_added or needs_bias else None
            if needs_bias and of_added is not None:
                of_bias = _compute_bias_gradient(of_added, rows.counts_E)
            if needs_weight:  # hidden has fewer columns to scale than the gradient
                scaled_MF = hidden * scales_M1
                of_weight = _compute_weight_gradient(
                    grad_MD, scaled_MF, rows.counts_E, ctx.is_input_major
                )
        return (
            of_hidden,
            of_weight,
            of_bias,
            of_scales.view_as(scales),
            of_added if needs_added else None,
            None,
            None,
        )
