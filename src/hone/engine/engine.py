"""The engine: token ids in, token ids and logprobs out, with continuous batching.

    add ─► waiting ─ plan: pages, a slot ─► prefill, a budget of tokens per pass ─► decoding ─┐
                                                                                 ▲          ▼
        passed to `on_finish`, slot and pages freed ◄── look: which are done? ◄──┴── some decode steps

Each `step` prefills the admitted prompts, then runs a window of several decode steps. Sampling and
stop tests run on the device, without Python per token. On a GPU decode steps are CUDA graphs
(`graphs.py`), and the host examines the results of the previous window while the current one runs,
so that the device never waits for the host. On a CPU a small model runs a window in one compiled
call (`packed_model.py`). Requests are admitted in order of arrival. Admission reserves the pages of
the longest possible completion, so that no admitted sequence waits for another.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.engine.admission import Admission, Planned
from hone.engine.cache import KVCache
from hone.engine.decoder import Decoder
from hone.engine.graphs import DecodeGraphs
from hone.engine.prefill import Prefill
from hone.engine.sequence import Sequence
from hone.engine.slots import Slots, Snapshot
from hone.engine.token_sampler import TokenSampler
from hone.kernels import numerics
from hone.kernels import row_state as column
from hone.kernels.cuda_graphs import Captured
from hone.kernels.decode import DecodeRows
from hone.kernels.pinned_memory import to_device
from hone.models.adapters import Adapter, read_adapter
from hone.models.language_model import LanguageModel
from hone.models.lora import lora_modules
from hone.records import Completion, ContextFull, GenerateRequest

PREFILL_TOKENS = 32768  # prompt tokens computed before decoding continues …
PASS_TOKENS = 16384  # … in passes of this size
# Decode steps launched at once on a GPU, where at most two such windows are queued.
WINDOW_STEPS = 4
STOP_TOKENS = 8  # stop tokens per sequence with preallocated room


@dataclass(frozen=True)
class _Turn:
    """Facts about the decoding batch, valid until a sequence joins or leaves it."""

    slots: NDArray[np.int64]
    kind: int  # kind of sampling
    has_adapters: bool
    watched: list[int]  # indices with a stop condition on the host
    window: int  # decode steps before the host looks again
    last_step: int  # the engine's step by which all are complete


@dataclass(frozen=True)
class _Look:
    """State of some sequences after all steps launched so far, for the host to examine."""

    sequences: list[Sequence]
    slots: NDArray[np.int64]
    watched: list[int]
    snapshot: Snapshot

    def running_indices(self, indices: Iterable[int]) -> list[int]:
        """Return the indices whose sequences have not ended since the snapshot."""
        return [i for i in indices if self.sequences[i].slot == self.slots[i]]


def _slots_of(sequences: list[Sequence]) -> NDArray[np.int64]:
    return np.array([s.slot for s in sequences], dtype=np.int64)


class Engine:
    """Generate completions with the trainer's own model.

    Not thread-safe: one thread owns it (see `inference/engine_service.py`).
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_batch_size: int = 256,
        max_model_len: int | None = None,
        kv_cache_gib: float = 8.0,
        prefill_tokens: int = PREFILL_TOKENS,
        version: int = 0,
        stand_in: bool = False,
    ) -> None:
        """Set up an engine without requests.

        Args:
            model: model to sample from.
            max_batch_size: largest number of sequences that decode at once.
            max_model_len: largest number of tokens of a prompt and its completion; None: what the
                model and the cache allow.
            kv_cache_gib: size of the KV cache in GiB.
            prefill_tokens: largest number of prompt tokens that are computed before decoding continues.
            version: policy version of the weights.
            stand_in: run a batch without a captured CUDA graph in the graph of a larger batch
                (`kernels/cuda_graphs.py`); the last bits of results then depend on timing.
        """
        self.model = model
        self.device = model.embed.weight.device
        self.max_batch_size = max_batch_size
        self.configured_len = max_model_len
        self.kv_cache_gib = kv_cache_gib
        self.prefill_tokens = prefill_tokens
        self.stand_in = stand_in
        self.max_model_len, allowed = _find_limits(model, max_model_len, kv_cache_gib)
        # The cache holds what is allowed, but no more than all slots can fill.
        tokens = min(allowed, max_batch_size * self.max_model_len)
        self.cache = KVCache(
            model.spec, model.embed.weight.dtype, self.device, tokens, max_batch_size
        )
        self.pool = self.cache.pool
        self.slots = Slots(
            max_batch_size,
            self.max_model_len,
            self.pool.pages_needed(self.max_model_len),
            STOP_TOKENS,
            self.device,
        )
        self.decoder = Decoder(model, self.cache, self.slots)
        self.sampler = self.decoder.sampler
        self.adapters = self.decoder.adapters
        self.packed = self.decoder.packed
        self.captured = Captured(stand_in) if self.decoder.stays_on_device else None
        # Captured passes use torch's attention, which sums in another order.
        is_captured = model.prefills_on_device and not numerics.keeps_order("attention")
        captured = self.captured if is_captured else None
        self.prefill = Prefill(model, self.cache, self.adapters, captured, max_batch_size)
        self.graphs = (
            DecodeGraphs(self.decoder, self.captured, max_batch_size)
            if self.captured is not None
            else None
        )
        self.version = version
        # Requests finished, their prompt tokens, their generated tokens.
        self.completions = self.tokens_read = self.tokens_written = 0
        self.admission = Admission(self.cache, self.slots)
        self.decoding: list[Sequence] = []
        self.steps = 0  # decode steps so far
        self._has_changed = True  # the decoding batch changed since the last turn
        self._under_way: _Look | None = None  # launched, not examined yet
        self._has_deadlines = False

    def with_model(self, model: LanguageModel, version: int) -> "Engine":
        """Return an engine with the same settings over another model, without requests."""
        own = model.spec.max_position_embeddings
        limit = None if self.configured_len is None else min(self.configured_len, own)
        return Engine(
            model,
            max_batch_size=self.max_batch_size,
            max_model_len=limit,
            kv_cache_gib=self.kv_cache_gib,
            prefill_tokens=self.prefill_tokens,
            version=version,
            stand_in=self.stand_in,
        )

    # ------------------------------------------------------------------------------------------ requests

    def add(self, request: GenerateRequest, on_finish: Callable[[Completion], None]) -> Sequence:
        """Queue a request; max_tokens is reduced to what the context length leaves.

        `on_finish` is called with the completion. Raises ContextFull if the prompt alone fills the
        context length, and ValueError for an empty prompt, unknown token ids, or an adapter that is
        not loaded.
        """
        room = self.max_model_len - len(request.prompt_ids)
        if not request.prompt_ids:
            raise ValueError("the prompt is empty")
        if room < 1:
            raise ContextFull(
                f"This model's maximum context length is {self.max_model_len} tokens, "
                f"the prompt alone has {len(request.prompt_ids)}"
            )
        beyond = (
            max(request.prompt_ids) if min(request.prompt_ids) >= 0 else min(request.prompt_ids)
        )
        if not 0 <= beyond < self.sampler.vocab_size:
            raise ValueError(
                f"the model has no token {beyond}: its vocabulary is {self.sampler.vocab_size}"
            )
        deadline = None if request.timeout is None else time.monotonic() + request.timeout
        adapter = self.adapters.number_of(request.adapter)
        sequence = Sequence(
            request, on_finish, min(request.sampling.max_tokens, room), deadline, adapter
        )
        self._has_deadlines |= deadline is not None
        self.admission.waiting.append(sequence)
        return sequence

    def abort_request(self, sequence: Sequence, reason: str = "abort") -> None:
        """End a request now with the tokens it has."""
        if sequence in self.decoding:
            self._process_results()
            if sequence in self.decoding:
                self._finish_sequences(
                    [(sequence, self._generated_count(sequence), reason)],
                    self.slots.take_snapshot(),
                )
        elif self.admission.withdraw_request(sequence):
            self._hand_over(sequence, 0, reason)

    def named_progress(self, known: dict[str, int]) -> dict[str, Completion]:
        """Return the new tokens of named requests that are decoding, by name.

        `known` maps names to the number of tokens that the caller has already; other requests are
        left out.
        """
        self._process_results()
        wanted = [s for s in self.decoding if s.request.name in known]
        if not wanted:
            return {}
        self._read_tokens(
            [(s, self._generated_count(s)) for s in wanted], self.slots.take_snapshot()
        )
        return {
            s.request.name: s.build_completion(self._generated_count(s), "").token_range(
                known[s.request.name]
            )
            for s in wanted
        }

    def abort_all(self) -> None:
        for sequence in self.live_sequences():
            self.abort_request(sequence)

    def reset(self) -> None:
        """Drop all requests without calling `on_finish`, and clear the state of a failed step."""
        self.admission.clear_all()
        self.pool.clear_pages()
        if self.cache.deltas is not None:
            self.cache.deltas.clear_snapshots()
        self.slots.clear_slots()
        self.decoding = []
        self._has_changed = True
        self._under_way = None

    def live_sequences(self) -> list[Sequence]:
        """Return the requests that have not ended."""
        return [*self.decoding, *self.admission.waiting_sequences()]

    @property
    def running_sequences(self) -> list[Sequence]:
        return [s for s in self.live_sequences() if s.slot >= 0]

    @property
    def is_idle(self) -> bool:
        return not (self.decoding or self.admission.waiting or self.admission.prefilling)

    def set_version(self, version: int) -> None:
        """Set the policy version of the next tokens, after a weight update.

        Running requests continue with the new weights. Cached prompts of older weights are not
        reused.
        """
        self.version = version
        if self.packed is not None:
            self.packed.is_stale = True
        self.pool.forget_prefixes()
        for sequence in self.running_sequences:
            sequence.is_of_one_policy = False
        for sequence in self.decoding:
            sequence.versions.append((self._generated_count(sequence), version))

    def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        """Return the completions of the requests, in order, once all are done."""
        done: dict[int, Completion] = {}
        for i, request in enumerate(requests):
            self.add(request, lambda completion, i=i: done.__setitem__(i, completion))  # type: ignore[misc]
        while not self.is_idle:
            self.step()
        return [done[i] for i in range(len(requests))]

    def load_adapter(self, name: str, directory: Path) -> None:
        """Load or replace a LoRA adapter in peft's format under a name that requests use.

        Running requests that use this adapter continue with the new weights. Raises ValueError if
        the adapter does not fit the model, or if the model already has an adapter in training.
        """
        if any(lora_modules(self.model)):
            raise ValueError(
                f"adapter {name}: the model has one that is being trained; it takes no others"
            )
        self.place_adapter(name, read_adapter(directory))

    def place_adapter(self, name: str, adapter: Adapter) -> None:
        """Load or replace an adapter, given by its factors. Raises ValueError if it does not fit."""
        is_known = name in self.adapters.loaded
        has_replaced = self.adapters.load_adapter(name, adapter)
        if is_known:
            self.set_version(self.version)  # cached prompts of the old adapter are not reused
        if has_replaced:
            self._drop_graphs()

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises ValueError if it is unknown or in use."""
        number = self.adapters.number_of(name)
        if any(s.adapter == number for s in self.live_sequences()):
            raise ValueError(f"adapter {name!r} has requests under way")
        self.adapters.unload_adapter(name)
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        """Discard all captured CUDA graphs, because tensors that they read were replaced."""
        if self.captured is not None:
            self.captured.clear()

    # ---------------------------------------------------------------------------------------------- steps

    @torch.no_grad()
    def step(self, admit: bool = True) -> None:
        """Admit and prefill what fits, then run a window of one or more decode steps.

        With `admit` False no new requests are admitted.
        """
        if self._has_deadlines:
            for sequence in [s for s in self.live_sequences() if s.is_late]:
                self.abort_request(sequence, "timeout")
        budget = self.prefill_tokens
        while budget > 0 and (
            planned := self.admission.plan_prefill(admit, min(budget, PASS_TOKENS))
        ):
            for part in [planned] if self.packed is None else self.admission.split_plan(planned):
                self._run_prefill(part)
            budget -= sum(chunk.end - chunk.start for _, chunk in planned)
        if self.decoding:
            self._run_decode()

    def _run_prefill(self, planned: Planned) -> None:
        """Compute keys and values of the planned chunks; draw a token after each completed
        prompt.
        """
        leaders = []
        last = []
        end = -1
        for sequence, chunk in planned:
            end += chunk.end - chunk.start
            sequence.computed = chunk.end
            if chunk.end == len(chunk.ids):
                leaders.append(sequence)
                last.append(end)
        started = [sequence for leader in leaders for sequence in (leader, *leader.siblings)]
        if started and self.slots.widen_stops(max(len(s.request.stop_ids) for s in started)):
            self._drop_graphs()
        chunks = [chunk for _, chunk in planned]
        packed = None if chunks[0].adapter else self.packed
        run = self.prefill.run_chunks if packed is None else packed.prefill_chunks
        result = run(chunks, last)
        self.admission.keep_snapshots(chunks)
        if started:
            if len(started) > len(leaders):
                which = [i for i, leader in enumerate(leaders) for _ in (leader, *leader.siblings)]
                result = result[to_device(which, self.device)]
            self._start_decoding(leaders, started, result, is_logits=packed is not None)

    def _start_decoding(
        self, leaders: list[Sequence], started: list[Sequence], result: Tensor, is_logits: bool
    ) -> None:
        """Move sequences whose prompts are computed to decoding; draw their first tokens.

        Args:
            leaders: sequences whose own prompts were computed.
            started: the leaders and their siblings, which have the same prompts.
            result: hidden states (B x D) of the last prompt tokens; with `is_logits`, their logits (B x V).
            is_logits: True if `result` holds logits.
        """
        active_B = to_device([s.slot for s in started], self.device)
        self.slots.fill_slots(started)
        self.sampler.fill_parameters(started)
        self.admission.finish_prefill(leaders)
        kind = TokenSampler.kind_of_batch(started)
        logits_BV = self.decoder.draw_tokens(
            result, active_B, kind, advance=False, is_logits=is_logits
        )
        self._note_step(logits_BV, active_B, started)
        for sequence in started:
            sequence.versions.append((0, self.version))
            sequence.first_step = self.steps
        self.decoding = [*self.decoding, *started]
        self._has_changed = True
        if self.graphs is None or any(s.max_tokens == 1 or s.is_watched for s in started):
            watched = [i for i, s in enumerate(started) if s.is_watched]
            snapshot = self.slots.take_snapshot()
            self._process_look(_Look(started, _slots_of(started), watched, snapshot))

    def _run_decode(self) -> None:
        if self._has_changed:
            self._turn = self._next_turn()
        turn = self._turn
        slots = self.slots
        B = len(self.decoding)
        before = self._under_way
        self._under_way = None
        left = turn.last_step - self.steps
        if left > 0:
            steps = min(turn.window, left)
            if self.graphs is not None:
                if self._has_changed or self.steps >= self.graphs.looks_again:
                    self.graphs.set_batch(self.decoding, turn.kind, turn.has_adapters, self.steps)
                logits_BV = self.graphs.run_steps(steps)
            else:
                rows = DecodeRows(slots.active, slots.state, slots.table)
                logits_BV = self.decoder.decode_step(B, turn.kind, turn.has_adapters, rows, steps)
            self._has_changed = False
            self.steps += steps
            if turn.window == 1:
                self._note_step(logits_BV, slots.active[:B], self.decoding)
            self._under_way = _Look(
                self.decoding, turn.slots, turn.watched, self.slots.take_snapshot()
            )
        if before is not None:
            self._process_look(before)
            if self.steps >= turn.last_step:  # the device computes the last tokens of all
                self._read_ahead(before)
        if self.graphs is None or turn.window == 1:
            self._process_results()

    def _next_turn(self) -> "_Turn":
        """Return the `_Turn` of the current decoding batch, and write its active slots to the
        device.
        """
        slots = [s.slot for s in self.decoding] + [self.slots.count] * (
            self.max_batch_size - len(self.decoding)
        )
        self.slots.active[:-1] = to_device(slots, self.device)
        watched = [i for i, s in enumerate(self.decoding) if s.is_watched]
        kind = TokenSampler.kind_of_batch(self.decoding)
        has_adapters = any(s.adapter for s in self.decoding)
        each_step = bool(watched) or any(s.is_noted for s in self.decoding)
        at_once = self.decoder.at_once(kind, has_adapters) if self.graphs is None else WINDOW_STEPS
        return _Turn(
            _slots_of(self.decoding),
            kind,
            has_adapters,
            watched,
            1 if each_step else at_once,
            max(s.first_step + s.max_tokens - 1 for s in self.decoding),
        )

    # --------------------------------------------------------------------------------------------- the end

    def _note_step(
        self, logits_BV: Tensor | None, active_B: Tensor, sequences: list[Sequence]
    ) -> None:
        masked = [s for s in sequences if s.request.sampling.has_mask]
        if masked:
            for s, ids in zip(
                masked, self.sampler.drawable_tokens([s.slot for s in masked]), strict=True
            ):
                s.add_mask(ids)
        wanted = [i for i, s in enumerate(sequences) if s.request.sampling.top_logprobs]
        if logits_BV is None or not wanted:
            return
        number = max(sequences[i].request.sampling.top_logprobs for i in wanted)
        index = torch.tensor(wanted, device=self.device)
        found = self.sampler.likeliest_tokens(logits_BV[index], active_B[index], number)
        for i, row in zip(wanted, found, strict=True):
            sequences[i].alternatives.append(row[: sequences[i].request.sampling.top_logprobs])

    def _generated_count(self, sequence: Sequence) -> int:
        """Return the number of generated tokens of a decoding sequence."""
        return 1 + self.steps - sequence.first_step

    def _process_results(self) -> None:
        """Process the results of the decode steps launched last, if any are pending."""
        if self._under_way is not None:
            look = self._under_way
            self._under_way = None
            self._process_look(look)

    def _process_look(self, look: _Look) -> None:
        """Finish sequences that are done or whose stop condition (`request.ends`) is met.

        For other sequences with `request.allows`, set the tokens that the next draw may take.
        """
        state = look.snapshot.on_host()
        sequences = look.sequences
        ended = state[look.slots, column.DONE]
        done = look.running_indices(ended.nonzero()[0].tolist())
        watched = look.running_indices(look.watched)
        if not done and not watched:
            return
        counts: list[int] = state[look.slots, column.COUNT].tolist()
        reasons = {i: "stop" if ended[i] == column.STOPPED else "length" for i in done}
        if watched:
            self._read_tokens([(sequences[i], counts[i]) for i in watched], look.snapshot)
            for i in watched:
                request = sequences[i].request
                so_far = sequences[i].ids[: counts[i]]
                kept = request.ends(so_far) if request.ends is not None else None
                if kept is not None:
                    counts[i], reasons[i] = kept, "stop"
                elif request.allows is not None and i not in reasons:
                    self.sampler.allow_next(sequences[i], so_far)
        if reasons:
            self._finish_sequences(
                [(sequences[i], counts[i], reason) for i, reason in reasons.items()], look.snapshot
            )

    def _read_ahead(self, look: _Look) -> None:
        """Copy running sequences' tokens to the host and register their pages for prefix sharing.

        Less work then remains when the sequences end.
        """
        counts: list[int] = look.snapshot.on_host()[look.slots, column.COUNT].tolist()
        going = [(look.sequences[i], counts[i]) for i in look.running_indices(range(len(counts)))]
        self._read_tokens(going, look.snapshot)
        for sequence, _ in going:
            self._remember_pages(sequence)

    def _read_tokens(self, wanted: Iterable[tuple[Sequence, int]], snapshot: Snapshot) -> None:
        """Copy generated tokens of sequences to the host, unless they are there already.

        `wanted` holds pairs (sequence, n), for the first n generated tokens of the sequence.
        `snapshot` must be newer than these tokens.
        """
        behind = [(s, n) for s, n in wanted if len(s.ids) < n]
        if not behind:
            return
        first = min(len(s.ids) for s, _ in behind)
        end = max(n for _, n in behind)
        tokens, logprobs = self.slots.generated_tokens(
            [s.slot for s, _ in behind], first, end, snapshot
        )
        for (s, n), ids, values in zip(behind, tokens, logprobs, strict=True):
            new = slice(len(s.ids) - first, n - first)
            s.ids += ids[new]
            s.logprobs += values[new]

    def _remember_pages(self, sequence: Sequence) -> None:
        """Register a sequence's full pages for prefix sharing.

        The newest token has no key in the cache yet, so it does not count.
        """
        full = (len(sequence.prompt_ids) + len(sequence.ids) - 1) // self.pool.size
        if sequence.is_of_one_policy and full > sequence.remembered:
            self.pool.remember_pages(
                [*sequence.prompt_ids, *sequence.ids[:-1]], sequence.pages, sequence.adapter
            )
            sequence.remembered = full

    def _finish_sequences(self, ended: list[tuple[Sequence, int, str]], snapshot: Snapshot) -> None:
        """End sequences of the decoding batch, given as (sequence, token count, finish reason)."""
        self._read_tokens([(s, n) for s, n, _ in ended], snapshot)
        gone = {id(s) for s, _, _ in ended}
        self.decoding = [s for s in self.decoding if id(s) not in gone]
        self._has_changed = True
        for sequence, n, reason in ended:
            self._remember_pages(sequence)
            sequence.routing = self.cache.routing_of(
                sequence.pages, len(sequence.prompt_ids) + n - 1
            )
            self.admission.release_sequence(sequence)
            self._hand_over(sequence, n, reason)

    def _hand_over(self, sequence: Sequence, count: int, reason: str) -> None:
        self.completions += 1
        self.tokens_read += len(sequence.prompt_ids)
        self.tokens_written += count
        sequence.on_finish(sequence.build_completion(count, reason))


def _find_limits(
    model: LanguageModel, max_model_len: int | None, kv_cache_gib: float
) -> tuple[int, int]:
    """Return the longest sequence and the size of the cache, both in tokens.

    Raises ValueError if `max_model_len` is over the model's limit or does not fit into the cache.
    """
    spec = model.spec
    limit = spec.max_position_embeddings
    if max_model_len and max_model_len > limit:
        raise ValueError(
            f"max_model_len {max_model_len} is over the model's max_position_embeddings {limit}"
        )
    token_bytes = spec.cache_numbers * model.embed.weight.dtype.itemsize
    allowed = int(kv_cache_gib * 2**30) // token_bytes
    wanted = max_model_len or 1
    if wanted > allowed:
        raise ValueError(
            f"kv_cache_gib {kv_cache_gib} holds {allowed} tokens of this model, max_model_len is {wanted}"
        )
    return max_model_len or min(limit, allowed), allowed
