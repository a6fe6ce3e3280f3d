"""GPT-OSS: experts with biases and clamped gates, attention with sinks, windows in half of the layers.

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hone.kernels.gating import ClampedGating
from hone.models.families.dense import FULL, SLIDING, parse_layers
from hone.models.families.qwen3_moe import Qwen3Moe

PACKED_FORMAT = "mxfp4"  # of the experts' weights in published files (`models/mxfp4.py`)
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "attention_bias": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "rope_theta": 150000.0,
}


@dataclass(frozen=True, kw_only=True)
class GptOss(Qwen3Moe):
    """Spec of GPT-OSS.

    The weights of all experts of a layer are one tensor, experts x inputs x outputs, with
    alternating gates and ups.
    """

    has_expert_biases: ClassVar[bool] = True
    has_input_major_experts: ClassVar[bool] = True
    stores_whole_experts: ClassVar[bool] = True

    def feed_forward_names(self) -> dict[str, list[str]]:
        # Files have these tensors whole; single experts have names for adapters and optimizers.
        each = [f"experts.{i}" for i in range(self.experts)]
        return {
            "router.weight": ["router.weight"],
            "router.bias": ["router.bias"],
            **{
                f"{part}.{kind}": [f"{one}.{part}_proj.{kind}" for one in each]
                for part in ("gate_up", "down")
                for kind in ("weight", "bias")
            },
        }

    def feed_forward_rows(self, name: str) -> int:
        rows = {
            "gate_up.weight": self.hidden_size,
            "gate_up.bias": 2 * self.intermediate_size,
            "down.weight": self.intermediate_size,
            "down.bias": self.hidden_size,
        }
        return rows.get(name, 0)

    def fused_name(self, name: str) -> str | None:
        head, _, own = name.rpartition(".mlp.")
        part, _, kind = own.partition(".")
        if part not in ("gate_up", "down"):
            return None
        suffix = "_bias" if kind == "bias" else ""
        return f"model.layers.{head.removeprefix('blocks.')}.mlp.experts.{part}_proj{suffix}"

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        return self.attention_linears

    def can_adapt(self, name: str) -> bool:
        return ".experts." not in name


def parse_gpt_oss(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the fields that GPT-OSS reads in its own way."""
    experts, chosen = int(config["num_local_experts"]), int(config["num_experts_per_tok"])
    limit = float(config["swiglu_limit"])
    if not 0 < chosen <= experts or limit <= 0:
        raise ValueError(
            f"{origin}: num_experts_per_tok {chosen} of num_local_experts {experts}, swiglu_limit {limit}: "
            "at least one expert of those that there are, and a limit above 0, are needed"
        )
    count = int(config["num_hidden_layers"])
    default = [FULL if (i + 1) % 2 == 0 else SLIDING for i in range(count)]
    kinds = list(config.get("layer_types") or default)
    return {
        "qk_norm": None,
        "layers": parse_layers(config, origin, kinds),
        "has_sinks": True,
        "experts": experts,
        "experts_per_token": chosen,
        "normalizes": True,
        "gating": ClampedGating(float(config["swiglu_alpha"]), limit),
    }
