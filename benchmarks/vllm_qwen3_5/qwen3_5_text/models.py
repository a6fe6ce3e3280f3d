"""Qwen3.5's text models with the states that vLLM asks hybrid models for."""

from vllm.model_executor.models import qwen3_5
from vllm.model_executor.models.interfaces import IsHybrid


class _States(IsHybrid):
    get_mamba_state_dtype_from_config = classmethod(
        qwen3_5.Qwen3_5ForConditionalGeneration.get_mamba_state_dtype_from_config.__func__
    )
    get_mamba_state_shape_from_config = classmethod(
        qwen3_5.Qwen3_5ForConditionalGeneration.get_mamba_state_shape_from_config.__func__
    )
    get_mamba_state_copy_func = classmethod(
        qwen3_5.Qwen3_5ForConditionalGeneration.get_mamba_state_copy_func.__func__
    )


class Qwen3_5ForCausalLM(qwen3_5.Qwen3_5ForCausalLM, _States):
    pass


class Qwen3_5MoeForCausalLM(qwen3_5.Qwen3_5MoeForCausalLM, _States):
    pass
