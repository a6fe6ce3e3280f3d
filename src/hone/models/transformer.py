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
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hone.kernels import cpu, cpu_training, gpu
from hone.kernels.flat_attention import takes_heads
from hone.kernels.gpu_training import norm_linear, swiglu_linear, whole_linear
from hone.kernels.linear import (
    few_linear,
    few_linear_onto,
    is_multiplied_here,
    is_ordered,
    linear,
    linear_parts,
)
from hone.kernels.norm import add_norm
from hone.kernels.row_gather import take_rows
from hone.kernels.swiglu import linear_swiglu, swiglu, swiglu_reference
from hone.models.attention_layouts import Heads, PackedAttention, Rotation
from hone.models.families.qwen3_moe import Qwen3Moe
from hone.models.spec import Llama3Rope, ModelSpec

# What is still to be added to the residual stream: a tensor, its parts, or None; a `Scaled` is the
# norm of a stream that is complete.
Pending = Tensor | gpu.Scaled | None


class Attention(Protocol):
    """Attention over the tokens that each query may see: qkv T x (H + 2K) x E -> T x (H * E).

    `heads` makes q, k and v of the projection; a kernel may fuse that with attention.
    """

    def __call__(self, layer: int, qkv_TNE: Tensor, heads: Heads, /) -> Tensor: ...


class Linear(nn.Module):
    """y = W x + b. Not nn.Linear, which would initialize weights; they are loaded, or set by
    `init_weights`.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.delta: Callable[[Tensor], Tensor | None] | None = (
            None  # adapters (`adapters.py`, `lora.py`)
        )

    def forward(self, x: Tensor) -> Tensor:
        if (whole := self.whole_weight()) is not None:
            return whole_linear(whole, x, self.weight, self.bias, *self.added_factors())
        y = linear(x, self.weight, self.bias)
        added = None if self.delta is None else self.delta(x)
        return y if added is None else y + added

    @property
    def is_plain(self) -> bool:
        """Return True if the layer is W x + b, or W x + b + B A x with the `added_factors` A and B."""
        return self.delta is None or getattr(self.delta, "is_plain", False)

    def added_factors(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return A and B of what is added to a plain layer."""
        return (None, None) if self.delta is None else self.delta.scaled_factors()  # type: ignore[attr-defined]

    def whole_weight(self) -> Tensor | None:
        """Return the weight with adapters merged as the sampler has it, on a GPU with exact
        numerics.
        """
        merged = getattr(self.delta, "merge_into", None)
        if merged is None or not self.is_plain or not is_ordered(self.weight):
            return None
        weight: Tensor = merged(self.weight)
        return weight

    def project_onto(
        self, stream_TO: Tensor, x_TI: Tensor, norm: "RMSNorm | None" = None
    ) -> tuple[Tensor, Pending]:
        """Return the residual stream and a pending delta, for few tokens on a GPU as parts S x T x
        O.

        For even fewer tokens the result is added to the stream, and the second value is the norm of
        that, if one is given.
        """
        if self.delta is not None:
            return stream_TO, self(x_TI)
        if gpu.is_few(x_TI, self.weight):
            following, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return few_linear_onto(stream_TO, x_TI, self.weight, self.bias, following, eps)
        return stream_TO, linear_parts(x_TI, self.weight, self.bias)


class Embedding(nn.Module):
    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size))

    def forward(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_TD: Tensor, delta_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + delta, and its norm."""
        return add_norm(x_TD, delta_TD, self.weight, self.eps)

    def norm_and_project(
        self, linear: Linear, x_TD: Tensor, delta: Pending
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta, and the projection of its norm."""
        if isinstance(delta, gpu.Scaled):
            return x_TD, few_linear(delta, linear.weight, linear.bias)
        if gpu.trains(x_TD) and linear.is_plain:
            parts = (linear.weight, linear.bias, *linear.added_factors(), linear.whole_weight())
            return norm_linear(x_TD, delta, self.weight, self.eps, *parts)
        total_TD, normed_TD = self(x_TD, delta)
        return total_TD, linear(normed_TD)

    def fused_before(self, projection: nn.Module, x_TD: Tensor) -> "RMSNorm | None":
        """Return this norm if the next projection takes it fused with the addition
        (`project_onto`).
        """
        # Ranks shard it, and gather it for its own block only.
        is_elsewhere = hasattr(self.weight, "to_local")
        if not isinstance(projection, Linear) or projection.delta is not None or is_elsewhere:
            return None
        return self if gpu.is_few(x_TD, projection.weight) else None


class SelfAttention(nn.Module):
    """Projections, with attention between them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads, self.head_dim = spec.num_attention_heads, spec.head_dim
        self.eps = spec.rms_norm_eps
        self.qkv = Linear(spec.hidden_size, sum(spec.qkv_splits), bias=spec.qkv_bias)
        self.out = Linear(spec.qkv_splits[0], spec.hidden_size, bias=spec.out_bias)
        self.q_norm = nn.Parameter(torch.ones(spec.head_dim)) if spec.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(spec.head_dim)) if spec.qk_norm else None

    def mix_heads(
        self, layer: int, qkv_TO: Tensor, rotation: Rotation, attend: Attention
    ) -> Tensor:
        qkv_TNE = qkv_TO.view(len(qkv_TO), qkv_TO.shape[1] // self.head_dim, self.head_dim)
        return attend(
            layer, qkv_TNE, Heads(self.heads, self.q_norm, self.k_norm, self.eps, rotation)
        )


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up = Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def norm_and_apply(
        self, norm: RMSNorm, x_TD: Tensor, delta: Pending, following: RMSNorm | None = None
    ) -> tuple[Tensor, Pending]:
        """Return x + delta, and the MLP of its norm, as `Linear.project_onto` does before
        `following`.
        """
        weights = (self.gate_up.weight, self.gate_up.bias)
        if isinstance(delta, gpu.Scaled):
            return self.down.project_onto(
                x_TD, few_linear(delta, *weights, is_swiglu=True), following
            )
        if self.gate_up.delta is None and gpu.takes(x_TD):
            x_TD, normed_TD = norm(x_TD, delta)
            return self.down.project_onto(x_TD, linear_swiglu(normed_TD, *weights), following)
        x_TD, gate_up_T2F = norm.norm_and_project(self.gate_up, x_TD, delta)
        if gpu.trains(gate_up_T2F) and self.down.is_plain:
            down = (
                self.down.weight,
                self.down.bias,
                *self.down.added_factors(),
                self.down.whole_weight(),
            )
            return x_TD, swiglu_linear(gate_up_T2F, *down)
        return self.down.project_onto(x_TD, swiglu(gate_up_T2F), following)


class Experts(nn.Module):
    """E small feed-forward experts of which each token uses k, by router softmax (Qwen3-MoE). Plain
    torch.

    Weights of all experts are stacked: gate_up E2F x D, down ED x F.
    """

    def __init__(self, spec: Qwen3Moe) -> None:
        super().__init__()
        self.spec, D, F_ = spec, spec.hidden_size, spec.intermediate_size
        self.given_TK: Tensor | None = None  # experts to use; -1: the router's choice
        self.chosen_TK: Tensor | None = None  # of the last forward
        self.differs_TK: Tensor | None = None  # given experts that the router would not have chosen
        self.router, self.gate_up, self.down = (
            Weight(spec.experts * rows, columns) for rows, columns in ((1, D), (2 * F_, D), (D, F_))
        )

    def norm_and_apply(
        self, norm: RMSNorm, x_TD: Tensor, delta_TD: Tensor | None, following: RMSNorm | None = None
    ) -> tuple[Tensor, Tensor]:
        x_TD, normed_TD = norm(x_TD, delta_TD)
        return x_TD, self(normed_TD)

    def forward(self, x_TD: Tensor) -> Tensor:
        probabilities_TE = F.linear(x_TD, self.router.weight).softmax(-1, dtype=torch.float32)
        weight_TK, expert_TK = probabilities_TE.topk(self.spec.experts_per_token)
        if self.given_TK is not None:
            is_own_TK = self.given_TK < 0
            self.differs_TK = ~is_own_TK & (self.given_TK[:, :, None] != expert_TK[:, None]).all(-1)
            expert_TK = torch.where(is_own_TK, expert_TK, self.given_TK)
            weight_TK = probabilities_TE.gather(1, expert_TK)
        self.chosen_TK = expert_TK
        if self.spec.normalizes:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        # M = T x k pairs of a token and an expert, ordered by expert.
        order_M = expert_TK.flatten().argsort(stable=True)
        counts_E = torch.bincount(expert_TK.flatten(), minlength=self.spec.experts)
        # F.embedding sums its gradient in a fixed order; indexing on a GPU does not.
        x_MD = F.embedding(order_M // self.spec.experts_per_token, x_TD)
        hidden_MF = swiglu_reference(grouped_linear(x_MD, self.gate_up.weight, counts_E))
        out_MD = grouped_linear(hidden_MF, self.down.weight, counts_E)
        out_TKD = F.embedding(order_M.argsort(), out_MD).view(*expert_TK.shape, -1)
        return (out_TKD * weight_TK.to(x_TD.dtype)[:, :, None]).sum(1)


class Weight(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Multiply the first counts[0] rows of x by the first weight, the next counts[1] by the second,
    …

    Weights are stacked, EO x I.
    """
    weights = weight_EOI.view(len(counts_E), -1, weight_EOI.shape[1])
    if x_MI.is_cuda and x_MI.dtype == torch.bfloat16:
        return F.grouped_mm(
            x_MI, weights.transpose(1, 2), offs=counts_E.cumsum(0, dtype=torch.int32)
        )
    parts = x_MI.split(counts_E.tolist())
    return torch.cat(
        [F.linear(part, weights[e]) for e, part in enumerate(parts) if len(part)]
        or [weights.new_empty(0, weights.shape[1])]
    )


FEED_FORWARD: dict[str, Any] = {"mlp": MLP, "experts": Experts}


class Block(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.attention = SelfAttention(spec)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = FEED_FORWARD[spec.feed_forward](spec)

    def forward(
        self,
        layer: int,
        x_TD: Tensor,
        delta: Pending,
        rotation: Rotation,
        attend: Attention,
        keep_N: Tensor | None,
        following: "Block | None" = None,
    ) -> tuple[Tensor, Pending]:
        """Take and return the residual stream and a pending delta.

        The next norm adds the delta to the stream; it may already be that norm's output.
        """
        if isinstance(attend, PackedAttention) and self.is_compiled(x_TD, keep_N):
            assert not isinstance(delta, gpu.Scaled)  # made on a GPU only
            return self.forward_compiled(x_TD, delta, rotation, attend, keep_N)
        x_TD, qkv_TO = self.attention_norm.norm_and_project(self.attention.qkv, x_TD, delta)
        mixed_TD = self.attention.mix_heads(layer, qkv_TO, rotation, attend)
        if keep_N is not None:
            x_TD, mixed_TD = take_rows(x_TD, keep_N), take_rows(mixed_TD, keep_N)
        x_TD, delta = self.attention.out.project_onto(
            x_TD, mixed_TD, self.mlp_norm.fused_before(self.mlp.gate_up, x_TD)
        )
        after = (
            None
            if following is None
            else following.attention_norm.fused_before(following.attention.qkv, x_TD)
        )
        return self.mlp.norm_and_apply(self.mlp_norm, x_TD, delta, after)

    def is_compiled(self, x_TD: Tensor, keep_N: Tensor | None = None) -> bool:
        """Return True if `forward_compiled` supports this: a dense block in training on a CPU, no
        biases.
        """
        # As many rows as the other linears have.
        kept_TD = x_TD if keep_N is None else x_TD[: len(keep_N)]
        own, linears = self.attention, [m for m in self.modules() if isinstance(m, Linear)]
        return (
            torch.is_grad_enabled()
            and cpu.takes(x_TD)
            and own.q_norm is not None
            and takes_heads(own.head_dim)
            and isinstance(self.mlp, MLP)
            and all(p.requires_grad for p in self.parameters())
            and all(
                m.delta is None and m.bias is None and is_multiplied_here(kept_TD, m.weight)
                for m in linears
            )
        )

    def forward_compiled(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        turn: Rotation,
        attend: PackedAttention,
        keep_N: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the block in two calls each way, with the same bits."""
        own, mlp = self.attention, self.mlp
        assert own.q_norm is not None and own.k_norm is not None
        norms = (
            self.attention_norm.weight,
            own.qkv.weight,
            own.q_norm,
            own.k_norm,
            turn.cos_T1E,
            turn.sin_T1E,
        )
        x_TD, mixed_TA = cpu_training.mix(
            x_TD, delta_TD, *norms, attend.sequences, own.eps, own.heads
        )
        if keep_N is not None:
            x_TD, mixed_TA = take_rows(x_TD, keep_N), take_rows(mixed_TA, keep_N)
        weights = (own.out.weight, self.mlp_norm.weight, mlp.gate_up.weight, mlp.down.weight)
        return cpu_training.feed(x_TD, mixed_TA, *weights, self.mlp_norm.eps)


class Transformer(nn.Module):
    """A causal language model of any family. `forward` gives hidden states, `compute_logits`
    logits.

    Weights are uninitialized until they are loaded (`models/hf.py`) or drawn (`init_weights`).
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec.vocab_size, spec.hidden_size)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.num_hidden_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.head = None if spec.tie_word_embeddings else Linear(spec.hidden_size, spec.vocab_size)
        self.rope_table: tuple[Tensor, Tensor] | None = None
        self.routing_TR: Tensor | None = (
            None  # experts to use in all blocks; -1: the router's choice
        )
        # With gradients: blocks keep only their inputs, and recompute the rest in backward.
        self.recomputes = False

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attention, keep_N: Tensor | None = None
    ) -> Tensor:
        """Return final normalized hidden states of tokens at positions in their own sequences.

        With `keep_N` (indices into T without repeats) only those rows are returned, N x D. The last
        block then computes only keys and values of the others.
        """
        return self.forward_embedded(self.embed(tokens_T), positions_T, attend, keep_N)

    def forward_embedded(
        self,
        x_TD: Tensor,
        positions_T: Tensor | None,
        attend: Attention,
        keep_N: Tensor | None = None,
    ) -> Tensor:
        """Do `forward` for embedded tokens. Positions may be omitted if `attend` knows them."""
        delta = None
        rotation = Rotation(self.rope_tables(x_TD.device, x_TD.dtype), positions_T)
        last = len(self.blocks) - 1
        self._give_routing(keep_N)
        for layer, block in enumerate(self.blocks):
            kept_N, following = (keep_N, None) if layer == last else (None, self.blocks[layer + 1])
            inputs = (layer, x_TD, delta, rotation, attend, kept_N, following)
            if self.recomputes and torch.is_grad_enabled():
                x_TD, delta = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x_TD, delta = block(*inputs)
        return self.norm(x_TD, delta)[1]

    def _give_routing(self, keep_N: Tensor | None) -> None:
        """Pass each block its part of `routing_TR`, the last one only the kept rows."""
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
        """Return True if a pass over few tokens needs no host work, so that graphs can capture it."""
        return self.spec.has_fast_paths and gpu.takes_model(self.embed.weight, self.spec.head_dim)

    @property
    def expert_layers(self) -> list["Experts"]:
        """Return the feed-forward parts of a mixture of experts."""
        return [block.mlp for block in self.blocks]  # type: ignore[misc]

    def compute_logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits T x V in the dtype of the weights."""
        return linear(hidden_TD, self.head_weight_VD)

    @property
    def head_weight_VD(self) -> Tensor:
        """Return the head's weight, which is the embedding's if they are tied."""
        return self.embed.weight if self.head is None else self.head.weight

    def rope_tables(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rotary angles of all positions, P x E (Su et al. 2021),
        half-split.
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
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(device, dtype), torch.cat([-sin, sin], -1).to(device, dtype)


def scale_frequencies(frequencies: Tensor, rope: Llama3Rope) -> Tensor:
    """Scale frequencies as Llama 3.1 does, by their number of turns in the original context."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(
        0, 1
    )
    return kept * frequencies + (1 - kept) * frequencies / rope.factor
