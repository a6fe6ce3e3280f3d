"""Causal attention over sequences laid end to end on the flat token axis T.

A token attends to itself and the earlier tokens of its sequence, and to the prefix of the sequence,
if there is one:

    packed            [sequence 0][sequence 1]…                                        training, whole prompts
    shared prompts    [prompt 0][completion 00][completion 01]…[prompt 1]…             training on groups
    continued         keys: [before 0][newest 0][before 1]…, queries: [newest 0]…      prompts with cached prefixes

A prompt that n samples of a group share is computed once.

On a GPU in half precision, and on a CPU with the compiled kernels, attention works on the flat
layout. Elsewhere, sequences of similar length are padded to one rectangle. Padding at most doubles
the length of a sequence, plus 32 tokens; only attention uses it, the linear layers compute on the
flat axis.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hone.kernels import gpu, numerics
from hone.kernels.attention_form import AttentionForm
from hone.kernels.delta_plan import DeltaHeads, DeltaPlan
from hone.kernels.delta_rule import run_plan
from hone.kernels.flash_sinks import FlashCall, attend_with_sinks, call_flash
from hone.kernels.flat_attention import Sequences, flat_attention, takes
from hone.kernels.gpu_training import heads_attention
from hone.kernels.norm import offset_norm
from hone.kernels.norm_rope import norm_rope, rotate
from hone.kernels.pinned_memory import to_device
from hone.kernels.row_gather import put_rows, repeat_rows, take_rows
from hone.models.mixers import Mixer, MixerState
from hone.models.rope import Rope

if TYPE_CHECKING:
    from hone.kernels.gpu.attention import Tiles


FLASH_HEAD_SIZE = 256  # the largest of flash attention


class Rotation:
    """Rotary cos and sin tables of a forward pass, for layers with the same rope.

    `cos_PE` and `sin_PE` have a row for each of all P positions, and E columns, or as many as are
    rotated. `cos_T1E` and `sin_T1E` have a row for each token and need `positions_T`, which may be
    None if the attention kernel computes with positions of its own. `rope` None: no rotation, the
    tables have ones and zeros.
    """

    def __init__(
        self, table: tuple[Tensor, Tensor], positions_T: Tensor | None, rope: Rope | None = None
    ) -> None:
        (self.cos_PE, self.sin_PE) = table
        self.positions_T = positions_T
        self.rope = rope

    def rotate_heads(self, x_TNE: Tensor) -> Tensor:
        """Return heads with their first numbers rotated to the tokens' positions."""
        width = self.cos_PE.shape[1]
        if width == x_TNE.shape[2]:
            return rotate(x_TNE, self.cos_T1E, self.sin_T1E)
        turned = rotate(x_TNE[..., :width], self.cos_T1E, self.sin_T1E)
        return torch.cat([turned, x_TNE[..., width:]], -1)

    @cached_property
    def query_factors_T11(self) -> Tensor | float:
        """Return the factor of each token's queries, which grows past the original length."""
        growth = None if self.rope is None else self.rope.growth
        if growth is None:
            return 1.0
        assert self.positions_T is not None
        factor, original_length = growth
        times_T = torch.floor(self.positions_T / original_length)
        factors_T = 1.0 + factor * torch.log1p(times_T)
        return factors_T.to(self.cos_PE.dtype)[:, None, None]

    @cached_property
    def cos_T1E(self) -> Tensor:
        return self._of_tokens(self.cos_PE)

    @cached_property
    def sin_T1E(self) -> Tensor:
        return self._of_tokens(self.sin_PE)

    def _of_tokens(self, table_PE: Tensor) -> Tensor:
        assert self.positions_T is not None
        # [positions] takes three times as long on a CPU
        return table_PE.index_select(0, self.positions_T).unsqueeze(1)


def no_rotation(x_TNE: Tensor) -> Rotation:
    """Return the rotation of heads that are not rotated; all tokens have position 0."""
    cos_1E = x_TNE.new_ones(1, x_TNE.shape[2])
    positions_T = torch.zeros(len(x_TNE), dtype=torch.int64, device=x_TNE.device)
    return Rotation((cos_1E, torch.zeros_like(cos_1E)), positions_T)


@dataclass(frozen=True)
class AttentionOptions:
    """Options that change a layer's attention from softmax(q k / sqrt(E)) v over all earlier tokens.

    Attributes:
        scale: factor of q k; None: E^-1/2.
        window: number of latest tokens that a token sees, itself included; None: all.
        cap: logits become cap * tanh(logits / cap).
        sinks_H: logit per head that joins the softmax; its share is dropped.
    """

    scale: float | None = None
    window: int | None = None
    cap: float | None = None
    sinks_H: Tensor | None = None

    def without_defaults(self, head_dim: int) -> "AttentionOptions | None":
        """Return None if all options have the values of plain attention."""
        is_plain_scale = self.scale is None or math.isclose(self.scale, head_dim**-0.5)
        is_plain = self.window is None and self.cap is None and self.sinks_H is None
        return None if is_plain_scale and is_plain else self

    @property
    def has_flash_form(self) -> bool:
        """Return True if flash attention supports these options: a window and sinks alone."""
        return self.scale is None and self.cap is None

    def reduce_to_plain(
        self, q_THE: Tensor, longest: int
    ) -> tuple[Tensor, "AttentionOptions | None"]:
        """Return queries and the options that are left if no sequence is longer than `longest`.

        The scale becomes part of the queries, and a window that all fits into has no effect.
        """
        if self.cap is not None:
            return q_THE, self
        if self.scale is not None:
            q_THE = q_THE * (self.scale * q_THE.shape[-1] ** 0.5)
        window = None if self.window is None or longest <= self.window else self.window
        if window is None and self.sinks_H is None:
            return q_THE, None
        return q_THE, AttentionOptions(window=window, sinks_H=self.sinks_H)

    def attend(self, q_BHCE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, distance: Tensor) -> Tensor:
        """Return attention outputs, B x H x C x E.

        Args:
            distance: tokens from each query back to each key, broadcastable to B x H x C x S;
                negative: the query does not see the key.
        """
        seen = distance >= 0
        if self.window is not None:
            seen = seen & (distance < self.window)
        k, v = (repeat_key_heads(x, q_BHCE.shape[1]) for x in (k_BKSE, v_BKSE))
        if self.cap is None and self.sinks_H is None:
            return F.scaled_dot_product_attention(q_BHCE, k, v, attn_mask=seen, scale=self.scale)
        scale = q_BHCE.shape[-1] ** -0.5 if self.scale is None else self.scale
        logits = (q_BHCE @ k.transpose(-1, -2)) * scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        logits = logits.float().masked_fill(~seen, -math.inf)
        if self.sinks_H is not None:
            sinks = self.sinks_H.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sinks], -1)
        share = logits.softmax(-1)[..., : k.shape[2]]
        return share.to(v.dtype) @ v


@dataclass(frozen=True)
class Heads:
    """Split a layer's fused projection, T x (H + 2K) x E, into q, k and v.

    q and k are normalized per head, then rotated by position; without `rotation` they are taken as
    they are. `norm_offset` is added to the scales, in float32. `is_plain` is False with an offset,
    with rotation of a part of each head, and with queries that grow with the position.
    """

    H: int
    q_scale_E: Tensor | None
    k_scale_E: Tensor | None
    eps: float
    rotation: Rotation | None
    options: AttentionOptions | None = None
    norm_offset: float = 0.0
    is_plain: bool = True

    @property
    def form(self) -> AttentionForm:
        """Return what GPU kernels of a decode step are told of these heads and their attention."""
        options = self.options or AttentionOptions()
        rope = None if self.rotation is None else self.rotation.rope
        growth = (None if rope is None else rope.growth) or (0.0, 1)
        return AttentionForm(options.scale, options.window, options.cap, self.norm_offset, *growth)

    def without_changes(self) -> "Heads":
        """Return the heads of a projection whose q and k are normalized and rotated already."""
        return Heads(self.H, None, None, self.eps, None)

    def __call__(self, qkv_TNE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v; q and k are normalized and then rotated."""
        if self.rotation is None:
            rest = (qkv_TNE.shape[1] - self.H) // 2
            q, k, v = qkv_TNE.split([self.H, rest, rest], 1)
            return q, k, v
        if self.is_plain:
            turn = (self.rotation.cos_T1E, self.rotation.sin_T1E)
            return norm_rope(qkv_TNE, self.q_scale_E, self.k_scale_E, *turn, self.eps, self.H)
        rest = (qkv_TNE.shape[1] - self.H) // 2
        q, k, v = qkv_TNE.split([self.H, rest, rest], 1)
        if self.q_scale_E is not None and self.k_scale_E is not None:
            q, k = (
                offset_norm(x, scale_E, self.norm_offset, self.eps)
                for x, scale_E in ((q, self.q_scale_E), (k, self.k_scale_E))
            )
        q = self.rotation.rotate_heads(q) * self.rotation.query_factors_T11
        return q, self.rotation.rotate_heads(k), v


class FlatAttention:
    """Causal attention over `sequences` of the flat token axis.

    Output rows of tokens that are in no sequence are undefined.
    """

    def __init__(self, sequences: Sequences, device: torch.device | str) -> None:
        self.sequences = sequences
        self.device = torch.device(device)
        self.has_prefixes = bool(sequences.rows[:, 3].any())

    def attend(
        self, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, options: AttentionOptions | None = None
    ) -> Tensor:
        """Return attention outputs, T x (H * E)."""
        if options is not None:
            q_THE, options = options.reduce_to_plain(q_THE, self.longest)
        if options is not None:
            if options.has_flash_form and takes_flash(q_THE) and not self.has_prefixes:
                places = self.sequence_boundaries
                v_TKE = v_TKE.contiguous()
                return flash_varlen(q_THE, k_TKE, v_TKE, *places, options).flatten(1)
            return self._attend_buckets(q_THE, k_TKE, v_TKE, options)
        if takes(q_THE):
            return flat_attention(q_THE, k_TKE, v_TKE, self.sequences).flatten(1)
        if keeps_order(q_THE):
            from hone.kernels.gpu import attention

            return attention.forward(q_THE, k_TKE, v_TKE, self.tile_plan)[0].flatten(1)
        if takes_flash(q_THE):
            if self.has_prefixes:
                k_TKE, v_TKE = (repeat_rows(x, self.seen_S) for x in (k_TKE, v_TKE))
            return flash_varlen(
                q_THE, k_TKE, v_TKE.contiguous(), *self.sequence_boundaries
            ).flatten(1)
        return self._attend_buckets(q_THE, k_TKE, v_TKE, None)

    def _attend_buckets(
        self, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, options: AttentionOptions | None
    ) -> Tensor:
        outs = [bucket.attend(q_THE, k_TKE, v_TKE, options) for bucket in self.length_buckets]
        if not outs:
            return q_THE.flatten(1)  # no tokens
        return put_rows(
            torch.cat(outs), torch.cat([bucket.flat for bucket in self.length_buckets]), len(q_THE)
        )

    @cached_property
    def longest(self) -> int:
        """Return the tokens of the longest sequence with its prefix."""
        return int((self.sequences.rows[:, 1] + self.sequences.rows[:, 3]).max(initial=0))

    @cached_property
    def seen_S(self) -> Tensor:
        """Return the tokens whose keys each sequence sees, its prefix first, end to end."""
        spans = [
            np.arange(first, first + count)
            for start, length, prefix, before in self.sequences.rows.tolist()
            for first, count in ((prefix, before), (start, length))
        ]
        return to_device(np.concatenate(spans), self.device)

    @cached_property
    def tile_plan(self) -> "Tiles":
        from hone.kernels.gpu import attention

        return attention.tiles(self.sequences.rows, self.sequences.groups, self.device)

    @cached_property
    def sequence_boundaries(self) -> tuple[Tensor, Tensor, int, int]:
        """Return cumulative lengths of queries and of keys per sequence, and the longest of each."""
        _, lengths, _, before = self.sequences.rows.T
        starts = (
            np.concatenate([[0], np.cumsum(x)]).astype(np.int32)
            for x in (lengths, lengths + before)
        )
        of_q, of_k = (to_device(x, self.device) for x in starts)
        return of_q, of_k, int(lengths.max()), int((lengths + before).max())

    @cached_property
    def length_buckets(self) -> list["_Bucket"]:
        return [_Bucket(rows, self.device) for rows in _by_length(self.sequences.rows)]


class PackedAttention(FlatAttention):
    """Causal attention of sequences with the given lengths.

    If `completions[i]` is given, sequence i is a prompt shared by completions that follow it and
    have these lengths.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        completions: Iterable[Sequence[int]] = (),
    ) -> None:
        groups = [(n, *own) for n, own in zip_longest(lengths, completions, fillvalue=())]
        length = np.fromiter(chain.from_iterable(groups), np.int64)
        sizes = np.array([len(group) for group in groups])
        ends = np.cumsum(sizes)
        start = np.cumsum(length) - length
        first = ends - sizes
        prefix = np.repeat(start[first], sizes)
        before = np.repeat(length[first], sizes)
        prefix[first] = before[first] = 0
        self.count = length.sum()
        rows = np.stack([start, length, prefix, before], axis=1)
        super().__init__(Sequences(rows, np.concatenate([[0], ends])), device)

    def with_padding(self, tokens: int) -> "PackedAttention":
        """Return this attention with a further sequence, of padding, behind the others."""
        if not tokens:
            return self
        padded = PackedAttention.__new__(PackedAttention)
        rows = np.concatenate([self.sequences.rows, [[self.count, tokens, 0, 0]]])
        groups = np.append(self.sequences.groups, len(rows))
        padded.count = self.count + tokens
        FlatAttention.__init__(padded, Sequences(rows, groups), self.device)
        return padded

    def token_positions(self) -> Tensor:
        """Return each token's position in its sequence; completions continue their prompt."""
        start, length, _, before = self.sequences.rows.T
        return to_device(np.arange(self.count) - np.repeat(start - before, length), self.device)

    def mix_sequences(self, layer: int, x_TD: Tensor, mixer: Mixer) -> Tensor:
        """Return the outputs of a mixer, T x D, for each sequence from its start.

        A completion starts from the state of its prompt.
        """
        states: dict[int, MixerState] = {}  # by start of the sequence
        out_TD = []
        for start, length, prefix, before in self.sequences.rows.tolist():
            if not length:
                continue
            first = states[prefix] if before else None
            y_1LD, states[start] = mixer(x_TD[None, start : start + length], first)
            out_TD.append(y_1LD[0])
        rest = len(x_TD) - sum(len(part) for part in out_TD)
        return torch.cat([*out_TD, x_TD.new_zeros(rest, x_TD.shape[1])])

    def mix_delta(self, layer: int, projected_TO: Tensor, heads: DeltaHeads) -> Tensor:
        """Return the outputs of the gated delta rule; a completion starts from its prompt's state."""
        return run_plan(projected_TO, heads, self.delta_plan)[0]

    @cached_property
    def delta_plan(self) -> DeltaPlan:
        return DeltaPlan(self.sequences, self.device)

    def __call__(self, layer: int, qkv_TNE: Tensor, heads: Heads) -> Tensor:
        wants_kernel = torch.is_grad_enabled() or self.has_prefixes
        has_positions = heads.rotation is None or heads.rotation.positions_T is not None
        if not (wants_kernel and has_positions and gpu.trains_model(qkv_TNE, qkv_TNE.shape[2])):
            return self.attend(*heads(qkv_TNE), heads.options)
        if heads.options is not None or not heads.is_plain:
            q_THE, k_TKE, v_TKE = heads(qkv_TNE)
            options = heads.options
            if options is not None:
                q_THE, options = options.reduce_to_plain(q_THE, self.longest)
            if options is not None:
                return self.attend(q_THE, k_TKE, v_TKE, options)
            qkv_TNE, heads = torch.cat([q_THE, k_TKE, v_TKE], 1), heads.without_changes()
        turn = no_rotation(qkv_TNE) if heads.rotation is None else heads.rotation
        assert turn.positions_T is not None
        rest = (turn.positions_T, self.sequences, self.tile_plan, heads.eps, heads.H)
        return heads_attention(
            qkv_TNE, heads.q_scale_E, heads.k_scale_E, (turn.cos_PE, turn.sin_PE), *rest
        )


class PlannedAttention(PackedAttention):
    """Causal attention, with gradients, of the sequences that tables of tiles on a GPU describe.

    The tables may change between passes, so that CUDA graphs can capture a pass.
    """

    def __init__(self, tiles: "Tiles", device: torch.device) -> None:
        nothing = Sequences(np.zeros((0, 4), np.int64), np.zeros(1, np.int64))
        FlatAttention.__init__(self, nothing, device)
        self.has_prefixes = tiles.has_prefixes
        self.tile_plan = tiles  # in place of the cached property


class ContinuedAttention(FlatAttention):
    """Causal attention of new tokens to themselves and to earlier tokens of the KV cache.

    Sequence i has `lengths[i]` new tokens after `before[i]` earlier tokens. The queries of all
    sequences are laid end to end. So are the keys and values; within a sequence, those of the
    earlier tokens come first. No gradient.
    """

    def __init__(
        self, lengths: list[int], before: list[int], device: torch.device | str = "cpu"
    ) -> None:
        own = np.array(lengths)
        earlier = np.array(before)
        ends = np.cumsum(own + earlier)
        rows = np.stack([ends - own, own, ends - own - earlier, earlier], axis=1)
        super().__init__(Sequences(rows, np.arange(len(rows) + 1)), device)
        spans = [np.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)]
        # Positions of the queries among the keys.
        self.own_T = to_device(np.concatenate(spans), self.device)

    def attend(
        self, q_THE: Tensor, k_SKE: Tensor, v_SKE: Tensor, options: AttentionOptions | None = None
    ) -> Tensor:
        """Return attention outputs, T x (H * E), of T new tokens over the S earlier and new tokens."""
        if options is not None:
            q_THE, options = options.reduce_to_plain(q_THE, self.longest)
        is_plain = options is None and not keeps_order(q_THE)
        has_flash_form = options is not None and options.has_flash_form
        if (is_plain or has_flash_form) and takes_flash(q_THE):
            places = self.sequence_boundaries
            return flash_varlen(q_THE, k_SKE, v_SKE, *places, options).flatten(1)
        q_SHE = put_rows(q_THE, self.own_T, len(k_SKE))
        return super().attend(q_SHE, k_SKE, v_SKE, options)[self.own_T]


def repeat_key_heads(x_BKSE: Tensor, heads: int) -> Tensor:
    """Return keys or values with a head for each of `heads` query heads, B x H x S x E."""
    groups = heads // x_BKSE.shape[1]
    return x_BKSE if groups == 1 else x_BKSE.repeat_interleave(groups, 1)


def is_half_on_gpu(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in gpu.HALF


def takes_flash(q_THE: Tensor) -> bool:
    """Return True if flash attention supports these heads."""
    size = q_THE.shape[2]
    return is_half_on_gpu(q_THE) and size <= FLASH_HEAD_SIZE and size % 8 == 0


def keeps_order(q_THE: Tensor) -> bool:
    """Return True if inference must use training's attention kernel, for exact numerics.

    With exact numerics, inference and training give the same bits. False if gradients are enabled.
    """
    has_kernel = gpu.IS_AVAILABLE and is_half_on_gpu(q_THE) and gpu.trains_heads(q_THE.shape[2])
    return has_kernel and numerics.keeps_order("attention") and not torch.is_grad_enabled()


def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_q: Tensor,
    of_k: Tensor,
    longest_q: int,
    longest_k: int,
    options: AttentionOptions | None = None,
) -> Tensor:
    """Run flash attention on the flat layout; the last query of a sequence sees all of its keys.

    `of_q` and `of_k` are cumulative lengths; `options` may have a window and sinks.
    """
    out: Tensor
    window = None if options is None else options.window
    left = -1 if window is None else window - 1
    call = FlashCall(of_q, of_k, longest_q, longest_k, left)
    if options is not None and options.sinks_H is not None:
        out = attend_with_sinks(q, k, v, options.sinks_H, call)
    elif torch.is_grad_enabled():
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(q, k, v, of_q, of_k, longest_q, longest_k, window_size=(left, 0))  # type: ignore[assignment]
    else:  # what varlen_attn calls, saving 0.2 ms of host time per layer
        out = call_flash(q, k, v, call)[0]
    return out


class _Bucket:
    """Sequences of similar length as a padded rectangle of B x C queries.

    A query sees the P keys of its sequence's prefix, then the sequence's own C keys, causally.
    """

    def __init__(self, rows: NDArray[np.int64], device: torch.device) -> None:
        start, length, prefix, before = rows.T[:, :, None]
        in_C = np.arange(length.max())
        in_P = np.arange(before.max())
        own_BC = start + np.minimum(in_C, length - 1)
        of_P = prefix + np.minimum(in_P, before - 1)
        is_own = in_C < length
        tensors = (
            own_BC,
            np.concatenate([of_P, own_BC], 1),
            own_BC[is_own],
            np.flatnonzero(is_own),
            in_P < before,
        )
        self.queries, self.keys, self.flat, self.cells, sees_BP = (
            to_device(x, device) for x in tensors
        )
        before_B = to_device(before[:, 0], device)
        self.places = (before_B, len(in_C), len(in_P))
        self.mask: Tensor | None = None  # None without prefixes: causal
        if len(in_P):
            causal_CC = torch.ones(len(in_C), len(in_C), dtype=torch.bool, device=device).tril()
            parts = (
                sees_BP[:, None].expand(-1, len(in_C), -1),
                causal_CC.expand(len(rows), -1, -1),
            )
            self.mask = torch.cat(parts, dim=-1)[:, None]

    @cached_property
    def distance_B1CS(self) -> Tensor:
        """Return the tokens from each query back to each key; negative for keys that it does not see."""
        before_B, C, P = self.places
        in_C, in_P = (torch.arange(n, device=before_B.device) for n in (C, P))
        own_CC = (in_C[:, None] - in_C[None]).expand(len(before_B), C, C)
        to_prefix = before_B[:, None, None] + in_C[None, :, None] - in_P[None, None]
        to_prefix = to_prefix.masked_fill(in_P[None, None] >= before_B[:, None, None], -1)
        return torch.cat([to_prefix, own_CC], -1)[:, None]

    def attend(
        self, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, options: AttentionOptions | None = None
    ) -> Tensor:
        """Return the attention output for this bucket's tokens."""
        q, k, v = (
            _gather_rows(*x)
            for x in ((q_THE, self.queries), (k_TKE, self.keys), (v_TKE, self.keys))
        )
        if options is not None:
            out_BHCE = options.attend(q, k, v, self.distance_B1CS)
            return take_rows(out_BHCE.transpose(1, 2).flatten(0, 1).flatten(1), self.cells)
        if is_half_on_gpu(q):
            # torch's kernel for large heads takes no groups; without it torch stores all logits.
            k, v = (repeat_key_heads(x, q.shape[1]) for x in (k, v))
        gqa = q.shape[1] != k.shape[1]
        out_BHCE = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, is_causal=self.mask is None, enable_gqa=gqa
        )
        return take_rows(out_BHCE.transpose(1, 2).flatten(0, 1).flatten(1), self.cells)


def _gather_rows(x_THE: Tensor, index_BS: Tensor) -> Tensor:
    """Gather rows (T x H x E) by an index (B x S); return (B x H x S x E).

    Gradients of rows that are gathered several times are added in a fixed order.
    """
    return repeat_rows(x_THE, index_BS).transpose(1, 2)


def _by_length(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Divide sequences (`Sequences.rows`) into buckets of similar length.

    In a bucket, the longest sequence has at most twice the tokens of the shortest, plus 32. The
    same holds for prefixes.
    """
    buckets: list[list[NDArray[np.int64]]] = []
    for row in sorted(rows[rows[:, 1] > 0], key=lambda row: (row[3] > 0, row[1], row[3])):
        first = buckets[-1][0] if buckets else row
        is_like = (
            row[1] <= 2 * first[1] + 32
            and row[3] <= 2 * first[3] + 32
            and first[3] <= 2 * row[3] + 32
        )
        if buckets and is_like and (row[3] > 0) == (first[3] > 0):
            buckets[-1].append(row)
        else:
            buckets.append([row])
    return [np.array(bucket) for bucket in buckets]
