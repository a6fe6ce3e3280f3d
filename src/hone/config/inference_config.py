"""Configuration of `inference`."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from hone.config.sections import DEFAULT_MODEL, ModelConfig, ServeConfig


class InferenceConfig(ServeConfig):
    PRIME_RL_SECTION: ClassVar[str] = "inference."

    model: ModelConfig = ModelConfig(name=DEFAULT_MODEL)
    adapters: dict[str, Path] = Field(default={})
    """LoRA adapters to serve: the name that requests ask for, and a directory in peft's format."""
    seed: int = 0
    """Seed of the random weights of model.random_init."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Least important kind of message that is printed and logged."""

    @model_validator(mode="before")
    @classmethod
    def _lift_server_keys(cls, values: Any) -> Any:
        """Move top-level `host` and `port`, vLLM's spelling, to the section `server`."""
        if not isinstance(values, dict) or not {"host", "port"} & set(values):
            return values
        flat = {key: values[key] for key in ("host", "port") if key in values}
        others = {key: value for key, value in values.items() if key not in flat}
        server = others.get("server") or {}
        if not isinstance(server, dict):
            return values
        for key in flat:
            if server.get(key, flat[key]) != flat[key]:
                raise ValueError(
                    f"{key} and server.{key} are both given, and differ; they mean the same"
                )
        return others | {"server": server | flat}
