"""Execute the operations of a block: plain torch, CPU kernels, GPU kernels, or exact numerics.

    Ops ◄── CpuOps      whole blocks in training: two compiled calls forward, two backward
        ◄── GpuOps      fused operations: in training, and in inference for few tokens
             ◄── ExactOps    one order of summation, adapters merged as in the sampler

`select_ops` chooses the class by a model's device and dtype and by the process's numerics (fast or
exact). An operation gets the residual stream and a pending delta: the output of the previous
operation, which the next norm adds to the stream.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hone.kernels import cpu, cpu_training, gpu, numerics
from hone.kernels.flat_attention import takes_heads
from hone.kernels.gpu_training import norm_linear, swiglu_linear, whole_linear
from hone.kernels.linear import few_linear, few_linear_onto, is_multiplied_here, linear_parts
from hone.kernels.row_gather import take_rows
from hone.kernels.swiglu import linear_swiglu, swiglu
from hone.models.attention_layouts import PackedAttention, Rotation
from hone.models.layers import (
    MLP,
    Attention,
    ExpertLinear,
    Linear,
    RMSNorm,
    SelfAttention,
    add_branch,
)


@dataclass(frozen=True)
class Branch:
    """Output of attention or MLP that is still to be normalized and scaled.

    Attributes:
        parts: T x D, or S x T x D, S parts to be summed.
        norm: norm of the sum; None: none.
        factor: factor of what is added to the residual stream.
    """

    parts: Tensor
    norm: RMSNorm | None
    factor: float


# What is still to be added to the residual stream: a tensor, its parts, a `Branch`, or None; a
# `Scaled` is the norm of a stream that is complete.
Pending = Tensor | Branch | gpu.Scaled | None
Following = tuple[RMSNorm, nn.Module]  # the next norm, and the layer that takes its output


class Ops:
    """Operations of a block by functions of `hone.kernels`, which use CPU kernels or plain torch."""

    def linear(self, layer: Linear, x_TI: Tensor) -> Tensor:
        y: Tensor = layer(x_TI)
        return y

    def norm_linear(
        self, norm: RMSNorm, layer: Linear, x_TD: Tensor, delta: Pending
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta, and the projection of the normalized sum by `layer`."""
        assert not isinstance(delta, gpu.Scaled | Branch)
        total_TD, normed_TD = norm(x_TD, delta)
        return total_TD, self.linear(layer, normed_TD)

    def linear_onto(
        self, layer: Linear, stream_TO: Tensor, x_TI: Tensor, following: Following | None = None
    ) -> tuple[Tensor, Pending]:
        """Return the residual stream, and the projection of `x_TI` by `layer` as pending delta.

        `following` has the next norm and the layer after it. GpuOps may instead add the projection
        to the stream at once. The delta is then None, or, if the layer in `following` supports it
        as input, the norm of the sum as a `Scaled`.
        """
        return stream_TO, self.linear(layer, x_TI)

    def mlp(
        self, norm: RMSNorm, mlp: MLP, x_TD: Tensor, delta: Pending, following: Following | None
    ) -> tuple[Tensor, Pending]:
        """Return x + delta, and the MLP's output for the normalized sum as pending delta."""
        x_TD, gate_up_T2F = self.norm_linear(norm, mlp.gate_up, x_TD, delta)
        return self.linear_onto(mlp.down, x_TD, swiglu(gate_up_T2F), following)

    def feed_forward(
        self,
        norm: RMSNorm,
        layer: nn.Module,
        x_TD: Tensor,
        delta: Pending,
        following: Following | None,
    ) -> tuple[Tensor, Pending]:
        """Return x + delta, and the output of `layer` for the normalized sum as pending delta.

        `layer` is an MLP or a mixture of experts.
        """
        if isinstance(layer, MLP):
            return self.mlp(norm, layer, x_TD, delta, following)
        assert not isinstance(delta, gpu.Scaled | Branch)
        x_TD, normed_TD = norm(x_TD, delta)
        return x_TD, layer(normed_TD)

    def project_branch(
        self, layer: Linear, x_TI: Tensor, norm: RMSNorm | None, factor: float
    ) -> Tensor | Branch:
        """Return factor * norm(projection of `x_TI` by `layer`) as pending delta."""
        branch_TD = self.linear(layer, x_TI)
        if norm is not None:
            branch_TD = norm(branch_TD, None)[1]
        return branch_TD if factor == 1.0 else branch_TD * factor

    def add_normed(
        self, norm: RMSNorm | None, x_TD: Tensor, delta: Pending
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta, and its norm if there is one, else the sum twice."""
        assert not isinstance(delta, gpu.Scaled | Branch)
        if norm is not None:
            return norm(x_TD, delta)
        total_TD = x_TD if delta is None else x_TD + delta
        return total_TD, total_TD

    def fused_block(
        self,
        block: nn.Module,
        x_TD: Tensor,
        delta: Pending,
        rotation: Rotation,
        attend: Attention,
        keep_N: Tensor | None,
    ) -> tuple[Tensor, Pending] | None:
        """Return the block's outputs if the whole block can be computed in fused form, else None."""
        return None


class CpuOps(Ops):
    """CPU kernels: a block in training takes two calls forward and two backward.

    Results have the same bits as those of separate steps.
    """

    def fused_block(
        self,
        block: nn.Module,
        x_TD: Tensor,
        delta: Pending,
        rotation: Rotation,
        attend: Attention,
        keep_N: Tensor | None,
    ) -> tuple[Tensor, Pending] | None:
        if not isinstance(attend, PackedAttention) or not self.can_fuse(block, x_TD, keep_N):
            return None
        assert not isinstance(delta, gpu.Scaled | Branch)
        own: SelfAttention = block.attention  # type: ignore[assignment]
        mlp: MLP = block.mlp  # type: ignore[assignment]
        before: RMSNorm = block.attention_norm  # type: ignore[assignment]
        between: RMSNorm = block.mlp_norm  # type: ignore[assignment]
        assert own.q_norm is not None and own.k_norm is not None
        weights = (before.weight, own.qkv.weight, own.q_norm, own.k_norm)
        tables = (rotation.cos_T1E, rotation.sin_T1E)
        x_TD, mixed_TA = cpu_training.mix(
            x_TD, delta, *weights, *tables, attend.sequences, own.eps, own.heads
        )
        if keep_N is not None:
            x_TD = take_rows(x_TD, keep_N)
            mixed_TA = take_rows(mixed_TA, keep_N)
        weights = (own.out.weight, between.weight, mlp.gate_up.weight, mlp.down.weight)
        return cpu_training.feed(x_TD, mixed_TA, *weights, between.eps)

    def can_fuse(self, block: Any, x_TD: Tensor, keep_N: Tensor | None = None) -> bool:
        """Return True for a dense block in training, without adapters, biases or frozen weights."""
        # As many rows as the other linears have.
        kept_TD = x_TD if keep_N is None else x_TD[: len(keep_N)]
        own: SelfAttention = block.attention
        linears = [layer for layer in block.modules() if isinstance(layer, Linear)]
        return bool(
            torch.is_grad_enabled()
            and block.has_fused_form
            and cpu.takes(x_TD)
            and own.q_norm is not None
            and own.options is None
            and own.has_plain_heads
            and takes_heads(own.head_dim)
            and isinstance(block.mlp, MLP)
            and all(p.requires_grad for p in block.parameters())
            and all(layer.delta is None and layer.bias is None for layer in linears)
            and all(is_multiplied_here(kept_TD, layer.weight) for layer in linears)
        )


class GpuOps(Ops):
    """GPU kernels in half precision: fused operations in training, and in inference for few tokens."""

    def merged_weight(self, layer: Linear) -> Tensor | None:
        """Return the merged weight W + B A, or None to compute W x and B A x separately."""
        return None

    def _weights(
        self, layer: Linear
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        return (layer.weight, layer.bias, *layer.added_factors(), self.merged_weight(layer))

    def norm_linear(
        self, norm: RMSNorm, layer: Linear, x_TD: Tensor, delta: Pending
    ) -> tuple[Tensor, Tensor]:
        if isinstance(delta, gpu.Scaled):
            return x_TD, few_linear(delta, layer.weight, layer.bias)
        assert not isinstance(delta, Branch)
        if gpu.trains(x_TD) and layer.is_plain:
            weights = self._weights(layer)
            return norm_linear(x_TD, delta, norm.weight, norm.eps, *weights, norm.offset)
        return super().norm_linear(norm, layer, x_TD, delta)

    def linear_onto(
        self, layer: Linear, stream_TO: Tensor, x_TI: Tensor, following: Following | None = None
    ) -> tuple[Tensor, Pending]:
        if layer.delta is not None:
            return stream_TO, self.linear(layer, x_TI)
        if gpu.is_few(x_TI, layer.weight):
            norm = following[0] if following and _takes_norm(following, stream_TO) else None
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return few_linear_onto(stream_TO, x_TI, layer.weight, layer.bias, weight, eps)
        return stream_TO, linear_parts(x_TI, layer.weight, layer.bias)

    def mlp(
        self, norm: RMSNorm, mlp: MLP, x_TD: Tensor, delta: Pending, following: Following | None
    ) -> tuple[Tensor, Pending]:
        gate_up = (mlp.gate_up.weight, mlp.gate_up.bias)
        if isinstance(delta, gpu.Scaled):
            hidden_TF = few_linear(delta, *gate_up, is_swiglu=True)
            return self.linear_onto(mlp.down, x_TD, hidden_TF, following)
        if mlp.gate_up.delta is None and gpu.takes(x_TD):
            x_TD, normed_TD = norm(x_TD, delta)
            hidden_TF = linear_swiglu(normed_TD, *gate_up)
            return self.linear_onto(mlp.down, x_TD, hidden_TF, following)
        x_TD, gate_up_T2F = self.norm_linear(norm, mlp.gate_up, x_TD, delta)
        if gpu.trains(gate_up_T2F) and mlp.down.is_plain:
            return x_TD, swiglu_linear(gate_up_T2F, *self._weights(mlp.down))
        return self.linear_onto(mlp.down, x_TD, swiglu(gate_up_T2F), following)

    def project_branch(
        self, layer: Linear, x_TI: Tensor, norm: RMSNorm | None, factor: float
    ) -> Tensor | Branch:
        if not gpu.takes(x_TI):
            return super().project_branch(layer, x_TI, norm, factor)
        if layer.delta is not None:
            return Branch(self.linear(layer, x_TI), norm, factor)
        return Branch(linear_parts(x_TI, layer.weight, layer.bias), norm, factor)

    def add_normed(
        self, norm: RMSNorm | None, x_TD: Tensor, delta: Pending
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(delta, Branch):
            return super().add_normed(norm, x_TD, delta)
        return add_branch(x_TD, delta.parts, delta.norm, delta.factor, norm)


class ExactOps(GpuOps):
    """GPU kernels with a fixed order of summation: the same bits in sampling and training.

    Training merges a LoRA adapter into the weight before the matrix product, as the sampler does.
    """

    def merged_weight(self, layer: Linear) -> Tensor | None:
        return layer.merged_weight()

    def linear(self, layer: Linear, x_TI: Tensor) -> Tensor:
        merged = layer.merged_weight()
        if merged is None:
            return super().linear(layer, x_TI)
        return whole_linear(merged, x_TI, layer.weight, layer.bias, *layer.added_factors())


def _takes_norm(following: Following, stream_TD: Tensor) -> bool:
    """Return True if the next layer accepts a `Scaled`: a norm not yet divided by rms(x)."""
    norm, layer = following
    # Ranks shard a norm's weight, and gather it for its own block only.
    is_sharded = hasattr(norm.weight, "to_local")
    is_dense = isinstance(layer, Linear) and not isinstance(layer, ExpertLinear)
    if not is_dense or layer.delta is not None or is_sharded or norm.offset:
        return False
    return gpu.is_few(stream_TD, layer.weight)


TORCH = Ops()
CPU = CpuOps()
GPU = GpuOps()
EXACT = ExactOps()


def select_ops(x_TD: Tensor) -> Ops:
    """Return the Ops for this tensor's device and dtype and the numerics (fast or exact)."""
    if gpu.has_kernels(x_TD):
        return EXACT if numerics.keeps_order("products") else GPU
    return CPU if cpu.takes(x_TD) else TORCH
