"""The one model definition, for training and for sampling.

All tokens of a call are laid end to end on one flat axis T, without padding; the attention object
that is passed in decides which of them see each other:

    tokens_T, positions_T ─ embed ─► x_TD ─┬─ norm ─ qkv ─ attend(layer, qkv, heads: q/k norm, rope) ─ out ─┬─►
                                           └──────────────────────── residual ──────────────────────────────┘
    training and prefill pass PackedAttention (sequences end to end), decoding passes the KV cache.

Weights are stored fused (`qkv`, `gate_up`); `models/hf.py` maps them to Hugging Face names. Shapes:
T tokens, D hidden, H query heads, K key/value heads, E head size, F feed-forward, V vocabulary.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hone.kernels import gpu
from hone.kernels.row_gather import take_rows
from hone.models.attention_layouts import Rotation
from hone.models.language_model import LanguageModel
from hone.models.layers import MLP, Attention, Embedding, Experts, Linear, RMSNorm, SelfAttention
from hone.models.ops import Ops, Pending, select_ops
from hone.models.spec import Llama3Rope, ModelSpec

FEED_FORWARD: dict[str, Any] = {"mlp": MLP, "experts": Experts}


class Block(nn.Module):
    # CpuOps may compute the whole block in one call; False in a subclass that has other steps.
    has_fused_form: ClassVar[bool] = True

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.attention = SelfAttention(spec)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = FEED_FORWARD[spec.feed_forward](spec)

    def forward(
        self,
        ops: Ops,
        layer: int,
        x_TD: Tensor,
        delta: Pending,
        rotation: Rotation,
        attend: Attention,
        keep_N: Tensor | None,
        following: "Block | None" = None,
    ) -> tuple[Tensor, Pending]:
        """Return the residual stream and the pending delta after this block.

        The next norm adds the delta to the stream. With `following`, the next block, the delta may
        already be added; a `Scaled`, the output of that block's first norm, is then returned in
        place of the delta.
        """
        fused = ops.fused_block(self, x_TD, delta, rotation, attend, keep_N)
        if fused is not None:
            return fused
        x_TD, qkv_TO = ops.norm_linear(self.attention_norm, self.attention.qkv, x_TD, delta)
        mixed_TD = self.attention.mix_heads(layer, qkv_TO, rotation, attend)
        if keep_N is not None:
            x_TD = take_rows(x_TD, keep_N)
            mixed_TD = take_rows(mixed_TD, keep_N)
        into_mlp = (self.mlp_norm, self.mlp.gate_up)
        x_TD, delta = ops.linear_onto(self.attention.out, x_TD, mixed_TD, into_mlp)
        after = None
        if following is not None:
            after = (following.attention_norm, following.attention.qkv)
        return ops.feed_forward(self.mlp_norm, self.mlp, x_TD, delta, after)


class Transformer(LanguageModel):
    """Hone's own implementation of a causal language model.

    Weights are uninitialized until they are loaded (`models/hf.py`) or drawn (`init_weights`).
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.embed = Embedding(spec.vocab_size, spec.hidden_size)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.num_hidden_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.head = None if spec.tie_word_embeddings else Linear(spec.hidden_size, spec.vocab_size)
        self.rope_table: tuple[Tensor, Tensor] | None = None

    @classmethod
    def weight_names(cls, spec: ModelSpec) -> dict[str, list[str]]:
        table = {
            "embed.weight": ["model.embed_tokens.weight"],
            "norm.weight": ["model.norm.weight"],
        }
        if not spec.tie_word_embeddings:
            table["head.weight"] = ["lm_head.weight"]
        for i in range(spec.num_hidden_layers):
            ours = f"blocks.{i}"
            theirs = f"model.layers.{i}"
            table |= {
                f"{ours}.attention_norm.weight": [f"{theirs}.input_layernorm.weight"],
                f"{ours}.attention.qkv.weight": [
                    f"{theirs}.self_attn.{x}_proj.weight" for x in "qkv"
                ],
                f"{ours}.attention.out.weight": [f"{theirs}.self_attn.o_proj.weight"],
                f"{ours}.mlp_norm.weight": [f"{theirs}.post_attention_layernorm.weight"],
            }
            if spec.qk_norm:
                table |= {
                    f"{ours}.attention.{x}_norm": [f"{theirs}.self_attn.{x}_norm.weight"]
                    for x in "qk"
                }
            if spec.qkv_bias:
                table[f"{ours}.attention.qkv.bias"] = [
                    f"{theirs}.self_attn.{x}_proj.bias" for x in "qkv"
                ]
            if spec.out_bias:
                table[f"{ours}.attention.out.bias"] = [f"{theirs}.self_attn.o_proj.bias"]
            for name, parts in spec.feed_forward_names().items():
                table[f"{ours}.mlp.{name}"] = [f"{theirs}.mlp.{part}" for part in parts]
        return table

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attention, keep_N: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states after the final norm, T x D.

        `positions_T` are the tokens' positions in their own sequences. With `keep_N` (indices into
        T without repeats) only those rows are returned, N x D; of the other tokens, the last block
        computes only keys and values.
        """
        return self.forward_embedded(self.embed(tokens_T), positions_T, attend, keep_N)

    def forward_embedded(
        self,
        x_TD: Tensor,
        positions_T: Tensor | None,
        attend: Attention,
        keep_N: Tensor | None = None,
    ) -> Tensor:
        """Run `forward` on embedded tokens. Positions may be omitted if `attend` knows them."""
        ops = select_ops(x_TD)
        delta = None
        rotation = Rotation(self.rope_tables(x_TD.device, x_TD.dtype), positions_T)
        last = len(self.blocks) - 1
        self._give_routing(keep_N)
        for layer, block in enumerate(self.blocks):
            kept_N, following = (keep_N, None) if layer == last else (None, self.blocks[layer + 1])
            inputs = (ops, layer, x_TD, delta, rotation, attend, kept_N, following)
            if self.recomputes and torch.is_grad_enabled():
                x_TD, delta = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x_TD, delta = block(*inputs)
        return self.norm(x_TD, delta)[1]

    def _give_routing(self, keep_N: Tensor | None) -> None:
        """Pass each block its given experts from `routing_TR`; the last, rows `keep_N` only."""
        if not self.spec.routed_experts:
            return
        *first, last = self.expert_layers
        parts = (
            [None] * len(self.expert_layers)
            if self.routing_TR is None
            else self.routing_TR.chunk(len(self.expert_layers), 1)
        )
        for mixture, own_TK in zip(first, parts, strict=False):
            mixture.given_TK = own_TK
        last.given_TK = parts[-1] if parts[-1] is None or keep_N is None else parts[-1][keep_N]

    @property
    def stays_on_device(self) -> bool:
        """Return True if a pass over few tokens needs no host work, as CUDA graphs require."""
        return self.spec.has_fast_paths and gpu.takes_model(self.embed.weight, self.spec.head_dim)

    @property
    def expert_layers(self) -> list["Experts"]:
        """Return the mixture of experts of each block, for models that have experts."""
        return [block.mlp for block in self.blocks]  # type: ignore[misc]

    def rope_tables(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rotary angles of all positions, P x E (Su et al. 2021).

        Each half of a row has all angles; the first half of sin is negated.
        """
        table = self.rope_table
        if table is None or table[0].device != device or table[0].dtype != dtype:
            table = self.rope_table = build_rope_table(self.spec, device, dtype)
        return table

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Draw normal weights with deviation `initializer_range`; norms are 1, biases 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm") or name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, self.spec.initializer_range, generator=generator)


def build_rope_table(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin for every position, P x E; sin's first half is negated."""
    half = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**half
    if spec.rope_scaling is not None:
        frequencies = scale_frequencies(frequencies, spec.rope_scaling)
    angles = torch.outer(torch.arange(spec.max_position_embeddings).float(), frequencies)
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat([cos, cos], -1).to(device, dtype), torch.cat([-sin, sin], -1).to(device, dtype)


def scale_frequencies(frequencies: Tensor, rope: Llama3Rope) -> Tensor:
    """Scale frequencies as Llama 3.1 does.

    The scale depends on a frequency's number of turns within the original context length.
    """
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(
        0, 1
    )
    return kept * frequencies + (1 - kept) * frequencies / rope.factor
