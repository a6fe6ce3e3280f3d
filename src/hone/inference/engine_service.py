"""Run an engine on the compute thread, the only thread that owns the device and calls torch.

    event loop (its own thread)                  compute (the main thread)
    generate(request) ───── pending ─ flush ─► inbox ─► engine.add ─► engine.step … ─┐
    run_on_engine(function) ─────────────────► inbox ─► function() between two steps ─┤
    awaiting futures ◄─ call_soon_threadsafe, once per step ◄──── finished requests ◄┘   (lockstep: once all are done)

Requests made in one turn of the event loop reach the engine together, so the rollouts of a group
share the pages of their prompt. In lockstep mode completions are held until the engine is idle:
batches then do not depend on timing, so runs repeat to the bit, and reward functions do not compete
with decoding for cores.

The compute thread is the main thread because of the OpenMP runtime, which counts the worker threads
of every thread that has ever computed. If it counts more than there are cores, it puts workers to
sleep after every operation, which makes small operations three times slower.
"""

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hone.engine.engine import Engine
from hone.engine.sequence import Sequence
from hone.records import Completion, GenerateRequest, Prompt, Sampling, Turn
from hone.text.tokenizer import Tokenizer

# Longest wait in seconds: a signal that arrives just before one is handled after it.
MAX_WAIT_SECONDS = 0.5
log = logging.getLogger("hone.inference")
T = TypeVar("T")
_Done = tuple[asyncio.Future[Any], Any, BaseException | None]


class EngineService:
    """Asyncio interface of an engine.

    `run_beside` runs the engine on the calling thread, and the asyncio program that sends the
    requests on a second thread. With `lockstep`, completions are delivered only when the engine is
    idle.
    """

    def __init__(self, engine: Engine, lockstep: bool = False) -> None:
        self.engine = engine
        self.lockstep = lockstep
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._pending: list[Callable[[], None]] = []
        self._done: list[_Done] = []  # completions and function results
        self._ran: list[_Done] = []  # function results while completions are held
        self._in_flight: set[asyncio.Future[Completion]] = set()
        self._closing = False
        self._is_draining = self._is_paused = False
        # What may be done with the engine while no request is there, the last first.
        self.idle_work: list[Callable[[Engine], None]] = []

    def run_beside(
        self,
        program: Coroutine[Any, Any, None],
        run_loop: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run,
    ) -> None:
        """Run the engine on the calling thread, and `program` on an event loop in another thread.

        Returns when the program ends; raises the program's exception. Call this on the main thread:
        Ctrl-C then cancels the program, and KeyboardInterrupt is raised once the program has
        cleaned up. `run_loop` runs a coroutine as `asyncio.run` does.
        """
        outcome: list[BaseException] = []
        self._closing = False

        async def main_program() -> None:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.current_task()
            started.set()
            await program

        def run_program() -> None:
            try:
                run_loop(main_program())
            except BaseException as error:
                outcome.append(error)
            finally:
                with self._wake:
                    self._closing = True
                    self._wake.notify()

        started = threading.Event()
        thread = threading.Thread(target=run_program, name="asyncio", daemon=True)
        thread.start()
        started.wait(60.0)
        try:
            self._take_work()
        except KeyboardInterrupt:
            if self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)
            thread.join(30.0)
            raise
        thread.join(30.0)
        if outcome:
            raise outcome[0]

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the completion of a request; cancelling the call aborts the request.

        Raises ValueError if the engine refuses the request.
        """
        future: asyncio.Future[Completion] = self._loop.create_future()
        sequences: list[Sequence] = []

        def add_request() -> None:
            try:
                sequences.append(
                    self.engine.add(request, lambda done: self._finish_future(future, done))
                )
                self._in_flight.add(future)
            except ValueError as error:
                self._finish_future(future, None, error)

        self._submit_work(add_request)
        try:
            return await future
        except asyncio.CancelledError:
            self._submit_work(
                lambda: self.engine.abort_request(sequences[0]) if sequences else None
            )
            raise

    async def run_on_engine(self, function: Callable[[], T]) -> T:
        """Run a function on the compute thread, between two steps of the engine."""
        future: asyncio.Future[T] = self._loop.create_future()

        def call_function() -> None:
            done = self._ran if self.lockstep else self._done
            try:
                done.append((future, function(), None))
            except BaseException as error:
                done.append((future, None, error))

        self._submit_work(call_function)
        return await future

    def on_loop(self, call: Callable[..., object], *arguments: Any) -> None:
        """Schedule a call on the event loop; called from the compute thread."""
        # The program has ended and its loop is closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    async def pause(self, mode: str) -> None:
        """Stop computing until `resume`; requests are still accepted. Returns once stopped.

        Args:
            mode: "keep": running requests continue after `resume`, with the weights loaded by then;
                "wait": they finish first; "abort": all requests end now with the tokens they have.
        """

        def stop_engine() -> None:
            if mode == "abort":
                self.engine.abort_all()
            self._is_draining = mode == "wait"
            self._is_paused = True

        await self.run_on_engine(stop_engine)
        while self._is_draining and self.engine.running_sequences:
            await asyncio.sleep(0.005)
        self._is_draining = False

    async def resume(self) -> None:
        def go_on() -> None:
            self._is_paused = self._is_draining = False

        await self.run_on_engine(go_on)

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def _has_work(self) -> bool:
        if self._is_paused:
            return self._is_draining and bool(self.engine.running_sequences)
        return not self.engine.is_idle

    def _submit_work(self, work: Callable[[], None]) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush_results)
        self._pending.append(work)

    def _flush_results(self) -> None:
        with self._wake:
            self._inbox += self._pending
            self._wake.notify()
        self._pending = []

    def _take_work(self) -> None:
        has_run = False
        while True:
            with self._wake:
                while not (self._inbox or self._has_work() or self._closing or self.idle_work):
                    self._wake.wait(MAX_WAIT_SECONDS)
                if self._closing:
                    return
                inbox = self._inbox
                self._inbox = []
            for work in inbox:
                work()
            if self.idle_work and not inbox and not self._has_work():
                self._run_idle_work()
                continue
            if self._ran:
                ran = self._ran
                self._ran = []
                self.on_loop(_deliver_results, ran)
            try:
                if self._has_work():
                    self.engine.step(admit=not self._is_paused)
                    if not has_run:
                        has_run = True
                        # Excludes loaded modules from collection, which would stop everything for
                        # 0.1 s.
                        gc.freeze()
            except Exception as error:  # out of memory, a bug: every waiting request gets it
                self.engine.reset()
                for future in list(self._in_flight):
                    self._finish_future(future, None, error)
            if self._done and (not self._has_work() or not self.lockstep):
                done = self._done
                self._done = []
                self.on_loop(_deliver_results, done)

    def _run_idle_work(self) -> None:
        try:
            self.idle_work.pop()(self.engine)
        except Exception:
            log.exception("The engine could not prepare for requests; it serves them without")
            self.idle_work.clear()

    def _finish_future(
        self, future: asyncio.Future[Any], result: Any, error: BaseException | None = None
    ) -> None:
        self._in_flight.discard(future)
        self._done.append((future, result, error))


def _deliver_results(done: list[_Done]) -> None:
    for future, result, error in done:
        if future.cancelled():
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


class LocalClient:
    """Client with which environments sample from the engine in this process."""

    def __init__(self, service: EngineService, tokenizer: Tokenizer) -> None:
        self.service = service
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(tokenizer.stop_ids)

    async def chat(self, prompt: Prompt, sampling: Sampling) -> Turn:
        prompt_ids = self.tokenizer.prompt_ids(prompt)
        completion = await self.service.generate(
            GenerateRequest(prompt_ids, sampling, self.stop_ids)
        )
        return self.tokenizer.build_turn(prompt, prompt_ids, completion)
