"""The gated delta rule (Gated DeltaNet, Yang et al. 2024): a token mixer whose state has a fixed size.

    projection ─┬─ q, k, v ─ causal convolution, silu ─ q and k normalized ─┐
                ├─ b, a ─ rate beta, decay g ───────────────────────────────┼─ recurrence ─ o ─┐
                └─ z ─────────────────────────────────────────────────── norm(o) * silu(z) ◄───┘

Per value head, the state is a matrix S, and each token computes

    S = exp(g) S;  S += k (beta (v - S^T k))^T;  o = S^T q

The state also has the convolution's last inputs. Sequences lie end to end on the flat axis T, and
each starts from zeros or from a given state, such as that of its prompt.

Shapes: T tokens, N sequences, B new tokens, K key heads, V value heads, E key size, F value size,
C = 2 K E + V F channels of the convolution, W its width, O = C + V F + 2 V outputs of the projection.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hone.kernels import gpu, row_state
from hone.kernels.delta_shape import DeltaShape
from hone.kernels.flat_attention import Sequences
from hone.kernels.pinned_memory import to_device
from hone.kernels.row_gather import put_rows, repeat_rows, take_rows

CHUNK = 64  # tokens that are computed at once on a GPU, and on a CPU in long sequences
SHORT_CHUNK = 16  # on a CPU in sequences of up to SHORT_TOKENS
SHORT_TOKENS = 512
NORM_EPS = 1e-6  # of the norms of q and k


@dataclass(frozen=True)
class DeltaHeads:
    """Weights and sizes of one layer.

    Attributes:
        conv_C1W: weight of the convolution, the newest token's last.
        decay_V: logarithm of each head's decay rate.
        bias_V: added to `a` before softplus.
        norm_F: scale of the norm of the outputs.
        eps: of that norm.
    """

    shape: DeltaShape
    conv_C1W: Tensor
    decay_V: Tensor
    bias_V: Tensor
    norm_F: Tensor
    eps: float

    def split_projection(self, projected_TO: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k and v side by side (T x C), z (T x VF), b and a (T x V)."""
        parts = projected_TO.split(self.shape.projection_rows, 1)
        return parts[0], parts[1], parts[2], parts[3]

    def split_channels(self, mixed_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k (T x K x E) and v (T x V x F)."""
        shape = self.shape
        keys = shape.key_heads * shape.key_size
        q, k, v = mixed_TC.split([keys, keys, shape.value_heads * shape.value_size], 1)
        of_key, of_value = (shape.key_heads, shape.key_size), (shape.value_heads, shape.value_size)
        return q.unflatten(1, of_key), k.unflatten(1, of_key), v.unflatten(1, of_value)

    def compute_gates(self, b_TV: Tensor, a_TV: Tensor) -> tuple[Tensor, Tensor]:
        """Return g, the logarithm of the decay, and beta, both T x V in float32."""
        g_TV = -self.decay_V.float().exp() * F.softplus(a_TV.float() + self.bias_V.float())
        return g_TV, b_TV.float().sigmoid()

    def normalize_outputs(self, o_TVF: Tensor, z_TG: Tensor) -> Tensor:
        """Return norm(o) * silu(z), T x VF, in the dtype of z."""
        normed = F.rms_norm(o_TVF.float(), o_TVF.shape[-1:], self.norm_F.float(), self.eps)
        return (normed.flatten(1) * F.silu(z_TG.float())).to(z_TG.dtype)


@dataclass(frozen=True)
class DeltaState:
    """State of a layer after the tokens of N sequences.

    Attributes:
        columns_NWC: the last W - 1 inputs of the convolution, oldest first.
        matrices_NVEF: S of each value head, float32.
    """

    columns_NWC: Tensor
    matrices_NVEF: Tensor

    def select(self, index_M: Tensor) -> "DeltaState":
        """Return the states of sequences `index_M`, which may repeat."""
        return DeltaState(*(repeat_rows(x, index_M) for x in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.columns_NWC, self.matrices_NVEF

    @staticmethod
    def zeros(count: int, shape: DeltaShape, like: Tensor) -> "DeltaState":
        """Return the state of `count` sequences before their first token."""
        columns = like.new_zeros(count, shape.conv_width - 1, shape.channels)
        matrices = like.new_zeros(count, *shape.matrix_sizes, dtype=torch.float32)
        return DeltaState(columns, matrices)


class Segments:
    """Sequences of the given lengths, end to end, with the tables that their computation reads.

    Args:
        first: place of the first token in the tables that GPU kernels read.
    """

    def __init__(self, lengths: NDArray[np.int64], device: torch.device, first: int = 0) -> None:
        self.lengths = lengths
        self.device = device
        self.first = first
        self.count = len(self.lengths)
        self.tokens = int(self.lengths.sum())
        self.ends = np.cumsum(self.lengths)

    @cached_property
    def boundaries(self) -> Tensor:
        """Return the places where sequences begin, and the end, N + 1."""
        return to_device(self.first + np.concatenate([[0], self.ends]), self.device)

    @cached_property
    def chunk_table(self) -> Tensor:
        """Return first token, tokens, sequence and number in its sequence of each chunk, int32."""
        counts = -(-self.lengths // CHUNK)
        owner_M = np.repeat(np.arange(self.count), counts)
        number_M = np.arange(len(owner_M)) - (np.cumsum(counts) - counts)[owner_M]
        before_M = number_M * CHUNK
        first_M = self.first + (self.ends - self.lengths)[owner_M] + before_M
        tokens_M = np.minimum(CHUNK, self.lengths[owner_M] - before_M)
        table = np.stack([first_M, tokens_M, owner_M, number_M], 1)
        return to_device(table.astype(np.int32), self.device)

    @cached_property
    def sequence_table(self) -> Tensor:
        """Return the first chunk and the number of chunks of each sequence, int32."""
        counts = -(-self.lengths // CHUNK)
        table = np.stack([np.cumsum(counts) - counts, counts], 1)
        return to_device(table.astype(np.int32), self.device)

    def convolution_cells(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return where tokens, first columns and last columns stand with columns before each sequence.

        T, N x (width - 1) and N x (width - 1) rows of a table of T + N (width - 1).
        """
        more = width - 1
        owner_T = np.repeat(np.arange(self.count), self.lengths)
        own_T = np.arange(self.tokens) + (owner_T + 1) * more
        ends = self.ends + (np.arange(self.count) + 1) * more
        first = (ends - self.lengths - more)[:, None] + np.arange(more)
        last = (ends - more)[:, None] + np.arange(more)
        own, before, after = (to_device(x, self.device) for x in (own_T, first, last))
        return own, before, after

    @cached_property
    def chunks(self) -> "Chunks":
        return Chunks(self)


class Chunks:
    """Chunks of `size` tokens, ordered by their number in their sequence.

    The first chunks of all sequences come first, then the second ones; longer sequences come before
    shorter ones.

    Attributes:
        size: tokens of a chunk; the last of a sequence may have fewer.
        cell_T: place of each token among all chunks' tokens.
        running: how many sequences have a first chunk, a second one, and so on.
        order_N: the sequences, longest first.
        place_N: place of each sequence in that order.
    """

    def __init__(self, segments: Segments) -> None:
        is_short = segments.lengths.max(initial=0) <= SHORT_TOKENS
        self.size = SHORT_CHUNK if is_short else CHUNK
        counts = -(-segments.lengths // self.size)
        order = np.argsort(-counts, kind="stable")
        place = np.argsort(order, kind="stable")
        most = int(counts.max(initial=0))
        self.running = [int((counts > c).sum()) for c in range(most)]
        first = np.concatenate([[0], np.cumsum(self.running)]).astype(np.int64)
        owner_T = np.repeat(np.arange(segments.count), segments.lengths)
        starts = segments.ends - segments.lengths
        offset_T = np.arange(segments.tokens) - starts[owner_T]
        chunk_T = first[offset_T // self.size] + place[owner_T]
        cell_T = chunk_T * self.size + offset_T % self.size
        self.count = int(first[-1])
        tables = (cell_T, order, place)
        self.cell_T, self.order_N, self.place_N = (to_device(x, segments.device) for x in tables)


def mix_segments(
    projected_TO: Tensor, heads: DeltaHeads, segments: Segments, before: DeltaState | None
) -> tuple[Tensor, DeltaState]:
    """Return the outputs of a layer's mixer, T x VF, and the state after each sequence.

    In plain torch, with gradients also for `before`, the state before each sequence; None: zeros.
    """
    qkv_TC, z_TG, b_TV, a_TV = heads.split_projection(projected_TO)
    if before is None:
        before = DeltaState.zeros(segments.count, heads.shape, projected_TO)
    mixed_TC, columns_NWC = causal_convolution(qkv_TC, heads.conv_C1W, before.columns_NWC, segments)
    g_TV, beta_TV = heads.compute_gates(b_TV, a_TV)
    o_TVF, matrices = chunked_delta_rule(
        *heads.split_channels(mixed_TC), g_TV, beta_TV, segments.chunks, before.matrices_NVEF
    )
    return heads.normalize_outputs(o_TVF, z_TG), DeltaState(columns_NWC, matrices)


class DeltaPlan:
    """Order in which sequences are computed: those without a prefix first, then their continuations.

    `sequences` may have groups that share a prefix, such as the completions of a prompt.

    Attributes:
        first: the sequences without a prefix.
        rest: their continuations; None: there are none.
        order_T: place of each token on the flat axis, in the order of computation.
        is_in_order: that order is the flat axis's.
        parents_N: index in `first` of each sequence of `rest`, never decreasing.
    """

    def __init__(self, sequences: Sequences, device: torch.device) -> None:
        rows = sequences.rows[sequences.rows[:, 1] > 0]
        first, rest = rows[rows[:, 3] == 0], rows[rows[:, 3] > 0]
        self.first = Segments(first[:, 1], device)
        self.rest = Segments(rest[:, 1], device, self.first.tokens) if len(rest) else None
        spans = [
            np.arange(start, start + n)
            for part in (first, rest)
            for start, n in part[:, :2].tolist()
        ]
        places = np.concatenate([np.zeros(0, np.int64), *spans])
        self.is_in_order = bool((places == np.arange(len(places))).all())
        self._parents = np.searchsorted(first[:, 0], rest[:, 2])
        self.order_T, self.parents_N = (to_device(x, device) for x in (places, self._parents))

    @staticmethod
    def for_lengths(lengths: NDArray[np.int64], device: torch.device) -> "DeltaPlan":
        """Return the plan of sequences without prefixes, end to end."""
        nothing = np.zeros_like(lengths)
        rows = np.stack([np.cumsum(lengths) - lengths, lengths, nothing, nothing], 1)
        return DeltaPlan(Sequences(rows, np.arange(len(rows) + 1)), device)

    @cached_property
    def children_PN(self) -> Tensor:
        """Return 1 where a sequence of `rest` (N) continues one of `first` (P), else 0, float32."""
        is_child = np.arange(self.first.count)[:, None] == self._parents
        return to_device(is_child.astype(np.float32), self.order_T.device)

    def run(
        self, projected_TO: Tensor, heads: DeltaHeads, before: DeltaState | None = None
    ) -> tuple[Tensor, DeltaState, DeltaState | None]:
        """Return the outputs of all tokens, T x VF, and the states after sequences.

        Args:
            before: states before the sequences without a prefix; None: zeros.

        Returns:
            Outputs, zeros for tokens in no sequence; states after sequences without a prefix; states
            after the others, None if there are none.
        """
        if gpu.has_kernels(projected_TO) and heads.shape.has_gpu_sizes:
            from hone.kernels.gpu import delta_kernels

            return delta_kernels.run_plan(projected_TO, heads, self, before)
        return self.run_reference(projected_TO, heads, before)

    def run_reference(
        self, projected_TO: Tensor, heads: DeltaHeads, before: DeltaState | None
    ) -> tuple[Tensor, DeltaState, DeltaState | None]:
        ordered_TO = take_rows(projected_TO, self.order_T)
        of_rest = ordered_TO[self.first.tokens :]
        out_TG, after = mix_segments(ordered_TO[: self.first.tokens], heads, self.first, before)
        last = None
        if self.rest is not None:
            more_TG, last = mix_segments(of_rest, heads, self.rest, after.select(self.parents_N))
            out_TG = torch.cat([out_TG, more_TG])
        return put_rows(out_TG, self.order_T, len(projected_TO)), after, last


def causal_convolution(
    x_TC: Tensor, weight_C1W: Tensor, columns_NWC: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Return silu of a depthwise causal convolution, T x C, and the last columns of each sequence."""
    width = weight_C1W.shape[-1]
    own_T, before, after = segments.convolution_cells(width)
    rows = len(x_TC) + before.numel()
    whole = put_rows(x_TC, own_T, rows) + put_rows(
        columns_NWC.to(x_TC.dtype).flatten(0, 1), before.flatten(), rows
    )
    total = torch.zeros_like(x_TC, dtype=torch.float32)
    for i, weight_C in enumerate(weight_C1W[:, 0].float().unbind(1)):
        total = total + take_rows(whole, own_T - (width - 1 - i)).float() * weight_C
    last = take_rows(whole, after.flatten()).unflatten(0, after.shape)
    return F.silu(total).to(x_TC.dtype), last


def chunked_delta_rule(
    q_TKE: Tensor,
    k_TKE: Tensor,
    v_TVF: Tensor,
    g_TV: Tensor,
    beta_TV: Tensor,
    chunks: Chunks,
    before_NVEF: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (T x V x F, float32) and the matrices after each sequence, in plain torch.

    Within a chunk the updates of all tokens are solved at once, as a triangular system; chunks of a
    sequence follow each other. q and k are normalized here.
    """

    size = chunks.size

    def by_chunk(x: Tensor) -> Tensor:
        cells = put_rows(x.float(), chunks.cell_T, chunks.count * size)
        return cells.unflatten(0, (chunks.count, size)).transpose(1, 2)  # M x heads x size x …

    groups = v_TVF.shape[1] // q_TKE.shape[1]
    q, k = (by_chunk(normalize(x)).repeat_interleave(groups, 1) for x in (q_TKE, k_TKE))
    q = q * q.shape[-1] ** -0.5
    v, beta = by_chunk(v_TVF), by_chunk(beta_TV)[..., None]
    decay = by_chunk(g_TV).cumsum(2)  # M x V x size, from the start of the chunk
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
    system = (beta * k) @ k.transpose(-1, -2) * between
    kept = decay.exp()[..., None]
    solved = torch.linalg.solve_triangular(
        system, torch.cat([beta * v, beta * k * kept], -1), upper=False, unitriangular=True
    )
    new_values, from_state = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = q @ k.transpose(-1, -2) * between
    into_state = k * (decay[..., -1:] - decay).exp()[..., None]
    whole_decay = decay[..., -1].exp()[..., None, None]
    sizes = chunks.running
    steps = zip(
        *(
            x.split(sizes)
            for x in (new_values, from_state, q * kept, scores, into_state, whole_decay)
        ),
        strict=True,
    )
    state = before_NVEF.index_select(0, chunks.order_N)
    outputs: list[Tensor] = []
    ended: list[Tensor] = []
    for running, (value, reads, query, score, key, factor) in zip(sizes, steps, strict=True):
        ended.append(state[running:])
        state = state[:running]
        value = value - reads @ state
        outputs.append(query @ state + score @ value)
        state = state * factor + key.transpose(-1, -2) @ value
    after = torch.cat([state, *reversed(ended)]).index_select(0, chunks.place_N)
    whole = torch.cat(outputs) if outputs else v
    return take_rows(whole.transpose(1, 2).flatten(0, 1), chunks.cell_T), after


def normalize(x: Tensor) -> Tensor:
    """Return x / sqrt(sum of x^2) over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def decode_delta(
    projected_BO: Tensor, heads: DeltaHeads, store: DeltaState, active_B: Tensor, state: Tensor
) -> Tensor:
    """Compute one new token of B sequences; return the mixer's outputs, B x VF.

    Updates the states of rows `active_B` of `store` in place, but for rows that are done (column
    DONE of `state`, `row_state.py`).
    """
    if gpu.takes(projected_BO) and heads.shape.has_gpu_sizes:
        from hone.kernels.gpu import delta_kernels

        return delta_kernels.decode_delta(projected_BO, heads, store, active_B, state)
    return decode_delta_reference(projected_BO, heads, store, active_B, state)


def decode_delta_reference(
    projected_BO: Tensor, heads: DeltaHeads, store: DeltaState, active_B: Tensor, state: Tensor
) -> Tensor:
    qkv_BC, z_BG, b_BV, a_BV = heads.split_projection(projected_BO)
    is_done_B11 = (state[active_B, row_state.DONE] != 0)[:, None, None]
    before = store.select(active_B)
    whole = torch.cat([before.columns_NWC, qkv_BC[:, None]], 1)
    weight_WC = heads.conv_C1W[:, 0].float().T
    mixed_BC = F.silu((whole.float() * weight_WC).sum(1)).to(qkv_BC.dtype)
    q, k, v = heads.split_channels(mixed_BC)
    g_BV, beta_BV = heads.compute_gates(b_BV, a_BV)
    groups = v.shape[1] // q.shape[1]
    q, k = (normalize(x).repeat_interleave(groups, 1) for x in (q, k))
    matrices = before.matrices_NVEF * g_BV.exp()[..., None, None]
    change = (v.float() - torch.einsum("bvef,bve->bvf", matrices, k)) * beta_BV[..., None]
    matrices = matrices + k[..., None] * change[..., None, :]
    o_BVF = torch.einsum("bvef,bve->bvf", matrices, q * q.shape[-1] ** -0.5)
    columns = torch.where(is_done_B11, before.columns_NWC, whole[:, 1:])
    store.columns_NWC.index_copy_(0, active_B, columns)
    matrices = torch.where(is_done_B11[..., None], before.matrices_NVEF, matrices)
    store.matrices_NVEF.index_copy_(0, active_B, matrices)
    return heads.normalize_outputs(o_BVF, z_BG)
