"""Shape of a model that transformers computes: any of its causal language models.

Imports no torch. Figures of memory and FLOPs are those of a dense model of this shape.
"""

import importlib.util
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from hone.models.spec import ModelSpec

NOT_SHAPE = ("dtype", "torch_dtype", "transformers_version")
TEXT_PARTS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class BorrowedSpec(ModelSpec):
    """Shape of a model on transformers' modules; `config_text` is its config.json."""

    config_text: str = ""

    has_fast_paths: ClassVar[bool] = False
    implementation: ClassVar[str] = "transformers"

    def stacked_rows(self, name: str) -> int:
        return 0

    @cached_property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self.config_text)
        return config


def is_installed() -> bool:
    """Return True if transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes the language model."""
    for key in TEXT_PARTS:
        if isinstance(config.get(key), dict):
            return config[key] | {"tie_word_embeddings": _is_tied(config, config[key])}
    return config


def _is_tied(config: dict[str, Any], part: dict[str, Any]) -> bool:
    return bool(part.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))


def parse_borrowed(config: dict[str, Any], origin: str) -> BorrowedSpec:
    """Return the shape of a model that transformers computes. Raises ValueError.

    Keys that a config.json leaves out have the values of transformers' configuration class.
    """
    whole = _with_defaults(config, origin)
    text = text_part(whole)
    cap = text.get("final_logit_softcapping")
    try:
        heads = int(text["num_attention_heads"])
        hidden = int(text["hidden_size"])
        return BorrowedSpec(
            vocab_size=int(text["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(text.get("intermediate_size") or 4 * hidden),
            num_hidden_layers=int(text["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            rms_norm_eps=float(text.get("rms_norm_eps") or 1e-6),
            rope_theta=0.0,
            tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
            max_position_embeddings=int(text.get("max_position_embeddings") or 32768),
            initializer_range=float(text.get("initializer_range") or 0.02),
            qkv_bias=False,
            qk_norm=False,
            logit_cap=None if cap is None else float(cap),
            config_text=json.dumps({k: v for k, v in config.items() if k not in NOT_SHAPE}),
        )
    except KeyError as error:
        raise ValueError(f"{origin}: key {error.args[0]!r} is missing") from None


def _with_defaults(config: dict[str, Any], origin: str) -> dict[str, Any]:
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(
            f"{origin}: architecture {(config.get('architectures') or ['(none named)'])[0]} is computed by "
            "transformers, which is not installed: uv sync --extra transformers"
        ) from None
    kind = str(config.get("model_type", ""))
    try:
        made = AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
    except (ValueError, KeyError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{origin}: transformers does not know this model: {first}") from None
    found: dict[str, Any] = made.to_dict()
    return found
