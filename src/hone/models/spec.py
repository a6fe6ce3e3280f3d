"""The shape of a model, read from a Hugging Face `config.json`. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM",)


@dataclass(frozen=True)
class ModelSpec:
    """What the transformer needs to know about itself; names follow `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float
    qkv_bias: bool  # q, k, v and output projections carry a bias (`attention_bias`)

    @property
    def qkv_splits(self) -> tuple[int, int, int]:
        """Rows of the fused qkv weight that belong to q, k and v."""
        kv = self.num_key_value_heads * self.head_dim
        return self.num_attention_heads * self.head_dim, kv, kv

    def flops_per_token(self, context: float = 0.0) -> float:
        """Forward FLOPs of one token that attends to `context` others (2 a multiply-add), the LM head included."""
        q, k, v = self.qkv_splits
        layer = self.hidden_size * (2 * q + k + v) + 3 * self.hidden_size * self.intermediate_size
        head = self.vocab_size * self.hidden_size
        return 2.0 * (self.num_hidden_layers * (layer + 2 * q * context) + head)


def read_model_config(directory: Path) -> dict[str, Any]:
    """The parsed `config.json` of a model directory; ValueError names the file when it is missing or broken."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} is not a model directory: it has no config.json")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    return config


def parse_model_config(config: dict[str, Any], origin: str = "config.json") -> ModelSpec:
    """`config.json` as a ModelSpec.

    Raises ValueError for an architecture or an option that the transformer does not implement: a model
    that would compute something else than its authors meant is refused, not approximated.
    """
    architectures = config.get("architectures") or ["(none named)"]
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ValueError(f"{origin}: architecture {architectures[0]} is not supported; supported: {supported}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ValueError(f"{origin}: rope type {rope_type!r} is not supported; supported: 'default'")
    if config.get("use_sliding_window"):
        raise ValueError(f"{origin}: use_sliding_window = true is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{origin}: hidden_act {config['hidden_act']!r} is not supported; supported: 'silu'")
    try:
        heads = int(config["num_attention_heads"])
        spec = ModelSpec(
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_hidden_layers=int(config["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_position_embeddings=int(config.get("max_position_embeddings", 32768)),
            initializer_range=float(config.get("initializer_range", 0.02)),
            qkv_bias=bool(config.get("attention_bias", False)),
        )
    except KeyError as error:
        raise ValueError(f"{origin}: key {error.args[0]!r} is missing") from None
    if spec.num_attention_heads % spec.num_key_value_heads:
        raise ValueError(
            f"{origin}: num_attention_heads {heads} is not a multiple of num_key_value_heads {spec.num_key_value_heads}"
        )
    return spec
