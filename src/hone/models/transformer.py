"""Hone's own transformer, for training and for sampling.

All tokens of a call are laid end to end on one flat axis T, without padding; the attention object
that is passed in decides which of them see each other:

    tokens_T, positions_T ─ embed ─► x_TD ─┬─ norm ─ qkv ─ attend(layer, qkv, heads: q/k norm, rope) ─ out ─┬─►
                                           └──────────────────────── residual ──────────────────────────────┘
    training and prefill pass PackedAttention (sequences end to end), decoding passes the KV cache.

Weights are stored fused (`qkv`, `gate_up`); `models/hf.py` maps them to Hugging Face names. Shapes:
T tokens, D hidden, H query heads, K key/value heads, E head size, F feed-forward, V vocabulary.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hone.kernels import gpu
from hone.kernels.row_gather import take_rows
from hone.models.attention_layouts import FLASH_HEAD_SIZE, Rotation
from hone.models.language_model import LanguageModel
from hone.models.layers import (
    MLP,
    Attention,
    DeltaNet,
    Embedding,
    Experts,
    Linear,
    make_mixer,
    make_norm,
)
from hone.models.ops import Ops, Pending, select_ops
from hone.models.rope import Rope
from hone.models.spec import BlockOptions, ModelSpec

FEED_FORWARD: dict[str, Any] = {"mlp": MLP, "experts": Experts}


class Block(nn.Module):
    # CpuOps may compute the whole block in one call; False in a subclass that has other steps.
    has_fused_form: ClassVar[bool] = True

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(spec.hidden_size, spec)
        self.attention = make_mixer(spec, layer)
        self.mlp_norm = make_norm(spec.hidden_size, spec)
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


class GeneralBlock(Block):
    """A block with norms after attention and MLP, other norms, activations, or factors of branches.

    x += factor * norm(attention(norm(x)));  x += factor * norm(mlp(norm(x)))
    """

    has_fused_form = False

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        size = spec.hidden_size
        before, after = (spec.block.norms in (place, "both") for place in ("before", "after"))
        self.attention_norm, self.mlp_norm = (  # type: ignore[assignment]
            make_norm(size, spec) if before else None for _ in range(2)
        )
        self.attention_norm_after, self.mlp_norm_after = (
            make_norm(size, spec) if after else None for _ in range(2)
        )
        self.factor = spec.block.branch_factor

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
        x_TD, normed_TD = ops.add_normed(self.attention_norm, x_TD, delta)
        qkv_TO = ops.linear(self.attention.qkv, normed_TD)
        mixed_TD = self.attention.mix_heads(layer, qkv_TO, rotation, attend)
        if keep_N is not None:
            x_TD = take_rows(x_TD, keep_N)
            mixed_TD = take_rows(mixed_TD, keep_N)
        out, down = self.attention.out, self.mlp.down
        delta = ops.project_branch(out, mixed_TD, self.attention_norm_after, self.factor)
        x_TD, normed_TD = ops.add_normed(self.mlp_norm, x_TD, delta)
        gated_TF = self.mlp.gate(ops.linear(self.mlp.gate_up, normed_TD))
        delta = ops.project_branch(down, gated_TF, self.mlp_norm_after, self.factor)
        if hasattr(self, "unshard"):  # ranks gather this block's norms for this block only
            return ops.add_normed(None, x_TD, delta)[0], None
        return x_TD, delta


class OffsetBlock(Block):
    """A block with an offset in its norms, and other mixers than plain attention."""

    has_fused_form = False


def make_block(spec: ModelSpec, layer: int) -> Block:
    if spec.block == BlockOptions():
        return Block(spec, layer)
    is_offset_only = replace(spec.block, norm_offset=0.0) == BlockOptions()
    return (OffsetBlock if is_offset_only else GeneralBlock)(spec, layer)


# By place of the norms, the HF name of each norm of a block.
NORM_NAMES = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {
        "attention_norm_after": "post_attention_layernorm",
        "mlp_norm_after": "post_feedforward_layernorm",
    },
    "both": {
        "attention_norm": "input_layernorm",
        "attention_norm_after": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_norm_after": "post_feedforward_layernorm",
    },
}


class Transformer(LanguageModel):
    """Hone's own implementation of a causal language model.

    Weights are uninitialized until they are loaded (`models/hf.py`) or drawn (`init_weights`).
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.embed = Embedding(spec.vocab_size, spec.hidden_size)
        self.blocks = nn.ModuleList(self.make_block(i) for i in range(spec.num_hidden_layers))
        self.norm = make_norm(spec.hidden_size, spec)
        self.head = None if spec.tie_word_embeddings else Linear(spec.hidden_size, spec.vocab_size)
        # The index of each layer among those of its kind, by which attention finds keys or states.
        deltas = [spec.delta_shape(i) is not None for i in range(spec.num_hidden_layers)]
        self.places = [
            sum(one == is_delta for one in deltas[:i]) for i, is_delta in enumerate(deltas)
        ]
        self.rope_tables: dict[Rope | None, tuple[Tensor, Tensor]] = {}

    def make_block(self, layer: int) -> nn.Module:
        return make_block(self.spec, layer)

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
                f"{ours}.{name}.weight": [f"{theirs}.{hf}.weight"]
                for name, hf in NORM_NAMES[spec.block.norms].items()
            }
            table |= {
                f"{ours}.attention.{name}": [f"{theirs}.{part}" for part in parts]
                for name, parts in spec.mixer_names(i).items()
            }
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
        return self._forward_embedded(self.embed(tokens_T), positions_T, attend, keep_N)

    def forward_newest(self, active_B: Tensor, state: Tensor, attend: Attention) -> Tensor:
        if not self.stays_on_device:
            return super().forward_newest(active_B, state, attend)
        from hone.kernels.gpu.row_kernels import newest_embeddings

        # The attention kernels read the positions from the state.
        x_BD = newest_embeddings(self.embed.weight, active_B, state)
        return self._forward_embedded(x_BD, None, attend)

    def _forward_embedded(
        self,
        x_TD: Tensor,
        positions_T: Tensor | None,
        attend: Attention,
        keep_N: Tensor | None = None,
    ) -> Tensor:
        """Run `forward` on embedded tokens. Positions may be omitted if `attend` knows them."""
        if self.spec.embedding_factor != 1.0:
            x_TD = x_TD * torch.tensor(self.spec.embedding_factor, dtype=x_TD.dtype)
        ops = select_ops(x_TD)
        delta = None
        rotations = self.make_rotations(x_TD, positions_T)
        last = len(self.blocks) - 1
        self._give_routing(keep_N)
        for layer, block in enumerate(self.blocks):
            kept_N, following = (keep_N, None) if layer == last else (None, self.blocks[layer + 1])
            rotation = rotations[self.spec.layers[layer].rope]
            inputs = (ops, self.places[layer], x_TD, delta, rotation, attend, kept_N, following)
            x_TD, delta = self.run_block(block, *inputs)
        hidden_TD = ops.add_normed(self.norm, x_TD, delta)[1]
        factor = self.spec.logit_factor
        return hidden_TD if factor == 1.0 else hidden_TD * factor

    def make_rotations(
        self, x_TD: Tensor, positions_T: Tensor | None
    ) -> dict[Rope | None, Rotation]:
        """Return the rotation of each rope of the model, in the dtype of `x_TD`."""
        return {
            rope: Rotation(self.rope_table(rope, x_TD), positions_T, rope)
            for rope in {layer.rope for layer in self.spec.layers}
        }

    def run_block(self, block: nn.Module, *inputs: Any) -> Any:
        """Return what a block returns; with gradients it may keep its inputs alone."""
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

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
        shapes = {self.spec.delta_shape(i) for i in range(self.spec.num_hidden_layers)}
        has_kernels = all(shape is None or shape.has_gpu_sizes for shape in shapes)
        return has_kernels and gpu.takes_model(self.embed.weight, self.spec.head_dim)

    @property
    def prefills_on_device(self) -> bool:
        # Capped attention and large heads have no kernel for whole prompts.
        has_flash = self.spec.attention_cap is None and self.spec.head_dim <= FLASH_HEAD_SIZE
        return self.stays_on_device and has_flash

    @property
    def trains_prefixes(self) -> bool:
        # Flash attention takes larger heads than Hone's kernels, but no options with prefixes.
        has_flash = gpu.has_kernels(self.embed.weight) and self.spec.head_dim <= FLASH_HEAD_SIZE
        return super().trains_prefixes or (self.spec.has_plain_attention and has_flash)

    @property
    def state_bytes(self) -> int:
        return self.spec.state_bytes(self.embed.weight.dtype.itemsize)

    @property
    def expert_layers(self) -> list["Experts"]:
        """Return the mixture of experts of each block, for models that have experts."""
        return [block.mlp for block in self.blocks]  # type: ignore[misc]

    def rope_table(self, rope: Rope | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin of all positions, on the device and in the dtype of `like`."""
        table = self.rope_tables.get(rope)
        if table is None or table[0].device != like.device or table[0].dtype != like.dtype:
            built = build_rope_table(rope, self.spec)
            table = tuple(x.to(like.device, like.dtype) for x in built)  # type: ignore[assignment]
            assert table is not None
            self.rope_tables[rope] = table
        return table

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Draw normal weights with deviation `initializer_range`; norms scale by 1, biases are 0."""
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0 - self.spec.block.norm_offset)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, self.spec.initializer_range, generator=generator)
        for module in self.modules():
            if isinstance(module, DeltaNet):
                module.draw_gates(generator)


def build_rope_table(rope: Rope | None, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles of all positions, P x width, float32.

    Each half of a row has all angles; the first half of sin is negated. Without a rope they are
    those of no rotation.
    """
    P = spec.max_position_embeddings
    if rope is None:
        return torch.ones(P, spec.head_dim), torch.zeros(P, spec.head_dim)
    half = torch.arange(0, rope.width, 2, dtype=torch.int64).float() / rope.width
    frequencies = 1.0 / rope.theta**half
    amplitude = 1.0
    if rope.scaling is not None:
        frequencies = rope.scaling.scale(frequencies, rope.theta)
        amplitude = rope.scaling.amplitude
    angles = torch.outer(torch.arange(P).float(), frequencies)
    cos = angles.cos() * amplitude
    sin = angles.sin() * amplitude
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
