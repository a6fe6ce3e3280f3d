"""The layers of a transformer: parameters and plain computation. `ops.py` chooses how they are executed.

Shapes: T tokens, D hidden, H query heads, K key/value heads, E head size, F feed-forward.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.kernels import gpu
from hone.kernels.delta_plan import DeltaHeads
from hone.kernels.delta_shape import DeltaShape
from hone.kernels.expert_products import ExpertWeights, decode_experts, multiply_experts
from hone.kernels.linear import linear
from hone.kernels.norm import add_norm, normalize_projections
from hone.kernels.swiglu import geglu, swiglu
from hone.models.attention_layouts import AttentionOptions, Heads, Rotation
from hone.models.expert_parallel import ExpertRanks, take_local_part
from hone.models.families.qwen3_moe import Qwen3Moe
from hone.models.mixers import Mixer
from hone.models.spec import ModelSpec


class Attention(Protocol):
    """Callable that computes attention: qkv (T x (H + 2K) x E) -> outputs (T x (H * E)).

    The callable determines which tokens each query attends to. It splits qkv into q, k and v by
    calling `heads`, or does this split inside its attention kernel.
    """

    def __call__(self, layer: int, qkv_TNE: Tensor, heads: Heads, /) -> Tensor: ...

    def mix_sequences(self, layer: int, x_TD: Tensor, mixer: Mixer, /) -> Tensor:
        """Return a mixer's outputs (T x D); tokens see only their own sequence.

        `layer` is the index of the mixer among those of the model.
        """
        ...

    def mix_delta(self, layer: int, projected_TO: Tensor, heads: DeltaHeads, /) -> Tensor:
        """Return the outputs (T x VF) of a layer with the gated delta rule (`kernels/delta_rule.py`).

        `layer` is its index among these layers.
        """
        ...


class Linear(nn.Module):
    """y = W x + b, without the initialization of nn.Linear.

    Weights are loaded, or set by `init_weights`.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.delta: Callable[[Tensor], Tensor | None] | None = (
            None  # adapters (`adapters.py`, `lora.py`)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b and the adapters' part, for T x I, or for … x I as transformers has it."""
        if x.dim() > 2:
            flat: Tensor = self(x.flatten(0, -2))
            return flat.unflatten(0, x.shape[:-1])
        y = linear(x, self.weight, self.bias)
        added = None if self.delta is None else self.delta(x)
        return y if added is None else y + added

    @property
    def is_plain(self) -> bool:
        """Return True if the layer is W x + b, or W x + b + B A x with a training adapter.

        False with adapter dropout, or with adapters chosen per token.
        """
        return self.delta is None or getattr(self.delta, "is_plain", False)

    def added_factors(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return A and B of an `is_plain` layer's adapter (B times the scale), or two Nones."""
        return (None, None) if self.delta is None else self.delta.scaled_factors()  # type: ignore[attr-defined]

    def merged_weight(self) -> Tensor | None:
        """Return the weight with its adapter merged, as the sampler has it.

        None if there is no trained adapter, or if it uses dropout.
        """
        merge = getattr(self.delta, "merge_into", None)
        if merge is None or not self.is_plain:
            return None
        weight: Tensor = merge(self.weight)
        return weight


class Embedding(nn.Module):
    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size))

    def forward(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self.weight)


class RMSNorm(nn.Module):
    """RMS norm scaled by weight + offset, added in float32; the offset is 1 in Gemma and Qwen3.5."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps = eps
        self.offset = offset

    def forward(self, x_TD: Tensor, delta_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + delta, and the normalized sum."""
        return add_norm(x_TD, delta_TD, self.weight, self.eps, self.offset)


def add_branch(
    x_TD: Tensor,
    parts: Tensor,
    norm_after: RMSNorm | None,
    factor: float,
    norm: RMSNorm | None,
) -> tuple[Tensor, Tensor]:
    """Return total = x + factor * norm_after(sum of parts), and norm(total), by a GPU kernel.

    Without gradients. Norms may be None; without `norm` the total is returned twice. `parts` is
    T x D, or S x T x D.
    """
    from hone.kernels.gpu import row_kernels

    one = norm_after or norm
    offset = 0.0 if one is None else one.offset
    eps = 0.0 if one is None else one.eps
    after, before = (None if each is None else each.weight for each in (norm_after, norm))
    return row_kernels.add_branch(x_TD, parts, after, factor, before, offset, eps)


def make_norm(size: int, spec: ModelSpec) -> RMSNorm:
    return RMSNorm(size, spec.rms_norm_eps, spec.block.norm_offset)


class SelfAttention(nn.Module):
    """Fused projection to q, k and v, attention, and output projection.

    Attention kernels normalize q and k per head and rotate them; norms over the whole projection
    come before.

    Attributes:
        sinks: logit per head that joins the softmax (GPT-OSS); None: there are none.
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.heads = spec.num_attention_heads
        self.head_dim = spec.head_dim
        self.eps = spec.rms_norm_eps
        self.qkv = Linear(spec.hidden_size, spec.projection_rows, bias=spec.qkv_bias)
        self.out = Linear(spec.qkv_splits[0], spec.hidden_size, bias=spec.out_bias)
        self.norm_offset = spec.block.norm_offset
        self.normalizes_whole = spec.qk_norm == "whole"
        self.has_plain_heads = spec.has_plain_heads
        self.q_norm, self.k_norm = (
            None if width is None else nn.Parameter(torch.full((width,), 1.0 - self.norm_offset))
            for width in _norm_widths(spec)
        )
        options = AttentionOptions(
            spec.attention_scale, spec.layers[layer].window, spec.attention_cap
        )
        self.options = options.without_defaults(spec.head_dim)
        self.sinks = nn.Parameter(torch.empty(self.heads)) if spec.has_sinks else None

    def mix_heads(
        self, layer: int, qkv_TO: Tensor, rotation: Rotation, attend: Attention
    ) -> Tensor:
        norms = (self.q_norm, self.k_norm)
        if self.normalizes_whole:
            assert self.q_norm is not None and self.k_norm is not None
            qkv_TO = normalize_projections(qkv_TO, self.q_norm, self.k_norm, self.eps)
            norms = (None, None)
        qkv_TNE = qkv_TO.view(len(qkv_TO), qkv_TO.shape[1] // self.head_dim, self.head_dim)
        options = self.options
        if self.sinks is not None:
            options = replace(options or AttentionOptions(), sinks_H=self.sinks)
        heads = Heads(
            self.heads,
            *norms,
            self.eps,
            rotation,
            options,
            self.norm_offset,
            self.has_plain_heads,
        )
        return attend(layer, qkv_TNE, heads)


def _norm_widths(spec: ModelSpec) -> tuple[int | None, int | None]:
    """Return the sizes of the weights of q's and k's norm."""
    if spec.qk_norm is None:
        return None, None
    if spec.qk_norm == "head":
        return spec.head_dim, spec.head_dim
    q, k, _ = spec.qkv_splits
    return q, k


class GatedAttention(SelfAttention):
    """Attention whose outputs are multiplied by sigmoid(gate).

    The projection has, for each query head, E numbers of q, then E of the gate; then k and v.
    """

    def mix_heads(
        self, layer: int, qkv_TO: Tensor, rotation: Rotation, attend: Attention
    ) -> Tensor:
        size = self.heads * self.head_dim
        q_TH2E = qkv_TO[:, : 2 * size].unflatten(1, (self.heads, 2, self.head_dim))
        q_THE, gate_THE = q_TH2E.unbind(2)
        plain_TO = torch.cat([q_THE.flatten(1), qkv_TO[:, 2 * size :]], 1)
        out_TQ = super().mix_heads(layer, plain_TO, rotation, attend)
        return out_TQ * gate_THE.flatten(1).sigmoid()


class DeltaNet(nn.Module):
    """The gated delta rule in place of attention (`kernels/delta_rule.py`).

    Attributes:
        qkv: projection to q, k and v, the gate z, and b and a, by rows.
        conv: weight of the causal convolution, channels x 1 x width, as in files.
        decay: logarithm of each head's decay rate (`A_log`).
        decay_bias: added before softplus (`dt_bias`).
        norm: scale of the norm of the outputs.
    """

    def __init__(self, spec: ModelSpec, shape: DeltaShape) -> None:
        super().__init__()
        self.shape = shape
        self.eps = spec.rms_norm_eps
        self.qkv = Linear(spec.hidden_size, sum(shape.projection_rows))
        self.conv = nn.Parameter(torch.empty(shape.channels, 1, shape.conv_width))
        self.decay = nn.Parameter(torch.empty(shape.value_heads))
        self.decay_bias = nn.Parameter(torch.empty(shape.value_heads))
        self.norm = nn.Parameter(torch.ones(shape.value_size))
        self.out = Linear(shape.outputs, spec.hidden_size)

    def mix_heads(
        self, layer: int, projected_TO: Tensor, rotation: Rotation, attend: Attention
    ) -> Tensor:
        weights = (self.conv, self.decay, self.decay_bias, self.norm)
        return attend.mix_delta(layer, projected_TO, DeltaHeads(self.shape, *weights, self.eps))

    @torch.no_grad()
    def draw_gates(self, generator: torch.Generator) -> None:
        """Draw decay rates of 0.01 to 16, as transformers does; the norm scales by 1."""
        rates = torch.empty_like(self.decay, dtype=torch.float32)
        self.decay.copy_(rates.uniform_(0.01, 16.0, generator=generator).log())
        self.decay_bias.fill_(1.0)
        self.norm.fill_(1.0)


def make_mixer(spec: ModelSpec, layer: int) -> "SelfAttention | DeltaNet":
    """Return a layer's attention, or what it has in its place."""
    shape = spec.delta_shape(layer)
    if shape is not None:
        return DeltaNet(spec, shape)
    return (GatedAttention if spec.gates_attention else SelfAttention)(spec, layer)


class MLP(nn.Module):
    """SwiGLU or GeGLU of `size` hidden units; None: those of the spec."""

    def __init__(self, spec: ModelSpec, size: int | None = None) -> None:
        super().__init__()
        size = size or spec.intermediate_size
        self.gate_up = Linear(spec.hidden_size, 2 * size, bias=spec.mlp_bias)
        self.down = Linear(size, spec.hidden_size, bias=spec.mlp_bias)
        self.activation = spec.block.activation

    def gate(self, gate_up_T2F: Tensor) -> Tensor:
        """Return the activated gate times the other half, T x F."""
        return swiglu(gate_up_T2F) if self.activation == "silu" else geglu(gate_up_T2F)


class Experts(nn.Module):
    """Mixture of experts: a softmax router chooses a few experts, small MLPs, for each token.

    All tokens use the shared expert, if there is one (Qwen3.5). Weights of all experts are stacked:
    gate_up (E2F x D), down (ED x F).

    Attributes:
        ranks: ranks among which the experts are divided; None: this process has all of them.
    """

    def __init__(self, spec: Qwen3Moe) -> None:
        super().__init__()
        self.spec = spec
        self.ranks: ExpertRanks | None = None
        self.shared: MLP | None = None  # shared expert, times sigmoid(shared_gate x)
        if spec.shared_size:
            self.shared = MLP(spec, spec.shared_size)
            self.shared_gate = Weight(1, spec.hidden_size)
        D = spec.hidden_size
        F_ = spec.intermediate_size
        self.given_TK: Tensor | None = None  # experts to use; -1: the router's choice
        self.chosen_TK: Tensor | None = None  # of the last forward
        self.differs_TK: Tensor | None = None  # given experts that the router would not have chosen
        self.router = Weight(spec.experts, D, spec.has_expert_biases)
        form = (spec.has_expert_biases, spec.has_input_major_experts)
        self.gate_up = ExpertLinear(spec.experts, D, 2 * F_, *form)
        self.down = ExpertLinear(spec.experts, F_, D, *form)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the outputs, T x D; GPU kernels without gradients return parts to sum, parts x T x D."""
        out = self._mix_experts(x_TD)
        if self.shared is None:
            return out
        hidden_TF = self.shared.gate(self.shared.gate_up(x_TD))
        shared_TD = self.shared.down(hidden_TF) * F.linear(x_TD, self.shared_gate.weight).sigmoid()
        return torch.cat([out, shared_TD[None]]) if out.dim() == 3 else out + shared_TD

    def _mix_experts(self, x_TD: Tensor) -> Tensor:
        K = self.spec.experts_per_token
        router = (self.router.weight, self.router.bias)
        experts = ExpertWeights(
            self.gate_up.stack_weights(x_TD.dtype),
            self.down.stack_weights(x_TD.dtype),
            self.gate_up.stack_biases(x_TD.dtype),
            self.down.stack_biases(x_TD.dtype),
            self.spec.has_input_major_experts,
            self.spec.gating,
            self.gate_up.delta,
            self.down.delta,
        )
        has_deltas = experts.gate_up_delta is not None or experts.down_delta is not None
        is_plain = self.given_TK is None and self.ranks is None and not has_deltas
        if gpu.takes(x_TD) and is_plain:
            parts_KTD, self.chosen_TK = decode_experts(
                x_TD, *router, experts, K, self.spec.normalizes
            )
            return parts_KTD
        probabilities_TE = F.linear(x_TD, *router).softmax(-1, dtype=torch.float32)
        weight_TK, expert_TK = probabilities_TE.topk(K)
        if self.given_TK is not None:
            is_own_TK = self.given_TK < 0
            self.differs_TK = ~is_own_TK & (self.given_TK[:, :, None] != expert_TK[:, None]).all(-1)
            expert_TK = torch.where(is_own_TK, expert_TK, self.given_TK)
            weight_TK = probabilities_TE.gather(1, expert_TK)
        self.chosen_TK = expert_TK
        if self.spec.normalizes:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        multiply = multiply_experts if self.ranks is None else self.ranks.multiply_experts
        return multiply(x_TD, experts, weight_TK, expert_TK)


class ExpertLinear(Linear):
    """The weights of one linear of all experts, stacked by rows.

    Each is outputs x inputs, or inputs x outputs if `is_input_major`.

    Attributes:
        delta: training adapter of M rows that are ordered by expert, and the numbers of rows by
            expert (`lora.py`).
    """

    delta: Callable[[Tensor, Tensor], Tensor] | None  # type: ignore[assignment]

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        bias: bool = False,
        is_input_major: bool = False,
    ) -> None:
        rows, columns = (inputs, outputs) if is_input_major else (outputs, inputs)
        super().__init__(columns, experts * rows)
        self.experts = experts
        self.bias = nn.Parameter(torch.empty(experts * outputs)) if bias else None

    def stack_weights(self, dtype: torch.dtype) -> Tensor:
        """Return the weights of this rank's experts, experts first."""
        rows = len(self.weight) // self.experts
        return take_local_part(self.weight).to(dtype).view(-1, rows, self.weight.shape[1])

    def stack_biases(self, dtype: torch.dtype) -> Tensor | None:
        """Return the biases of this rank's experts as experts x outputs."""
        if self.bias is None:
            return None
        return take_local_part(self.bias).to(dtype).view(-1, len(self.bias) // self.experts)

    def forward(self, x_MI: Tensor) -> Tensor:
        raise TypeError("the products of experts are computed together, by Experts")


class Weight(nn.Module):
    """A matrix, and perhaps a bias, that other modules multiply by."""

    def __init__(self, rows: int, columns: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
