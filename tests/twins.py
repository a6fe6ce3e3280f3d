"""What kernels compute, in torch's own operations: tests hold kernels and their gradients to it.

Twins that the product falls back on stand beside their kernels (`*_reference`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.kernels import gpu
from hone.kernels.flat_attention import Sequences
from hone.kernels.logprobs import at_least_fp32
from hone.kernels.norm import add_norm_reference
from hone.kernels.norm_rope import norm_rope_reference, rotate
from hone.kernels.swiglu import swiglu_reference


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    return x[index]


def put_rows(x: Tensor, index: Tensor, rows: int) -> Tensor:
    return x.new_zeros(rows, *x.shape[1:]).index_add(0, index, x)


def linear_parts(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, splits: int, step: int
) -> Tensor:
    """Parts of the inner dimension of whole steps, the last ones a step longer where they cannot be alike."""
    steps = x_TI.shape[1] // step
    ends = [(split + 1) * steps // splits * step for split in range(splits - 1)]
    pieces = zip(x_TI.tensor_split(ends, 1), weight_OI.tensor_split(ends, 1), strict=True)
    parts = torch.stack([F.linear(x, w) for x, w in pieces])
    if bias_O is not None:
        parts[0] += bias_O
    return parts


def few(
    normed: gpu.Scaled, weight_OI: Tensor, bias_O: Tensor | None, is_swiglu: bool = False
) -> Tensor:
    """In fp32 up to the result, as `kernels/gpu/few_row_products.py`."""
    x_TD = normed.scaled_TD.float()
    rstd_T1 = torch.rsqrt(normed.squares_TP.sum(dim=1, keepdim=True) / x_TD.shape[1] + normed.eps)
    out_TO = F.linear(x_TD * rstd_T1, weight_OI.float(), None if bias_O is None else bias_O.float())
    return (swiglu_reference(out_TO) if is_swiglu else out_TO).to(weight_OI.dtype)


def few_onto(
    residual_TO: Tensor,
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    norm_O: Tensor | None,
    eps: float,
) -> tuple[Tensor, gpu.Scaled | None]:
    added_TO = F.linear(x_TI.float(), weight_OI.float(), None if bias_O is None else bias_O.float())
    total_TO = (residual_TO + added_TO).to(x_TI.dtype)
    if norm_O is None:
        return total_TO, None
    squares_T1 = total_TO.float().square().sum(dim=1, keepdim=True)
    return total_TO, gpu.Scaled((total_TO * norm_O).to(x_TI.dtype), squares_T1, eps)


def low_rank_linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Any, a_RI: Any = None, b_OR: Any = None
) -> Tensor:
    out_TO = F.linear(x_TI, weight_OI, bias_O)
    return out_TO if a_RI is None else out_TO + (x_TI @ a_RI.t()) @ b_OR.t()


def norm_linear(
    x_TD: Tensor, delta_TD: Any, scale_D: Tensor, eps: float, *linear: Any
) -> tuple[Tensor, Tensor]:
    total, normed = add_norm_reference(x_TD, delta_TD, scale_D, eps)
    return total, low_rank_linear(normed, *linear)


def swiglu_linear(gate_up_T2F: Tensor, *linear: Any) -> Tensor:
    return low_rank_linear(swiglu_reference(gate_up_T2F), *linear)


def flat_attention(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, sequences: Sequences) -> Tensor:
    outs, order = [], []
    for start, length, prefix, prefix_length in sequences.rows.tolist():
        own, before = slice(start, start + length), slice(prefix, prefix + prefix_length)
        k, v = (torch.cat([x[before], x[own]]).transpose(0, 1)[None] for x in (k_TKE, v_TKE))
        sees = torch.ones(
            length, prefix_length + length, dtype=torch.bool, device=q_THE.device
        ).tril(prefix_length)
        gqa = q_THE.shape[1] != k_TKE.shape[1]
        q = q_THE[own].transpose(0, 1)[None]
        outs.append(
            F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=gqa)[0].transpose(
                0, 1
            )
        )
        order.append(torch.arange(start, start + length, device=q_THE.device))
    return torch.cat(outs)[torch.cat(order).argsort()]


def heads_attention(
    qkv_TNE: Tensor,
    q_scale_E: Any,
    k_scale_E: Any,
    table: tuple[Tensor, Tensor],
    positions_T: Tensor,
    sequences: Sequences,
    tiles: object,
    eps: float,
    H: int,
) -> Tensor:
    cos, sin = (part[positions_T].unsqueeze(1) for part in table)
    if q_scale_E is None:
        K = (qkv_TNE.shape[1] - H) // 2
        q, k, v = qkv_TNE.split([H, K, K], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    else:
        q, k, v = norm_rope_reference(qkv_TNE, q_scale_E, k_scale_E, cos, sin, eps, H)
    return flat_attention(q, k, v, sequences).flatten(1)


def head_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    cap: float | None = None,
) -> tuple[Tensor, ...]:
    """All logits at once; both results have gradients."""
    logits_NV = at_least_fp32(hidden_ND @ weight_VD.t())
    if cap is not None:
        logits_NV = cap * torch.tanh(logits_NV / cap)
    logprobs_NV = torch.log_softmax(logits_NV / temperature_N[:, None], dim=-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return logprobs_NV.gather(1, targets_N[:, None]).squeeze(1), entropy_N
