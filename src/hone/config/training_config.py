"""Keys that all trainers have: optimizer, adapters, memory, and several processes."""

from typing import Literal

from pydantic import model_validator

from hone.config.base import Config, Free
from hone.config.lora_config import LoRAConfig, check_optimizer
from hone.config.sections import OptimConfig, Positive, SchedulerConfig, Sharding


class TrainingConfig(Config):
    """Base class of trainers' configurations."""

    optim: OptimConfig = OptimConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    activation_checkpointing: Free[bool | Literal["auto"]] = "auto"
    """Keep only the inputs of the transformer blocks and recompute the rest in the backward pass: much less memory,
    about a quarter more time. auto does so where a step would not fit the memory otherwise; with several trainer
    processes it keeps all."""
    lora: LoRAConfig | None = None
    """Train LoRA adapters and leave the model's weights as they are, when a key of this section is given, for example
    lora.rank."""
    sharding: Free[Sharding] = "auto"
    """With several trainer processes: full stores a part of each weight and of the optimiser's state in each of them
    (FSDP2), none stores all in each; auto is full on GPUs, and on CPUs where context_parallel or expert_parallel
    divides the work."""
    context_parallel: Free[Positive] = 1
    """Divide the tokens of each micro-batch among this many neighbouring trainer processes, for sequences that do not
    fit one GPU. Attention divides heads instead: the number of query heads must be a multiple of this value.
    With the section dpo of `sft` it must be 1."""
    expert_parallel: Free[bool] = False
    """Divide the experts of a mixture of experts among all trainer processes and send tokens to them, instead of
    gathering all experts for each pass. The number of experts must be a multiple of the number of processes."""

    @model_validator(mode="after")
    def _lora_fits(self) -> "TrainingConfig":
        check_optimizer(self.lora, self.optim)
        return self
