"""Configuration of LoRA. Imports no torch."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hone.config.base import Config, parse_untyped
from hone.config.sections import OptimConfig, Positive, as_list

Target = str  # last part of a linear's HF name, as q_proj
Saved = Literal[
    "embed_tokens",
    "lm_head",
    "norm",
    "input_layernorm",
    "post_attention_layernorm",
    "q_norm",
    "k_norm",
]


class LoRAConfig(Config):
    rank: Positive = 16
    """Rank of the product B A that is added to each adapted weight; more can learn more and needs more memory."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the adapter: its product is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply the adapter's product by alpha / sqrt(rank) instead of alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapter's inputs that is set to zero at random while training."""
    targets: Annotated[list[Target], BeforeValidator(as_list), Field(min_length=1)] | None = None
    """Linear layers that get an adapter, by the last part of their names, as q_proj; unless given all of the blocks. In
    a mixture of experts each expert has adapters of its own; on transformers' modules experts have none."""
    modules_to_save: Annotated[list[Saved], BeforeValidator(as_list)] = Field(default=[])
    """Modules whose own weights are trained too, and saved with the adapter."""
    start_from: Path | None = None
    """Directory of an adapter in peft's format to start from, of the same rank. Unless given, A is random and B is 0,
    so that training starts from the model itself."""

    base_bits: Annotated[Literal[8, 16], BeforeValidator(parse_untyped)] = 16
    """Bits of the frozen weights of the blocks' linear layers, in training and in sampling: 8 stores them as int8 with
    a scale for up to 128 inputs of a row, which takes half the memory, but for experts; activations are then always
    recomputed. Weights that are written have the model's number type."""
    merge: bool = True
    """Sample from a second copy of the adapted weights, with the adapter merged. false: compute the adapter beside the
    weights, which needs no copy and decodes more slowly; always so with base_bits 8."""

    @property
    def keeps_copy(self) -> bool:
        """Return True if the sampler holds a merged copy of the adapted weights."""
        return self.merge and self.base_bits == 16

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def keeps_reference(self) -> bool:
        """Return True if disabling the adapter gives the initial model (the KL reference)."""
        return not self.modules_to_save and self.start_from is None


def check_optimizer(lora: LoRAConfig | None, optim: OptimConfig) -> None:
    if lora is not None and optim.type == "muon":
        raise ValueError(
            "optim.type: muon moves whole weights, which lora freezes; for adapters set it to adamw"
        )
