"""From hidden states to logprobs and entropies of targets, with never more than a chunk of the logits in memory.

    hidden_ND ─ chunk of rows ─► logits (fp32) ─► logprob, entropy ──┐  forward keeps two numbers a row
                     └───────── once more ─► softmax ─► gradients ◄──┘  backward

The logits of 32,768 tokens over 152k words would take 19 GiB, their gradients as much again.
"""

from typing import Any

import torch
from torch import Tensor

from hone.kernels import cpu
from hone.kernels.linear import exact_logits, linear
from hone.kernels.logprobs import at_least_fp32, target_logprobs, target_logprobs_reference

CHUNK_BYTES = 2**30  # of logits at once
WHOLE_BYTES = 2**28  # on a CPU so many are kept, which saves the second product


def head_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature_N: Tensor, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Logprob of each target under softmax(hidden W^T / T), and the entropy of that distribution, fp32, in nats.

    The entropy has a gradient where it is asked for.
    """
    is_small = 4 * len(hidden_ND) * len(weight_VD) <= WHOLE_BYTES
    if cpu.takes(hidden_ND) and is_small and not entropy_gradient:
        return target_logprobs(linear(hidden_ND, weight_VD), targets_N, temperature_N)
    rows = max(CHUNK_BYTES // (4 * len(weight_VD)), 64)
    logprobs_N, entropy_N = _Head.apply(hidden_ND, weight_VD, targets_N, temperature_N, rows)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N if entropy_gradient else entropy_N.detach()


def head_logprobs_reference(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature_N: Tensor
) -> tuple[Tensor, Tensor]:
    """All logits at once; both results have gradients."""
    logprobs_NV = torch.log_softmax(at_least_fp32(hidden_ND @ weight_VD.t()) / temperature_N[:, None], dim=-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return logprobs_NV.gather(1, targets_N[:, None]).squeeze(1), entropy_N


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, rows: int) -> Any:
        hidden, dtype = hidden.contiguous(), torch.promote_types(hidden.dtype, torch.float32)
        temperature = temperature.to(dtype)
        logprobs, entropy = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(2))
        for i in range(0, len(hidden), rows):
            part = slice(i, i + rows)
            results = target_logprobs_reference(exact_logits(hidden[part], weight), targets[part], temperature[part])
            logprobs[part], entropy[part] = results
        ctx.save_for_backward(hidden, weight, targets, temperature, entropy)
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, weight, targets, temperature, entropy = ctx.saved_tensors
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=temperature.dtype)
        for i in range(0, len(hidden), ctx.rows):
            part = slice(i, i + ctx.rows)
            x, T = hidden[part], temperature[part, None]
            logprobs = exact_logits(x, weight).div_(T).log_softmax(dim=-1)
            slope = torch.zeros_like(logprobs)
            probs = logprobs.exp()
            if grad is not None:
                slope.addcmul_(probs, grad[part, None], value=-1)
                slope.scatter_add_(1, targets[part, None], grad[part, None])
            if grad_entropy is not None:
                slope.addcmul_(probs * (logprobs + entropy[part, None]), grad_entropy[part, None], value=-1)
            slope = slope.div_(T).to(x.dtype)
            of_hidden[part] = slope @ weight
            of_weight += slope.t() @ x
        return of_hidden, of_weight.to(weight.dtype), None, None, None
