"""Keys and values of running sequences, in pages: layers x (k, v) x pages x PAGE x K x E.

Pages, not a row a sequence: a group's prompt is then stored once, prompts that start alike share what they have in
common, and a sequence takes up no more than its length. Kernels read pages as they lie (`kernels/decode.py`).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hone.engine.pages import PagePool
from hone.engine.slots import to_device, untouched_zeros
from hone.kernels import gpu
from hone.kernels.decode import Rows, attend_by_pages, attend_by_pages_reference, takes_pages
from hone.models.attention import ContinuedAttention, Heads, PackedAttention
from hone.models.spec import ModelSpec

# A tile of the GPU's kernel is a page; on a CPU short prompts are worth sharing. In multiples of 16 the CPU's attention
# gives the same bits however a sequence is cut.
PAGE = {"cuda": 64, "cpu": 16}


class KVCache:
    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, tokens: int) -> None:
        """Room for that many tokens."""
        size = PAGE.get(device.type, 16)
        self.pool = PagePool(1 + -(-tokens // size), size)
        shape = (spec.num_hidden_layers, 2, self.pool.pages, size, spec.num_key_value_heads, spec.head_dim)
        # Zeros, not garbage: masked positions are multiplied by a probability of 0, and 0 x NaN is NaN.
        self.store = untouched_zeros(shape, dtype, device)

    @staticmethod
    def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
        return 2 * spec.num_hidden_layers * spec.num_key_value_heads * spec.head_dim * dtype.itemsize

    def copy_pages(self, source: list[int], target: list[int]) -> None:
        device = self.store.device
        self.store[:, :, to_device(target, device)] = self.store[:, :, to_device(source, device)]


@dataclass(frozen=True)
class Stretch:
    """Tokens start … end of a prompt, to be computed in one pass; those before are in the cache."""

    ids: list[int]
    pages: list[int]
    start: int
    end: int


class PrefillAttention:
    """Attention of stretches of prompts, end to end, to what is before them; keeps their keys and values."""

    def __init__(self, cache: KVCache, stretches: list[Stretch]) -> None:
        self.cache, self.stretches = cache, stretches
        device, size = cache.store.device, cache.pool.size
        offsets = [np.arange(s.start, s.end) for s in stretches]
        cells = [_cells(s.pages, at, size) for s, at in zip(stretches, offsets, strict=True)]
        self.positions_T, self.cells_T = (to_device(np.concatenate(x), device) for x in (offsets, cells))
        self.lengths = [s.end - s.start for s in stretches]

    @cached_property
    def fresh(self) -> PackedAttention | None:
        """Where all stretches start at the start."""
        if any(s.start for s in self.stretches):
            return None
        return PackedAttention(self.lengths, self.cache.store.device)

    @cached_property
    def continued(self) -> tuple[Tensor, ContinuedAttention]:
        """Where not: the cells of all that each stretch sees, and how it sees it."""
        device, size = self.cache.store.device, self.cache.pool.size
        cells = np.concatenate([_cells(s.pages, np.arange(s.end), size) for s in self.stretches])
        attention = ContinuedAttention(self.lengths, [s.start for s in self.stretches], device)
        return to_device(cells, device), attention

    def __call__(self, layer: int, qkv_TNE: Tensor, heads: Heads) -> Tensor:
        keys, values = (x.flatten(0, 1) for x in self.cache.store[layer])
        if gpu.takes(qkv_TNE) and gpu.takes_heads(qkv_TNE.shape[2]):
            from hone.kernels.gpu import rows

            rotation = heads.rotation
            assert rotation.positions_T is not None
            tables = (rotation.cos_PE, rotation.sin_PE, rotation.positions_T)
            q, k, v = rows.heads(
                qkv_TNE, heads.q_scale_E, heads.k_scale_E, *tables, self.cells_T, keys, values, heads.eps, heads.H
            )
        else:
            q, k, v = heads(qkv_TNE)
            keys.index_copy_(0, self.cells_T, k)
            values.index_copy_(0, self.cells_T, v)
        if self.fresh is not None:
            return self.fresh.attend(q, k, v)
        cells, attention = self.continued
        return attention.attend(q, keys[cells], values[cells])


def _cells(pages: list[int], positions: np.ndarray, size: int) -> np.ndarray:
    return np.asarray(pages)[positions // size] * size + positions % size


class DecodeAttention:
    """Attention of one new token a row to everything before it, itself included."""

    def __init__(self, cache: KVCache, rows: Rows) -> None:
        self.cache, self.rows = cache, rows

    def __call__(self, layer: int, qkv_BNE: Tensor, heads: Heads) -> Tensor:
        keys, values = self.cache.store[layer]
        rows = self.rows
        if gpu.takes(qkv_BNE) and gpu.takes_heads(qkv_BNE.shape[2]):
            from hone.kernels.gpu.decode import decode

            scales, tables = (heads.q_scale_E, heads.k_scale_E), (heads.rotation.cos_PE, heads.rotation.sin_PE)
            where = (rows.active_B, rows.state, rows.table)
            return decode(
                qkv_BNE, *scales, *tables, heads.eps, heads.H, keys, values, *where, rows.shared, rows.is_wide
            )
        q, k, v = heads(qkv_BNE)
        attend = attend_by_pages if takes_pages(q) else attend_by_pages_reference
        return attend(q, k, v, keys, values, rows)
