"""Keys and values of the running sequences, one row a sequence, active rows first.

rows      0 … B-1 run, the rest are free; a row that ends is filled by the last one, so decoding always
          works on a dense block [:B] and a finished sequence costs nothing from then on
layout    layers x (k, v) x rows x positions x K x E
"""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.kernels.flat_attention import attend_to_cache, takes
from hone.models.attention import PackedAttention
from hone.models.spec import ModelSpec

GROWTH = 64  # positions are allocated in multiples of this


class KVCache:
    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, budget_bytes: int) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.budget_bytes = budget_bytes
        self.rows = self.positions = 0
        self.store = torch.empty(0)

    def rows_within_budget(self, positions: int) -> int:
        """How many sequences of that length fit into the memory allowed (at least one)."""
        per_token = 2 * self.spec.num_hidden_layers * self.spec.num_key_value_heads * self.spec.head_dim
        return max(1, self.budget_bytes // (per_token * self.dtype.itemsize * round_up(positions)))

    def reserve(self, rows: int, positions: int, keep: int) -> None:
        """Makes room for that many rows and positions; the first `keep` rows keep their content."""
        positions = max(round_up(positions), self.positions)
        if rows <= self.rows and positions == self.positions:
            return
        rows = max(rows, self.rows if positions == self.positions else keep)
        spec = self.spec
        shape = (spec.num_hidden_layers, 2, rows, positions, spec.num_key_value_heads, spec.head_dim)
        # Zeros, not garbage: masked positions are multiplied by a probability of 0, and 0 x NaN is NaN.
        store = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if keep:
            store[:, :, :keep, : self.positions] = self.store[:, :, :keep]
        self.store, self.rows, self.positions = store, rows, positions

    def move(self, source: Tensor, target: Tensor) -> None:
        """Rows `source` replace rows `target`."""
        self.store[:, :, target] = self.store[:, :, source]


def round_up(positions: int) -> int:
    return -(-positions // GROWTH) * GROWTH


class PrefillAttention:
    """Attention among whole prompts that keeps their keys and values: `copies` says which token goes where.

    Each of the R copies takes flat token `source[i]` to flat cell `target[i]` (row * positions + position), so
    a prompt that several samples share is computed once and copied to each of them.
    """

    def __init__(self, cache: KVCache, packed: PackedAttention, source: Tensor, target: Tensor) -> None:
        self.cache, self.packed, self.source, self.target = cache, packed, source, target

    def __call__(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        for kind, x_TKE in enumerate((k_TKE, v_TKE)):
            self.cache.store[layer, kind].flatten(0, 1).index_copy_(0, self.target, x_TKE[self.source])
        return self.packed(layer, q_THE, k_TKE, v_TKE)


class DecodeAttention:
    """Attention of one new token a row to everything before it in the row, itself included.

    `lengths_B` counts the tokens already stored.
    """

    def __init__(self, cache: KVCache, lengths_B: Tensor) -> None:
        self.cache, self.lengths_B = cache, lengths_B

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row, the new one included."""
        return 1 + int(self.lengths_B.max())

    @cached_property
    def cell_B(self) -> Tensor:
        """Where the new tokens go, in the flat cells of a layer."""
        return torch.arange(len(self.lengths_B), device=self.cache.device) * self.cache.positions + self.lengths_B

    @cached_property
    def bias_B11L(self) -> Tensor:
        seen_BL = torch.arange(self.longest, device=self.cache.device)[None, :] <= self.lengths_B[:, None]
        bias = torch.zeros(seen_BL.shape, dtype=self.cache.dtype, device=self.cache.device)
        return bias.masked_fill_(~seen_BL, float("-inf"))[:, None, None, :]

    def __call__(self, layer: int, q_BHE: Tensor, k_BKE: Tensor, v_BKE: Tensor) -> Tensor:
        if takes(q_BHE):
            return attend_to_cache(q_BHE, k_BKE, v_BKE, self.cache.store[layer], self.lengths_B)
        B, H, _ = q_BHE.shape
        k_all, v_all = self.cache.store[layer]
        k_all.flatten(0, 1).index_copy_(0, self.cell_B, k_BKE)
        v_all.flatten(0, 1).index_copy_(0, self.cell_B, v_BKE)
        k_BKLE, v_BKLE = (x[:B, : self.longest].transpose(1, 2) for x in (k_all, v_all))
        gqa = k_BKE.shape[1] != H
        out = F.scaled_dot_product_attention(
            q_BHE.unsqueeze(2), k_BKLE, v_BKLE, attn_mask=self.bias_B11L, enable_gqa=gqa
        )
        return out.reshape(B, -1)
