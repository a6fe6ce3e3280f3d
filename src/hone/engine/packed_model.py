"""A small model on the CPU: one compiled call for all layers, over repacked weights.

The weights are packed into panels for the matrix products of the kernel,
`kernels/cpu/whole_model.py`. The reference is `Transformer` with DecodeAttention and
PrefillAttention, which all other models use.
"""

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.engine.cache import KVCache
from hone.engine.prefill import PrefillChunk
from hone.engine.slots import Slots
from hone.kernels import cpu, row_state
from hone.kernels.decode import DecodeRows
from hone.kernels.linear import LARGE_WEIGHT
from hone.models.language_model import LanguageModel
from hone.models.layers import Linear, SelfAttention
from hone.models.lora import lora_modules
from hone.models.transformer import Block, Transformer

NO_DRAWS = (0,) * 10  # placeholder arguments without draws


class Quickest:
    """Choose the fastest of several equivalent variants by timing them in use.

    A trial runs all variants in order and in reverse order, twice, so that work that grows from
    call to call favours none. The fastest is used for KEPT calls, then the next trial begins.
    """

    KEPT = 100  # calls that a choice is kept for

    def __init__(self, ways: int) -> None:
        there = list(range(ways))
        self._trial = 2 * (there + there[::-1])
        self._times: list[list[float]] = [[] for _ in there]
        self._calls = 0
        self._best = 0

    def choose_way(self) -> int:
        """Return the index of the variant to use now; report its time with `record_time`."""
        return self._trial[self._calls] if self._calls < len(self._trial) else self._best

    def record_time(self, seconds: float) -> None:
        """Record the time of the variant that was used, in seconds per unit of work."""
        if self._calls < len(self._trial):
            self._times[self.choose_way()].append(seconds)
        self._calls += 1
        if self._calls == len(self._trial):
            medians = [sorted(times)[len(times) // 2] for times in self._times]
            self._best = medians.index(min(medians))
        elif self._calls == len(self._trial) + self.KEPT:
            self._calls = 0
            for times in self._times:
                times.clear()


class PackedModel:
    """A model with packed copies of its weights.

    The weights are packed again if torch's version counters show an in-place change, or if
    `is_stale` is set.
    """

    def __init__(self, model: LanguageModel, cache: KVCache) -> None:
        assert isinstance(model, Transformer)
        self.model = model
        self.cache = cache
        self.parameters = list(model.parameters())
        self.is_stale = True
        # Sequences per thread that decode together: few, whose keys and values stay in its cache
        # over the steps of a call, or many, which read the weights less often. The best value
        # depends on the machine.
        self._windows = (
            load_layer_kernels().ROWS,
            3 * load_layer_kernels().ROWS,
            load_layer_kernels().BLOCK,
        )
        self._quickest = Quickest(len(self._windows))
        self._changes = 0
        self._packed: dict[int, Tensor] = {}

    @staticmethod
    def supports_model(model: LanguageModel) -> bool:
        weights = [p for p in model.parameters() if p.dim() == 2]
        has_one_form = model.spec.has_fast_paths and len(set(model.spec.layers)) == 1
        is_small = all(weight.numel() <= LARGE_WEIGHT for weight in weights)
        is_plain = not any(lora_modules(model))
        return (
            cpu.takes(model.embed.weight)
            and has_one_form
            and is_small
            and is_plain
            and model.spec.head_dim % 16 == 0
        )

    def decode_rows(self, rows: DecodeRows) -> Tensor:
        """Return logits (B x V) after the newest token of each active row, and update the cache."""
        active = rows.active_B.numpy()
        B = rows.active_B.shape[0]
        state = rows.state.numpy()
        tokens = np.empty((B, load_layer_kernels().COLUMNS), dtype=np.int64)
        tokens[:, load_layer_kernels().TOKEN] = state[active, row_state.LAST]
        tokens[:, load_layer_kernels().POSITION] = state[active, row_state.LENGTH]
        tokens[:, load_layer_kernels().PAGES], tokens[:, load_layer_kernels().RESULT] = (
            active * rows.table.shape[1],
            np.arange(B),
        )
        return self._run_kernel(tokens, _task_bounds(B), rows.table, B)

    def decode_steps(self, rows: DecodeRows, number: int, slots: Slots) -> None:
        """Decode up to `number` tokens for each active row, drawn without penalties or filters."""
        B = len(rows.active_B)
        threads = torch.get_num_threads()
        room = np.empty((B, load_layer_kernels().COLUMNS), dtype=np.int64)
        counts = rows.state.numpy()[:, row_state.COUNT]
        self._follow_weights()  # before timing starts
        before = int(counts.sum())
        start = time.perf_counter()
        self._run_kernel(
            room,
            np.arange(threads + 1) * B // threads,
            rows.table,
            0,
            number,
            self._windows[self._quickest.choose_way()],
            rows.active_B.data_ptr(),
            rows.state.data_ptr(),
            rows.table.shape[1],
            slots.parameters.data_ptr(),
            slots.stops.data_ptr(),
            slots.stops.shape[1],
            slots.tokens.data_ptr(),
            slots.logprobs.data_ptr(),
            slots.tokens.shape[1],
        )
        if threads * load_layer_kernels().ROWS < B:  # otherwise all windows are equal
            self._quickest.record_time(
                (time.perf_counter() - start) / max(1, int(counts.sum()) - before)
            )

    def prefill_chunks(self, chunks: list[PrefillChunk], kept: list[int]) -> Tensor:
        """Prefill prompt chunks, update the cache, and return the logits of the tokens `kept`.

        `kept` holds token indices over all chunks, concatenated. No chunk may read keys or values
        that another chunk of this call computes.
        """
        lengths = np.array([s.end - s.start for s in chunks])
        ends = np.cumsum(lengths)
        table = np.zeros((len(chunks), max(len(s.pages) for s in chunks)), dtype=np.int64)
        tokens = np.full((ends[-1], load_layer_kernels().COLUMNS), -1, dtype=np.int64)
        for i, (s, end) in enumerate(zip(chunks, ends, strict=True)):
            table[i, : len(s.pages)] = s.pages
            own = tokens[end - lengths[i] : end]
            own[:, load_layer_kernels().TOKEN], own[:, load_layer_kernels().POSITION] = (
                s.ids[s.start : s.end],
                np.arange(s.start, s.end),
            )
        tokens[:, load_layer_kernels().PAGES] = np.repeat(
            np.arange(len(chunks)) * table.shape[1], lengths
        )
        tokens[kept, load_layer_kernels().RESULT] = np.arange(len(kept))
        # Those in the same block.
        task = np.maximum.accumulate((ends - lengths) // load_layer_kernels().BLOCK)
        firsts = np.append((ends - lengths)[np.flatnonzero(np.diff(task, prepend=-1))], ends[-1])
        return self._run_kernel(tokens, firsts, torch.from_numpy(table), len(kept))

    def _run_kernel(
        self,
        tokens: NDArray[np.int64],
        firsts: NDArray[np.int64],
        table: Tensor,
        count: int,
        steps: int = 0,
        *drawing: int,
    ) -> Tensor:
        """Run the compiled kernel and return logits, `count` x V.

        If `steps` is 0, compute logits of the given tokens. Otherwise run up to `steps` decode
        steps; `tokens` is then scratch memory, and `count` is 0.

        Args:
            tokens: one row of COLUMNS numbers per token.
            firsts: index of the first row (or active sequence) of each task, and the end of the last task.
            table: page table.
            count: number of rows with logits.
            steps: decode steps to run.
            drawing: arguments of `whole_model.run` after `steps`.
        """
        self._follow_weights()
        model = self.model
        spec = self.model.spec
        weight = self.model.embed.weight
        out = weight.new_empty(count, spec.vocab_size)
        load_layer_kernels().run(
            len(firsts) - 1,
            firsts.ctypes.data,
            tokens.ctypes.data,
            spec.hidden_size,
            spec.num_attention_heads,
            spec.num_key_value_heads,
            spec.head_dim,
            spec.intermediate_size,
            spec.vocab_size,
            spec.num_hidden_layers,
            self._addresses.data_ptr(),
            weight.data_ptr(),
            *(x.data_ptr() for x in model.rope_table(spec.layers[0].rope, weight)),
            spec.rms_norm_eps,
            model.norm.weight.data_ptr(),
            self._head,
            self.cache.pool.size,
            table.data_ptr(),
            out.data_ptr(),
            steps,
            *(drawing or NO_DRAWS),
        )
        return out

    def _follow_weights(self) -> None:
        changes = sum(parameter._version for parameter in self.parameters)
        if self.is_stale or changes != self._changes:
            self._pack_weights()
            self.is_stale = False
            self._changes = changes

    def _pack_weights(self) -> None:
        from hone.kernels.cpu import products

        def pack_matrix(W: Tensor) -> int:
            N, K = W.shape
            if id(W) not in self._packed:
                self._packed[id(W)] = W.new_empty(-(-N // products.WIDTH), K, products.WIDTH)
            panels = self._packed[id(W)]
            products.pack(N, K, W.data_ptr(), W.stride(1), W.stride(0), panels.data_ptr())
            return panels.data_ptr()

        def address_of(tensor: Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr()

        def pack_linear(module: Linear) -> tuple[int, int]:
            return pack_matrix(module.weight), address_of(module.bias)

        table = []
        for layer, block in enumerate(self.model.blocks):
            assert isinstance(block, Block)
            attention = block.attention
            assert isinstance(attention, SelfAttention)
            mlp = block.mlp
            scales = (address_of(attention.q_norm), address_of(attention.k_norm))
            first = (
                block.attention_norm.weight.data_ptr(),
                *pack_linear(attention.qkv),
                *scales,
                *pack_linear(attention.out),
            )
            second = (
                block.mlp_norm.weight.data_ptr(),
                *pack_linear(mlp.gate_up),
                *pack_linear(mlp.down),
            )
            table.append([*first, *second, *(x.data_ptr() for x in self.cache.layers[layer])])
        self._addresses = torch.tensor(table)
        self._head = pack_matrix(self.model.head_weight_VD)


def _task_bounds(B: int) -> NDArray[np.int64]:
    """Divide B rows into tasks of similar size; return each task's first row, then B.

    Each thread gets about the same number of tasks.
    """
    threads = torch.get_num_threads()
    ROWS = load_layer_kernels().ROWS
    tasks = threads * -(-B // (threads * load_layer_kernels().BLOCK))
    block = -(-B // (tasks * ROWS)) * ROWS
    return np.minimum(np.arange(0, B + block, block), B)


def load_layer_kernels() -> Any:
    """Return the module of compiled whole-model kernels; its first import takes a second."""
    from hone.kernels.cpu import whole_model

    return whole_model
