"""Gemma 4's E-series: blocks with an input per layer, and layers that share keys and values.

    tokens ─┬─ embed ─► x ─► block 0 ─► block 1 ─► … ─► norm
            └─ inputs of all layers ──┘──────────┘       x += norm(W2 (gelu(W1 x) * input)) after each MLP

The last layers have no keys of their own and read those of an earlier layer, its source. Norms, also
that of the values, and rotation come before the attention kernel.

Shapes as in `transformer.py`; P numbers of an input, L layers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.kernels import gpu
from hone.kernels.norm import offset_norm
from hone.kernels.row_gather import take_rows
from hone.models.attention_layouts import AttentionOptions, Heads, Rotation
from hone.models.families.gemma4 import Gemma4
from hone.models.language_model import LanguageModel
from hone.models.layers import MLP, Attention, Embedding, Linear, RMSNorm, make_norm
from hone.models.ops import Ops, select_ops
from hone.models.transformer import Transformer


class Gemma4Attention(nn.Module):
    """Projection to q, and to k and v in layers that have them; attention; output projection."""

    def __init__(self, spec: Gemma4, layer: int) -> None:
        super().__init__()
        size = spec.head_sizes[layer]
        self.heads = spec.num_attention_heads
        self.key_heads = spec.num_key_value_heads
        self.head_dim = size
        self.eps = spec.rms_norm_eps
        self.has_keys = spec.is_source(layer)
        self.qkv = Linear(spec.hidden_size, sum(spec.head_rows(layer)))
        self.out = Linear(self.heads * size, spec.hidden_size)
        self.q_norm = nn.Parameter(torch.ones(size))
        self.k_norm = nn.Parameter(torch.ones(size)) if self.has_keys else None
        options = AttentionOptions(spec.attention_scale, spec.layers[layer].window)
        self.options = options.without_defaults(size)

    def mix_heads(
        self,
        place: int,
        qkv_TO: Tensor,
        rotation: Rotation,
        attend: Attention,
        source_TNE: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs, T x (H * E), and the prepared heads, T x (H + 2K) x E."""
        heads_TNE = self.prepare_heads(qkv_TO, rotation, source_TNE)
        heads = Heads(self.heads, None, None, self.eps, None, self.options)
        return attend(place, heads_TNE, heads), heads_TNE

    def prepare_heads(
        self, qkv_TO: Tensor, rotation: Rotation, source_TNE: Tensor | None
    ) -> Tensor:
        """Return q and k, normalized and rotated, and v, normalized, side by side.

        k and v are those of the prepared heads `source_TNE` in layers that have none of their own.
        """
        qkv_TNE = qkv_TO.unflatten(1, (-1, self.head_dim))
        if gpu.takes(qkv_TO) and gpu.takes_heads(self.head_dim):
            from hone.kernels.gpu import row_kernels

            assert rotation.positions_T is not None
            return row_kernels.prepare_heads(
                qkv_TNE,
                source_TNE,
                self.q_norm,
                self.k_norm,
                rotation.cos_PE,
                rotation.sin_PE,
                rotation.positions_T,
                self.eps,
                (self.heads, self.key_heads),
            )
        q_THE = offset_norm(qkv_TNE[:, : self.heads], self.q_norm, 0.0, self.eps)
        q_THE = rotation.rotate_heads(q_THE)
        if source_TNE is not None:
            return torch.cat([q_THE, source_TNE[:, self.heads :]], 1)
        assert self.k_norm is not None
        k_TKE, v_TKE = qkv_TNE[:, self.heads :].chunk(2, 1)
        k_TKE = rotation.rotate_heads(offset_norm(k_TKE, self.k_norm, 0.0, self.eps))
        v_TKE = offset_norm(v_TKE, torch.ones_like(self.k_norm), 0.0, self.eps)
        return torch.cat([q_THE, k_TKE, v_TKE], 1)


class Gemma4Block(nn.Module):
    scale: Tensor  # `layer_scalar` in files; not trained

    def __init__(self, spec: Gemma4, layer: int) -> None:
        super().__init__()
        size = spec.hidden_size
        self.attention_norm = make_norm(size, spec)
        self.attention = Gemma4Attention(spec, layer)
        self.attention_norm_after = make_norm(size, spec)
        self.mlp_norm = make_norm(size, spec)
        self.mlp = MLP(spec, spec.mlp_size(layer))
        self.mlp_norm_after = make_norm(size, spec)
        self.input_gate = Linear(size, spec.layer_input_size)
        self.input_projection = Linear(spec.layer_input_size, size)
        self.input_norm_after = make_norm(size, spec)
        self.register_buffer("scale", torch.ones(1))

    def forward(
        self,
        ops: Ops,
        place: int,
        x_TD: Tensor,
        rotation: Rotation,
        attend: Attention,
        input_TP: Tensor,
        source_TNE: Tensor | None,
        keep_N: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream after this block, and its prepared heads.

        Args:
            place: index of the layer's keys and values among those of the model.
            input_TP: the tokens' inputs to this layer.
            source_TNE: prepared heads of the source layer; None: the layer has keys of its own.
        """
        x_TD, normed_TD = ops.add_normed(self.attention_norm, x_TD, None)
        qkv_TO = ops.linear(self.attention.qkv, normed_TD)
        mixed_TD, heads_TNE = self.attention.mix_heads(place, qkv_TO, rotation, attend, source_TNE)
        if keep_N is not None:
            x_TD, mixed_TD, input_TP = (take_rows(x, keep_N) for x in (x_TD, mixed_TD, input_TP))
        delta = ops.project_branch(self.attention.out, mixed_TD, self.attention_norm_after, 1.0)
        x_TD, normed_TD = ops.add_normed(self.mlp_norm, x_TD, delta)
        gated_TF = self.mlp.gate(ops.linear(self.mlp.gate_up, normed_TD))
        delta = ops.project_branch(self.mlp.down, gated_TF, self.mlp_norm_after, 1.0)
        x_TD, _ = ops.add_normed(None, x_TD, delta)
        gate_TP = F.gelu(ops.linear(self.input_gate, x_TD), approximate="tanh") * input_TP
        delta = ops.project_branch(self.input_projection, gate_TP, self.input_norm_after, 1.0)
        x_TD, _ = ops.add_normed(None, x_TD, delta)
        return x_TD * self.scale, heads_TNE


class Gemma4Transformer(Transformer):
    """Gemma 4's E-series on Hone's own blocks.

    Attributes:
        layer_embed: a token's own inputs to all layers, V x (L * P).
        input_projection: from the embedding to inputs of all layers.
        input_norm: of these, P.
    """

    spec: Gemma4

    def __init__(self, spec: Gemma4) -> None:
        super().__init__(spec)
        width = spec.num_hidden_layers * spec.layer_input_size
        self.layer_embed = Embedding(spec.vocab_size, width)
        self.input_projection = Linear(spec.hidden_size, width)
        self.input_norm = RMSNorm(spec.layer_input_size, spec.rms_norm_eps)
        own = [layer for layer, source in enumerate(spec.sources) if layer == source]
        self.places = [own.index(source) for source in spec.sources]

    def make_block(self, layer: int) -> nn.Module:
        return Gemma4Block(self.spec, layer)

    @classmethod
    def weight_names(cls, spec: Any) -> dict[str, list[str]]:
        table = super().weight_names(spec) | {
            "layer_embed.weight": ["model.embed_tokens_per_layer.weight"],
            "input_projection.weight": ["model.per_layer_model_projection.weight"],
            "input_norm.weight": ["model.per_layer_projection_norm.weight"],
        }
        of_block = {
            "input_gate.weight": "per_layer_input_gate.weight",
            "input_projection.weight": "per_layer_projection.weight",
            "input_norm_after.weight": "post_per_layer_input_norm.weight",
            "scale": "layer_scalar",
        }
        for i in range(spec.num_hidden_layers):
            table |= {
                f"blocks.{i}.{ours}": [f"model.layers.{i}.{hf}"] for ours, hf in of_block.items()
            }
        return table

    @property
    def stays_on_device(self) -> bool:
        weight = self.embed.weight
        return all(gpu.takes_model(weight, size) for size in set(self.spec.head_sizes))

    def forward_newest(self, active_B: Tensor, state: Tensor, attend: Attention) -> Tensor:
        # Transformer's version passes neither tokens nor positions on, and blocks need both.
        return LanguageModel.forward_newest(self, active_B, state, attend)

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attention, keep_N: Tensor | None = None
    ) -> Tensor:
        factor = torch.tensor(self.spec.embedding_factor, dtype=self.embed.weight.dtype)
        x_TD = self.embed(tokens_T) * factor
        input_TLP = self.compute_layer_inputs(tokens_T, x_TD)
        ops = select_ops(x_TD)
        rotations = self.make_rotations(x_TD, positions_T)
        last = len(self.blocks) - 1
        found: dict[int, Tensor] = {}  # prepared heads of source layers
        for layer, block in enumerate(self.blocks):
            source = self.spec.sources[layer]
            inputs = (
                ops,
                self.places[layer],
                x_TD,
                rotations[self.spec.layers[layer].rope],
                attend,
                input_TLP[:, layer],
                found.get(source),
                keep_N if layer == last else None,
            )
            x_TD, heads_TNE = self.run_block(block, *inputs)
            if layer in self.spec.sources[layer + 1 :]:
                found[layer] = heads_TNE
        hidden_TD: Tensor = ops.add_normed(self.norm, x_TD, None)[1]
        return hidden_TD

    def compute_layer_inputs(self, tokens_T: Tensor, x_TD: Tensor) -> Tensor:
        """Return each token's inputs to all layers, T x L x P, from its embedding and a table."""
        shape = (self.spec.num_hidden_layers, self.spec.layer_input_size)
        of_table = self.layer_embed(tokens_T)
        of_table = of_table * torch.tensor(shape[1] ** 0.5, dtype=of_table.dtype)
        projected_TL = self.input_projection(x_TD) * self.spec.hidden_size**-0.5
        normed_TLP = offset_norm(
            projected_TL.unflatten(1, shape), self.input_norm.weight, 0.0, self.input_norm.eps
        )
        return (normed_TLP + of_table.unflatten(1, shape)) * 2.0**-0.5
