"""Configuration of `rl`: what the components share stands once at the top."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from hone.config.base import Config
from hone.config.sections import (
    EngineConfig,
    EnvConfig,
    OptimConfig,
    Positive,
    RunConfig,
    SamplingConfig,
    SchedulerConfig,
    WeightsConfig,
    as_list,
)


class LossConfig(Config):
    mask_ratio_low: Annotated[float, Field(ge=0)] = 0.125
    """Tokens whose importance ratio is lower are dropped."""
    mask_ratio_high: Annotated[float, Field(gt=0)] = 8.0
    """Tokens whose importance ratio is higher are dropped."""
    ratio_type: Literal["token", "sequence"] = "token"
    """One ratio a token, or one a sequence: the geometric mean over its tokens."""
    kl_tau: Annotated[float, Field(ge=0)] = 0.0
    """Weight of log r, added to the loss of every kept token."""


class TrainerConfig(Config):
    optim: OptimConfig = OptimConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    loss: LossConfig = LossConfig()
    micro_batch_tokens: Positive = 16384
    """Most tokens in one forward and backward pass."""


class OrchestratorConfig(Config):
    env: Annotated[list[EnvConfig], BeforeValidator(as_list), Field(min_length=1)]
    """Environments; their examples are mixed."""
    batch_size: Positive = 128
    """Rollouts in a step: prompts_per_step x rollouts_per_example."""
    rollouts_per_example: Annotated[int, Field(ge=2)] = 16
    """Rollouts of one prompt (a group); the advantage is the reward minus the group's mean, so at least 2."""
    sampling: SamplingConfig = SamplingConfig()
    drop_zero_signal: bool = True
    """Leave out groups whose rollouts all have the same reward: their advantages are 0."""
    rollout_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds until a rollout is given up."""

    @model_validator(mode="after")
    def _batch_divides(self) -> "OrchestratorConfig":
        if self.batch_size % self.rollouts_per_example:
            raise ValueError(
                f"batch-size {self.batch_size} is not a multiple of rollouts-per-example {self.rollouts_per_example} "
                "(batch_size counts rollouts: prompts_per_step x rollouts_per_example)"
            )
        return self

    @property
    def prompts_per_step(self) -> int:
        return self.batch_size // self.rollouts_per_example


class CkptConfig(Config):
    interval: Positive = 50
    """Write a checkpoint to resume from every so many steps, and at the last."""
    keep: Positive = 1
    """How many to keep."""


class RLConfig(RunConfig):
    max_steps: Positive = 100
    """Optimiser steps."""
    seq_len: Positive = 2048
    """Longest prompt plus completion."""
    resume: bool = False
    """Continue the run in output_dir from its last checkpoint."""
    ckpt: CkptConfig | None = None
    """Checkpoints to resume from; none unless a key of it is given."""
    weights: WeightsConfig = WeightsConfig()
    orchestrator: OrchestratorConfig
    trainer: TrainerConfig = TrainerConfig()
    inference: EngineConfig = EngineConfig()
