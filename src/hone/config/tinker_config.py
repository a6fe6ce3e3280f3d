"""Configuration of `hone tinker`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hone.config.sections import (
    DEFAULT_MODEL,
    EngineConfig,
    ModelConfig,
    Positive,
    ServerConfig,
    as_list,
)


class TinkerConfig(EngineConfig):
    model: ModelConfig = ModelConfig(name=DEFAULT_MODEL)
    served_names: Annotated[list[str], BeforeValidator(as_list)] = Field(default=[])
    """Further names by which clients may ask for the model, such as Qwen/Qwen3-8B for a directory."""
    directory: Path = Path("outputs/tinker")
    """Directory of the checkpoints that clients save, which outlive the server."""
    merge: bool = True
    """Merge the snapshot that samples into a copy of the weights, which is fastest; snapshots take turns. False: no
    copy, and several snapshots sample together, each as an adapter that every decoding step pays for."""
    sampling_adapters: Positive = 4
    """With merge false: snapshots that sample at the same time; others wait."""
    training_adapters: Positive = 8
    """Models in training, of rank 32, that memory of a GPU is kept for; more, or larger ones, may not find any."""
    server: ServerConfig = ServerConfig()
    api_key: str | None = None
    """Secret of the clients, which send it with tml- before it: TINKER_API_KEY=tml-SECRET. Also read from the
    environment variable HONE_API_KEY, or from the file that HONE_API_KEY_FILE names."""
    seed: int = 0
    """Seed of the random weights of model.random_init."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Least important kind of message that is printed and logged."""
