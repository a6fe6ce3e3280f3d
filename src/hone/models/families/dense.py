"""Dense families: the fields of ModelSpec that each reads from its `config.json` in its own way.

Each function returns fields that replace those of `families._parse_common_fields`. Imports no torch.
"""

from collections.abc import Mapping
from typing import Any

from hone.models.rope import NotImplementedHere, Rope, parse_rope
from hone.models.spec import BlockOptions, LayerAttention

Config = Mapping[str, Any]
Fields = dict[str, Any]
FULL = "full_attention"
SLIDING = "sliding_attention"
ORIGINAL_LENGTH = "original_max_position_embeddings"


def read_head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def parse_layers(config: Config, origin: str, kinds: list[str]) -> tuple[LayerAttention, ...]:
    """Return the layers of a model whose rotation is the same, or differs by the kind of layer."""
    count = int(config["num_hidden_layers"])
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown or len(kinds) != count:
        found = f"the kind {unknown[0]}" if unknown else f"{len(kinds)} kinds for {count} layers"
        raise NotImplementedHere(
            f"{origin}: layer_types with {found}; supported: {FULL}, {SLIDING}, one a layer"
        )
    window = config.get("sliding_window")
    windows = {FULL: None, SLIDING: int(window) if window else None}
    ropes = {kind: _parse_kind_rope(config, kind, origin) for kind in set(kinds)}
    return tuple(LayerAttention(ropes[kind], windows[kind]) for kind in kinds)


def parse_full_layers(config: Config, origin: str) -> tuple[LayerAttention, ...]:
    """Return layers that all have full attention."""
    return parse_layers(config, origin, [FULL] * int(config["num_hidden_layers"]))


def _parse_kind_rope(config: Config, kind: str, origin: str) -> Rope:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if {FULL, SLIDING} & found.keys():
        keys = found.get(kind) or {}
    else:  # of all layers; the original length may stand beside it
        length = {key: config[key] for key in (ORIGINAL_LENGTH,) if config.get(key)}
        keys = {**found, **length}
    return parse_rope(keys, dict(config), read_head_dim(config), origin)


def _refuse_flat_rope(config: Config, origin: str) -> None:
    """Raise NotImplementedHere if `rope_parameters` do not name the layers that they are of."""
    found = config.get("rope_parameters")
    if found and not {FULL, SLIDING} & found.keys():
        raise NotImplementedHere(f"{origin}: rope_parameters without {FULL} and {SLIDING}")


def _repeat_kinds(config: Config, period: int) -> list[str]:
    """Return the layers' kinds: `layer_types`, or every `period`-th full and the others sliding."""
    count = int(config["num_hidden_layers"])
    default = [SLIDING if (i + 1) % period else FULL for i in range(count)]
    return list(config.get("layer_types") or default)


def parse_llama(config: Config, origin: str) -> Fields:
    return {"qk_norm": None, "mlp_bias": bool(config.get("mlp_bias", False))}


def _parse_qwen_layers(config: Config, origin: str) -> tuple[LayerAttention, ...]:
    if not config.get("use_sliding_window"):
        return parse_full_layers(config, origin)
    count = int(config["num_hidden_layers"])
    first = int(config.get("max_window_layers", 28))
    kinds = config.get("layer_types") or [SLIDING if i >= first else FULL for i in range(count)]
    return parse_layers({"sliding_window": 4096, **config}, origin, list(kinds))


def parse_qwen3(config: Config, origin: str) -> Fields:
    return {"qk_norm": "head", "layers": _parse_qwen_layers(config, origin)}


def parse_qwen2(config: Config, origin: str) -> Fields:
    layers = _parse_qwen_layers(config, origin)
    return {"qk_norm": None, "qkv_bias": True, "out_bias": False, "layers": layers}


def parse_mistral(config: Config, origin: str) -> Fields:
    """Mistral: a window on all layers, if there is one; no biases."""
    kind = SLIDING if config.get("sliding_window") else FULL
    layers = parse_layers(config, origin, [kind] * int(config["num_hidden_layers"]))
    return {"qk_norm": None, "qkv_bias": False, "out_bias": False, "layers": layers}


def parse_ministral3(config: Config, origin: str) -> Fields:
    """Ministral 3: Mistral with YaRN, and queries that grow with the position."""
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        raise NotImplementedHere(f"{origin}: rope_parameters are missing")
    return parse_mistral(config, origin)


def parse_smollm3(config: Config, origin: str) -> Fields:
    """SmolLM3: Llama with some layers that are not rotated."""
    count = int(config["num_hidden_layers"])
    period = int(config.get("no_rope_layer_interval", 4))
    rotated = config.get("no_rope_layers") or [(i + 1) % period != 0 for i in range(count)]
    if len(rotated) < count:
        raise ValueError(f"{origin}: no_rope_layers has {len(rotated)} numbers for {count} layers")
    kinds = [FULL] * count
    if config.get("use_sliding_window") and config.get("sliding_window"):
        default = [FULL if is_rotated else SLIDING for is_rotated in rotated[:count]]
        kinds = list(config.get("layer_types") or default)
    parsed = parse_layers({"rope_theta": 2e6, **config}, origin, kinds)
    layers = tuple(
        layer if is_rotated else LayerAttention(None, layer.window)
        for layer, is_rotated in zip(parsed, rotated, strict=False)
    )
    tied = bool(config.get("tie_word_embeddings", True))
    return parse_llama(config, origin) | {"layers": layers, "tie_word_embeddings": tied}


def parse_olmo2(config: Config, origin: str) -> Fields:
    return {"qk_norm": "whole", "block": BlockOptions(norms="after")}


def parse_olmo3(config: Config, origin: str) -> Fields:
    """OLMo 3: OLMo 2 with windows; `rope_scaling`, as older files have it, is of full layers alone."""
    _refuse_flat_rope(config, origin)
    rope = config.get("rope_parameters")
    if not rope:
        theta = {"rope_theta": config.get("rope_theta", 5e5)}
        rope = {FULL: theta | dict(config.get("rope_scaling") or {}), SLIDING: theta}
    windows = {"sliding_window": config.get("sliding_window", 4096), "rope_parameters": rope}
    layers = parse_layers({**config, **windows}, origin, _repeat_kinds(config, 4))
    return parse_olmo2(config, origin) | {"layers": layers}


GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
GEMMA2_DEFAULTS = GEMMA3_DEFAULTS | {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def _parse_gemma(config: Config, origin: str) -> Fields:
    if config.get("use_bidirectional_attention"):
        raise NotImplementedHere(f"{origin}: use_bidirectional_attention is not supported")
    return {
        "attention_scale": float(config["query_pre_attn_scalar"]) ** -0.5,
        "attention_cap": config.get("attn_logit_softcapping"),
        "logit_cap": config.get("final_logit_softcapping"),
        "embedding_factor": int(config["hidden_size"]) ** 0.5,
        "block": BlockOptions(norms="both", norm_offset=1.0, activation="gelu"),
    }


def parse_gemma2(config: Config, origin: str) -> Fields:
    layers = parse_layers(config, origin, _repeat_kinds(config, 2))
    return _parse_gemma(config, origin) | {"qk_norm": None, "layers": layers}


def parse_gemma3(config: Config, origin: str) -> Fields:
    """Gemma 3: `rope_scaling`, as older files have it, is of full layers alone."""
    _refuse_flat_rope(config, origin)
    found = config.get("rope_parameters") or {FULL: dict(config.get("rope_scaling") or {})}
    thetas = {
        FULL: config.get("rope_theta", 1e6),
        SLIDING: config.get("rope_local_base_freq", 1e4),
    }
    ropes = {kind: {"rope_theta": thetas[kind], **(found.get(kind) or {})} for kind in thetas}
    kinds = _repeat_kinds(config, int(config.get("sliding_window_pattern") or 6))
    layers = parse_layers({**config, "rope_parameters": ropes}, origin, kinds)
    return _parse_gemma(config, origin) | {"qk_norm": "head", "layers": layers}


def parse_granite(config: Config, origin: str) -> Fields:
    """Granite 3 and 4 (dense): Llama with factors."""
    factor = float(config.get("residual_multiplier", 1.0))
    return parse_llama(config, origin) | {
        "attention_scale": float(config.get("attention_multiplier", 1.0)),
        "embedding_factor": float(config.get("embedding_multiplier", 1.0)),
        "logit_factor": 1.0 / float(config.get("logits_scaling", 1.0)),
        "block": BlockOptions(branch_factor=factor),
    }


def parse_phi3(config: Config, origin: str) -> Fields:
    """Phi-3 and Phi-4-mini: fused projections, partial rotation, LongRoPE under three names."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = dict(config.get(key) or {})
    if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
        rope["rope_type"] = "longrope"
    return parse_mistral({**config, key: rope}, origin) | {"fuses_projections": True}
