"""Configuration of `inference`."""

from typing import Literal

from hone.config.sections import ModelConfig, ServeConfig


class InferenceConfig(ServeConfig):
    model: ModelConfig
    seed: int = 0
    """Of random weights, with model.random-init."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """How much is logged."""
