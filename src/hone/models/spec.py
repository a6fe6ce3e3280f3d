"""The shape of a model, read from a Hugging Face `config.json`. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
ELSEWHERE = "; vLLM samples from other models (--backend vllm)"


@dataclass(frozen=True)
class Llama3Rope:
    """Rotary frequencies of Llama 3.1: slow ones are divided by `factor`, fast ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


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
    qkv_bias: bool
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = True
    rope_scaling: Llama3Rope | None = None

    @property
    def qkv_splits(self) -> tuple[int, int, int]:
        """Rows of the fused qkv weight that belong to q, k and v."""
        kv = self.num_key_value_heads * self.head_dim
        return self.num_attention_heads * self.head_dim, kv, kv

    def flops_per_token(self, context: float = 0.0, head: float = 1.0) -> float:
        """Forward FLOPs of one token (2 a multiply-add) that attends to `context` others, the LM head for a share."""
        q, k, v = self.qkv_splits
        layer = self.hidden_size * (2 * q + k + v) + 3 * self.hidden_size * self.intermediate_size
        logits = self.vocab_size * self.hidden_size
        return 2.0 * (self.num_hidden_layers * (layer + 2 * q * context) + head * logits)


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
    architecture = (config.get("architectures") or ["(none named)"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ValueError(f"{origin}: architecture {architecture} is not supported; supported: {supported}{ELSEWHERE}")
    for key, meant in (("use_sliding_window", False), ("partial_rotary_factor", 1.0), ("hidden_act", "silu")):
        found = config.get(key)
        if found is not None and found != meant:
            raise ValueError(f"{origin}: {key} {found!r} is not supported; supported: {meant!r}{ELSEWHERE}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{origin}: partial_rotary_factor other than 1.0 is not supported{ELSEWHERE}")
    is_llama = architecture == "LlamaForCausalLM"
    has_bias = bool(config.get("attention_bias", False))
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
            qkv_bias=has_bias or architecture == "Qwen2ForCausalLM",
            out_bias=has_bias and architecture != "Qwen2ForCausalLM",
            mlp_bias=is_llama and bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            rope_scaling=_rope_scaling(rope, origin),
        )
    except KeyError as error:
        raise ValueError(f"{origin}: key {error.args[0]!r} is missing") from None
    if spec.num_attention_heads % spec.num_key_value_heads:
        raise ValueError(
            f"{origin}: num_attention_heads {heads} is not a multiple of num_key_value_heads {spec.num_key_value_heads}"
        )
    return spec


def _rope_scaling(rope: dict[str, Any], origin: str) -> Llama3Rope | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"{origin}: rope type {kind!r} is not supported; supported: 'default', 'llama3'{ELSEWHERE}")
    return Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )
