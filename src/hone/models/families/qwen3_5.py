"""Qwen3.5, dense (also 3.6 and 3.8): gated delta rule in most layers, gated attention in the others.

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hone.kernels.delta_shape import CHUNK_TOKENS, DeltaShape
from hone.models.families.dense import parse_full_layers
from hone.models.families.qwen3_moe import Qwen3Moe
from hone.models.rope import NotImplementedHere
from hone.models.spec import BlockOptions, ModelSpec

FULL = "full_attention"
LINEAR = "linear_attention"
# HF names of what the projection of a layer with the delta rule stacks, and of its other weights.
DELTA_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
DELTA_WEIGHTS = {
    "conv": "conv1d.weight",
    "decay": "A_log",
    "decay_bias": "dt_bias",
    "norm": "norm.weight",
    "out.weight": "out_proj.weight",
}


@dataclass(frozen=True, kw_only=True)
class Qwen35(ModelSpec):
    """Spec of Qwen3.5.

    Attributes:
        is_delta: for each layer, True if it has the gated delta rule instead of attention.
    """

    delta: DeltaShape
    is_delta: tuple[bool, ...]

    gates_attention = True

    def delta_shape(self, layer: int) -> DeltaShape | None:
        return self.delta if self.is_delta[layer] else None

    @property
    def context_marks(self) -> tuple[int, ...]:
        return tuple(sorted({*super().context_marks, CHUNK_TOKENS}))

    @property
    def attention_layers(self) -> int:
        return self.num_hidden_layers - sum(self.is_delta)

    @property
    def delta_layers(self) -> int:
        return sum(self.is_delta)

    def state_bytes(self, itemsize: int) -> int:
        return self.delta_layers * self.delta.state_bytes(itemsize)

    def mixer_names(self, layer: int) -> dict[str, list[str]]:
        if not self.is_delta[layer]:
            return super().mixer_names(layer)
        names = {"qkv.weight": [f"linear_attn.{x}.weight" for x in DELTA_PROJECTIONS]}
        return names | {ours: [f"linear_attn.{hf}"] for ours, hf in DELTA_WEIGHTS.items()}

    def stacked_rows(self, name: str) -> tuple[int, ...] | int:
        if ".qkv." not in name:
            return super().stacked_rows(name)
        if self.is_delta[int(name.split(".")[1])]:
            return self.delta.projection_rows
        q, k, v = self.qkv_splits
        return 2 * q, k, v

    @property
    def attention_linears(self) -> dict[str, tuple[int, int]]:
        D = self.hidden_size
        q = self.qkv_splits[0]
        rows = zip(DELTA_PROJECTIONS, self.delta.projection_rows, strict=True)
        return {
            **super().attention_linears,
            "q_proj": (D, 2 * q),
            **{name: (D, count) for name, count in rows},
            "out_proj": (self.delta.outputs, D),
        }

    def count_layers(self, name: str) -> int:
        if name in (*DELTA_PROJECTIONS, "out_proj"):
            return self.delta_layers
        is_attention = name in super().attention_linears
        return self.attention_layers if is_attention else self.num_hidden_layers

    def mixer_parameters(self) -> int:
        D = self.hidden_size
        q, k, v = self.qkv_splits
        of_attention = D * (3 * q + k + v)
        of_delta = D * (sum(self.delta.projection_rows) + self.delta.outputs)
        return self.attention_layers * of_attention + self.delta_layers * of_delta

    def mixer_flops(self, context: float) -> float:
        of_delta = self.delta_layers * self.delta.chunk_flops()
        return super().mixer_flops(context) + of_delta

    @property
    def kept_mixers(self) -> int:
        q, k, v = self.qkv_splits
        of_attention = 5 * q + k + v  # with the gate, and its product with the outputs
        shape = self.delta
        # Projection, convolution, normalized q and k, chunks' systems, outputs before and after the gate.
        rows = sum(shape.projection_rows) + 2 * shape.channels + 2 * shape.outputs
        of_delta = rows + CHUNK_TOKENS * shape.value_heads
        return self.attention_layers * of_attention + self.delta_layers * of_delta


@dataclass(frozen=True, kw_only=True)
class Qwen35Moe(Qwen35, Qwen3Moe):
    """Spec of Qwen3.5 with experts and a shared expert."""


def parse_qwen3_5_moe(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the fields that Qwen3.5 with experts reads in its own way."""
    return parse_qwen3_5(config, origin) | {
        "intermediate_size": int(config["moe_intermediate_size"]),
        "experts": int(config["num_experts"]),
        "experts_per_token": int(config["num_experts_per_tok"]),
        "normalizes": True,
        "shared_size": int(config["shared_expert_intermediate_size"]),
    }


def parse_qwen3_5(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the fields that Qwen3.5 reads in its own way."""
    count = int(config["num_hidden_layers"])
    period = int(config.get("full_attention_interval") or 4)
    default = [LINEAR if (i + 1) % period else FULL for i in range(count)]
    kinds = list(config.get("layer_types") or default)
    unknown = sorted(set(kinds) - {FULL, LINEAR})
    if unknown or len(kinds) != count:
        found = f"the kind {unknown[0]}" if unknown else f"{len(kinds)} kinds for {count} layers"
        raise NotImplementedHere(
            f"{origin}: layer_types with {found}; supported: {FULL}, {LINEAR}, one a layer"
        )
    shape = DeltaShape(
        key_heads=int(config["linear_num_key_heads"]),
        value_heads=int(config["linear_num_value_heads"]),
        key_size=int(config["linear_key_head_dim"]),
        value_size=int(config["linear_value_head_dim"]),
        conv_width=int(config["linear_conv_kernel_dim"]),
    )
    if shape.value_heads % shape.key_heads:
        raise ValueError(
            f"{origin}: linear_num_value_heads {shape.value_heads} is not a multiple of "
            f"linear_num_key_heads {shape.key_heads}"
        )
    return {
        "qk_norm": "head",
        "layers": parse_full_layers({"partial_rotary_factor": 0.25, **config}, origin),
        "block": BlockOptions(norm_offset=1.0),
        "delta": shape,
        "is_delta": tuple(kind == LINEAR for kind in kinds),
    }


DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MOE_DEFAULTS = DEFAULTS | {
    "intermediate_size": 0,  # unused: every block has experts
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
