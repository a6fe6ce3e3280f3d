"""Configuration of `hone probe`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hone.config.base import Config
from hone.config.lora_config import LoRAConfig
from hone.config.sections import ModelConfig, Positive, Url, as_list


class ProbeConfig(Config):
    model: ModelConfig
    lora: LoRAConfig | None = None
    """Look at training with an adapter like this one, drawn at random, beside frozen weights."""
    rollouts: Positive = 200
    """Rollouts to sample, of random tokens: single ones and many at once, of one prompt, and such that go on."""
    max_tokens: Annotated[int, Field(ge=2)] = 256
    """Most tokens of a completion, and of what is new in a prompt."""
    lengths: Annotated[list[Positive], BeforeValidator(as_list)] = Field(default=[])
    """Tokens of the prompts, in turn; unless given, each has up to max_tokens new ones."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature, also used for the compared logprobs."""
    seed: int = 0
    """Seed of all random draws."""
    server: Url | None = None
    """A server of Hone's, whatever computes behind it (`--backend vllm`), that serves this model under this name: its
    rollouts are looked at instead of the engine's, with chats of random letters."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Least important kind of message that is printed and logged."""
