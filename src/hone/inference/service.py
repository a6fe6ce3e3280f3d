"""The compute thread: the one thread that owns a device. Everything else is asyncio and never calls torch.

    event loop                                   compute thread
    generate(request) ─ pending ─ flush ─► inbox ─► engine.add ─► engine.step … ─┐
    run(function)     ───────────────────► inbox ─► function() between two steps ─┤
    awaiting futures ◄─ call_soon_threadsafe, once a step ◄───── what finished ◄──┘   (lockstep: once all did)

Requests made in the same turn of the event loop reach the engine together, so the rollouts of a group share
their prompt. In lockstep mode results are held until the engine has run dry: what is computed together then does
not depend on timing, so runs repeat to the bit, and rewards do not compete with decoding for the cores.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from hone.engine.engine import Engine, Sequence
from hone.records import Completion, GenerateRequest, Message, Sampling, Turn
from hone.text.tokenizer import Tokenizer

T = TypeVar("T")


class EngineService:
    """An engine on its own thread, for asyncio. Use as `async with EngineService(engine) as service`."""

    def __init__(self, engine: Engine, lockstep: bool = False) -> None:
        self.engine, self.lockstep = engine, lockstep
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._pending: list[Callable[[], None]] = []
        self._done: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        self._in_flight: set[asyncio.Future[Completion]] = set()
        self._closing = False

    async def __aenter__(self) -> "EngineService":
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, 60.0)  # it finishes the step that it is in

    async def generate(self, request: GenerateRequest) -> Completion:
        """The completion of a request. Raises ValueError where the engine refuses it. Cancelling aborts it."""
        future: asyncio.Future[Completion] = self._loop.create_future()
        sequences: list[Sequence] = []

        def add() -> None:
            try:
                sequences.append(self.engine.add(request, lambda done: self._finish(future, done)))
                self._in_flight.add(future)
            except ValueError as error:
                self._finish(future, None, error)

        self._submit(add)
        try:
            return await future
        except asyncio.CancelledError:
            self._submit(lambda: self.engine.abort(sequences[0]) if sequences else None)
            raise

    async def run(self, function: Callable[[], T]) -> T:
        """Runs a function on the compute thread, between two steps of the engine."""
        future: asyncio.Future[T] = self._loop.create_future()

        def call() -> None:
            try:
                self._finish(future, function())
            except BaseException as error:
                self._finish(future, None, error)

        self._submit(call)
        return await future

    def _submit(self, work: Callable[[], None]) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(work)

    def _flush(self) -> None:
        with self._wake:
            self._inbox += self._pending
            self._wake.notify()
        self._pending = []

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._inbox and self.engine.is_idle and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
                inbox, self._inbox = self._inbox, []
            for work in inbox:
                work()
            try:
                self.engine.step()
            except Exception as error:  # out of memory, a bug: every waiting request learns of it
                self.engine.waiting.clear()
                self.engine.running.clear()
                for future in list(self._in_flight):
                    self._finish(future, None, error)
            if self._done and (self.engine.is_idle or not self.lockstep):
                done, self._done = self._done, []
                self._loop.call_soon_threadsafe(_deliver, done)

    def _finish(self, future: asyncio.Future[Any], result: Any, error: BaseException | None = None) -> None:
        self._in_flight.discard(future)
        self._done.append((future, result, error))


def _deliver(done: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    for future, result, error in done:
        if future.cancelled():
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


class LocalClient:
    """The model of this process as environments see it."""

    def __init__(self, service: EngineService, tokenizer: Tokenizer) -> None:
        self.service, self.tokenizer = service, tokenizer
        self.stop_ids = frozenset(tokenizer.stop_ids)

    async def chat(self, messages: list[Message], sampling: Sampling) -> Turn:
        prompt_ids = self.tokenizer.prompt_ids(messages)
        completion = await self.service.generate(GenerateRequest(prompt_ids, sampling, self.stop_ids))
        return Turn(prompt_ids, completion, self.tokenizer.decode(completion.ids))
