"""KV cache in pages: for each layer, (k, v) x pages x PAGE x K x E.

PAGE is the number of tokens per page, K the number of key-value heads, E their size, which may
differ by layer. Thanks to pages, the prompt of a group of completions is stored once, prompts share
common prefixes, and a sequence takes memory only for its own length. Kernels read pages in place
(`kernels/decode.py`).
"""

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.engine.delta_states import DeltaStates
from hone.engine.mixer_states import DecodeMixing, MixerStates, kept_states
from hone.engine.pages import PagePool
from hone.engine.slots import untouched_zeros
from hone.kernels import gpu, row_state
from hone.kernels.decode import (
    DecodeRows,
    attend_by_pages,
    attend_by_pages_reference,
    read_pages,
    takes_pages,
)
from hone.kernels.delta_plan import DeltaHeads
from hone.kernels.delta_rule import decode_delta
from hone.kernels.pinned_memory import to_device
from hone.models.adapters import Adapters
from hone.models.attention_layouts import Heads
from hone.models.language_model import LanguageModel
from hone.models.mixers import Mixer
from hone.models.spec import ModelSpec

# GPU kernels' tiles divide a page; on a CPU short prompts are worth sharing. With multiples of 16
# the CPU's attention gives the same bits however a sequence is split.
PAGE = {"cuda": 64, "cpu": 16}


class KVCache:
    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        tokens: int,
        sequences: int = 1,
    ) -> None:
        """Allocate pages for `tokens` tokens of at most `sequences` sequences at once."""
        size = PAGE.get(device.type, 16)
        self.hidden_size = spec.hidden_size
        self.pool = PagePool(1 + -(-tokens // size), size)
        self.device = device
        # Zeros, not garbage: masked positions are multiplied by a probability of 0, and 0 x NaN is NaN.
        sizes = spec.cache_head_sizes
        pages = (2, self.pool.pages, size, spec.num_key_value_heads)
        # By size of a head: layers x (k, v) x pages x PAGE x K x E
        self.stores = {
            head_size: untouched_zeros((sizes.count(head_size), *pages, head_size), dtype, device)
            for head_size in dict.fromkeys(sizes)
        }
        parts = {head_size: iter(store.unbind()) for head_size, store in self.stores.items()}
        self.layers = [next(parts[head_size]) for head_size in sizes]  # of each layer, k and v

        # Experts of each token plus 1 (0: unknown), in pages like its keys, so that both are shared
        # together.
        cells = self.pool.pages * size
        self.routing = (
            untouched_zeros((cells, spec.routed_experts), torch.int16, device)
            if spec.routed_experts
            else None
        )

        self.mixers: MixerStates | None = None
        if spec.mixer_layers:
            kept = kept_states(sequences)
            self.mixers = MixerStates(spec, self.pool, dtype, device, kept)
        self.deltas: DeltaStates | None = None
        if spec.delta_layers:
            self.deltas = DeltaStates(spec, self.pool, dtype, device, sequences)
        self._no_rotation: dict[int, tuple[Tensor, Tensor]] = {}  # by size of a head

    def no_rotation(self, positions: int, layer: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of heads of a layer that are not rotated, `positions` x E."""
        keys = self.layers[layer]
        size = keys.shape[-1]
        found = self._no_rotation.get(size)
        if found is None or len(found[0]) < positions:
            cos_PE = keys.new_ones(positions, size)
            found = self._no_rotation[size] = (cos_PE, torch.zeros_like(cos_PE))
        return found

    @property
    def nbytes(self) -> int:
        """Return the bytes of all pages; on a CPU, pages that were never used take no memory."""
        others = [] if self.routing is None else [self.routing]
        others += [] if self.mixers is None else [self.mixers.inputs]
        others += [] if self.deltas is None else [self.deltas.columns, self.deltas.matrices]
        return sum(x.nbytes for x in (*self.stores.values(), *others))

    def note_routing(
        self, model: LanguageModel, cells_T: Tensor, kept_N: Tensor | None = None
    ) -> None:
        """Record the experts that the last forward pass chose for its tokens.

        Args:
            model: a mixture of experts; nothing is recorded for other models.
            cells_T: cache cells of the tokens.
            kept_N: indices of the tokens that the last block computed; None: all.
        """
        if self.routing is None:
            return
        chosen = [mixture.chosen_TK for mixture in model.expert_layers]
        if kept_N is not None:
            known_TK = chosen[-1].new_full((len(cells_T), chosen[-1].shape[1]), -1)
            chosen[-1] = known_TK.index_copy_(0, kept_N, chosen[-1])
        routing_TR = (torch.cat(chosen, 1) + 1).to(torch.int16)
        self.routing[cells_T] = routing_TR

    def routing_of(self, pages: list[int], count: int) -> NDArray[np.int16] | None:
        """Return the experts of a sequence's first `count` tokens, count x R, or None.

        R is the number of experts per token over all blocks; unknown experts are -1. None for a
        model without experts.
        """
        if self.routing is None:
            return None
        by_page = self.routing.view(-1, self.pool.size, self.routing.shape[1])
        found: NDArray[np.int16] = (
            (by_page[to_device(pages, self.routing.device)].flatten(0, 1)[:count] - 1).cpu().numpy()
        )
        return found

    def copy_pages(self, source: list[int], target: list[int], tokens: int | None = None) -> None:
        """Copy pages `source` to pages `target`: the first `tokens` tokens of each, or all."""
        here, there = (to_device(pages, self.device) for pages in (source, target))
        # Wider elements mean fewer of them to look up.
        wide = [store.flatten(4).view(torch.int64) for store in self.stores.values()]
        copied = [(one[:, :, :, :tokens], 2) for one in wide]
        if self.routing is not None:
            copied.append(
                (self.routing.view(-1, self.pool.size, self.routing.shape[1])[:, :tokens], 0)
            )
        if self.mixers is not None:
            by_page = self.mixers.inputs.unflatten(1, (-1, self.pool.size))
            copied.append((by_page[:, :, :tokens], 1))
            self.mixers.copy_pages(source, target, tokens)
        for pages, dimension in copied:
            pages.index_copy_(dimension, there, pages.index_select(dimension, here))


class DecodeAttention:
    """Attention of one new token per sequence over the sequence's earlier tokens and the new one."""

    def __init__(self, cache: KVCache, rows: DecodeRows, adapters: Adapters | None = None) -> None:
        self.cache = cache
        self.rows = rows
        self.adapters = adapters

    @cached_property
    def mixing(self) -> DecodeMixing:
        assert self.cache.mixers is not None and self.adapters is not None
        return DecodeMixing(self.cache.mixers, self.rows, self.adapters)

    def mix_sequences(self, layer: int, x_BD: Tensor, mixer: Mixer) -> Tensor:
        """Return the outputs of a mixer, B x D, for the new tokens."""
        return self.mixing.mix_sequences(layer, x_BD, mixer)

    def mix_delta(self, layer: int, projected_BO: Tensor, heads: DeltaHeads) -> Tensor:
        """Return the outputs of the gated delta rule for the new tokens, and update their states."""
        assert self.cache.deltas is not None
        store = self.cache.deltas.layers[layer]
        return decode_delta(projected_BO, heads, store, self.rows.active_B, self.rows.state)

    @cached_property
    def longest(self) -> int:
        """Return the tokens of the longest sequence, with the new one; the layers of a step share it."""
        return int(self.rows.state[self.rows.active_B, row_state.LENGTH].max()) + 1

    def __call__(self, layer: int, qkv_BNE: Tensor, heads: Heads) -> Tensor:
        options = heads.options
        if gpu.takes(qkv_BNE) and gpu.takes_heads(qkv_BNE.shape[2]):
            return self._attend_on_gpu(layer, qkv_BNE, heads)
        keys, values = self.cache.layers[layer]
        rows = self.rows
        q, k, v = heads(qkv_BNE)
        if options is not None:
            q, options = options.reduce_to_plain(q, self.longest)
        if options is not None:
            k_BLKE, v_BLKE, distance_BL = read_pages(k, v, keys, values, rows)
            out_BH1E = options.attend(
                q.unsqueeze(2),
                k_BLKE.transpose(1, 2),
                v_BLKE.transpose(1, 2),
                distance_BL[:, None, None],
            )
            return out_BH1E.reshape(len(q), -1)
        attend = attend_by_pages if takes_pages(q) else attend_by_pages_reference
        return attend(q, k, v, keys, values, rows)

    def _attend_on_gpu(self, layer: int, qkv_BNE: Tensor, heads: Heads) -> Tensor:
        from hone.kernels.gpu.decode import decode

        keys, values = self.cache.layers[layer]
        rows = self.rows
        turn = heads.rotation
        if turn is None:
            positions = rows.table.shape[1] * self.cache.pool.size
            tables = self.cache.no_rotation(positions, layer)
        else:
            tables = (turn.cos_PE, turn.sin_PE)
        return decode(
            qkv_BNE,
            heads.q_scale_E,
            heads.k_scale_E,
            *tables,
            heads.eps,
            heads.H,
            keys,
            values,
            rows.active_B,
            rows.state,
            rows.table,
            rows.shared,
            rows.divided,
            rows.is_long,
            self.cache.hidden_size,
            heads.form,
            None if heads.options is None else heads.options.sinks_H,
        )
