"""Configuration of `inference`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from hone.config.sections import ModelConfig, ServeConfig


class InferenceConfig(ServeConfig):
    model: ModelConfig
    adapters: dict[str, Path] = Field(default={})
    """LoRA adapters in peft's format, by the name under which requests ask for them."""
    seed: int = 0
    """Of random weights, with model.random-init."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """How much is logged."""
