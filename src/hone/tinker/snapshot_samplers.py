"""Snapshots of adapters, any number of them on disk, sample in one engine.

MergedTurns    one snapshot at a time is merged into the engine's weights; others wait for their turn
SamplerSlots   a fixed number of snapshots are adapters of the engine, and sample together
"""

import asyncio
import functools
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from hone.inference.engine_service import EngineService
from hone.models.adapters import Adapter
from hone.models.merged_weights import MergedWeights

KEPT_ADAPTERS = 8  # snapshots that are kept in memory
UNKNOWN_KEY = ""  # that of weights after a failure; no snapshot has it
TURN_SECONDS = 0.25  # how long a turn admits requests while others wait


@dataclass
class _Slot:
    name: str  # of the engine's adapter
    key: str = ""  # snapshot in it
    uses: int = 0
    last_use: int = 0
    is_loading: bool = False


class SnapshotSamplers(ABC):
    """Snapshots by key, those used last in memory. All methods run on one event loop.

    Attributes:
        merges_head: True if snapshots may have an adapter of the unembedding.
    """

    merges_head = False

    def __init__(self, service: EngineService) -> None:
        self.service = service
        self._recent: OrderedDict[str, Adapter] = OrderedDict()

    @abstractmethod
    def use_snapshot(
        self, key: str | None, load: Callable[[], Adapter]
    ) -> AbstractAsyncContextManager[str | None]:
        """Context manager in which requests sample from a snapshot.

        Waits for its turn. Returns the name of the engine's adapter; None: the engine's weights.

        Args:
            key: the snapshot; None: the base model.
            load: reads the snapshot, on the compute thread, if it is not in memory.
        """

    @abstractmethod
    async def replace_adapter(self, key: str, adapter: Adapter) -> None:
        """Replace a snapshot by a newer one; running requests continue with it."""

    def keep_adapter(self, key: str, adapter: Adapter) -> None:
        """Keep a snapshot in memory for its first use."""
        self._recent[key] = adapter
        self._recent.move_to_end(key)
        while len(self._recent) > KEPT_ADAPTERS:
            self._recent.popitem(last=False)

    def has_adapter(self, key: str | None) -> bool:
        """Return True if a snapshot is in memory."""
        return key in self._recent

    def _find_adapter(self, key: str, load: Callable[[], Adapter]) -> Adapter:
        adapter = self._recent.get(key)
        return load() if adapter is None else adapter


class MergedTurns(SnapshotSamplers):
    """Merge one snapshot at a time into the engine's weights.

    Sampling is as fast as without adapters. A snapshot's turn lasts while it has requests, and
    admits new ones until another has waited for TURN_SECONDS.
    """

    merges_head = True

    def __init__(self, service: EngineService, merged: MergedWeights) -> None:
        super().__init__(service)
        self.merged = merged
        self._key: str | None = None  # of the present turn
        self._uses = 0
        self._is_switching = False
        # Requests of other snapshots, in the order of arrival.
        self._waiting: list[tuple[str | None, Callable[[], Adapter], asyncio.Future[None]]] = []
        self._waiting_since = 0.0

    async def replace_adapter(self, key: str, adapter: Adapter) -> None:
        self.keep_adapter(key, adapter)
        if self._key == key:
            await self.service.run_on_engine(functools.partial(self._merge, adapter))

    @asynccontextmanager
    async def use_snapshot(
        self, key: str | None, load: Callable[[], Adapter]
    ) -> AsyncIterator[str | None]:
        await self._wait_for_turn(key, load)
        try:
            yield None
        finally:
            self._uses -= 1
            self._start_turn()

    async def _wait_for_turn(self, key: str | None, load: Callable[[], Adapter]) -> None:
        is_late = bool(self._waiting) and time.monotonic() - self._waiting_since > TURN_SECONDS
        if key == self._key and not self._is_switching and not is_late:
            self._uses += 1
            return
        if not self._waiting:
            self._waiting_since = time.monotonic()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, load, turn))
        self._start_turn()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._uses -= 1
                self._start_turn()
            raise

    def _start_turn(self) -> None:
        """Begin the turn of the snapshot that has waited longest, if the present one is over."""
        if self._uses or self._is_switching or not self._waiting:
            return
        self._is_switching = True
        self._task = asyncio.ensure_future(self._switch(*self._waiting[0][:2]))

    async def _switch(self, key: str | None, load: Callable[[], Adapter]) -> None:
        error: BaseException | None = None
        if key != self._key:
            try:
                await self.service.run_on_engine(lambda: self._load_and_merge(key, load))
                self._key = key
            except BaseException as found:
                error = found
                self._key = UNKNOWN_KEY
        self._is_switching = False
        turns = [turn for one, _, turn in self._waiting if one == key]
        self._waiting = [one for one in self._waiting if one[0] != key]
        self._waiting_since = time.monotonic()
        for turn in turns:
            if turn.cancelled():
                continue
            if error is not None:
                turn.set_exception(error)
            else:
                self._uses += 1
                turn.set_result(None)
        self._start_turn()

    def _load_and_merge(self, key: str | None, load: Callable[[], Adapter]) -> None:
        self._merge(None if key is None else self._find_adapter(key, load))

    def _merge(self, adapter: Adapter | None) -> None:
        self.merged.merge_adapter(adapter)
        engine = self.service.engine
        engine.set_version(engine.version + 1)  # cached prompts are those of other weights


class SamplerSlots(SnapshotSamplers):
    """Keep a fixed number of snapshots as adapters of the engine.

    Several sample together, and no weights are copied. Each slot costs every decode step.
    """

    def __init__(self, service: EngineService, count: int) -> None:
        super().__init__(service)
        self._slots = [_Slot(f"slot-{i}") for i in range(count)]
        self._changed = asyncio.Condition()
        self._clock = 0

    async def replace_adapter(self, key: str, adapter: Adapter) -> None:
        self.keep_adapter(key, adapter)
        for slot in self._slots:
            if slot.key == key:
                place = functools.partial(self.service.engine.place_adapter, slot.name, adapter)
                await self.service.run_on_engine(place)

    @asynccontextmanager
    async def use_snapshot(
        self, key: str | None, load: Callable[[], Adapter]
    ) -> AsyncIterator[str | None]:
        if key is None:
            yield None
            return
        slot = await self._take_slot(key, load)
        try:
            yield slot.name
        finally:
            slot.uses -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _take_slot(self, key: str, load: Callable[[], Adapter]) -> _Slot:
        self._clock += 1
        async with self._changed:
            while True:
                slot = next((one for one in self._slots if one.key == key), None)
                if slot is not None and not slot.is_loading:
                    slot.uses += 1
                    slot.last_use = self._clock
                    return slot
                free = [one for one in self._slots if not one.uses and not one.is_loading]
                if slot is None and free:
                    break
                await self._changed.wait()
            slot = min(free, key=lambda one: one.last_use)
            slot.key, slot.uses, slot.last_use, slot.is_loading = key, 1, self._clock, True
        try:
            await self.service.run_on_engine(lambda: self._fill_slot(slot, load))
        except BaseException:
            slot.key, slot.uses = "", 0
            raise
        finally:
            slot.is_loading = False
            async with self._changed:
                self._changed.notify_all()
        return slot

    def _fill_slot(self, slot: _Slot, load: Callable[[], Adapter]) -> None:
        self.service.engine.place_adapter(slot.name, self._find_adapter(slot.key, load))
