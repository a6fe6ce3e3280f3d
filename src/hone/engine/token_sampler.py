"""Draw tokens with a counter-based generator: random number i of a request depends on (seed, i)
alone.

So the same request gives the same tokens whatever else runs.

    logits ─ penalties, bias ─ top-k, top-p, min-p (one threshold each) ─► draw ─► token, stop test, bookkeeping
       └─────────────────────────────────────────────────────────────────► logprob of the token, log-softmax(logits / T)

Most requests use neither penalties nor filters, and draw directly from the logits.
"""

import numpy as np
import torch
from torch import Tensor

from hone.engine.sequence import Sequence
from hone.engine.slots import Slots
from hone.kernels import cpu, gpu, numerics
from hone.kernels import row_state as column

_GOLDEN, _MIX_1, _MIX_2 = (
    x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
FILTERED_OUT = -1e30  # finite, since compiled loops assume that there are no infinities


def uniform_numbers(seeds: Tensor, counters: Tensor) -> Tensor:
    """Return uniform float64 numbers in [0, 1) for int64 seeds and counters.

    The generator is splitmix64 (Steele et al. 2014).
    """
    bits = _mix_bits(_mix_bits(seeds) + (counters + 1) * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


def _shift_right(z: Tensor, by: int) -> Tensor:
    """Shift right as if z were unsigned."""
    return (z >> by) & (2 ** (64 - by) - 1)


def _mix_bits(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def draw_tokens(
    logits_BV: Tensor,
    plain_BV: Tensor,
    threshold_B: Tensor | None,
    slots: Slots,
    active_B: Tensor,
    advance: bool,
) -> None:
    """Draw a token for every active slot that is not done; store it and its logprob in the slot.

    At temperature 0 (below 1e-5, where logits / T overflows) the most likely token is drawn. At
    other temperatures, tokens with a logit below the threshold are left out, and the first token
    whose cumulative probability exceeds the uniform random number is drawn.

    Args:
        logits_BV: logits to draw from, with penalties and bias.
        plain_BV: logits of the model, for the logprob at the slot's logprob temperature.
        threshold_B: smallest logit that may be drawn, for each row; None: no limit.
        slots: state of the sequences.
        active_B: slot of each row.
        advance: True in a decode step, which has stored the keys of each slot's last token; False after prefill.
    """
    slot = (slots.parameters, slots.state, active_B, slots.stops, slots.tokens, slots.logprobs)
    if logits_BV.is_cuda and gpu.IS_AVAILABLE:
        from hone.kernels.gpu import sampling

        before_B = slots.state[active_B, column.COUNT] if numerics.keeps_order("head") else None
        sampling.draw(logits_BV, plain_BV, threshold_B, *slot, advance)
        if before_B is not None:
            note_ordered_logprobs(plain_BV, before_B, slots, active_B)
        return
    if threshold_B is not None:
        logits_BV = logits_BV.masked_fill(logits_BV < threshold_B[:, None], FILTERED_OUT)
    if not cpu.takes(logits_BV):
        draw_reference(logits_BV, plain_BV, slots, active_B, advance)
        return
    from hone.kernels.cpu import decode

    logits_BV = logits_BV.contiguous()
    plain_BV = plain_BV.contiguous()
    addresses = [
        x.data_ptr() for x in (logits_BV, plain_BV, slots.parameters, slots.state, active_B)
    ]
    decode.draw(
        *logits_BV.shape,
        *addresses[:2],
        int(plain_BV is not logits_BV),
        *addresses[2:],
        slots.stops.data_ptr(),
        slots.stops.shape[1],
        slots.tokens.data_ptr(),
        slots.logprobs.data_ptr(),
        slots.tokens.shape[1],
        int(advance),
    )


def note_ordered_logprobs(
    plain_BV: Tensor, before_B: Tensor, slots: Slots, active_B: Tensor
) -> None:
    """Overwrite the logprob of each slot's newest token with the one that training computes.

    `before_B` holds each slot's number of tokens before the draw; slots that drew none are
    unchanged.
    """
    from hone.kernels.gpu import training_kernels

    last_B = slots.state[active_B, column.LAST]
    drawn_B = slots.state[active_B, column.COUNT] > before_B
    temperature_B = slots.parameters[active_B, column.LOGPROB_TEMPERATURE].float()
    _, logprobs_B, _ = training_kernels.statistics(plain_BV, last_B, temperature_B)
    place_B = slots.state[active_B, column.COUNT].clamp(min=1) - 1
    noted_B = slots.logprobs[active_B, place_B]
    slots.logprobs[active_B, place_B] = torch.where(drawn_B, logprobs_B.to(noted_B.dtype), noted_B)


def draw_reference(
    logits_BV: Tensor, plain_BV: Tensor, slots: Slots, active_B: Tensor, advance: bool
) -> None:
    is_running_B = slots.state[active_B, column.DONE] == 0
    active_B = active_B[is_running_B]
    logits_BV = logits_BV[is_running_B]
    plain_BV = plain_BV[is_running_B]
    state = slots.state[active_B]
    parameters = slots.parameters[active_B]
    count_B = state[:, column.COUNT]
    tokens_B = pick_tokens(
        logits_BV,
        parameters[:, column.TEMPERATURE],
        uniform_numbers(state[:, column.SEED], count_B),
    )
    logprobs_BV = torch.log_softmax(
        plain_BV.float() / parameters[:, column.LOGPROB_TEMPERATURE, None], dim=-1
    )
    slots.tokens[active_B, count_B] = tokens_B
    slots.logprobs[active_B, count_B] = logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1)
    is_stop_B = (slots.stops[active_B] == tokens_B[:, None]).any(dim=1) & (
        count_B + 1 >= state[:, column.MIN]
    )
    is_full_B = count_B + 1 >= state[:, column.MAX]
    state[:, column.LAST] = tokens_B
    state[:, column.LENGTH] += int(advance)
    state[:, column.COUNT] += 1
    state[:, column.DONE] = torch.where(
        is_stop_B, column.STOPPED, torch.where(is_full_B, column.FULL, 0)
    )
    slots.state[active_B] = state


def pick_tokens(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> Tensor:
    """Return one token per row: the likeliest at temperature 0, else by cumulative probability."""
    is_greedy_B = temperature_B < 1e-5
    scale_B1 = torch.where(is_greedy_B, 1.0, temperature_B)[:, None]
    cdf_BV = torch.softmax(logits_BV.double() / scale_B1, dim=-1).cumsum(dim=-1)
    target_B1 = uniform_B.double()[:, None] * cdf_BV[:, -1:]
    drawn_B = (
        torch.searchsorted(cdf_BV, target_B1, right=True)
        .squeeze(1)
        .clamp_(max=logits_BV.shape[-1] - 1)
    )
    return torch.where(is_greedy_B, logits_BV.argmax(dim=-1), drawn_B)


def filter_thresholds(logits_BV: Tensor, parameters: Tensor) -> Tensor:
    """Return the smallest logit of each row that passes top-k, top-p and min-p.

    top-p applies to the tokens that top-k keeps: it keeps the likeliest until their total
    probability reaches top-p (Holtzman et al. 2020). min-p keeps tokens with at least that fraction
    of the likeliest token's probability (Nguyen et al. 2024).
    """
    V = logits_BV.shape[1]
    temperature_B1 = parameters[:, column.TEMPERATURE, None]
    temperature_B1 = torch.where(temperature_B1 < 1e-5, 1.0, temperature_B1)
    top_k_B1 = parameters[:, column.TOP_K, None]
    values_BV = logits_BV.sort(dim=-1, descending=True).values
    rank_V = torch.arange(V, device=logits_BV.device)
    in_k_BV = (rank_V < top_k_B1) | (top_k_B1 < 1)
    probs_BV = torch.softmax(
        (values_BV / temperature_B1).masked_fill(~in_k_BV, float("-inf")), dim=-1
    )
    before_BV = probs_BV.cumsum(dim=-1) - probs_BV
    kept_B1 = (
        (in_k_BV & (before_BV < parameters[:, column.TOP_P, None]))
        .sum(dim=-1, keepdim=True)
        .clamp(min=1)
    )
    least_B1 = values_BV[:, :1] + parameters[:, column.MIN_P, None].log() * temperature_B1
    return torch.maximum(values_BV.gather(1, kept_B1 - 1), least_B1).squeeze(1)


class TokenSampler:
    """Draw tokens for slots, and keep the counts that penalties need.

    The kind of a batch is the last in this list that any request needs: PLAIN; NOTED: top logprobs;
    FILTERED: top-k, top-p, min-p, min_tokens or raw logprobs; PENALISED: penalties, bias or tokens
    that a form allows; MASKED: the tokens that could be drawn are reported.
    """

    PLAIN, NOTED, FILTERED, PENALISED, MASKED = range(5)  # NOTED: plain, but logits are wanted

    def __init__(self, slots: Slots, vocab_size: int) -> None:
        self.slots = slots
        self.vocab_size = vocab_size
        self.counts: Tensor | None = None  # draws per token, presence in the prompt, bias
        self.in_prompt: Tensor
        self.bias: Tensor
        self.can_draw: Tensor | None = None  # slots x V: tokens of the last draw of kind MASKED

    @classmethod
    def kind_of_batch(cls, sequences: list[Sequence]) -> int:
        samplings = [s.request.sampling for s in sequences]
        if any(s.has_mask for s in samplings):
            return cls.MASKED
        if any(s.is_penalised for s in samplings) or any(
            s.request.allows is not None for s in sequences
        ):
            return cls.PENALISED
        if any(s.is_filtered for s in samplings):
            return cls.FILTERED
        return cls.NOTED if any(s.top_logprobs for s in samplings) else cls.PLAIN

    def fill_parameters(self, sequences: list[Sequence]) -> None:
        """Set penalty counts, bias and allowed tokens of sequences before their first draw."""
        penalised = [
            s for s in sequences if s.request.sampling.is_penalised or s.request.allows is not None
        ]
        has_mask = any(s.request.sampling.has_mask for s in sequences)
        if has_mask and self.can_draw is None:
            shape = (self.slots.count + 1, self.vocab_size)
            self.can_draw = torch.zeros(shape, dtype=torch.bool, device=self.slots.device)
        if not penalised and not has_mask and self.counts is None:
            return
        if self.counts is None:
            shape = (self.slots.count + 1, self.vocab_size)
            device = self.slots.device
            self.counts = torch.zeros(shape, dtype=torch.int32, device=device)
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
            self.bias = torch.zeros(shape, device=device)
        index = [s.slot for s in sequences]
        self.counts[index], self.in_prompt[index], self.bias[index] = 0, False, 0.0
        for s in penalised:
            self.in_prompt[s.slot, s.prompt_ids] = True
            for token, bias in s.request.sampling.logit_bias:
                self.bias[s.slot, token] = bias
            if s.request.allows is not None:
                self.allow_next(s, [])

    def allow_next(self, sequence: Sequence, ids: list[int]) -> None:
        """Set the allowed tokens of the draw that follows `ids`."""
        allows = sequence.request.allows
        assert allows is not None
        row = np.where(allows(ids), np.float32(0), np.float32(FILTERED_OUT))
        for token, bias in sequence.request.sampling.logit_bias:
            row[token] += bias
        self.bias[sequence.slot] = torch.from_numpy(row).to(self.bias.device)

    def sample_tokens(self, logits_BV: Tensor, active_B: Tensor, kind: int, advance: bool) -> None:
        if kind <= self.NOTED:
            draw_tokens(logits_BV, logits_BV, None, self.slots, active_B, advance)
            return
        parameters = self.slots.parameters[active_B]
        changed_BV = (
            self._apply_penalties(logits_BV, active_B, parameters)
            if kind >= self.PENALISED
            else logits_BV
        )
        changed_BV = self._without_early_stops(changed_BV, active_B)
        threshold_B = filter_thresholds(changed_BV, parameters)
        if kind == self.MASKED:
            assert self.can_draw is not None
            self.can_draw[active_B] = changed_BV >= threshold_B[:, None]
        draw_tokens(changed_BV, logits_BV, threshold_B, self.slots, active_B, advance)
        if self.counts is not None:
            drawn_B = self.slots.state[active_B, column.LAST]
            ones_B = torch.ones_like(drawn_B, dtype=torch.int32)
            self.counts.index_put_((active_B, drawn_B), ones_B, accumulate=True)

    def sample_hidden(
        self, hidden_BD: Tensor, weight_VD: Tensor, active_B: Tensor, advance: bool
    ) -> None:
        """Draw tokens of a batch of kind PLAIN from hidden states on a GPU, without storing logits."""
        from hone.kernels.gpu import sampling

        slots = self.slots
        of_slots = (
            slots.parameters,
            slots.state,
            active_B,
            slots.stops,
            slots.tokens,
            slots.logprobs,
        )
        sampling.draw_from_hidden(hidden_BD, weight_VD, *of_slots, advance)

    def _apply_penalties(self, logits_BV: Tensor, active_B: Tensor, parameters: Tensor) -> Tensor:
        assert self.counts is not None
        counts_BV = self.counts[active_B]
        repetition, presence, frequency = (
            parameters[:, i, None] for i in (column.REPETITION, column.PRESENCE, column.FREQUENCY)
        )
        weaker_BV = torch.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
        logits_BV = torch.where(self.in_prompt[active_B] | (counts_BV > 0), weaker_BV, logits_BV)
        return logits_BV - frequency * counts_BV - presence * (counts_BV > 0) + self.bias[active_B]

    def _without_early_stops(self, logits_BV: Tensor, active_B: Tensor) -> Tensor:
        state = self.slots.state[active_B]
        stops_BS = self.slots.stops[active_B]
        is_early_B = state[:, column.COUNT] + 1 < state[:, column.MIN]
        held_BS = (stops_BS >= 0) & is_early_B[:, None]
        ceiling_BS = torch.where(held_BS, FILTERED_OUT, float("inf")).to(logits_BV.dtype)
        return logits_BV.scatter_reduce(1, stops_BS.clamp(min=0), ceiling_BS, "amin")

    def drawable_tokens(self, slots: list[int]) -> list[list[int]]:
        """Return the ids that the last draw of kind MASKED could have taken, for each slot."""
        assert self.can_draw is not None
        rows_BV = self.can_draw[slots].cpu()
        return [row_V.nonzero().flatten().tolist() for row_V in rows_BV]

    def likeliest_tokens(
        self, logits_BV: Tensor, active_B: Tensor, number: int
    ) -> list[list[tuple[int, float]]]:
        """Return the `number` likeliest tokens of each row with their logprobs."""
        temperature = self.slots.parameters[active_B, column.LOGPROB_TEMPERATURE]
        top = torch.log_softmax(logits_BV.float() / temperature[:, None], dim=-1).topk(
            number, dim=-1
        )
        return [
            list(zip(*row, strict=True))
            for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
