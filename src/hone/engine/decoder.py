"""Compute one token for each decoding sequence, and the first token after each prompt.

    slots ─ newest tokens ─┬─ layer by layer: DecodeAttention over the cache ─ hidden states ─┬─► draw ─► slots
                           └─ packed: one call for all layers ─ logits ───────────────────────┘

The engine runs decode steps one by one, or `graphs.py` captures a step once and replays it. A small
model on a CPU uses repacked weights (`packed_model.py`): one call runs several steps, draws
included, if no request uses filters, penalties or top logprobs.
"""

from dataclasses import replace

from torch import Tensor

from hone.engine.cache import DecodeAttention, KVCache
from hone.engine.packed_model import PackedModel
from hone.engine.slots import Slots
from hone.engine.token_sampler import TokenSampler
from hone.kernels import gpu, numerics
from hone.kernels import row_state as column
from hone.kernels.decode import DecodeRows
from hone.kernels.head import cap_logits
from hone.kernels.linear import exact_logits
from hone.models.adapters import Adapters
from hone.models.language_model import LanguageModel

PACKED_STEPS = 16  # steps of a small CPU model per call: Python's overhead equals one step


class Decoder:
    """The model and the sampler of a decode step.

    Attributes:
        packed: compiled model for requests without adapters; None unless the model is small and on
            a CPU.
        stays_on_device: True if a step needs no host work, so that CUDA graphs can capture it.
    """

    def __init__(self, model: LanguageModel, cache: KVCache, slots: Slots) -> None:
        self.model = model
        self.cache = cache
        self.slots = slots
        self.sampler = TokenSampler(slots, model.spec.vocab_size)
        self.adapters = Adapters(model)
        self.packed = PackedModel(model, cache) if PackedModel.supports_model(model) else None
        self.stays_on_device = model.stays_on_device

    def at_once(self, kind: int, has_adapters: bool) -> int:
        """Return how many decode steps one call of `decode_step` can run."""
        return (
            PACKED_STEPS
            if self.packed is not None and not has_adapters and kind == TokenSampler.PLAIN
            else 1
        )

    def decode_step(
        self, B: int, kind: int, has_adapters: bool, rows: DecodeRows, steps: int = 1
    ) -> Tensor | None:
        """Run one decode step, or up to `steps`, for the first B active slots.

        Args:
            B: number of active slots to decode.
            kind: kind of sampling (`TokenSampler`).
            has_adapters: True if a request uses a LoRA adapter.
            rows: active slots and page table, as the attention kernels read them.
            steps: decode steps to run, at most `at_once`.

        Returns:
            The logits (B x V) if they were computed, else None.
        """
        active_B = rows.active_B[:B]
        state = self.slots.state
        rows = replace(rows, active_B=active_B, state=state)
        if self.packed is not None and not has_adapters:
            if kind == TokenSampler.PLAIN:
                self.packed.decode_steps(rows, steps, self.slots)
                return None
            return self.draw_tokens(
                self.packed.decode_rows(rows), active_B, kind, advance=True, is_logits=True
            )
        attention = DecodeAttention(self.cache, rows, self.adapters)
        with self.adapters.used_by(state[active_B, column.ADAPTER] if has_adapters else None):
            hidden_BD = self.model.forward_newest(active_B, state, attention)
        if self.cache.routing is not None:
            size = self.cache.pool.size
            length_B = state[active_B, column.LENGTH]
            cells_B = rows.table[active_B, length_B // size] * size + length_B % size
            self.cache.note_routing(self.model, cells_B)
        return self.draw_tokens(hidden_BD, active_B, kind, advance=True)

    def draw_tokens(
        self, result_BD: Tensor, active_B: Tensor, kind: int, advance: bool, is_logits: bool = False
    ) -> Tensor | None:
        """Draw a token for each slot of `active_B`, from hidden states or logits.

        Args:
            result_BD: hidden states (B x D), or logits (B x V) with `is_logits`.
            active_B: slot of each row.
            kind: kind of sampling (`TokenSampler`).
            advance: True in a decode step, which has stored the keys of each slot's last token; False after prefill.
            is_logits: True if `result_BD` holds logits.

        Returns:
            The logits (B x V) if they were computed, else None.
        """
        weight_VD = self.model.head_weight_VD
        cap = self.model.spec.logit_cap
        is_plain = kind == TokenSampler.PLAIN and not numerics.keeps_order("head") and cap is None
        if not is_logits and is_plain and gpu.takes_head(result_BD):
            self.sampler.sample_hidden(result_BD, weight_VD, active_B, advance)
            return None
        logits_BV = result_BD if is_logits else cap_logits(exact_logits(result_BD, weight_VD), cap)
        self.sampler.sample_tokens(logits_BV, active_B, kind, advance)
        return logits_BV
