"""Model families: parse a Hugging Face `config.json` into the ModelSpec of its family.

Imports no torch.
"""

from typing import Any

from hone.config.sections import Implementation
from hone.models.families.hf_spec import is_installed, parse_hf_config
from hone.models.families.qwen3_moe import Qwen3Moe
from hone.models.spec import Llama3Rope, ModelSpec, NotImplementedHere

FAMILIES: dict[str, type[ModelSpec]] = {
    "Qwen3ForCausalLM": ModelSpec,
    "Qwen2ForCausalLM": ModelSpec,
    "LlamaForCausalLM": ModelSpec,
    "Qwen3MoeForCausalLM": Qwen3Moe,
}
ELSEWHERE = (
    "; transformers, if it is installed (the extra transformers), computes others, and vLLM samples from them "
    "(--backend vllm)"
)


def is_known(config: dict[str, Any]) -> bool:
    """Return True if a `config.json` belongs to one of Hone's families."""
    return (config.get("architectures") or [""])[0] in FAMILIES


def parse_model_config(
    config: dict[str, Any], origin: str = "config.json", implementation: Implementation = "auto"
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
    except NotImplementedHere:
        if implementation == "hone" or not is_installed():
            raise
        return parse_hf_config(config, origin)


def _parse_own(config: dict[str, Any], origin: str) -> ModelSpec:
    architecture = (config.get("architectures") or ["(none named)"])[0]
    if architecture not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise NotImplementedHere(
            f"{origin}: architecture {architecture} is not supported; supported: {supported}{ELSEWHERE}"
        )
    family = FAMILIES[architecture]
    for key, meant in (
        ("use_sliding_window", False),
        ("partial_rotary_factor", 1.0),
        ("hidden_act", "silu"),
    ):
        found = config.get(key)
        if found is not None and found != meant:
            raise NotImplementedHere(
                f"{origin}: {key} {found!r} is not supported; supported: {meant!r}{ELSEWHERE}"
            )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotImplementedHere(
            f"{origin}: partial_rotary_factor other than 1.0 is not supported{ELSEWHERE}"
        )
    is_llama = architecture == "LlamaForCausalLM"
    has_bias = bool(config.get("attention_bias", False))
    try:
        heads = int(config["num_attention_heads"])
        spec = family(
            **family.parse_own_fields(config, origin),
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
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
            qk_norm=architecture.startswith("Qwen3"),
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
        raise NotImplementedHere(
            f"{origin}: rope type {kind!r} is not supported; supported: 'default', 'llama3'{ELSEWHERE}"
        )
    return Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )
