"""Model families: parse a Hugging Face `config.json` into the ModelSpec of its family.

Imports no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hone.config.sections import Implementation
from hone.models.families import dense, gemma4, gpt_oss, qwen3_5
from hone.models.families.hf_spec import is_installed, parse_hf_config, refuse_quantized
from hone.models.families.qwen3_5 import Qwen35, parse_qwen3_5
from hone.models.families.qwen3_moe import Qwen3Moe, parse_qwen3_moe
from hone.models.rope import NotImplementedHere, ShortRope
from hone.models.spec import ModelSpec

Config = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """How the config.json of an architecture is read.

    Attributes:
        parse: returns the fields that replace those of `_parse_common_fields`.
        spec: class of the shape.
        defaults: values of keys that a config.json may leave out, as in transformers' class.
        activation: supported value of `hidden_act` or `hidden_activation`.
        rotates_part: True if heads may be rotated in part.
        packed_format: quantized weights that are read, by `quant_method`; "": none.
    """

    parse: Callable[[Config, str], dict[str, Any]]
    spec: type[ModelSpec] = ModelSpec
    defaults: Config = field(default_factory=dict)
    activation: str = "silu"
    rotates_part: bool = False
    packed_format: str = ""


GELU = "gelu_pytorch_tanh"
SHORT_CONTEXT = {"max_position_embeddings": 2048}
OLMO_DEFAULTS = SHORT_CONTEXT | {"rms_norm_eps": 1e-5}
MISTRAL_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
MINISTRAL3_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
}
PHI3_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    dense.ORIGINAL_LENGTH: 4096,
}
FAMILIES = {
    "Qwen3ForCausalLM": Family(
        dense.parse_qwen3, defaults={"head_dim": 128, "num_key_value_heads": 32}
    ),
    "Qwen2ForCausalLM": Family(dense.parse_qwen2, defaults={"num_key_value_heads": 32}),
    "LlamaForCausalLM": Family(dense.parse_llama, defaults=SHORT_CONTEXT),
    "Qwen3MoeForCausalLM": Family(parse_qwen3_moe, Qwen3Moe, defaults={"num_key_value_heads": 4}),
    "Gemma2ForCausalLM": Family(
        dense.parse_gemma2, defaults=dense.GEMMA2_DEFAULTS, activation=GELU
    ),
    "Gemma3ForCausalLM": Family(
        dense.parse_gemma3, defaults=dense.GEMMA3_DEFAULTS, activation=GELU
    ),
    "Gemma4ForCausalLM": Family(
        gemma4.parse_gemma4, gemma4.Gemma4, defaults=gemma4.DEFAULTS, activation=GELU
    ),
    "GptOssForCausalLM": Family(
        gpt_oss.parse_gpt_oss,
        gpt_oss.GptOss,
        gpt_oss.DEFAULTS,
        packed_format=gpt_oss.PACKED_FORMAT,
    ),
    "GraniteForCausalLM": Family(dense.parse_granite, defaults=SHORT_CONTEXT),
    "Ministral3ForCausalLM": Family(dense.parse_ministral3, defaults=MINISTRAL3_DEFAULTS),
    "MistralForCausalLM": Family(dense.parse_mistral, defaults=MISTRAL_DEFAULTS),
    "Olmo2ForCausalLM": Family(dense.parse_olmo2, defaults=OLMO_DEFAULTS),
    "Olmo3ForCausalLM": Family(dense.parse_olmo3, defaults=OLMO_DEFAULTS),
    "Phi3ForCausalLM": Family(dense.parse_phi3, defaults=PHI3_DEFAULTS, rotates_part=True),
    "Qwen3_5ForCausalLM": Family(
        parse_qwen3_5, Qwen35, defaults=qwen3_5.DEFAULTS, rotates_part=True
    ),
    "Qwen3_5MoeForCausalLM": Family(
        qwen3_5.parse_qwen3_5_moe,
        qwen3_5.Qwen35Moe,
        defaults=qwen3_5.MOE_DEFAULTS,
        rotates_part=True,
    ),
    "SmolLM3ForCausalLM": Family(dense.parse_smollm3, defaults={"num_key_value_heads": 4}),
}
# Models with other parts whose text part is a model of the table, by its model_type.
WITH_TEXT_PART = {
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
}
TEXT_PARTS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
ALTERNATIVES_HINT = (
    "; transformers, if it is installed (the extra transformers), computes others, and vLLM samples from them "
    "(--backend vllm)"
)


def _find_text_part(config: Config) -> tuple[str, Config]:
    """Return the architecture of a config.json's language model, and the keys that describe it."""
    architecture = (config.get("architectures") or ["(none named)"])[0]
    if architecture not in WITH_TEXT_PART or not isinstance(config.get("text_config"), dict):
        return architecture, config
    text = config["text_config"]
    own = TEXT_PARTS.get(str(text.get("model_type")), architecture)
    if "tie_word_embeddings" in config:
        text = {**text, "tie_word_embeddings": config["tie_word_embeddings"]}
    return own, text


def is_known(config: Config) -> bool:
    """Return True if a `config.json` belongs to one of Hone's families."""
    return _find_text_part(config)[0] in FAMILIES


def parse_model_config(
    config: Config, origin: str = "config.json", implementation: Implementation = "auto"
) -> ModelSpec:
    """Return the ModelSpec of a `config.json`; `origin` names the file in errors.

    Args:
        implementation: "hone": Hone's own blocks; "transformers": transformers' modules; "auto":
            Hone's where there are some for the model.

    Raises:
        ValueError: the implementation does not have the architecture or an option: a model that
            would compute something else than intended is refused, not approximated.
    """
    if implementation == "transformers":
        return parse_hf_config(config, origin)
    try:
        return _parse_own(config, origin)
    except NotImplementedHere as error:
        if implementation == "hone" or not is_installed():
            raise
        reason = str(error).removesuffix(ALTERNATIVES_HINT) if is_known(config) else ""
        return parse_hf_config(config, origin, reason)


def _parse_own(config: Config, origin: str) -> ModelSpec:
    architecture, text = _find_text_part(config)
    family = FAMILIES.get(architecture)
    if family is None:
        supported = ", ".join([*FAMILIES, *sorted(WITH_TEXT_PART)])
        raise NotImplementedHere(
            f"{origin}: architecture {architecture} is not supported; supported: {supported}{ALTERNATIVES_HINT}"
        )
    has_other_parts = text is not config
    refuse_quantized(config, origin, family.packed_format)
    text = family.defaults | text
    ropes = [text[key] for key in ("rope_parameters", "rope_scaling") if text.get(key)]
    if len(ropes) > 1 and ropes[0] != ropes[1]:
        raise NotImplementedHere(
            f"{origin}: rope_parameters and rope_scaling differ; give one of them{ALTERNATIVES_HINT}"
        )
    try:
        fields = _parse_common_fields(text, family, origin) | family.parse(text, origin)
        if "layers" not in fields:
            fields["layers"] = dense.parse_full_layers(text, origin)
    except NotImplementedHere as error:
        raise NotImplementedHere(f"{error}{ALTERNATIVES_HINT}") from None
    except KeyError as error:
        # transformers' classes have defaults for keys that a text part leaves out
        kind = NotImplementedHere if has_other_parts else ValueError
        raise kind(f"{origin}: key {error.args[0]!r} is missing") from None
    lengths = [fields["max_position_embeddings"]]
    for layer in fields["layers"]:
        if layer.rope is not None and isinstance(layer.rope.scaling, ShortRope):
            lengths.append(layer.rope.scaling.original_length)
    fields["max_position_embeddings"] = min(lengths)
    spec = family.spec(**fields, is_text_part=has_other_parts)
    head_sizes = getattr(spec, "head_sizes", (spec.head_dim,) * len(spec.layers))
    has_parts = any(
        layer.rope and layer.rope.width != size
        for layer, size in zip(spec.layers, head_sizes, strict=True)
    )
    if has_parts and not family.rotates_part:
        raise NotImplementedHere(
            f"{origin}: partial_rotary_factor other than 1.0 is not supported{ALTERNATIVES_HINT}"
        )
    if spec.num_attention_heads % spec.num_key_value_heads:
        raise ValueError(
            f"{origin}: num_attention_heads {spec.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{spec.num_key_value_heads}"
        )
    return spec


def _parse_common_fields(config: Config, family: Family, origin: str) -> dict[str, Any]:
    """Return the fields as most families read them, without the layers."""
    found = config.get("hidden_activation") or config.get("hidden_act")
    if found is not None and found != family.activation:
        raise NotImplementedHere(
            f"{origin}: hidden_act {found!r} is not supported; supported: {family.activation!r}"
        )
    heads = int(config["num_attention_heads"])
    has_bias = bool(config.get("attention_bias", False))
    return {
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": int(config["hidden_size"]),
        "intermediate_size": int(config["intermediate_size"]),
        "num_hidden_layers": int(config["num_hidden_layers"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": dense.read_head_dim(config),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_position_embeddings": int(config.get("max_position_embeddings", 32768)),
        "initializer_range": float(config.get("initializer_range", 0.02)),
        "qkv_bias": has_bias,
        "out_bias": has_bias,
    }
