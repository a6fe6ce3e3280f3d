"""Shape of a model, and what follows from it: weight names, FLOPs, activation memory.

Imports no torch. `ModelSpec` is the dense family; other families derive from it (`families/`) and
override what differs. Other modules read here which kind of feed-forward layer a block has, and
whether the fast paths (packed model, CUDA graphs) support the model.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hone.kernels.delta_shape import DeltaShape
from hone.models.rope import Rope

BLOCK_INPUTS = 128  # most inputs that share a scale in 8-bit weights (eight_bit.py)


@dataclass(frozen=True)
class LayerAttention:
    """Rotation and attention window of one layer.

    Attributes:
        rope: rotary positions; None: none.
        window: number of latest tokens that a token sees, itself included; None: all.
    """

    rope: Rope | None
    window: int | None = None


@dataclass(frozen=True)
class BlockOptions:
    """Options that change a block from x += attention(norm(x)); x += mlp(norm(x)).

    Attributes:
        norms: "before" attention and MLP, "after" them, or "both".
        norm_offset: added to the stored weight of every norm, in float32.
        activation: of the gate in the MLP; "gelu": its tanh form.
        branch_factor: factor of what attention and MLP add to the residual stream.
    """

    norms: Literal["before", "after", "both"] = "before"
    norm_offset: float = 0.0
    activation: Literal["silu", "gelu"] = "silu"
    branch_factor: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a model; field names follow `config.json`.

    Attributes:
        layers: what differs between layers, one entry for each.
        qk_norm: RMS norm of q and k: per "head", over the "whole" projection, or None.
        attention_scale: factor of q k; None: head_dim^-0.5.
        attention_cap: attention logits become cap * tanh(logits / cap).
        logit_cap: the same for the model's logits.
        embedding_factor: factor of the token embeddings, rounded to the dtype of the weights.
        logit_factor: factor of the logits, before the cap.
        fuses_projections: files store q, k and v as one tensor, and gate and up.
        has_sinks: a logit per head joins the softmax of attention.
        is_text_part: the files have other parts, such as a vision tower, which stay as they are.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    layers: tuple[LayerAttention, ...]
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float
    qkv_bias: bool
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "whole"] | None = "head"
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    embedding_factor: float = 1.0
    logit_factor: float = 1.0
    fuses_projections: bool = False
    has_sinks: bool = False
    is_text_part: bool = False
    block: BlockOptions = BlockOptions()

    @property
    def qkv_splits(self) -> tuple[int, int, int]:
        """Return the numbers of rows of q, k and v in the fused weight."""
        kv = self.num_key_value_heads * self.head_dim
        return self.num_attention_heads * self.head_dim, kv, kv

    @property
    def projection_rows(self) -> int:
        """Return the rows of the fused weight of q, k and v, and of a gate if there is one."""
        return sum(self.qkv_splits) + (self.qkv_splits[0] if self.gates_attention else 0)

    # --------------------------------------------------------------------------- overridden by families

    feed_forward: ClassVar[Literal["mlp", "experts"]] = "mlp"  # module in `models/transformer.py`
    implementation: ClassVar[str] = "hone"  # what computes the model
    gates_attention: ClassVar[bool] = False  # q_proj has a gate beside q, for each head
    prepares_heads: ClassVar[bool] = False  # norms and rotation come before the attention kernel
    stores_whole_experts: ClassVar[bool] = False  # files always have one tensor for all experts

    @property
    def has_fast_paths(self) -> bool:
        """Return True if packed models and captured steps support this model's blocks."""
        is_plain = self.attention_scale is None and self.has_plain_attention
        has_factors = self.embedding_factor != 1.0 or self.logit_factor != 1.0
        return (
            self.block == BlockOptions()
            and self.has_plain_heads
            and self.qk_norm != "whole"
            and is_plain
            and not has_factors
        )

    @property
    def has_plain_attention(self) -> bool:
        """Return True if attention has no windows, no cap of its logits, and no sinks."""
        has_windows = any(layer.window for layer in self.layers)
        return self.attention_cap is None and not self.has_sinks and not has_windows

    @property
    def has_plain_heads(self) -> bool:
        """Return True if norms of single heads have no offset, and whole heads are rotated.

        False also if queries grow with the position.
        """
        ropes = {layer.rope for layer in self.layers if layer.rope is not None}
        has_offset = self.qk_norm == "head" and self.block.norm_offset != 0
        return not has_offset and all(
            rope.width == self.head_dim and rope.growth is None for rope in ropes
        )

    @property
    def shares_pages(self) -> bool:
        """Return True if a GPU can read pages of several sequences at once in a decode step."""
        return self.has_plain_heads and self.has_plain_attention

    @property
    def context_marks(self) -> tuple[int, ...]:
        """Return distances in tokens at which a layer computes otherwise: a window, a chunk of tokens."""
        windows = {layer.window for layer in self.layers}
        lengths = {layer.rope.original_length for layer in self.layers if layer.rope is not None}
        return tuple(sorted(mark for mark in windows | lengths if mark))

    @property
    def routing_shape(self) -> tuple[int, int]:
        """Return the number of blocks that choose experts, and of experts per token in each."""
        return 0, 0

    @property
    def routed_experts(self) -> int:
        """Return the number of experts per token over all blocks, 0 if there is no routing."""
        blocks, experts = self.routing_shape
        return blocks * experts

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of the linears of a block that support LoRA, by HF name.

        If blocks differ, these are the largest shapes.
        """
        D = self.hidden_size
        F = self.intermediate_size
        if self.fuses_projections:
            return self.attention_linears | {"gate_up_proj": (D, 2 * F), "down_proj": (F, D)}
        return self.attention_linears | {
            "gate_proj": (D, F),
            "up_proj": (D, F),
            "down_proj": (F, D),
        }

    def feed_forward_names(self) -> dict[str, list[str]]:
        """Return, by feed-forward parameter, the names of the HF tensors that it stacks by rows."""
        if self.fuses_projections:
            return {
                "gate_up.weight": ["gate_up_proj.weight"],
                "down.weight": ["down_proj.weight"],
            }
        table = {
            "gate_up.weight": ["gate_proj.weight", "up_proj.weight"],
            "down.weight": ["down_proj.weight"],
        }
        if self.mlp_bias:
            table |= {
                "gate_up.bias": ["gate_proj.bias", "up_proj.bias"],
                "down.bias": ["down_proj.bias"],
            }
        return table

    def feed_forward_rows(self, name: str) -> int:
        """Return the number of rows of each HF tensor in the feed-forward parameter `name`.

        0 if the parameter is a single HF tensor.
        """
        return self.intermediate_size if name.startswith("gate_up.") else 0

    def delta_shape(self, layer: int) -> DeltaShape | None:
        """Return the sizes of a layer with the gated delta rule; None: the layer has attention."""
        return None

    @property
    def delta_layers(self) -> int:
        """Return the number of layers with the gated delta rule."""
        return 0

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's state in all layers with the gated delta rule."""
        return 0

    def mixer_names(self, layer: int) -> dict[str, list[str]]:
        """Return, by parameter of a layer's attention, the HF tensors that it stacks by rows."""
        projections = ["qkv"] if self.fuses_projections else list("qkv")
        table = {
            "qkv.weight": [f"self_attn.{x}_proj.weight" for x in projections],
            "out.weight": ["self_attn.o_proj.weight"],
        }
        if self.qk_norm:
            table |= {f"{x}_norm": [f"self_attn.{x}_norm.weight"] for x in "qk"}
        if self.qkv_bias:
            table["qkv.bias"] = [f"self_attn.{x}_proj.bias" for x in "qkv"]
        if self.out_bias:
            table["out.bias"] = ["self_attn.o_proj.bias"]
        if self.has_sinks:
            table["sinks"] = ["self_attn.sinks"]
        return table

    def fused_name(self, name: str) -> str | None:
        """Return the HF name of the tensor that stacks this parameter of all experts, experts first.

        None: files have only the tensors that the parameter stacks.
        """
        return None

    def is_unused(self, name: str) -> bool:
        """Return True if files may have a tensor of this HF name that the model does not use."""
        return False

    def can_adapt(self, name: str) -> bool:
        """Return True if the linear of this HF name may have a LoRA adapter."""
        return True

    def count_linears(self, name: str) -> int:
        """Return how many linears of this HF name a block has."""
        return 1

    def count_layers(self, name: str) -> int:
        """Return how many layers have linears of this HF name."""
        return self.num_hidden_layers

    def list_linears(self, name: str) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of every linear of this HF name in the model."""
        return [self.linear_shapes[name]] * (self.count_layers(name) * self.count_linears(name))

    def stacked_rows(self, name: str) -> tuple[int, ...] | int:
        """Return the rows of each HF tensor that a parameter stacks, or of all; 0: it is one tensor."""
        if self.fuses_projections:
            return 0
        if ".qkv." in name:
            return self.qkv_splits
        _, is_feed_forward, own = name.partition(".mlp.")
        return self.feed_forward_rows(own) if is_feed_forward else 0

    @property
    def active_feed_forward(self) -> int:
        """Return the number of a block's feed-forward weights used per token."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def kept_feed_forward(self) -> int:
        """Return how many activations per token a block's feed-forward layer keeps for backward."""
        return 2 * self.intermediate_size

    # --------------------------------------------------------------------------------------- derived for all families

    @property
    def attention_linears(self) -> dict[str, tuple[int, int]]:
        D = self.hidden_size
        (q, k, v) = self.qkv_splits
        if self.fuses_projections:
            return {"qkv_proj": (D, q + k + v), "o_proj": (q, D)}
        return {"q_proj": (D, q), "k_proj": (D, k), "v_proj": (D, v), "o_proj": (q, D)}

    @property
    def attention_layers(self) -> int:
        """Return the number of layers with attention."""
        return self.num_hidden_layers

    @property
    def cache_head_sizes(self) -> tuple[int, ...]:
        """Return the size of a head of each layer that has keys and values in the cache."""
        return (self.head_dim,) * self.attention_layers

    @property
    def mixer_layers(self) -> int:
        """Return the number of layers that mix tokens in another way, with a state."""
        return 0

    @property
    def cache_numbers(self) -> int:
        """Return how many numbers the cache has per token: keys, values, inputs of mixers."""
        of_attention = self.attention_layers * sum(self.qkv_splits[1:])
        return of_attention + self.mixer_layers * self.hidden_size

    def parameter_count(self) -> int:
        """Return the number of weights, without norms and biases."""
        head = 1 if self.tie_word_embeddings else 2
        return (
            head * self.vocab_size * self.hidden_size
            + self.mixer_parameters()
            + self.num_hidden_layers * self.feed_forward_size
        )

    @property
    def feed_forward_size(self) -> int:
        """Return the number of weights of a block's feed-forward part."""
        return self.active_feed_forward

    def mixer_parameters(self) -> int:
        """Return the number of weights of all layers' attention, or what they have in its place."""
        q, k, v = self.qkv_splits
        return self.num_hidden_layers * self.hidden_size * (2 * q + k + v)

    def mixer_flops(self, context: float) -> float:
        """Return forward FLOPs per token of attention itself, in all layers; a multiply-add counts 2."""
        return 4.0 * self.attention_layers * self.qkv_splits[0] * context

    @property
    def kept_mixers(self) -> int:
        """Return how many activations per token all layers' attention keeps for backward."""
        q, k, v = self.qkv_splits
        return self.num_hidden_layers * (2 * q + k + v)

    def flops_per_token(self, context: float = 0.0, head: float = 1.0) -> float:
        """Return forward FLOPs of one token that attends to `context` others.

        A multiply-add counts 2; `head` is the fraction of tokens that use the LM head.
        """
        weights = (
            self.mixer_parameters()
            + self.num_hidden_layers * self.active_feed_forward
            + head * self.vocab_size * self.hidden_size
        )
        return 2.0 * weights + self.mixer_flops(context)


def make_plain_layers(theta: float, head_dim: int, count: int) -> tuple[LayerAttention, ...]:
    """Return layers without windows whose whole heads are rotated, all alike."""
    return (LayerAttention(Rope(theta, head_dim)),) * count


def read_model_config(directory: Path) -> dict[str, Any]:
    """Parse the `config.json` of a model directory. Raises ValueError that names the file."""
    return model_config_of(model_config_text(directory), directory)


def model_config_text(directory: Path) -> str:
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} is not a model directory: it has no config.json")
    return path.read_text()


def model_config_of(text: str, directory: Path) -> dict[str, Any]:
    """Parse `text`, the config.json of the directory. Raises ValueError for invalid JSON."""
    try:
        config: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{directory / 'config.json'} is not valid JSON: {error}") from None
    return config
