"""Admission: assign requests a slot and pages for their longest completion, in order of arrival.

    waiting ─ plan: a slot, pages, shared prefix ─► chunked prefill (`PrefillChunk`) ─► decoding (`engine.py`)

A slot is a sequence's row in the device state (`slots.py`). A request whose prompt is already being
prefilled for another request becomes a sibling of that request: both share the full pages of the
prompt.
"""

from collections import defaultdict, deque
from itertools import chain

from hone.engine.cache import KVCache
from hone.engine.delta_states import DeltaChunk
from hone.engine.prefill import PrefillChunk
from hone.engine.sequence import Sequence
from hone.engine.slots import Slots

Planned = list[tuple[Sequence, PrefillChunk]]


class Admission:
    def __init__(self, cache: KVCache, slots: Slots) -> None:
        self.cache = cache
        self.pool = cache.pool
        self.deltas = cache.deltas
        self.slots = slots
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        # The first waiting requests that lack slots or pages; others wait for their turn.
        self.without_room = 0

    def waiting_sequences(self) -> list[Sequence]:
        """Return the sequences that have no generated token yet."""
        return [*chain.from_iterable((s, *s.siblings) for s in self.prefilling), *self.waiting]

    def plan_prefill(self, admit: bool, budget: int) -> Planned:
        """Plan the next prefill pass of up to `budget` tokens.

        Prompts whose prefill has begun come first, then, if `admit` is True, new requests in order
        of arrival. Each new request gets a slot and its pages. Returns an empty list if there is
        nothing to compute.
        """
        planned: Planned = []
        if not (self.prefilling or self.waiting):
            return planned

        def plan_sequence(sequence: Sequence) -> None:
            nonlocal budget
            end = min(len(sequence.prompt_ids), sequence.computed + budget)
            if sequence.is_of_one_policy:
                self.pool.remember_pages(
                    sequence.prompt_ids[:end], sequence.pages, sequence.adapter
                )
            chunk = PrefillChunk(
                sequence.prompt_ids,
                sequence.pages,
                sequence.computed,
                end,
                sequence.adapter,
                self._plan_states(sequence, end),
            )
            planned.append((sequence, chunk))
            budget -= end - sequence.computed

        for sequence in self.prefilling:
            if budget > 0:
                plan_sequence(sequence)
        leaders = {s.prefix_key: s for s in self.prefilling}
        while admit and self.waiting:
            if not self.slots.free:
                self.without_room = len(self.waiting)
                break
            sequence = self.waiting[0]
            prompt = sequence.prompt_ids
            leader = leaders.get(sequence.prefix_key)
            if leader is None and budget <= 0:
                break
            if leader is None:
                shared = self.pool.match_prefix(prompt, sequence.adapter)
                if self.deltas is not None:
                    shared = self.deltas.trim_prefix(shared)
            else:
                shared = leader.pages[: len(prompt) // self.pool.size]
            # The last token's keys are never read.
            own = self.pool.pages_needed(len(prompt) + sequence.max_tokens - 1) - len(shared)
            if own + self.pool.idle_among(shared) > self.pool.available_count:
                self.without_room = len(self.waiting)
                break
            self.waiting.popleft()
            self.without_room = max(0, self.without_room - 1)
            self.pool.share_pages(shared)
            sequence.pages = shared + self.pool.take_pages(own)
            sequence.slot = self.slots.free.pop()
            if leader is not None:
                sequence.is_of_one_policy = leader.is_of_one_policy
                leader.siblings.append(sequence)
                continue
            sequence.computed = len(shared) * self.pool.size
            if self.deltas is not None and shared:
                self.deltas.restore_prefix(shared, sequence.slot)
            leaders[sequence.prefix_key] = sequence
            self.prefilling.append(sequence)
            plan_sequence(sequence)
        return planned

    def _plan_states(self, sequence: Sequence, end: int) -> DeltaChunk | None:
        """Return which states a chunk of a prompt, up to token `end`, reads and writes."""
        if self.deltas is None:
            return None
        start = sequence.computed
        boundary = self.deltas.boundary_of(len(sequence.prompt_ids))
        row = None
        if sequence.is_of_one_policy and start < boundary <= end:
            before = sequence.prompt_ids[:boundary]
            row = self.deltas.take_row(self.pool.find_chain(before, sequence.adapter))
        return DeltaChunk(sequence.slot, start == 0, row, boundary - start)

    def keep_snapshots(self, chunks: list[PrefillChunk]) -> None:
        """Register the snapshots of states that a prefill pass has taken."""
        for chunk in chunks:
            if self.deltas is None or chunk.delta is None or chunk.delta.snapshot_row is None:
                continue
            before = chunk.ids[: chunk.start + chunk.delta.until]
            chain = self.pool.find_chain(before, chunk.adapter)
            self.deltas.keep_snapshot(chain, chunk.delta.snapshot_row)

    def split_plan(self, planned: Planned) -> list[Planned]:
        """Split a plan into passes, so that no pass reads pages that it computes itself.

        Chunks with adapters and chunks without are in separate passes.
        """
        turns: dict[int, int] = {}  # by page
        parts: dict[tuple[int, bool], Planned] = defaultdict(list)
        for sequence, chunk in planned:
            first = chunk.start // self.pool.size
            turn = 1 + max((turns.get(page, 0) for page in chunk.pages[:first]), default=0)
            turns.update(
                dict.fromkeys(chunk.pages[first : self.pool.pages_needed(chunk.end)], turn)
            )
            parts[turn, chunk.adapter > 0].append((sequence, chunk))
        return [parts[key] for key in sorted(parts)]

    def finish_prefill(self, leaders: list[Sequence]) -> None:
        """Finish the prefill of `leaders` and of their siblings (requests with the same prompts).

        Siblings share the full pages of the leader's prompt. The last, partial page is copied for
        each sibling, since decoding writes to it.
        """
        source = []
        target = []
        most = 0
        siblings = [(leader, sibling) for leader in leaders for sibling in leader.siblings]
        for leader in leaders:
            full, rest = divmod(len(leader.prompt_ids), self.pool.size)
            if rest:
                most = max(most, rest)
                source += [leader.pages[full]] * len(leader.siblings)
                target += [sibling.pages[full] for sibling in leader.siblings]
            leader.siblings = []
        if target:
            self.cache.copy_pages(source, target, most)
        if self.deltas is not None and siblings:
            slots = [leader.slot for leader, _ in siblings]
            self.deltas.copy_rows(slots, [sibling.slot for _, sibling in siblings])
        self.prefilling = [s for s in self.prefilling if s not in leaders]

    def withdraw_request(self, sequence: Sequence) -> bool:
        """Remove a request that has no generated token yet.

        Returns False if the request already has a generated token or has ended.
        """
        if sequence in self.waiting:
            self.without_room -= self.waiting.index(sequence) < self.without_room
            self.waiting.remove(sequence)
            return True
        leader = next((s for s in self.prefilling if sequence is s or sequence in s.siblings), None)
        if leader is None:
            return False
        if sequence is not leader:
            leader.siblings.remove(sequence)
        else:
            self.prefilling.remove(leader)
            if leader.siblings:  # the first sibling takes over from it
                heir, *heir_siblings = leader.siblings
                begun = self.pool.pages_needed(leader.computed)
                self.cache.copy_pages(leader.pages[:begun], heir.pages[:begun])
                if self.deltas is not None:
                    self.deltas.copy_rows([leader.slot], [heir.slot])
                heir.computed = leader.computed
                heir.siblings = heir_siblings
                self.prefilling.insert(0, heir)
        self.release_sequence(sequence)
        return True

    def release_sequence(self, sequence: Sequence) -> None:
        """Free the pages and the slot of a sequence."""
        self.pool.release_pages(sequence.pages)
        self.slots.free.append(sequence.slot)
        sequence.pages = []
        sequence.slot = -1

    def clear_all(self) -> None:
        self.waiting.clear()
        self.without_room = 0
        self.prefilling = []
