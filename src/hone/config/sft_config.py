"""Configuration of `sft`."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from hone.config.base import Config, Free
from hone.config.sections import (
    EvalConfig,
    OnBadStep,
    Positive,
    ResumableConfig,
    Share,
    WeightsConfig,
    as_list,
)
from hone.config.training_config import TrainingConfig

UNKNOWN_ROW_TOKENS = 1024  # row length while the data has not been read
Role = Literal["system", "user", "assistant", "tool"]


class DataConfig(Config):
    name: Annotated[list[str], BeforeValidator(as_list), Field(min_length=1)]
    """Training data: a hub id, a .jsonl, .json, .csv, .parquet or .arrow file, a folder that `save_to_disk` of datasets
    wrote, or a list of them. Rows have `messages`, or `prompt` and `completion`; with the section dpo they have
    `chosen` and `rejected`, and `prompt` where these are answers alone."""
    weights: Annotated[list[Annotated[float, Field(gt=0)]], BeforeValidator(as_list)] | None = None
    """How often each data set is used in an epoch, one number per data set: 2 uses every row twice, 0.5 a random half
    of the rows, drawn anew in each epoch."""
    fake: bool = False
    """Train on random tokens instead of data.name, to measure speed: conversations of a quarter of seq_len up to
    seq_len, with a loss on every token."""
    split: str = "train"
    """Split, for a data set from the hub."""
    train_on: Annotated[list[Role], BeforeValidator(as_list), Field(min_length=1)] = Field(
        default=["assistant"]
    )
    """Roles whose messages have a loss; other messages are context only."""
    seq_len: Positive | None = None
    """Tokens in a row of the batch; longer conversations are left out, and the log says how many. Unless given, the
    longest conversation of the data fits, as far as the model has positions for it, and up to 8,192 tokens."""
    max_left_out: Share = 0.2
    """Share of the rows that may be left out because they are too long, cannot be rendered or have nothing to learn;
    above it the run ends before its first step."""
    rewritten_turns: Literal["split", "last"] = "split"
    """What a conversation becomes whose template writes earlier turns differently once it goes on (some leave out
    earlier thinking). split: a sample for every group of turns that one rendering shows as they were written; last: one
    sample, with a loss on the turns that the whole conversation shows so."""
    batch_size: Positive = 128
    """Rows of seq_len tokens in one optimiser step."""
    micro_batch_size: Free[Positive | None] = None
    """Rows in one forward and backward pass; fewer need less memory and give the same step. Unless given, as many
    as fit the device's memory, on a GPU up to 65,536 tokens."""
    pack: Literal["cat", "stack"] = "cat"
    """How conversations become rows. cat: as many whole ones as fit, which never attend to each other; stack: one per
    row."""
    shuffle: bool = True
    """Draw a new order of the conversations in every epoch."""
    streaming: bool = False
    """Read data while training instead of loading it all first, and start over at its end; needs max_steps.
    data.weights are then shares of rows."""
    buffer: Positive = 1000
    """streaming with shuffle: rows held in memory, from which the next one is drawn; more mix better."""

    @model_validator(mode="before")
    @classmethod
    def _fake_needs_no_name(cls, values: Any) -> Any:
        is_nameless = isinstance(values, dict) and values.get("fake") and "name" not in values
        return {"name": "fake", **values} if is_nameless else values

    @model_validator(mode="after")
    def _a_weight_each(self) -> "DataConfig":
        if self.weights is not None and len(self.weights) != len(self.name):
            raise ValueError(
                f"data.weights has {len(self.weights)} values, data.name {len(self.name)} data sets"
            )
        return self


class DPOConfig(Config):
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the model is held to the reference, which is the initial model: smaller values let it move
    further."""
    type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Loss of a pair. sigmoid: DPO; hinge: max(0, 1 - beta margin), as in SLiC; ipo: (margin - 1 / (2 beta))^2, with
    log-probabilities averaged over the tokens of an answer."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """sigmoid: share of the pairs whose preference is assumed to be the wrong way round (conservative DPO)."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a second loss, the mean of -log p over the tokens of the chosen answer, which keeps its probability
    from falling."""

    @model_validator(mode="after")
    def _only_sigmoid_is_smoothed(self) -> "DPOConfig":
        if self.label_smoothing and self.type != "sigmoid":
            raise ValueError(f"dpo.label_smoothing needs dpo.type sigmoid, found {self.type}")
        return self


class ValConfig(Config):
    name: str
    """Validation data, a hub id or a local file like data.name."""
    split: str = "train"
    """Split, for a data set from the hub."""
    interval: Positive = 100
    """Compute the validation loss every this many steps, and after the last."""


class SFTConfig(TrainingConfig, ResumableConfig):
    PRIME_RL_SECTION: ClassVar[str] = "trainer."
    CAN_FORK: ClassVar[bool] = False

    data: DataConfig
    val: Free[ValConfig | None] = None
    eval: Free[EvalConfig | None] = None
    """Evaluate on environments while training; not done unless a key of this section is given."""
    bench: Free[bool] = False
    """Measure speed instead of training: 3 steps of warm-up, 10 measured ones, a table; nothing is written."""
    max_steps: Free[Positive | None] = None
    """Optimiser steps to train for; one pass over the data unless given."""
    max_seconds: Free[Annotated[float, Field(gt=0)] | None] = None
    """Stop after this many seconds of training, if max_steps is not reached before."""
    on_bad_step: Free[OnBadStep] = "stop"
    """What to do when gradients are not finite or above optim.skip_norm: stop ends the run, skip continues without that
    step. Either way the worst conversations are written to bad_steps/."""
    dpo: DPOConfig | None = None
    """Train on pairs of a chosen and a rejected answer by direct preference optimization, when a key of this section is
    given, for example --dpo.beta 0.1. The two answers of a pair share a row of seq_len tokens."""
    weights: Free[WeightsConfig] = WeightsConfig()

    @property
    def keeps_reference_copy(self) -> bool:
        """Return True if a copy of the initial model is kept as the reference of `dpo`."""
        return self.dpo is not None and not (self.lora and self.lora.keeps_reference)

    @model_validator(mode="after")
    def _batch_divides(self) -> "SFTConfig":
        if self.data.streaming and self.max_steps is None:
            raise ValueError("data.streaming has no end: give max_steps")
        if self.dpo and self.context_parallel > 1:
            raise ValueError("context_parallel: dpo compares whole answers; take 1")
        if self.dpo and self.data.fake:
            raise ValueError("data.fake has no pairs for dpo: give data.name")
        micro = self.data.micro_batch_size
        if micro and self.data.batch_size % micro:
            raise ValueError(
                f"data.batch-size {self.data.batch_size} is not a multiple of data.micro-batch-size {micro}"
            )
        return self
