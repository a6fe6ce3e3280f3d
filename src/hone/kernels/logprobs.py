"""Logprobs of targets under softmax(logits / T), and the entropies of those distributions."""

import torch
from torch import Tensor

from hone.kernels import cpu


def target_logprobs(
    logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logprob of each target, fp32, in nats, and the entropy without gradient."""
    if not cpu.takes(logits_NV):
        return target_logprobs_reference(logits_NV, targets_N, temperature_N)
    logprobs_N, entropy_N = _Compiled.apply(logits_NV, targets_N, temperature_N)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N


def target_logprobs_reference(
    logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor
) -> tuple[Tensor, Tensor]:
    logprobs_NV = torch.log_softmax(at_least_fp32(logits_NV) / temperature_N[:, None], dim=-1)
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return logprobs_NV.gather(1, targets_N[:, None]).squeeze(1), entropy_N


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature):  # type: ignore[no-untyped-def]
        from hone.kernels.cpu import logprobs as kernels

        logits = logits.contiguous()
        temperature = temperature.float().contiguous()
        logsum, logprobs, entropy = (torch.empty_like(temperature) for _ in range(3))
        tensors = (logits, targets.contiguous(), temperature, logsum, logprobs, entropy)
        kernels.forward(*logits.shape, *(t.data_ptr() for t in tensors))
        ctx.save_for_backward(logits, targets, temperature, logsum)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        from hone.kernels.cpu import logprobs as kernels

        logits, targets, temperature, logsum = ctx.saved_tensors
        out = torch.empty_like(logits)
        tensors = (grad.contiguous(), logits, targets.contiguous(), temperature, logsum, out)
        kernels.backward(*logits.shape, *(t.data_ptr() for t in tensors))
        return out, None, None
