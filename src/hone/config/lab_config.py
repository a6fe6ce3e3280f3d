"""Configuration of `hone lab run`: a job file of hosted training, mapped to a run of `rl`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from hone import machine
from hone.config.base import Config, validate_values
from hone.config.lora_config import LoRAConfig
from hone.config.orchestrator_config import BufferConfig
from hone.config.rl_config import RLConfig
from hone.config.sections import (
    EnvConfig,
    EvalConfig,
    Positive,
    SamplingConfig,
    WandbConfig,
    as_list,
    require_distinct,
)


class LabCheckpoints(Config):
    interval: Positive = 50
    """Steps from one checkpoint, and from one writing of the weights, to the next."""


class LabSampling(SamplingConfig):
    max_tokens: Positive = 512
    """Most tokens in a completion; a longer one is cut there."""


class LabConfig(Config):
    model: str
    """Model to train: a directory in Hugging Face format, or a hub id (owner/model)."""
    env: Annotated[
        list[EnvConfig],
        BeforeValidator(as_list),
        Field(min_length=1),
        AfterValidator(require_distinct),
    ]
    """Environments to train on."""
    name: str | None = None
    """Name of the run: what it writes is in outputs/NAME. The first environment's name unless given."""
    max_steps: Positive = 100
    """Training steps."""
    batch_size: Positive = 128
    """Rollouts of a step."""
    rollouts_per_example: Annotated[int, Field(ge=2)] = 8
    """Rollouts of each prompt."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-5
    """Peak learning rate."""
    lora_alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the LoRA adapters, whose rank is 16."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """Groups sampled at once, as a multiple of what a step needs."""
    max_async_level: Annotated[int, Field(ge=0)] = 1
    """Steps that sampling may be ahead of training, where each has a GPU of its own."""
    seq_len: Positive = 4096
    """Most tokens of a prompt and what follows it together."""
    seed: int = 0
    """Seed of every random choice."""
    sampling: LabSampling = LabSampling()
    buffer: BufferConfig = BufferConfig()
    eval: EvalConfig | None = None
    checkpoints: LabCheckpoints = LabCheckpoints()
    wandb: WandbConfig | None = None
    resume: bool | str = False
    """Continue an earlier run: true, auto (or start, where there is none), or the path of a checkpoints/step_N."""
    clean: bool = False
    """Delete what an earlier run left in the run's directory, and start again."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Least important kind of message that is printed and logged."""

    @property
    def output_dir(self) -> Path:
        return Path("outputs") / (self.name or self.env[0].known_as.rpartition("/")[2])

    def resolve_config(self) -> RLConfig:
        interval = {"interval": self.checkpoints.interval}
        values: dict[str, Any] = {
            "model": {"name": self.model},
            "output_dir": self.output_dir,
            "seed": self.seed,
            "clean": self.clean,
            "resume": self.resume,
            "log_level": self.log_level,
            "max_steps": self.max_steps,
            "seq_len": self.seq_len,
            "max_async_level": self.max_async_level,
            "wandb": self.wandb and self.wandb.model_dump(),
            "ckpt": interval,
            "weights": interval,
            "orchestrator": {
                "env": [env.model_dump() for env in self.env],
                "batch_size": self.batch_size,
                "rollouts_per_example": self.rollouts_per_example,
                "oversampling_factor": self.oversampling_factor,
                "sampling": self.sampling.model_dump(),
                "buffer": self.buffer.model_dump(),
                "eval": self.eval and self.eval.model_dump(),
            },
            "trainer": {
                "optim": {"lr": self.learning_rate, "weight_decay": 0.0},
                "lora": LoRAConfig(alpha=self.lora_alpha).model_dump(),
            },
        }
        if len(machine.usable_gpus()) < 2:
            values |= {"inference_gpu_ids": [0], "trainer_gpu_ids": [0]}
        return validate_values(RLConfig, values)
