"""Configuration of `sft`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from hone.config.base import Config, Free
from hone.config.lora import LoRAConfig, check_optimizer
from hone.config.sections import (
    EvalConfig,
    OnBadStep,
    OptimConfig,
    Positive,
    ResumableConfig,
    SchedulerConfig,
    Sharding,
    WeightsConfig,
    as_list,
)

Role = Literal["system", "user", "assistant", "tool"]


class DataConfig(Config):
    name: Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)]
    """Hub id of a data set, or local .jsonl or .parquet file, with `messages` or `prompt` and `completion`; one, or
    several."""
    weights: list[Annotated[float, Field(gt=0)]] | None = None
    """How often a row of each data set comes in an epoch: 2 is twice, 0.5 is half of its rows, others every time."""
    fake: bool = False
    """Random tokens instead, whatever the name: conversations of a quarter of seq_len to all of it, every token a
    target."""
    split: str = "train"
    """Split, for a data set from the hub."""
    train_on: Annotated[list[Role], BeforeValidator(as_list), Field(min_length=1)] = Field(default=["assistant"])
    """Roles whose messages are learnt."""
    seq_len: Positive = 128
    """Tokens in a row; longer conversations are dropped and counted."""
    batch_size: Positive = 128
    """Rows in an optimiser step."""
    micro_batch_size: Free[Positive | None] = None
    """Rows in one forward and backward pass; fewer need less memory. The whole batch unless given."""
    pack: Literal["cat", "stack"] = "cat"
    """cat fills a row with whole conversations, which never see each other; stack puts one in a row."""
    shuffle: bool = True
    """New order in every epoch."""
    streaming: bool = False
    """Read the data as it is needed and keep none of it, again from its start at its end; needs max_steps. Weights are
    then shares of rows."""
    buffer: Positive = 1000
    """Rows that streaming draws the next one from, where it shuffles."""

    @model_validator(mode="before")
    @classmethod
    def _fake_needs_no_name(cls, values: Any) -> Any:
        is_nameless = isinstance(values, dict) and values.get("fake") and "name" not in values
        return {"name": "fake", **values} if is_nameless else values

    @model_validator(mode="after")
    def _a_weight_each(self) -> "DataConfig":
        if self.weights is not None and len(self.weights) != len(self.name):
            raise ValueError(f"data.weights has {len(self.weights)} values, data.name {len(self.name)} data sets")
        return self


class ValConfig(Config):
    name: str
    """Validation data, like data.name."""
    split: str = "train"
    """Split, for a data set from the hub."""
    interval: Positive = 100
    """Validate every so many steps, and at the last."""


class SFTConfig(ResumableConfig):
    data: DataConfig
    val: Free[ValConfig | None] = None
    eval: Free[EvalConfig | None] = None
    """Evaluate on environments while training."""
    bench: Free[bool] = False
    """Measure 10 steps after 3 for warming up, print a table and write nothing."""
    max_steps: Free[Positive | None] = None
    """Optimiser steps; one pass over the data unless given."""
    max_seconds: Free[Annotated[float, Field(gt=0)] | None] = None
    """Stop after so much wall time of training, if max_steps have not come first."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    scheduler: SchedulerConfig = SchedulerConfig()
    on_bad_step: Free[OnBadStep] = "stop"
    """When gradients are not finite, or over optim.skip_norm: end the run, or go on without that step. The
    conversations go to bad_steps/ either way."""
    activation_checkpointing: Free[bool] = False
    """Keep the inputs of blocks alone and compute the rest once more going back: less memory, a third more work."""
    lora: LoRAConfig | None = None
    """Train adapters beside frozen weights, when a key of it is given, as --lora.rank 16."""
    sharding: Free[Sharding] = "auto"
    """With several ranks. full: each stores a part of every weight and of the optimiser's state (FSDP2); none: each
    stores all. auto: full on GPUs, none on CPUs."""
    weights: Free[WeightsConfig] = WeightsConfig()

    @model_validator(mode="after")
    def _batch_divides(self) -> "SFTConfig":
        if self.data.streaming and self.max_steps is None:
            raise ValueError("data.streaming has no end: give max_steps")
        micro = self.data.micro_batch_size
        if micro and self.data.batch_size % micro:
            raise ValueError(
                f"data.batch-size {self.data.batch_size} is not a multiple of data.micro-batch-size {micro}"
            )
        check_optimizer(self.lora, self.optim)
        return self
