"""Configuration of `inference`."""

from typing import Annotated, Literal

from pydantic import Field

from hone.config.base import Config
from hone.config.sections import EngineConfig, ModelConfig


class ServerConfig(Config):
    host: str | None = None
    """Address to bind; 127.0.0.1 without an API key, all interfaces with one."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 8000
    """Port; 0 takes a free one."""


class InferenceConfig(EngineConfig):
    model: ModelConfig
    server: ServerConfig = ServerConfig()
    api_key: str | None = None
    """Key that requests must carry as a bearer token."""
    seed: int = 0
    """Of random weights, with model.random-init."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """How much is logged."""
