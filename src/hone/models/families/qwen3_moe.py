"""Qwen3-MoE: each token uses a few of many small feed-forward experts. Imports no torch."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hone.models.rope import NotImplementedHere
from hone.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(ModelSpec):
    """Spec of Qwen3-MoE. `intermediate_size` is that of one expert."""

    experts: int
    experts_per_token: int
    normalizes: bool  # normalize the weights of a token's experts to sum 1

    feed_forward: ClassVar[Literal["mlp", "experts"]] = "experts"

    @property
    def has_fast_paths(self) -> bool:
        return False

    @property
    def routing_shape(self) -> tuple[int, int]:
        return self.num_hidden_layers, self.experts_per_token

    def count_linears(self, name: str) -> int:
        return 1 if name in self.attention_linears else self.experts

    def feed_forward_names(self) -> dict[str, list[str]]:
        each = [f"experts.{i}" for i in range(self.experts)]
        return {
            "router.weight": ["gate.weight"],
            "gate_up.weight": [f"{one}.{x}_proj.weight" for one in each for x in ("gate", "up")],
            "down.weight": [f"{one}.down_proj.weight" for one in each],
        }

    def feed_forward_rows(self, name: str) -> int:
        return self.hidden_size if name.startswith("down.") else super().feed_forward_rows(name)

    @property
    def active_feed_forward(self) -> int:
        router = self.experts * self.hidden_size
        return router + self.experts_per_token * 3 * self.hidden_size * self.intermediate_size

    @property
    def feed_forward_size(self) -> int:
        return self.experts * (self.hidden_size + 3 * self.hidden_size * self.intermediate_size)

    @property
    def kept_feed_forward(self) -> int:
        return self.experts_per_token * (2 * self.hidden_size + 3 * self.intermediate_size)


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
