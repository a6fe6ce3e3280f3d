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

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.kernels import gpu, row_state
from hone.kernels.delta_plan import (
    NORM_EPS,
    Chunks,
    DeltaHeads,
    DeltaPlan,
    DeltaState,
    Segments,
)
from hone.kernels.row_gather import put_rows, take_rows


def run_plan(
    projected_TO: Tensor, heads: DeltaHeads, plan: DeltaPlan, before: DeltaState | None = None
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

        return delta_kernels.run_plan(projected_TO, heads, plan, before)
    return run_plan_reference(projected_TO, heads, plan, before)


def run_plan_reference(
    projected_TO: Tensor, heads: DeltaHeads, plan: DeltaPlan, before: DeltaState | None
) -> tuple[Tensor, DeltaState, DeltaState | None]:
    ordered_TO = take_rows(projected_TO, plan.order_T)
    of_first, of_rest = ordered_TO.tensor_split([plan.first.tokens])
    out_TG, after = mix_segments(of_first, heads, plan.first, before)
    last = None
    if plan.rest is not None:
        more_TG, last = mix_segments(of_rest, heads, plan.rest, after.select(plan.parents_N))
        out_TG = torch.cat([out_TG, more_TG])
    return put_rows(out_TG, plan.order_T, len(projected_TO)), after, last


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
