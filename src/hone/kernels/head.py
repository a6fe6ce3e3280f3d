"""Logprobs and entropies of targets from hidden states, with at most a chunk of logits in memory.

    hidden_ND ─ chunk of rows ─► logits (fp32) ─► logprob, entropy ─► loss ─► gradients of the chunk      (head_loss)

    hidden_ND ─ chunk of rows ─► logits (fp32) ─► logprob, entropy ──┐  forward keeps no logits
                     └───────── recomputed ─► softmax ─► gradients ◄─┘  backward                     (head_logprobs)

The logits of 32,768 tokens over a vocabulary of 152k would take 19 GiB, their gradients as much
again. If the loss of a chunk does not depend on other chunks, its gradients are computed together
with its logits. Otherwise logits are computed twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hone.kernels import cpu, gpu
from hone.kernels.linear import exact_logits, linear
from hone.kernels.logprobs import at_least_fp32, target_logprobs, target_logprobs_reference

CHUNK_BYTES = 2**30  # of logits at once
WHOLE_BYTES = 2**28  # on a CPU so many are kept, which saves the second product


def head_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    entropy_gradient: bool = False,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return targets' logprobs under softmax(hidden W^T / T), and entropies; fp32, in nats.

    The entropy has a gradient only with `entropy_gradient`. `cap`: see `cap_logits`.
    """
    if _keeps_logits(hidden_ND, weight_VD) and not entropy_gradient:
        logits_NV = cap_logits(linear(hidden_ND, weight_VD), cap)
        return target_logprobs(logits_NV, targets_N, temperature_N)
    inputs = (hidden_ND, weight_VD, targets_N, temperature_N, chunk_rows(weight_VD), cap)
    logprobs_N, entropy_N = _Head.apply(*inputs)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N if entropy_gradient else entropy_N.detach()


# Of the targets in a slice, by their logprobs and entropies
Loss = Callable[[slice, Tensor, Tensor], Tensor]


def head_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    loss: Loss,
    entropy_gradient: bool = False,
    cap: float | None = None,
) -> Tensor:
    """Return the sum of `loss(part, logprobs, entropies)` over slices `part` of the targets.

    The loss must itself be a sum over targets, so that the result does not depend on the slices.
    """
    if not torch.is_grad_enabled() or _keeps_logits(hidden_ND, weight_VD):
        results = head_logprobs(
            hidden_ND, weight_VD, targets_N, temperature_N, entropy_gradient, cap
        )
        return loss(slice(0, len(hidden_ND)), *results)
    inputs = (hidden_ND, weight_VD, targets_N, temperature_N, chunk_rows(weight_VD), cap, loss)
    total: Tensor = _HeadLoss.apply(*inputs)  # type: ignore[no-untyped-call]
    return total


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap), or the logits if there is no cap."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def chunk_rows(weight_VD: Tensor) -> int:
    return max(CHUNK_BYTES // (4 * len(weight_VD)), 64)


def _keeps_logits(hidden: Tensor, weight: Tensor) -> bool:
    return cpu.takes(hidden) and 4 * len(hidden) * len(weight) <= WHOLE_BYTES


class _Chunk:
    """Logits of a slice of rows, with their log-sum-exps, target logprobs and entropies."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        cap: float | None,
    ) -> None:
        self.hidden = hidden
        self.weight = weight
        self.targets = targets
        self.temperature = temperature
        self.logits = cap_logits(exact_logits(hidden, weight), cap)
        # Derivative of the cap.
        self.factor = None if cap is None else 1 - (self.logits / cap) ** 2
        self.on_gpu = gpu.IS_AVAILABLE and hidden.is_cuda and self.logits.dtype == torch.float32
        if self.on_gpu:
            from hone.kernels.gpu import training_kernels

            self.logsum, self.logprobs, self.entropy = training_kernels.statistics(
                self.logits, targets, temperature
            )
        else:
            self.logits.div_(temperature[:, None])
            self.logsum = self.logits.logsumexp(dim=-1)
            self.logprobs, self.entropy = target_logprobs_reference(
                self.logits, targets, torch.ones_like(temperature)
            )

    def add_gradients(
        self, grad: Tensor, grad_entropy: Tensor | None, of_hidden: Tensor, of_weight: Tensor | None
    ) -> None:
        """Write the hidden states' gradient to `of_hidden`; add the weight's gradient to
        `of_weight`.

        The logits may be overwritten.
        """
        if self.on_gpu:
            from hone.kernels.gpu import training_kernels

            slope = training_kernels.slope(
                self.logits,
                self.targets,
                self.temperature,
                self.logsum,
                self.entropy,
                grad.contiguous(),
                None if grad_entropy is None else grad_entropy.contiguous(),
                self.hidden.dtype,
            )
        else:
            logprobs = self.logits.sub_(self.logsum[:, None])
            probs = logprobs.exp()
            slope = probs * -grad[:, None]
            slope.scatter_add_(1, self.targets[:, None], grad[:, None])
            if grad_entropy is not None:
                slope.addcmul_(
                    probs * (logprobs + self.entropy[:, None]), grad_entropy[:, None], value=-1
                )
            slope = slope.div_(self.temperature[:, None]).to(self.hidden.dtype)
        if self.factor is not None:
            slope = slope.mul_(self.factor)
        torch.mm(slope, self.weight, out=of_hidden)
        if of_weight is None:
            return
        if self.hidden.is_cuda and self.hidden.dtype != of_weight.dtype:
            torch.addmm(of_weight, slope.t(), self.hidden, out_dtype=of_weight.dtype, out=of_weight)
        else:
            of_weight += slope.t() @ self.hidden


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        rows: int,
        cap: float | None,
    ) -> Any:
        hidden = hidden.contiguous()
        temperature = at_least_fp32(temperature)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy = (
            torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(2)
        )
        for part in _slices(len(hidden), rows):
            rest = (targets[part], temperature[part].to(dtype), cap)
            chunk = _Chunk(hidden[part], weight, *rest)
            logprobs[part], entropy[part] = chunk.logprobs, chunk.entropy
        ctx.save_for_backward(hidden, weight, targets, temperature.to(dtype))
        ctx.rows, ctx.cap = rows, cap
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, weight, targets, temperature = ctx.saved_tensors
        grad = torch.zeros_like(temperature) if grad is None else grad
        of_hidden = torch.empty_like(hidden)
        of_weight = (
            torch.zeros_like(weight, dtype=temperature.dtype) if ctx.needs_input_grad[1] else None
        )
        for part in _slices(len(hidden), ctx.rows):
            chunk = _Chunk(hidden[part], weight, targets[part], temperature[part], ctx.cap)
            entropy_part = None if grad_entropy is None else grad_entropy[part]
            chunk.add_gradients(grad[part], entropy_part, of_hidden[part], of_weight)
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        rows: int,
        cap: float | None,
        loss: Loss,
    ) -> Any:
        hidden, dtype = hidden.contiguous(), torch.promote_types(hidden.dtype, torch.float32)
        temperature = temperature.to(dtype)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        for part in _slices(len(hidden), rows):
            chunk = _Chunk(hidden[part], weight, targets[part], temperature[part], cap)
            with torch.enable_grad():
                values = (chunk.logprobs.requires_grad_(), chunk.entropy.requires_grad_())
                of_part = loss(part, *values)
                grad, grad_entropy = torch.autograd.grad(of_part, values, allow_unused=True)
            total += of_part.detach()
            grad = torch.zeros_like(chunk.logprobs) if grad is None else grad
            chunk.add_gradients(grad, grad_entropy, of_hidden[part], of_weight)
        ctx.save_for_backward(of_hidden, None if of_weight is None else of_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        of_hidden, of_weight = ctx.saved_tensors
        return (
            of_hidden * grad,
            None if of_weight is None else of_weight * grad,
            None,
            None,
            None,
            None,
            None,
        )


def _slices(count: int, rows: int) -> list[slice]:
    return [slice(i, min(i + rows, count)) for i in range(0, count, rows)]
