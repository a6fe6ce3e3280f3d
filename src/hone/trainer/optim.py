"""AdamW with a schedule and clipping, over fp32 masters where the weights themselves are stored in half precision."""

import math

import torch
from torch import Tensor, nn

from hone.config.sections import OptimConfig, SchedulerConfig


def learning_rate(optim: OptimConfig, schedule: SchedulerConfig, step: int, max_steps: int) -> float:
    """The rate of step `step` (from 1): linear warm-up, then the schedule down to min_lr at `max_steps`."""
    if step <= schedule.warmup_steps:
        return optim.lr * step / schedule.warmup_steps
    span = max(max_steps - schedule.warmup_steps, 1)
    done = min((step - schedule.warmup_steps) / span, 1.0)
    if schedule.type == "linear":
        return optim.lr + (schedule.min_lr - optim.lr) * done
    if schedule.type == "cosine":
        return schedule.min_lr + (optim.lr - schedule.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
    return optim.lr


class Optimizer:
    """Steps the parameters of a module in place: their storage never moves, so a sampler may read it."""

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self.config = config
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = list(model.parameters())
        half = self.parameters[0].dtype != torch.float32
        self.masters = [p.detach().float() for p in self.parameters] if half else self.parameters
        matrices = [p for p in self.masters if p.dim() > 1]
        others = [p for p in self.masters if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)

    def step(self, lr: float) -> float:
        """Clips, steps and clears the gradients; returns their norm before clipping."""
        if self.masters is not self.parameters:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        norm = float(nn.utils.clip_grad_norm_(self.masters, self.config.max_norm))
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad()
        if self.masters is not self.parameters:
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.parameters, strict=True):
                    parameter.copy_(master)
        return norm

    def state(self) -> dict[str, Tensor]:
        """Everything that a resume needs, by name: masters and moments."""
        tensors: dict[str, Tensor] = {}
        for name, master in zip(self.names, self.masters, strict=True):
            tensors[f"master.{name}"] = master.detach()
            for key, value in self.adamw.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        for name, master, parameter in zip(self.names, self.masters, self.parameters, strict=True):
            master.copy_(tensors[f"master.{name}"])
            parameter.copy_(master)
            moments = {k.removesuffix(f".{name}"): v for k, v in tensors.items() if k.endswith(f".{name}")}
            moments.pop("master")
            self.adamw.state[master] = {
                key: value.clone() if key == "step" else value.to(master.device, copy=True) for key, value in moments.items()
            }
