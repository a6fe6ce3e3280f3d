"""Snapshots of adapters take turns in a fixed number of the engine's adapters.

snapshots (any number, on disk)          slots (few: each costs every decode step)
  run 1, step 10 ──────────────────────►  slot-0
  run 1, step 11 ─── loaded on use ────►  slot-1
  run 2, step 4                           …
"""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from hone.inference.engine_service import EngineService
from hone.models.adapters import Adapter

KEPT_ADAPTERS = 8  # snapshots that are kept in memory beside those in slots


@dataclass
class _Slot:
    name: str  # of the engine's adapter
    key: str = ""  # snapshot in it
    uses: int = 0
    last_use: int = 0
    is_loading: bool = False


class SamplerSlots:
    """The engine's adapters, shared by snapshots. All methods run on one event loop."""

    def __init__(self, service: EngineService, count: int) -> None:
        self.service = service
        self._slots = [_Slot(f"slot-{i}") for i in range(count)]
        self._changed = asyncio.Condition()
        self._clock = 0
        self._recent: OrderedDict[str, Adapter] = OrderedDict()

    def keep_adapter(self, key: str, adapter: Adapter) -> None:
        """Keep a snapshot in memory for its first use."""
        self._recent[key] = adapter
        self._recent.move_to_end(key)
        while len(self._recent) > KEPT_ADAPTERS:
            self._recent.popitem(last=False)

    async def replace_adapter(self, key: str, adapter: Adapter) -> None:
        """Replace a snapshot by a newer one; running requests continue with it."""
        self.keep_adapter(key, adapter)
        for slot in self._slots:
            if slot.key == key:
                place = functools.partial(self.service.engine.place_adapter, slot.name, adapter)
                await self.service.run_on_engine(place)

    @asynccontextmanager
    async def use_snapshot(self, key: str, load: Callable[[], Adapter]) -> AsyncIterator[str]:
        """Context manager: the name of the engine's adapter that has a snapshot.

        Waits while requests with other snapshots are in all slots. `load` reads the snapshot, on
        the compute thread, if it is not in memory.
        """
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
        adapter = self._recent.get(slot.key)
        if adapter is None:
            adapter = load()
        self.service.engine.place_adapter(slot.name, adapter)
