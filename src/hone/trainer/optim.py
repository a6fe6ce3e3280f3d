"""AdamW and Muon with schedule and clipping, over fp32 masters of half-precision weights."""

import logging
import math
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from hone import machine
from hone.config.lora_config import LoRAConfig
from hone.config.rl_config import TrainerConfig
from hone.config.sections import OptimConfig, SchedulerConfig
from hone.config.sft_config import SFTConfig
from hone.kernels import adamw
from hone.kernels.pinned_memory import brought, reachable_zeros
from hone.models.expert_parallel import take_local_part
from hone.models.hf import split_rows
from hone.models.language_model import LanguageModel
from hone.trainer import muon
from hone.trainer.ranks import Ranks
from hone.trainer.sharding import is_sharded

HALF = (torch.bfloat16, torch.float16)
log = logging.getLogger("hone")


Trained = TypeVar("Trained", TrainerConfig, SFTConfig)  # what says how a model is trained
LARGE_MODEL_WEIGHTS = 4e9
LARGE_MODEL_LR = 1e-6  # of RL on all weights of such a model
MUON_LR = 2e-3


def choose_lr(optim: OptimConfig, lora: LoRAConfig | None, weights: int, is_rl: bool) -> float:
    """Return the peak learning rate; "auto" is chosen by the model's size and what is trained.

    Smaller models take larger steps: by the power 2/3 of their size, at most 300 times larger.
    LoRA takes ten times those of all weights (Schulman et al. 2025, "LoRA Without Regret").
    """
    if optim.lr != "auto":
        return float(optim.lr)
    if optim.type == "muon":
        return MUON_LR
    by_size = min(300.0, max(1.0, (LARGE_MODEL_WEIGHTS / weights) ** (2 / 3)))
    return LARGE_MODEL_LR * by_size * (1 if lora is None else 10) * (1 if is_rl else 10)


def resolve_lr(config: Trained, weights: int, is_rl: bool) -> Trained:
    """Return the configuration with a learning rate in place of "auto", which is logged."""
    if config.optim.lr != "auto":
        return config
    lr = choose_lr(config.optim, config.lora, weights, is_rl)
    log.info("Learning rate %.2g (optim.lr auto)", lr)
    return config.model_copy(update={"optim": config.optim.model_copy(update={"lr": lr})})


def learning_rate(
    optim: OptimConfig, schedule: SchedulerConfig, step: int, max_steps: int
) -> float:
    """Return the learning rate of step `step`, counted from 1: warm-up, then the schedule.

    The warm-up is linear. A schedule that decays reaches min_lr one step after the last, so that
    the last step still has an effect.
    """
    assert not isinstance(optim.lr, str)
    if step <= schedule.warmup_steps:
        return optim.lr * step / schedule.warmup_steps
    span = max(max_steps - schedule.warmup_steps, 1)
    before = step - 1
    done = min((before - schedule.warmup_steps) / span, 1.0)
    if schedule.type == "wsd":  # warm-up, stable, decay (Hu et al. 2024)
        done = min(
            1.0,
            max(
                0.0,
                (before - max_steps * (1 - schedule.decay_fraction))
                / (max_steps * schedule.decay_fraction),
            ),
        )
    if schedule.type in ("linear", "wsd"):
        return optim.lr + (schedule.min_lr - optim.lr) * done
    if schedule.type == "cosine":
        return schedule.min_lr + (optim.lr - schedule.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
    return optim.lr


class Optimizer:
    """In-place AdamW (Loshchilov & Hutter 2019), with Muon for the blocks' matrices if configured.

    Parameters keep their storage, so a sampler may read them. Half-precision parameters are rounded
    from fp32 masters. With `type` muon, Muon updates the matrices of the transformer blocks
    (`muon.py`); matrices that are stored in one parameter are updated separately. Gradients are
    summed over ranks; each rank of a sharded model updates its own shard.

    AdamW runs in torch's fused kernel; for half-precision parameters on a GPU, for bfloat16 moments
    and for offloaded state it runs in `kernels/adamw.py`. `torch.optim.AdamW` is not used, because
    constructing it would import torch's compiler, which takes longer than loading a small model.
    Tests compare the updates with those of `torch.optim.AdamW`.
    """

    def __init__(
        self, model: LanguageModel, config: OptimConfig, ranks: Ranks | None = None
    ) -> None:
        self.config = config
        self.spec = model.spec
        self.ranks = ranks or Ranks()
        self.is_sharded = is_sharded(model)
        trained: dict[str, Tensor] = {
            name: p for name, p in model.named_parameters() if p.requires_grad
        }
        self.names = list(trained)
        self.parameters: list[Tensor] = list(trained.values())
        is_half = self.parameters[0].dtype in HALF
        self.device = self.parameters[0].device
        self.by_muon = _find_muon_matrices(trained) if config.type == "muon" else []
        self.is_away = config.offload and self.device.type == "cuda"
        if self.is_away:
            self._check_offload(is_half, self.by_muon)
        self.masters = self.parameters
        if is_half:
            self.masters = [self._new_state(p, torch.float32, p) for p in self.parameters]
        self._allocate_moments()
        # torch's kernel keeps moments in fp32 and needs a separate pass to round half-precision
        # weights.
        is_short = config.state_dtype == "bfloat16"
        has_kernel = is_half and adamw.takes(take_local_part(self.masters[0]))
        self.is_own = is_short or self.is_away or has_kernel
        self._divide_by_decay()
        self._sums: list[Tensor] | None = None

    def _allocate_moments(self) -> None:
        """Allocate AdamW's two moments or Muon's one (never in bfloat16), and the step counts."""
        is_short = self.config.state_dtype == "bfloat16"
        self.exp_avg = list[Tensor]()
        self.exp_avg_sq = list[Tensor]()
        for i, master in enumerate(self.masters):
            is_muon = i in self.by_muon
            dtype = torch.bfloat16 if is_short and not is_muon else master.dtype
            self.exp_avg.append(self._new_state(master, dtype))
            self.exp_avg_sq.append(
                master.new_zeros(0) if is_muon else self._new_state(master, dtype)
            )
        self.steps = [torch.zeros((), device=self.masters[0].device) for _ in self.masters]

    def _divide_by_decay(self) -> None:
        """Divide AdamW's parameters into matrices, which decay, and others; set up its kernel."""
        matrices = [i for i, p in enumerate(self.masters) if p.dim() > 1 and i not in self.by_muon]
        others = [i for i, p in enumerate(self.masters) if p.dim() <= 1]
        groups = [(matrices, self.config.weight_decay), (others, 0.0)]
        self.groups = [(members, decay) for members, decay in groups if members]
        self.by_adamw = [i for members, _ in self.groups for i in members]
        if self.is_own:
            kinds = (self.parameters, self.masters, self.exp_avg, self.exp_avg_sq)
            tensors = [[take_local_part(kind[i]).detach() for i in self.by_adamw] for kind in kinds]
            decays = [decay for members, decay in self.groups for _ in members]
            self.own = adamw.AdamW(tensors, decays)

    def change_settings(self, config: OptimConfig) -> None:
        """Use other rates, decay or limits of AdamW from the next step on; types stay as they are."""
        decays = config.weight_decay != self.config.weight_decay
        self.config = config
        if decays:
            self._divide_by_decay()

    def _check_offload(self, half: bool, by_muon: list[int]) -> None:
        if self.ranks.count > 1:
            raise ValueError(
                f"optim.offload is for one trainer process; there are {self.ranks.count}"
            )
        of_masters = 4 * half
        of_moments = 2 * self.config.moment_bytes
        wanted = sum(
            p.numel() * (of_masters + (4 if i in by_muon else of_moments))
            for i, p in enumerate(self.parameters)
        )
        if wanted > machine.usable_memory():
            raise ValueError(
                f"optim.offload: the optimiser's state takes {wanted / 2**30:.1f} GiB, this machine has "
                f"{machine.usable_memory() / 2**30:.1f} GiB of memory; optim.state_dtype = bfloat16 takes less"
            )
        log.info(
            "Locking %.1f GiB of this machine's memory for the optimiser's state", wanted / 2**30
        )

    def _new_state(self, like: Tensor, dtype: torch.dtype, value: Tensor | None = None) -> Tensor:
        """Return a state tensor shaped like `like`, in host memory if state is offloaded.

        It is filled with `value`, or zeros.
        """
        if self.is_away:
            zeros = reachable_zeros(like.shape, dtype)
            return zeros if value is None else zeros.copy_(value.detach())
        return (
            torch.zeros_like(like, dtype=dtype, requires_grad=False)
            if value is None
            else value.detach().to(dtype)
        )

    @torch.no_grad()
    def accumulate_gradients(self) -> None:
        """Add a micro-batch's gradients to sums in fp32, since half precision would round."""
        if self.masters is self.parameters:
            return  # summed in place
        grads = self.local_gradients()
        if self._sums is None:
            self._sums = _to_float32(grads)
        else:
            torch._foreach_add_(self._sums, grads)
        self.clear_gradients()

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Clip the gradients, update the parameters and clear the gradients; return the norm.

        The norm is that of the gradients before clipping. If it is not finite or exceeds
        `skip_norm`, no parameter is updated.
        """
        grads = self._sums or self.local_gradients()
        self._sums = None
        if not self.is_own or self.ranks.count > 1:
            grads = _to_float32(grads)
        if not self.is_sharded:
            grads = self.ranks.sum_each(grads)
        norm = self.gradient_norm(grads)
        if self.is_bad(norm):
            return norm
        scale = min(self.config.max_norm / (norm + 1e-6), 1.0)
        if self.is_own:
            self._own_step(grads, lr, scale)
        else:
            self._torchs_step(grads, lr, scale)
        for start in range(0, len(self.by_muon), muon.AT_ONCE):
            self._muon_step(self.by_muon[start : start + muon.AT_ONCE], grads, lr, scale)
        self.clear_gradients()
        if not self.is_own:
            self.follow_masters()
        # The fused kernels do not count changes.
        torch.autograd.graph.increment_version(self.parameters)
        return norm

    @torch.no_grad()
    def compile_kernels(self) -> None:
        """Compile the kernels of a step by launching them on dummy numbers.

        The norm of the present gradients is computed too; then the gradients are cleared.
        """
        self.gradient_norm(self.local_gradients())
        torch._foreach_add_(self.steps, 0)
        if self.is_own:
            self.own.rehearse()
        self.clear_gradients()

    def _own_step(self, grads: list[Tensor], lr: float, scale: float) -> None:
        torch._foreach_add_([self.steps[i] for i in self.by_adamw], 1)
        step = int(self.steps[self.by_adamw[0]])
        change = adamw.Change(scale, lr, self.config.betas, step, self.config.eps)
        self.own.step([grads[i] for i in self.by_adamw], change)

    def _muon_step(self, which: list[int], grads: list[Tensor], lr: float, scale: float) -> None:
        moved = [grads[i].float() * scale if self.is_own else grads[i] for i in which]
        splits = [partial(split_rows, self.spec, self.names[i]) for i in which]
        with brought(
            [*(self.masters[i] for i in which), *(self.exp_avg[i] for i in which)], self.device
        ) as there:
            masters = there[: len(which)]
            momenta = there[len(which) :]
            muon.step_muon(masters, moved, momenta, lr, self.config.weight_decay, splits)
            if self.is_own and self.masters is not self.parameters:
                torch._foreach_copy_([self.parameters[i] for i in which], masters)

    def _torchs_step(self, grads: list[Tensor], lr: float, scale: float) -> None:
        if scale < 1.0:
            torch._foreach_mul_(grads, scale)
        beta1, beta2 = self.config.betas
        for members, weight_decay in self.groups:
            masters, exp_avg, exp_avg_sq = (
                [take_local_part(values[i]) for i in members]
                for values in (self.masters, self.exp_avg, self.exp_avg_sq)
            )
            steps = [self.steps[i] for i in members]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                masters,
                [grads[i] for i in members],
                exp_avg,
                exp_avg_sq,
                [],
                steps,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay,
                eps=self.config.eps,
                amsgrad=False,
                maximize=False,
            )

    def local_gradients(self) -> list[Tensor]:
        """Return this rank's part of each gradient, zeros if there is none."""
        return [
            torch.zeros_like(take_local_part(p)) if p.grad is None else take_local_part(p.grad)
            for p in self.parameters
        ]

    def gradient_norm(self, grads: list[Tensor]) -> float:
        """Return the norm of all gradients together."""
        norm = _total_norm(grads)
        return float(self.ranks.sum_over_ranks(norm.square()).sqrt() if self.is_sharded else norm)

    def is_bad(self, norm: float) -> bool:
        return not math.isfinite(norm) or norm > (self.config.skip_norm or math.inf)

    def discard_gradients(self) -> None:
        """Forget all gradients since the last step."""
        self._sums = None
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Return everything that a resume needs, by name."""
        if self.is_away:
            torch.cuda.synchronize(self.device)  # the CPU is about to read what the GPU writes
        kinds = {
            "master": self.masters,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "step": self.steps,
        }
        named = {
            f"{kind}.{n}": t.detach()
            for kind, ts in kinds.items()
            for n, t in zip(self.names, ts, strict=True)
        }
        return {name: tensor for name, tensor in named.items() if tensor.numel()}

    @torch.no_grad()
    def follow_masters(self) -> None:
        """Update parameters from their masters, after an update or a load."""
        if self.masters is not self.parameters:
            torch._foreach_copy_([*self.parameters], [*self.masters])


def _find_muon_matrices(trained: dict[str, Tensor]) -> list[int]:
    """Return the indices of the parameters that Muon updates: the blocks' 2-D weights."""
    named = enumerate(trained.items())
    return [i for i, (name, p) in named if p.dim() == 2 and name.startswith("blocks.")]


def _total_norm(grads: list[Tensor]) -> Tensor:
    """Return the L2 norm of all tensors together.

    On a CPU it is computed row by row, so that it does not depend on the number of threads.
    """
    if grads[0].device.type != "cpu":
        return torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
        )
    grads = _to_float32(grads)
    rows = [
        torch.linalg.vector_norm(x.flatten(1) if x.dim() > 1 else x[:, None], dim=1) for x in grads
    ]
    return torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64).to(grads[0].dtype)


def _to_float32(tensors: list[Tensor]) -> list[Tensor]:
    if tensors[0].dtype not in HALF:
        return tensors
    copies = [torch.empty_like(x, dtype=torch.float32) for x in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies
