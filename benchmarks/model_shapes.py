"""Shapes of published models, for random weights, and what bounds a decode step of them."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from peer import ROOT, median
from training import QWEN3_06B, gpu_seconds

if TYPE_CHECKING:
    from hone.models.spec import ModelSpec

_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_EXPERTS = {
    **QWEN3_06B,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
MODELS = {
    # Of no published model: small enough for a GPU that trains all of it
    "MoE-2.7B": {
        **_EXPERTS,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_experts": 64,
        "moe_intermediate_size": 512,
    },
    "Qwen3-30B-A3B": {
        **_EXPERTS,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "moe_intermediate_size": 768,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20B": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "Qwen3-0.6B": QWEN3_06B,
    "SmolLM2-135M": {
        **QWEN3_06B,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 1e5,
        "max_position_embeddings": 8192,
    },
    "Llama-3.2-1B": {
        **QWEN3_06B,
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "Qwen3-1.7B": {**QWEN3_06B, "hidden_size": 2048, "intermediate_size": 6144},
    "Qwen3-4B": {
        **QWEN3_06B,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "Qwen2.5-1.5B": {
        **QWEN3_06B,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
    "Qwen2.5-7B": {
        **QWEN3_06B,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
    },
    "Qwen3-8B": {
        **QWEN3_06B,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen3-14B": {
        **QWEN3_06B,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
}
_QWEN35 = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 248320,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
MODELS |= {
    "Qwen3.5-0.8B": {
        **_QWEN35,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
    },
    "Qwen3.5-35B-A3B": {
        **_QWEN35,
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
    },
    "Qwen3.5-4B": {
        **_QWEN35,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
    },
}
TINY = ROOT / "examples" / "reverse_text_tiny" / "model"


def write_shape(directory: Path, name: str) -> None:
    """A model's directory without weights: the shape of that name, the tiny model's tokenizer and end of a text."""
    directory.mkdir()
    for file in TINY.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    ends = {
        key: json.loads((TINY / "config.json").read_text())[key]
        for key in ("eos_token_id", "pad_token_id")
    }
    (directory / "config.json").write_text(json.dumps({**MODELS[name], **ends}))


def step_limits(
    spec: "ModelSpec", batch: int, context: float, rate: float, flops: float
) -> tuple[float, float]:
    """Seconds of a step by bytes and by arithmetic, in bf16; `context`: tokens of each sequence so far."""
    # Of which few are read
    rows = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
    rows += spec.vocab_size * spec.num_hidden_layers * getattr(spec, "layer_input_size", 0)
    if spec.routed_experts:  # chosen by no token, if all are equally likely
        idle = (1 - spec.experts_per_token / spec.experts) ** batch
        rows += idle * spec.num_hidden_layers * spec.feed_forward_size
    numbers = spec.parameter_count() - rows + batch * context * spec.cache_numbers
    of_states = 2 * batch * spec.state_bytes(2)  # read and written
    return (2 * numbers + of_states) / rate, batch * spec.flops_per_token(context) / flops


def measure_bandwidth() -> float:
    """Bytes a second of a large copy on the device, read and written."""
    import torch

    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = median([gpu_seconds(partial(target.copy_, source)) for _ in range(6)])
    del source, target
    torch.cuda.empty_cache()  # others measure how much there is
    return 2 * 2**32 / seconds
