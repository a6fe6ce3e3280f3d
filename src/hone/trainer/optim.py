"""AdamW and Muon, schedule and clipping, over fp32 masters where the weights are stored in half precision."""

import math

import torch
from torch import Tensor, nn

from hone.config.sections import OptimConfig, SchedulerConfig
from hone.models.hf import split_rows
from hone.models.transformer import Transformer
from hone.trainer import muon


def learning_rate(optim: OptimConfig, schedule: SchedulerConfig, step: int, max_steps: int) -> float:
    """The rate of step `step` (from 1): linear warm-up, then the schedule down to min_lr at `max_steps`."""
    if step <= schedule.warmup_steps:
        return optim.lr * step / schedule.warmup_steps
    span = max(max_steps - schedule.warmup_steps, 1)
    done = min((step - schedule.warmup_steps) / span, 1.0)
    if schedule.type == "wsd":  # warm-up, stable, decay (Hu et al. 2024)
        done = min(
            1.0, max(0.0, (step - max_steps * (1 - schedule.decay_fraction)) / (max_steps * schedule.decay_fraction))
        )
    if schedule.type in ("linear", "wsd"):
        return optim.lr + (schedule.min_lr - optim.lr) * done
    if schedule.type == "cosine":
        return schedule.min_lr + (optim.lr - schedule.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
    return optim.lr


class Optimizer:
    """AdamW (Loshchilov & Hutter 2019) on a model's parameters, in place: their storage never moves, so a sampler
    may read it. Half-precision parameters are rounded from fp32 masters. With `type` muon the matrices of the blocks
    are moved by Muon (`muon.py`), each of the parts that are stored together by itself.

    Calls torch's fused kernel itself: constructing `torch.optim.AdamW` imports the compiler, which takes longer
    than loading a small model. Equality with it is tested.
    """

    def __init__(self, model: Transformer, config: OptimConfig) -> None:
        self.config, self.spec = config, model.spec
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = list(model.parameters())
        half = self.parameters[0].dtype != torch.float32
        self.masters = [p.detach().float() for p in self.parameters] if half else self.parameters
        self.exp_avg = [torch.zeros_like(m, requires_grad=False) for m in self.masters]
        self.by_muon = [
            i for i, (name, p) in enumerate(zip(self.names, self.masters, strict=True))
            if config.type == "muon" and p.dim() == 2 and name.startswith("blocks.")
        ]  # fmt: skip
        self.exp_avg_sq = [
            m.new_zeros(0 if i in self.by_muon else m.shape) for i, m in enumerate(self.masters)
        ]  # Muon has none
        device = self.masters[0].device
        self.steps = [torch.zeros((), device=device) for _ in self.masters]
        matrices = [i for i, p in enumerate(self.masters) if p.dim() > 1 and i not in self.by_muon]
        others = [i for i, p in enumerate(self.masters) if p.dim() <= 1]
        self.groups = [(matrices, config.weight_decay), (others, 0.0)]

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Clips, steps and clears the gradients; returns their norm before clipping.

        Where the norm is not finite, or over `skip_norm`, nothing is done: the gradients are there to be looked at.
        """
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        norm = float(nn.utils.get_total_norm(grads))
        if self.is_bad(norm):
            return norm
        scale = min(self.config.max_norm / (norm + 1e-6), 1.0)
        grads = [grad.float() for grad in grads]
        if scale < 1.0:
            torch._foreach_mul_(grads, scale)
        beta1, beta2 = self.config.betas
        for members, weight_decay in self.groups:
            masters, grad, exp_avg, exp_avg_sq = (
                [values[i] for i in members] for values in (self.masters, grads, self.exp_avg, self.exp_avg_sq)
            )
            steps = [self.steps[i] for i in members]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                masters, grad, exp_avg, exp_avg_sq, [], steps, lr=lr, beta1=beta1, beta2=beta2,
                weight_decay=weight_decay, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
        for i in self.by_muon:
            weights = split_rows(self.spec, self.names[i], self.masters[i].data)
            muon.step(weights, grads[i], self.exp_avg[i], lr, self.config.weight_decay)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.grad = None
            if parameter is not master:
                parameter.copy_(master)
        return norm

    def is_bad(self, norm: float) -> bool:
        return not math.isfinite(norm) or norm > (self.config.skip_norm or math.inf)

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Everything that a resume needs, by name."""
        kinds = {"master": self.masters, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "step": self.steps}
        named = {f"{kind}.{n}": t.detach() for kind, ts in kinds.items() for n, t in zip(self.names, ts, strict=True)}
        return {name: tensor for name, tensor in named.items() if tensor.numel()}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Takes over what `state` gave; the parameters follow."""
        for name, value in self.state().items():
            value.copy_(tensors[name])
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
