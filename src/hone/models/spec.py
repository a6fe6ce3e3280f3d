"""The shape of a model, and what follows from it: names of weights, FLOPs, what training keeps. Imports no torch.

`ModelSpec` is the dense family; another one derives from it (`families/`) and says what is different. Whoever needs to
know something about the feed-forward part of a block, or whether a fast path takes the model, asks here.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal


@dataclass(frozen=True)
class Llama3Rope:
    """Rotary frequencies of Llama 3.1: slow ones are divided by `factor`, fast ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelSpec:
    """What the transformer needs to know about itself; names follow `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float
    qkv_bias: bool
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = True
    rope_scaling: Llama3Rope | None = None

    @property
    def qkv_splits(self) -> tuple[int, int, int]:
        """Rows of the fused qkv weight that belong to q, k and v."""
        kv = self.num_key_value_heads * self.head_dim
        return self.num_attention_heads * self.head_dim, kv, kv

    # --------------------------------------------------------------------------- what families may say otherwise

    @classmethod
    def family_fields(cls, config: dict[str, Any], origin: str) -> dict[str, Any]:
        """The fields that a `config.json` of this family has under keys of its own. Raises ValueError, KeyError."""
        return {"intermediate_size": int(config["intermediate_size"])}

    feed_forward: ClassVar[Literal["mlp", "experts"]] = (
        "mlp"  # the module, in `models/transformer.py`
    )
    has_fast_paths: ClassVar[bool] = (
        True  # whether packed models and captured steps know this block
    )

    @property
    def routed_experts(self) -> int:
        """Experts that a token goes through in all blocks together; 0 where there is no choice."""
        return 0

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a block's linears that may have an adapter, by their HF names."""
        D, F = self.hidden_size, self.intermediate_size
        return self.attention_linears | {
            "gate_proj": (D, F),
            "up_proj": (D, F),
            "down_proj": (F, D),
        }

    def feed_forward_names(self) -> dict[str, list[str]]:
        """Each of a block's feed-forward parameters by the HF tensors that, stacked by rows, make it."""
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
        """How many rows each HF tensor has of the fused parameter `gate_up`; all of others."""
        return self.intermediate_size if name.startswith("gate_up.") else 0

    @property
    def active_feed_forward(self) -> int:
        """Weights of a block's feed-forward part that a token is multiplied with."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def kept_feed_forward(self) -> int:
        """Numbers of a token that a block's feed-forward part keeps for the way back."""
        return 2 * self.intermediate_size

    # --------------------------------------------------------------------------------------- what follows for all

    @property
    def attention_linears(self) -> dict[str, tuple[int, int]]:
        D, (q, k, v) = self.hidden_size, self.qkv_splits
        return {"q_proj": (D, q), "k_proj": (D, k), "v_proj": (D, v), "o_proj": (q, D)}

    @property
    def cache_numbers(self) -> int:
        """Numbers of a token's keys and values."""
        return self.num_hidden_layers * sum(self.qkv_splits[1:])

    def parameter_count(self) -> int:
        """Weights in all; norms and biases, which are few, are left out."""
        head = 1 if self.tie_word_embeddings else 2
        return (
            head * self.vocab_size * self.hidden_size
            + self.num_hidden_layers * self._block_parameters(self.feed_forward_size)
        )

    @property
    def feed_forward_size(self) -> int:
        """Weights of a block's feed-forward part."""
        return self.active_feed_forward

    def _block_parameters(self, feed_forward: int) -> int:
        q, k, v = self.qkv_splits
        return self.hidden_size * (2 * q + k + v) + feed_forward

    def flops_per_token(self, context: float = 0.0, head: float = 1.0) -> float:
        """Forward FLOPs of one token (2 a multiply-add) that attends to `context` others, the LM head for a share."""
        layer = self._block_parameters(self.active_feed_forward) + 2 * self.qkv_splits[0] * context
        return 2.0 * (self.num_hidden_layers * layer + head * self.vocab_size * self.hidden_size)


def read_model_config(directory: Path) -> dict[str, Any]:
    """The parsed `config.json` of a model directory; ValueError names the file when it is missing or broken."""
    return model_config_of(model_config_text(directory), directory)


def model_config_text(directory: Path) -> str:
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} is not a model directory: it has no config.json")
    return path.read_text()


def model_config_of(text: str, directory: Path) -> dict[str, Any]:
    """That of the directory, of which this is the text."""
    try:
        config: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{directory / 'config.json'} is not valid JSON: {error}") from None
    return config
