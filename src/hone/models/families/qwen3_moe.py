"""Qwen3-MoE: each token uses a few of many small feed-forward experts. Imports no torch."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hone.kernels.gating import ClampedGating
from hone.models.rope import NotImplementedHere
from hone.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(ModelSpec):
    """Spec of Qwen3-MoE. `intermediate_size` is that of one expert."""

    experts: int
    experts_per_token: int
    normalizes: bool  # normalize the weights of a token's experts to sum 1
    shared_size: int = 0  # hidden units of the shared expert; 0: there is none
    gating: ClampedGating | None = None  # how experts combine gates and ups; None: silu(gate) * up

    feed_forward: ClassVar[Literal["mlp", "experts"]] = "experts"
    has_expert_biases: ClassVar[bool] = False  # of the router and of all experts
    has_input_major_experts: ClassVar[bool] = False  # weights are inputs x outputs

    @property
    def has_fast_paths(self) -> bool:
        return False

    @property
    def routing_shape(self) -> tuple[int, int]:
        return self.num_hidden_layers, self.experts_per_token

    def count_linears(self, name: str) -> int:
        return 1 if name in self.attention_linears else self.experts + (self.shared_size > 0)

    def feed_forward_names(self) -> dict[str, list[str]]:
        each = [f"experts.{i}" for i in range(self.experts)]
        shared = {
            "shared.gate_up.weight": [f"shared_expert.{x}_proj.weight" for x in ("gate", "up")],
            "shared.down.weight": ["shared_expert.down_proj.weight"],
            "shared_gate.weight": ["shared_expert_gate.weight"],
        }
        return {
            **(shared if self.shared_size else {}),
            "router.weight": ["gate.weight"],
            "gate_up.weight": [f"{one}.{x}_proj.weight" for one in each for x in ("gate", "up")],
            "down.weight": [f"{one}.down_proj.weight" for one in each],
        }

    def feed_forward_rows(self, name: str) -> int:
        if name.startswith("shared.gate_up."):
            return self.shared_size
        return self.hidden_size if name.startswith("down.") else super().feed_forward_rows(name)

    def fused_name(self, name: str) -> str | None:
        head, _, own = name.rpartition(".mlp.")
        layer = head.removeprefix("blocks.")
        if own not in ("gate_up.weight", "down.weight"):
            return None
        return f"model.layers.{layer}.mlp.experts.{own.removesuffix('.weight')}_proj"

    @property
    def active_feed_forward(self) -> int:
        router = self.experts * self.hidden_size
        return (
            router
            + self._shared_weights
            + self.experts_per_token * 3 * self.hidden_size * self.intermediate_size
        )

    @property
    def feed_forward_size(self) -> int:
        of_experts = self.experts * 3 * self.hidden_size * self.intermediate_size
        return self.experts * self.hidden_size + of_experts + self._shared_weights

    @property
    def _shared_weights(self) -> int:
        return (3 * self.shared_size + 1) * self.hidden_size if self.shared_size else 0

    @property
    def kept_feed_forward(self) -> int:
        of_experts = self.experts_per_token * (2 * self.hidden_size + 3 * self.intermediate_size)
        return of_experts + 3 * self.shared_size


def parse_qwen3_moe(config: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return the fields that Qwen3-MoE reads in its own way."""
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise NotImplementedHere(
            f"{origin}: blocks without experts (decoder_sparse_step, mlp_only_layers) are not supported"
        )
    if config.get("use_sliding_window"):
        raise NotImplementedHere(f"{origin}: use_sliding_window is not supported")
    experts = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return {
        "intermediate_size": int(config["moe_intermediate_size"]),
        "experts": int(config[experts]),
        "experts_per_token": int(config["num_experts_per_tok"]),
        "normalizes": bool(config.get("norm_topk_prob", False)),
    }
