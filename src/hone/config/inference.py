"""Configuration of `inference`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from hone.config.sections import ModelConfig, ServeConfig


class InferenceConfig(ServeConfig):
    model: ModelConfig
    adapters: dict[str, Path] = Field(default={})
    """LoRA adapters to serve: the name that requests ask for, and a directory in peft's format."""
    seed: int = 0
    """Seed of the random weights of model.random_init."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Least important kind of message that is printed and logged."""
