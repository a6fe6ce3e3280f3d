"""Gemma 4, E-series (E2B, E4B): inputs per layer, heads whose size differs by layer, shared keys and values.

Imports no torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from hone.models.families.dense import FULL, SLIDING, parse_layers
from hone.models.rope import NotImplementedHere
from hone.models.spec import BlockOptions, LayerAttention, ModelSpec

DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "tie_word_embeddings": True,
}
ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
FULL_HEAD_SIZE = 512
# Projections of layers that share keys, by their number.
UNUSED_TENSOR = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:[kv]_proj|[kv]_norm)\.weight")
# Options of other Gemma 4 models, which are refused.
OTHER_OPTIONS = ("attention_k_eq_v", "enable_moe_block", "num_global_key_value_heads")
# HF names of a block's linears other than those of attention and MLP.
INPUT_LINEARS = ("per_layer_input_gate", "per_layer_projection")


@dataclass(frozen=True, kw_only=True)
class Gemma4(ModelSpec):
    """Shape of a Gemma 4 E-series model.

    `head_dim` is the largest of all layers.

    Attributes:
        head_sizes: size of a head, for each layer.
        sources: the layer whose keys and values a layer uses, for each layer; itself if it has its own.
        layer_input_size: numbers of a token's input to each layer.
        has_wide_mlp: layers without keys of their own have MLPs of twice the width.
    """

    head_sizes: tuple[int, ...]
    sources: tuple[int, ...]
    layer_input_size: int
    has_wide_mlp: bool

    prepares_heads: ClassVar[bool] = True

    @property
    def has_fast_paths(self) -> bool:
        return False

    @property
    def shares_pages(self) -> bool:
        return False

    def is_unused(self, name: str) -> bool:
        found = UNUSED_TENSOR.fullmatch(name)
        return found is not None and not self.is_source(int(found[1]))

    def is_source(self, layer: int) -> bool:
        """Return True if the layer has keys and values of its own."""
        return self.sources[layer] == layer

    def head_rows(self, layer: int) -> tuple[int, ...]:
        """Return the rows of q, and of k and v if the layer has them, in the fused weight."""
        size = self.head_sizes[layer]
        kv = self.num_key_value_heads * size
        q = self.num_attention_heads * size
        return (q, kv, kv) if self.is_source(layer) else (q,)

    def mlp_size(self, layer: int) -> int:
        """Return the width of a layer's MLP."""
        is_wide = self.has_wide_mlp and not self.is_source(layer)
        return self.intermediate_size * (2 if is_wide else 1)

    @property
    def cache_head_sizes(self) -> tuple[int, ...]:
        every = enumerate(self.head_sizes)
        return tuple(size for layer, size in every if self.is_source(layer))

    @property
    def attention_layers(self) -> int:
        return len(self.cache_head_sizes)

    @property
    def cache_numbers(self) -> int:
        return 2 * self.num_key_value_heads * sum(self.cache_head_sizes)

    def mixer_names(self, layer: int) -> dict[str, list[str]]:
        parts = "qkv"[: len(self.head_rows(layer))]
        return {
            "qkv.weight": [f"self_attn.{x}_proj.weight" for x in parts],
            "out.weight": ["self_attn.o_proj.weight"],
            **{f"{x}_norm": [f"self_attn.{x}_norm.weight"] for x in parts if x != "v"},
        }

    def stacked_rows(self, name: str) -> tuple[int, ...] | int:
        if not name.startswith("blocks."):
            return 0
        layer = int(name.split(".")[1])
        if ".qkv." in name:
            return self.head_rows(layer)
        return self.mlp_size(layer) if ".mlp.gate_up." in name else 0

    # ----------------------------------------------------------------------------- sizes, over all layers

    def _block_linears(self, layer: int) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of the linears of one block, by HF name."""
        D, F, P = self.hidden_size, self.mlp_size(layer), self.layer_input_size
        rows = self.head_rows(layer)
        gate, projection = INPUT_LINEARS
        return {
            **{f"{x}_proj": (D, count) for x, count in zip("qkv", rows, strict=False)},
            "o_proj": (rows[0], D),
            "gate_proj": (D, F),
            "up_proj": (D, F),
            "down_proj": (F, D),
            gate: (D, P),
            projection: (P, D),
        }

    @cached_property
    def _linears(self) -> list[dict[str, tuple[int, int]]]:
        return [self._block_linears(layer) for layer in range(self.num_hidden_layers)]

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        names = max(self._linears, key=len)
        return {name: max(block.get(name, (0, 0)) for block in self._linears) for name in names}

    def list_linears(self, name: str) -> list[tuple[int, int]]:
        return [block[name] for block in self._linears if name in block]

    def count_layers(self, name: str) -> int:
        return len(self.list_linears(name))

    def parameter_count(self) -> int:
        D, P, L = self.hidden_size, self.layer_input_size, self.num_hidden_layers
        of_inputs = self.vocab_size * L * P + D * L * P
        return self.vocab_size * D + of_inputs + self.mixer_parameters() + self._feed_forwards

    @property
    def _widths(self) -> int:
        """Return the widths of all layers' MLPs together."""
        return sum(self.mlp_size(layer) for layer in range(self.num_hidden_layers))

    @property
    def _feed_forwards(self) -> int:
        """Return the weights of all layers' MLPs and inputs."""
        of_inputs = 2 * self.layer_input_size * self.num_hidden_layers
        return self.hidden_size * (3 * self._widths + of_inputs)

    @property
    def _projection_rows(self) -> int:
        """Return the rows of all layers' projections to q, k and v."""
        return sum(sum(self.head_rows(layer)) for layer in range(self.num_hidden_layers))

    @property
    def _outputs(self) -> int:
        """Return the numbers per token that all layers' attention gives."""
        return self.num_attention_heads * sum(self.head_sizes)

    def mixer_parameters(self) -> int:
        return self.hidden_size * (self._projection_rows + self._outputs)

    def mixer_flops(self, context: float) -> float:
        flops = 0.0
        for size, layer in zip(self.head_sizes, self.layers, strict=True):
            seen = context if layer.window is None else min(context, layer.window)
            flops += 4.0 * self.num_attention_heads * size * seen
        return flops

    def flops_per_token(self, context: float = 0.0, head: float = 1.0) -> float:
        of_inputs = self.hidden_size * self.layer_input_size * self.num_hidden_layers
        weights = self.mixer_parameters() + self._feed_forwards + of_inputs
        return 2.0 * (weights + head * self.vocab_size * self.hidden_size) + self.mixer_flops(
            context
        )

    @property
    def active_feed_forward(self) -> int:
        return self._feed_forwards // self.num_hidden_layers

    @property
    def kept_feed_forward(self) -> int:
        return 3 * self._widths // self.num_hidden_layers + 3 * self.layer_input_size

    @property
    def kept_mixers(self) -> int:
        return 2 * self._projection_rows + 2 * self._outputs


def parse_gemma4(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the fields that Gemma 4 reads in its own way."""
    for key in OTHER_OPTIONS:
        if config.get(key):
            raise NotImplementedHere(f"{origin}: {key} is not supported")
    if config.get("use_bidirectional_attention") == "all":
        raise NotImplementedHere(f"{origin}: use_bidirectional_attention is not supported")
    size = int(config["hidden_size_per_layer_input"] or 0)
    if not size or config["vocab_size_per_layer_input"] != config["vocab_size"]:
        raise NotImplementedHere(
            f"{origin}: models without inputs per layer, or with some for a part of the vocabulary "
            "(hidden_size_per_layer_input, vocab_size_per_layer_input), are not supported"
        )
    count = int(config["num_hidden_layers"])
    kinds = list(
        config.get("layer_types") or [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(count)]
    )
    shared = int(config.get("num_kv_shared_layers") or 0)
    if len(kinds) != count or not 0 <= shared < count:
        raise NotImplementedHere(
            f"{origin}: layer_types has {len(kinds)} kinds for {count} layers, of which {shared} share keys"
        )
    small = int(config["head_dim"])
    sizes = {FULL: _read_full_head_size(config, kinds), SLIDING: small}
    ropes = dict(config.get("rope_parameters") or ROPES)
    layers: list[LayerAttention] = []
    for kind in kinds:
        one = dict(config) | {"head_dim": sizes.get(kind, small), "rope_parameters": ropes}
        layers += parse_layers(one | {"num_hidden_layers": 1}, origin, [kind])
    own = count - shared
    last = {
        kind: max((i for i in range(own) if kinds[i] == kind), default=-1) for kind in set(kinds)
    }
    if min(last.values()) < 0:
        raise NotImplementedHere(
            f"{origin}: num_kv_shared_layers leaves a kind of layer without keys"
        )
    head_sizes = tuple(sizes[kind] for kind in kinds)
    return {
        "qk_norm": "head",
        "layers": tuple(layers),
        "head_dim": max(head_sizes),
        "head_sizes": head_sizes,
        "sources": tuple(i if i < own else last[kind] for i, kind in enumerate(kinds)),
        "layer_input_size": size,
        "has_wide_mlp": bool(config.get("use_double_wide_mlp")),
        "attention_scale": 1.0,
        "logit_cap": config.get("final_logit_softcapping"),
        "embedding_factor": int(config["hidden_size"]) ** 0.5,
        "block": BlockOptions(norms="both", activation="gelu"),
    }


def _read_full_head_size(config: Mapping[str, Any], kinds: list[str]) -> int:
    """Return the size of a head in layers with full attention: in its own key, or by layer."""
    if config.get("global_head_dim"):
        return int(config["global_head_dim"])
    by_layer = config.get("per_layer_config") or {}
    for layer, kind in enumerate(kinds):
        keys = by_layer.get(str(layer), {})
        if kind == FULL and "head_dim" in keys:
            return int(keys["head_dim"])
    return FULL_HEAD_SIZE
