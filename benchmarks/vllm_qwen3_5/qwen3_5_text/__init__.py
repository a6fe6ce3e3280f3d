"""A plugin for vLLM 0.24: Qwen3.5's text part alone, by the configuration that Hone's shapes have.

vLLM registers Qwen3_5ForConditionalGeneration only, whose configuration has a vision tower. States
stay in float32 unless the configuration says otherwise, as in published models.
"""


def register() -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models import config

    class TextConfig(config.Qwen3_5ForConditionalGenerationConfig):
        @staticmethod
        def verify_and_update_config(vllm_config) -> None:
            text = vllm_config.model_config.hf_text_config
            if getattr(text, "mamba_ssm_dtype", None) is None:
                text.mamba_ssm_dtype = "float32"
            config.Qwen3_5ForConditionalGenerationConfig.verify_and_update_config(vllm_config)

    for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        config.MODELS_CONFIG_MAP[name] = TextConfig
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"qwen3_5_text.models:{name}")
