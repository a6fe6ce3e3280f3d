"""Decode attention: one new token per sequence over the pages of the KV cache.

The keys and values of the new token are stored in the cache first.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.kernels import cpu, row_state

if TYPE_CHECKING:
    from hone.kernels.gpu.decode import Shared
    from hone.kernels.gpu.decode_attention import Divided


@dataclass(frozen=True)
class DecodeRows:
    """Sequences of a decode step, as row numbers of the state matrix and the page table.

    Attributes:
        active_B: int64, row number of each sequence.
        state: state matrix; `row_state.py` lists its columns.
        table: page table; position p of row r is cell p % PAGE of page table[r, p // PAGE].
        shared: pages that several sequences share and a GPU reads once.
        divided: division of each sequence among GPU thread blocks.
        is_long: use the GPU's tile sizes for long sequences.
    """

    active_B: Tensor
    state: Tensor
    table: Tensor
    shared: "Shared | None" = None
    divided: "Divided | None" = None
    is_long: bool = False


def takes_pages(x_THE: Tensor) -> bool:
    """Return True if `attend_by_pages` supports such heads: it reads KV pages in place, on a CPU."""
    return cpu.takes(x_THE) and x_THE.shape[-1] % 16 == 0


def attend_by_pages(
    q_BHE: Tensor, k_BKE: Tensor, v_BKE: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows
) -> Tensor:
    """Store k and v in the KV cache; return attention outputs, B x (H * E). For CPU tensors.

    keys, values: KV cache of a layer, pages x PAGE x K x E. `takes_pages` must be True for q.
    """
    from hone.kernels.cpu import decode
    from hone.kernels.flat_attention import addresses

    B, H, E = q_BHE.shape
    out = q_BHE.new_empty(B, H * E)
    PAGE, K = keys.shape[1:3]
    pointers = (rows.active_B.data_ptr(), rows.state.data_ptr(), rows.table.data_ptr())
    decode.attend(
        B,
        H,
        K,
        E,
        *addresses(q_BHE, k_BKE, v_BKE),
        keys.data_ptr(),
        values.data_ptr(),
        PAGE,
        *pointers,
        rows.table.shape[1],
        out.data_ptr(),
    )
    return out


def attend_by_pages_reference(
    q_BHE: Tensor, k_BKE: Tensor, v_BKE: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows
) -> Tensor:
    B, H, _ = q_BHE.shape
    k_BLKE, v_BLKE, distance_BL = read_pages(k_BKE, v_BKE, keys, values, rows)
    out = F.scaled_dot_product_attention(
        q_BHE.unsqueeze(2),
        k_BLKE.transpose(1, 2),
        v_BLKE.transpose(1, 2),
        attn_mask=(distance_BL >= 0)[:, None, None, :],
        enable_gqa=k_BKE.shape[1] != H,
    )
    return out.reshape(B, -1)


def read_pages(
    k_BKE: Tensor, v_BKE: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows
) -> tuple[Tensor, Tensor, Tensor]:
    """Write each sequence's newest key and value; return all of them, B x L x K x E, padded.

    The third tensor has the tokens from the newest back to each key, B x L; negative: padding.
    """
    PAGE = keys.shape[1]
    lengths_B = rows.state[rows.active_B, row_state.LENGTH]
    table = rows.table[rows.active_B]
    page_B = table.gather(1, (lengths_B // PAGE)[:, None]).squeeze(1)
    keys[page_B, lengths_B % PAGE], values[page_B, lengths_B % PAGE] = k_BKE, v_BKE
    pages = table[:, : int(lengths_B.max()) // PAGE + 1]
    k_BLKE, v_BLKE = (x[pages].flatten(1, 2) for x in (keys, values))
    seen_BL = torch.arange(k_BLKE.shape[1], device=pages.device)[None, :] <= lengths_B[:, None]
    v_BLKE = v_BLKE.masked_fill(~seen_BL[:, :, None, None], 0.0)  # 0 x NaN would be NaN
    at_L = torch.arange(k_BLKE.shape[1], device=pages.device)
    return k_BLKE, v_BLKE, lengths_B[:, None] - at_L[None, :]
