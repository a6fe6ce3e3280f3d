"""Flash attention with sinks: a logit per head that joins the softmax, and whose share is dropped.

A sink acts as a key whose value is zero. The forward pass scales the outputs of torch's flash attention
by the share that is left. The backward pass calls torch's with these outputs and the log-sum-exp that
includes the sink.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class FlashCall(NamedTuple):
    """The arguments of torch's flash attention that describe the sequences of a flat token axis.

    Attributes:
        of_q, of_k: cumulative lengths of queries and of keys.
        longest_q, longest_k: tokens of the longest sequence.
        left: tokens that a token sees before itself; -1: all.
    """

    of_q: Tensor
    of_k: Tensor
    longest_q: int
    longest_k: int
    left: int


def call_flash(q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, ...]:
    """Run torch's causal flash attention; return outputs, logsumexp (H x T), and the random state."""
    found = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        *call[:4],
        0.0,
        False,
        False,
        window_size_left=call.left,
        window_size_right=0,
    )
    return found[0], found[1], found[2], found[3]


def differentiate_flash(
    grad: Tensor, qkv: tuple[Tensor, Tensor, Tensor], found: tuple[Tensor, ...], call: FlashCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `found` has what `call_flash` returns."""
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad,
        *qkv,
        found[0],
        found[1],
        *call[:4],
        0.0,
        False,
        found[2],
        found[3],
        window_size_left=call.left,
        window_size_right=0,
    )
    return gradients


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, call: FlashCall) -> Tensor:
    """Return attention outputs, T x H x E, with gradients."""
    out: Tensor = _FlashWithSinks.apply(q, k, v, sinks_H, call)  # type: ignore[no-untyped-call]
    return out


class _FlashWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, call: FlashCall
    ) -> Tensor:
        plain, logsum_HT, *random = call_flash(q, k, v, call)
        total_HT = torch.logaddexp(logsum_HT, sinks_H.float()[:, None])
        share_TH1 = (logsum_HT - total_HT).exp().T[:, :, None]
        out = (plain * share_TH1).to(plain.dtype)
        ctx.save_for_backward(q, k, v, sinks_H, out, total_HT, *random, call.of_q, call.of_k)
        ctx.sizes = call[2:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, sinks_H, out, total_HT, seed, unused, of_q, of_k = ctx.saved_tensors
        grad = grad.contiguous()
        found = (out, total_HT, seed, unused)
        call = FlashCall(of_q, of_k, *ctx.sizes)
        of_qkv = differentiate_flash(grad, (q, k, v), found, call)
        share_HT = (sinks_H.float()[:, None] - total_HT).exp()
        product_TH = (grad.float() * out.float()).sum(-1)
        of_sinks = -(share_HT * product_TH.T).sum(1).to(sinks_H.dtype)
        return *of_qkv, of_sinks, None
