"""A decode step of a small model on the CPU in one compiled call (`kernels/cpu/layers.py`), over packed weights.

Its twin is `Transformer.hidden` with DecodeAttention, which decodes wherever this does not.
"""

import torch
from torch import Tensor, nn

from hone.engine.cache import KVCache
from hone.kernels import cpu
from hone.kernels.decode import Rows
from hone.kernels.linear import HAS_AVX512, LARGE_WEIGHT
from hone.models.transformer import Transformer

MOST_ROWS = 64  # of a task, so that what it works on stays in the core's cache


class PackedModel:
    """Packs again when weights have changed: when torch has counted a change in place, or when told so."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.parameters = list(model.parameters())
        self.is_stale = True
        self._changes = 0
        self._packed: dict[int, Tensor] = {}

    @staticmethod
    def takes(model: Transformer) -> bool:
        spec = model.spec
        linears = [m for m in model.blocks.modules() if hasattr(m, "delta")]
        is_small = all(linear.weight.numel() <= LARGE_WEIGHT for linear in linears)
        return HAS_AVX512 and cpu.takes(model.embed.weight) and is_small and spec.head_dim % 16 == 0

    def hidden(self, rows: Rows) -> Tensor:
        """Final hidden states B x D of the newest token of each active row; its keys and values go into the cache."""
        from hone.kernels.cpu import layers

        changes = sum(parameter._version for parameter in self.parameters)
        if self.is_stale or changes != self._changes:
            self._pack()
            self.is_stale, self._changes = False, changes
        model, spec, B = self.model, self.model.spec, rows.active_B.shape[0]
        share = -(-B // torch.get_num_threads())
        block = min(MOST_ROWS, -(-share // 8) * 8)
        out = model.embed.weight.new_empty(B, spec.hidden_size)
        where = (rows.active_B.data_ptr(), rows.state.data_ptr(), rows.table.data_ptr(), rows.table.shape[1])
        layers.hidden(
            B, block, spec.hidden_size, spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim,
            spec.intermediate_size, spec.num_hidden_layers, self._addresses.data_ptr(), model.embed.weight.data_ptr(),
            *(x.data_ptr() for x in model.rope_tables(out.device, out.dtype)), spec.rms_norm_eps,
            model.norm.weight.data_ptr(), self.cache.pool.size, *where, out.data_ptr(),
        )  # fmt: skip
        return out

    def _pack(self) -> None:
        from hone.kernels.cpu import layers, products

        def weight(linear: nn.Module) -> int:
            W: Tensor = linear.weight  # type: ignore[assignment]
            N, K = W.shape
            packed = self._packed.get(id(linear))
            if packed is None:
                packed = self._packed[id(linear)] = W.new_empty(-(-N // products.WIDTH), K, products.WIDTH)
            products.pack(N, K, W.data_ptr(), W.stride(1), W.stride(0), packed.data_ptr())
            return packed.data_ptr()

        def address(tensor: Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr()

        table = []
        for layer, block in enumerate(self.model.blocks):
            attention, mlp, (keys, values) = block.attention, block.mlp, self.cache.store[layer]
            row = {
                layers.ATTENTION_NORM: block.attention_norm.weight.data_ptr(),
                layers.QKV: weight(attention.qkv),
                layers.QKV_BIAS: address(attention.qkv.bias),
                layers.Q_NORM: address(attention.q_norm),
                layers.K_NORM: address(attention.k_norm),
                layers.OUT: weight(attention.out),
                layers.OUT_BIAS: address(attention.out.bias),
                layers.MLP_NORM: block.mlp_norm.weight.data_ptr(),
                layers.GATE_UP: weight(mlp.gate_up),
                layers.GATE_UP_BIAS: address(mlp.gate_up.bias),
                layers.DOWN: weight(mlp.down),
                layers.DOWN_BIAS: address(mlp.down.bias),
                layers.KEYS: keys.data_ptr(),
                layers.VALUES: values.data_ptr(),
            }
            table.append([row[i] for i in range(layers.ADDRESSES)])
        self._addresses = torch.tensor(table)
