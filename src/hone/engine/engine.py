"""The engine: token ids in, token ids and logprobs out, with continuous batching.

    add ─► waiting ─ admit: prompts (each distinct one once) ─► rows of the cache ─┐
                                                                                   ▼
                       finished, handed to `on_finish` ◄─ stop test ◄─ sample ◄─ decode one token a row ─┐
                                    row freed at once                     └──────────────────────────────┘

Each `step` admits what fits, then decodes one token for every running sequence. All state of a sequence is a
row of a few tensors; rows [:running] are active. Nothing per token runs in Python.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hone.engine.cache import DecodeAttention, KVCache, PrefillAttention
from hone.engine.sampler import sample, uniforms
from hone.models.attention import PackedAttention
from hone.models.transformer import Transformer
from hone.records import Completion, GenerateRequest

PREFILL_TOKENS = 16384  # prompt tokens computed in one pass


@dataclass(eq=False)
class Sequence:
    """A request on its way: `versions` are the policy versions of its tokens, as (first token, version)."""

    request: GenerateRequest
    on_finish: Callable[[Completion], None]
    max_tokens: int
    versions: list[tuple[int, int]] = field(default_factory=list)


class Engine:
    """Generation over the trainer's own model. Not thread-safe: one thread owns it (see `inference/service.py`)."""

    def __init__(
        self,
        model: Transformer,
        *,
        max_batch_size: int = 256,
        max_model_len: int | None = None,
        kv_cache_gib: float = 8.0,
        version: int = 0,
    ) -> None:
        weight = model.embed.weight
        limit = model.spec.max_position_embeddings
        if max_model_len and max_model_len > limit:
            raise ValueError(f"max_model_len {max_model_len} is over the model's max_position_embeddings {limit}")
        self.model, self.device, self.configured_len = model, weight.device, max_model_len
        self.max_batch_size, self.max_model_len = max_batch_size, max_model_len or limit
        self.cache = KVCache(model.spec, weight.dtype, self.device, int(kv_cache_gib * 2**30))
        self.version, self.completions = version, 0  # completions: handed over so far
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._rows = _Rows(0, 0, 1, self.device)

    def with_model(self, model: Transformer, version: int) -> "Engine":
        """An engine like this one, without requests, over another model."""
        own = model.spec.max_position_embeddings
        limit = None if self.configured_len is None else min(self.configured_len, own)
        kv_cache_gib = self.cache.budget_bytes / 2**30
        return Engine(
            model, max_batch_size=self.max_batch_size, max_model_len=limit, kv_cache_gib=kv_cache_gib, version=version
        )

    # ------------------------------------------------------------------------------------------ requests

    def add(self, request: GenerateRequest, on_finish: Callable[[Completion], None]) -> Sequence:
        """Queues a request. Raises ValueError for an empty or overlong prompt; max_tokens is cut to what fits."""
        room = self.max_model_len - len(request.prompt_ids)
        if not request.prompt_ids:
            raise ValueError("the prompt is empty")
        if room < 1:
            raise ValueError(
                f"This model's maximum context length is {self.max_model_len} tokens, "
                f"the prompt alone has {len(request.prompt_ids)}"
            )
        sequence = Sequence(request, on_finish, min(request.sampling.max_tokens, room))
        self.waiting.append(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Ends a request now; it finishes with what it has and the reason "abort"."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            sequence.on_finish(Completion([], [], [], "abort"))
        elif sequence in self.running:
            self._finish([self.running.index(sequence)], "abort")

    def set_version(self, version: int) -> None:
        """Names the weights that the next tokens come from."""
        self.version = version
        generated = self._rows.count[: len(self.running)].tolist()
        for sequence, count in zip(self.running, generated, strict=True):
            sequence.versions.append((count, version))

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        """Completions of the requests, in their order; runs until all are done."""
        done: dict[int, Completion] = {}
        for i, request in enumerate(requests):
            self.add(request, lambda completion, i=i: done.__setitem__(i, completion))  # type: ignore[misc]
        while not self.is_idle:
            self.step()
        return [done[i] for i in range(len(requests))]

    # ---------------------------------------------------------------------------------------------- steps

    @torch.no_grad()
    def step(self, admit: bool = True) -> None:
        """Admits waiting requests as far as they fit, then decodes one token for every running one."""
        if self.waiting and admit:
            self._admit()
        if self.running:
            self._decode()

    def _admit(self) -> None:
        """Prefills the next requests: each gets a row, its prompt's keys and values, and its first token."""
        admitted: list[Sequence] = []
        prompts: dict[tuple[int, ...], int] = {}  # each distinct prompt once
        tokens, positions = 0, self.cache.positions
        while self.waiting and len(self.running) + len(admitted) < self.max_batch_size:
            sequence = self.waiting[0]
            prompt = tuple(sequence.request.prompt_ids)
            needed = max(positions, len(prompt) + sequence.max_tokens)
            if len(self.running) + len(admitted) + 1 > self.cache.rows_within_budget(needed):
                break
            if prompt not in prompts:
                if admitted and tokens + len(prompt) > PREFILL_TOKENS:
                    break
                prompts[prompt] = len(prompts)
                tokens += len(prompt)
            positions = needed
            admitted.append(self.waiting.popleft())
        if not admitted:
            return
        first = len(self.running)
        total = first + len(admitted)
        self.cache.reserve(total, positions, keep=first)
        stops = max(len(s.request.stop_ids) for s in admitted)
        self._rows.reserve(self.cache.rows, self.cache.positions, stops, keep=first)
        self.running += admitted
        for sequence in admitted:
            sequence.versions.append((0, self.version))

        which = [prompts[tuple(s.request.prompt_ids)] for s in admitted]
        packed = PackedAttention([len(p) for p in prompts], self.device)
        starts = packed.starts
        spans = [np.arange(starts[w], starts[w + 1]) for w in which]
        cells = [(first + i) * self.cache.positions + np.arange(len(span)) for i, span in enumerate(spans)]
        source, target = (torch.from_numpy(np.concatenate(x)).to(self.device) for x in (spans, cells))
        flat = torch.tensor([t for p in prompts for t in p], device=self.device)
        last = torch.from_numpy(starts[1:] - 1).to(self.device)
        prefill = PrefillAttention(self.cache, packed, source, target)
        hidden_PD = self.model(flat, packed.positions(), prefill, last)
        logits_BV = self.model.logits(hidden_PD)[torch.tensor(which, device=self.device)]

        self._rows.fill(first, admitted)
        self._take(logits_BV, first)

    def _decode(self) -> None:
        B = len(self.running)
        rows = self._rows
        attention = DecodeAttention(self.cache, rows.length[:B])
        hidden_BD = self.model(rows.last_token[:B], rows.length[:B], attention)
        rows.length[:B] += 1
        self._take(self.model.logits(hidden_BD), 0)

    def _take(self, logits_BV: Tensor, first: int) -> None:
        """Samples one token for the rows from `first` on, stores it, and finishes the rows that are done."""
        rows, B = self._rows, len(logits_BV)
        at = slice(first, first + B)
        count_B1 = rows.count[at, None]
        uniform_B = rows.uniform[at].gather(1, count_B1).squeeze(1)
        tokens_B, logprobs_B = sample(logits_BV, rows.temperature[at], uniform_B)
        rows.tokens[at].scatter_(1, count_B1, tokens_B[:, None])
        rows.logprobs[at].scatter_(1, count_B1, logprobs_B[:, None])
        rows.last_token[at] = tokens_B
        rows.count[at] += 1
        stopped_B = (tokens_B[:, None] == rows.stops[at]).any(dim=1)
        done_B = stopped_B | (rows.count[at] >= rows.max_count[at])
        if bool(done_B.any()):
            finished = (done_B.nonzero().squeeze(1) + first).tolist()
            self._finish(finished, None)

    def _finish(self, finished: list[int], reason: str | None) -> None:
        """Hands over the completions of these rows and fills their places with the last active rows."""
        rows = self._rows
        index = torch.tensor(finished, device=self.device)
        counts = rows.count[index].tolist()
        width = max(max(counts), 1)
        tokens, logprobs = rows.tokens[index, :width].tolist(), rows.logprobs[index, :width].tolist()
        leaving = [self.running[i] for i in finished]
        self.completions += len(leaving)
        gone = set(finished)
        left = len(self.running) - len(finished)
        holes = [i for i in finished if i < left]
        movers = [i for i in range(left, len(self.running)) if i not in gone]
        for hole, mover in zip(holes, movers, strict=True):
            self.running[hole] = self.running[mover]
        del self.running[left:]
        if holes:
            source, target = (torch.tensor(x, device=self.device) for x in (movers, holes))
            self.cache.move(source, target)
            rows.move(source, target)
        for sequence, n, ids, logps in zip(leaving, counts, tokens, logprobs, strict=True):
            ids, logps = ids[:n], logps[:n]
            stopped = bool(ids) and ids[-1] in sequence.request.stop_ids
            ended = reason or ("stop" if stopped else "length")
            sequence.on_finish(Completion(ids, logps, _expand(sequence.versions, n), ended))


class _Rows:
    """Per-row state of the running sequences: R rows, C tokens at most."""

    def __init__(self, rows: int, capacity: int, stops: int, device: torch.device) -> None:
        self.device, self.rows, self.capacity, self.num_stops = device, rows, capacity, stops

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.length = integers(rows)  # tokens whose keys are in the cache
        self.count = integers(rows)  # tokens generated
        self.max_count = integers(rows)
        self.last_token = integers(rows)
        self.temperature = torch.ones(rows, device=device)
        self.stops = integers(rows, stops)
        self.tokens = integers(rows, capacity)
        self.logprobs = torch.zeros(rows, capacity, device=device)
        self.uniform = torch.zeros(rows, capacity, dtype=torch.float64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def reserve(self, rows: int, capacity: int, stops: int, keep: int) -> None:
        """Room for that many rows, tokens and stop tokens; the first `keep` rows keep their content."""
        stops = max(stops, self.num_stops)
        if rows == self.rows and capacity == self.capacity and stops == self.num_stops:
            return
        larger = _Rows(rows, capacity, stops, self.device)
        for name, old in self.tensors().items():
            new: Tensor = getattr(larger, name)
            new[(slice(0, keep), *(slice(0, n) for n in old.shape[1:]))] = old[:keep]
        self.__dict__.update(vars(larger))

    def fill(self, first: int, sequences: list[Sequence]) -> None:
        """Sets the rows from `first` on to the start of these sequences."""
        at = slice(first, first + len(sequences))
        requests = [s.request for s in sequences]
        most = max(s.max_tokens for s in sequences)
        self.length[at] = torch.tensor([len(r.prompt_ids) for r in requests], device=self.device)
        self.count[at] = 0
        self.max_count[at] = torch.tensor([s.max_tokens for s in sequences], device=self.device)
        self.temperature[at] = torch.tensor([float(r.sampling.temperature) for r in requests], device=self.device)
        table = [sorted(r.stop_ids) + [-1] * (self.num_stops - len(r.stop_ids)) for r in requests]
        self.stops[at] = torch.tensor(table, dtype=torch.int64, device=self.device).view(len(requests), self.num_stops)
        draws = uniforms([r.sampling.seed for r in requests], most)
        self.uniform[at, :most] = torch.from_numpy(draws).to(self.device)

    def move(self, source: Tensor, target: Tensor) -> None:
        for tensor in self.tensors().values():
            tensor[target] = tensor[source]


def _expand(segments: list[tuple[int, int]], count: int) -> list[int]:
    """(first token, version) pairs as one version a token."""
    versions: list[int] = []
    for (start, version), (end, _) in zip(segments, [*segments[1:], (count, 0)], strict=True):
        versions += [version] * (end - start)
    return versions
