"""Shape of a model that transformers computes: any of its causal language models.

Imports no torch. Figures of memory and FLOPs are those of a dense model of this shape.
"""

import importlib.util
import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from hone.models.spec import ModelSpec

NOT_SHAPE = ("dtype", "torch_dtype", "transformers_version")
HYBRID_KIND = "hybrid"  # attention and a mixer side by side
ATTENTION_KINDS = ("full_attention", "sliding_attention", HYBRID_KIND)
MIXER_KINDS = ("linear_attention", "conv", "mamba", HYBRID_KIND)
OTHER_KINDS = ("mlp", "moe")
# peft refuses adapters of out_proj there: kernels of Mamba read the weight alone.
WITHOUT_OUT_PROJ = ("falcon_h1", "nemotron_h")
FEED_FORWARD_PARTS = ("mlp", "moe", "expert", "feed_forward")  # in names of modules


@dataclass(frozen=True)
class HFSpec(ModelSpec):
    """Shape of a model on transformers' modules; `config_text` is its config.json.

    `head_dim` is the largest of all layers, `num_key_value_heads` their least common multiple.
    """

    config_text: str = ""
    window: int | None = None
    original_length: int | None = None  # before rotation was scaled
    experts: int = 1
    active_experts: int = 1
    layer_kinds: tuple[str, ...] = ()
    own_reason: str = ""  # why Hone's own implementation does not compute the model

    implementation: ClassVar[str] = "transformers"

    @property
    def has_fast_paths(self) -> bool:
        return False

    @property
    def shares_pages(self) -> bool:
        return False  # windows and caps of layers are known in a pass only

    @property
    def attention_layers(self) -> int:
        return sum(kind in ATTENTION_KINDS for kind in self.layer_kinds)

    @property
    def mixer_layers(self) -> int:
        return sum(kind in MIXER_KINDS for kind in self.layer_kinds)

    def can_adapt(self, name: str) -> bool:
        kind = self.config.get("model_type")
        if kind in WITHOUT_OUT_PROJ and name.removesuffix(".weight").endswith(".out_proj"):
            return False
        if self.experts == 1:
            return True
        # peft reads gate_proj and its like as parts of the experts.
        layer = next((int(part) for part in name.split(".") if part.isdigit()), 0)
        mixes_tokens = self.layer_kinds[layer] in (*ATTENTION_KINDS, *MIXER_KINDS)
        return mixes_tokens and not any(part in name for part in FEED_FORWARD_PARTS)

    def stacked_rows(self, name: str) -> int:
        return 0

    @property
    def context_marks(self) -> tuple[int, ...]:
        return tuple(mark for mark in (self.window, self.original_length) if mark)

    @property
    def active_feed_forward(self) -> int:
        return self.active_experts * super().active_feed_forward

    @property
    def feed_forward_size(self) -> int:
        return self.experts * super().active_feed_forward

    @cached_property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self.config_text)
        return config


def is_installed() -> bool:
    """Return True if transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None


def refuse_quantized(config: dict[str, Any], origin: str, supported: str = "") -> None:
    """Raise ValueError if config.json says that the weights are stored quantized.

    `supported` is a `quant_method` that is read nevertheless.
    """
    text = config.get("text_config")
    parts = [config, text if isinstance(text, dict) else {}]
    for found in filter(None, (part.get("quantization_config") for part in parts)):
        method = found.get("quant_method") if isinstance(found, dict) else found
        if method != supported:
            but = f", but for {supported}" if supported else ""
            raise ValueError(
                f"{origin}: quantized weights (quantization_config: {method}) are not supported{but}; "
                "convert them to bfloat16"
            )


def parse_hf_config(config: dict[str, Any], origin: str, own_reason: str = "") -> HFSpec:
    """Return the shape of a model that transformers computes. Raises ValueError.

    Keys that a config.json leaves out have the values of transformers' configuration class.
    `own_reason` says why Hone's own implementation does not compute the model, for errors.
    """
    refuse_quantized(config, origin)
    try:
        text = make_text_config(config, origin)
        return replace(_parse_text(config, text, origin), own_reason=own_reason)
    except ValueError as error:
        if own_reason:
            raise ValueError(f"{own_reason}; on transformers' modules: {error}") from None
        raise
    except Exception as error:  # transformers raises its own error for keys that differ by layer
        first = str(error).splitlines()[0]
        raise ValueError(f"{origin}: not supported on transformers' modules: {first}") from None


def _parse_text(config: dict[str, Any], text: Any, origin: str) -> HFSpec:

    def read(*names: str) -> Any:
        return next((found for x in names if (found := getattr(text, x, None)) is not None), None)

    heads, hidden, layers = (
        read(name) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    if None in (heads, hidden, layers):
        raise ValueError(
            f"{origin}: num_attention_heads, hidden_size or num_hidden_layers is missing"
        )
    kinds = read("layer_types", "layers_block_type") or [ATTENTION_KINDS[0]] * int(layers)
    known = dict.fromkeys((*ATTENTION_KINDS, *MIXER_KINDS, *OTHER_KINDS))
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise ValueError(
            f"{origin}: layers of the kind {unknown[0]} are not supported on transformers' modules; supported: "
            f"{', '.join(known)}"
        )
    sizes = _read_head_sizes(text, int(heads), int(hidden))
    experts = read("num_local_experts", "num_experts", "n_routed_experts") or 1
    return HFSpec(
        vocab_size=int(text.vocab_size),
        hidden_size=int(hidden),
        intermediate_size=int(read("moe_intermediate_size", "intermediate_size") or 4 * hidden),
        num_hidden_layers=int(layers),
        num_attention_heads=int(heads),
        num_key_value_heads=math.lcm(*(count for count, _ in sizes)),
        head_dim=max(size for _, size in sizes),
        rms_norm_eps=1e-6,
        layers=(),
        tie_word_embeddings=bool(text.tie_word_embeddings),
        max_position_embeddings=_find_longest(
            int(read("max_position_embeddings") or 32768), read("rope_parameters", "rope_scaling")
        ),
        initializer_range=float(read("initializer_range") or 0.02),
        qkv_bias=False,
        qk_norm=None,
        is_text_part=isinstance(config.get("text_config"), dict),
        logit_cap=read("final_logit_softcapping"),
        config_text=json.dumps({k: v for k, v in config.items() if k not in NOT_SHAPE}),
        window=read("sliding_window"),
        original_length=_find_original_length(read("rope_parameters", "rope_scaling")),
        experts=int(experts),
        layer_kinds=tuple(kinds),
        active_experts=int(read("num_experts_per_tok", "top_k_experts") or 1) if experts > 1 else 1,
    )


def _find_original_length(rope: Any) -> int | None:
    """Return the context length before the rotation was scaled, also if layers have rotations of their own."""
    if not isinstance(rope, dict):
        return None
    found = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    lengths = [part.get("original_max_position_embeddings") for part in found]
    return max((int(n) for n in lengths if n), default=None)


def _read_head_sizes(text: Any, heads: int, hidden: int) -> list[tuple[int, int]]:
    """Return number and size of the key/value heads of each layer, or of all layers alike."""
    found = []
    for layer in getattr(text, "per_layer_config", None) or [text]:
        names = ("qk_head_dim", "head_dim")
        size = next((x for name in names if (x := getattr(layer, name, None))), hidden // heads)
        found.append((int(getattr(layer, "num_key_value_heads", None) or heads), int(size)))
    return found


def _find_longest(length: int, rope: Any) -> int:
    """Return the most positions: with LongRoPE, those that have the same rotation in all sequences."""
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "longrope":
        return length
    return min(length, _find_original_length(rope) or length)


def make_text_config(config: dict[str, Any], origin: str = "config.json") -> Any:
    """Return transformers' configuration object of the language model. Raises ValueError."""
    whole = _make_config(config, origin)
    text = whole.get_text_config()
    if text is not whole:  # the whole model ties its weights or not
        text.tie_word_embeddings = whole.tie_word_embeddings
    return text


def _decode_floats(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with the floats that transformers writes as {"__float__": "Infinity"}."""

    def decode(found: dict[str, Any]) -> Any:
        return float(found["__float__"]) if found.keys() == {"__float__"} else found

    decoded: dict[str, Any] = json.loads(json.dumps(config), object_hook=decode)
    return decoded


def _make_config(config: dict[str, Any], origin: str) -> Any:
    kind = str(config.get("model_type"))
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        raise ValueError(
            f"{origin}: a model of type {kind} is computed by transformers, which is not installed; install the extra "
            "transformers (uv sync --extra transformers)"
        ) from None
    if kind not in CONFIG_MAPPING.keys():  # noqa: SIM118, a mapping that loads its values
        raise ValueError(f"{origin}: this version of transformers has no model of type {kind}")
    try:
        return CONFIG_MAPPING[kind].from_dict(_decode_floats(config))
    except Exception as error:  # each configuration class checks in its own way
        found = " ".join(str(error).split())
        raise ValueError(f"{origin}: transformers refuses it: {found}") from None
