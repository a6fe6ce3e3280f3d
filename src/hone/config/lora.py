"""Configuration of LoRA. Imports no torch."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hone.config.base import Config
from hone.config.sections import OptimConfig, Positive, as_list

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Saved = Literal["embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"]
ALL: list[Target] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoRAConfig(Config):
    rank: Positive = 16
    """Of the product B A that is added to each weight."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The product is scaled by alpha / rank."""
    rslora: bool = False
    """Scaled by alpha / sqrt(rank) instead."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the inputs of A that is dropped in training."""
    targets: Annotated[list[Target], BeforeValidator(as_list), Field(min_length=1)] = Field(default=ALL)
    """Which linear layers have an adapter."""
    modules_to_save: Annotated[list[Saved], BeforeValidator(as_list)] = Field(default=[])
    """Modules that are trained whole, and saved with the adapter."""
    start_from: Path | None = None
    """An adapter in peft's format to start from, of this rank; otherwise A is drawn and B is 0."""

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def check_optimizer(lora: LoRAConfig | None, optim: OptimConfig) -> None:
    if lora is not None and optim.type == "muon":
        raise ValueError("optim.type: muon moves whole weights, which lora freezes; for adapters set it to adamw")
