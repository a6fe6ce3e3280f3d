"""Worker processes of environments: if one blocks or crashes, only its own rollouts fail.

    WorkerProcess ── {"rollout": 7, …} or {"score": 7, …} ──►  handler in the worker (worker_loop.py)
                  ◄─ {"chat": 7, "question": 2, messages, sampling, tools} ─   optional: a request to the policy
                  ── {"reply": 7, "question": 2, turn} or {…, error, code} ──►
                  ◄─ {"done": 7, "result": …} or {"error": 7, "message": …} ──
    also: {"cancel": 7}
          {"ping": -1} ─► {"pong": -1}      answered by the worker's event loop
          {"alive": -1} ─► {"alive": -1}    answered by the worker's reading thread

Messages are lines of JSON over the worker's standard input and output. A worker for the verifiers
library sends no "chat"; each of its rollouts receives the URL of an OpenAI endpoint
(`policy_endpoint.py`). A worker that dies is replaced; its rollouts fail and are retried like other
failed rollouts. A worker is killed if its process stops responding, or if its event loop is blocked
when a rollout times out.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hone import machine
from hone.child_process import describe_exit
from hone.environments.environment import Environment, ModelClient
from hone.environments.protocols.worker_loop import ARGUMENTS_VARIABLE
from hone.records import ContextFull, Sampling

ANSWER_SECONDS = 5.0  # seconds in which a responsive worker answers
# Seconds between checks of a busy worker; a thread answers even if its loop blocks.
CHECK_SECONDS = 3.0
START_SECONDS = 120.0  # seconds in which a worker has to import its environment and respond
MAX_MESSAGE_BYTES = 2**28  # bytes of a message, at most

log = logging.getLogger("hone.environments")


@dataclass
class _Pending:
    """Request sent to a worker: the future of its result, the model client and the process."""

    future: asyncio.Future[Any]
    client: ModelClient | None
    process: asyncio.subprocess.Process | None = None


class WorkerProcess:
    """A worker process that is restarted when it dies.

    Args:
        name: name of the environment, for log and error messages.
        command: command line of the worker.
        arguments: keyword arguments of the environment.
    """

    def __init__(self, name: str, command: list[str], arguments: dict[str, Any]) -> None:
        self.name = name
        self.command = command
        self.environment = os.environ | {ARGUMENTS_VARIABLE: json.dumps(arguments)}
        self.process: asyncio.subprocess.Process | None = None
        self._pending: dict[int, _Pending] = {}
        self._request_ids = itertools.count()
        self._reader: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        self._has_answered = asyncio.Event()
        self._last, self._is_up = 0.0, False  # when it last responded, and if it ever has

    @property
    def pending_count(self) -> int:
        return len(self._pending)

    async def send_request(
        self, kind: str, message: dict[str, Any], client: ModelClient | None = None
    ) -> Any:
        """Send a request to the worker and return its result.

        `client` answers the model requests that the worker sends meanwhile. Raises ConnectionError
        if the worker dies, RuntimeError if the environment raises.
        """
        request_id = next(self._request_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        pending = self._pending[request_id] = _Pending(future, client)
        try:
            pending.process = await self._start_process()
            self._send_message({kind: request_id, **message})
            return await future
        except asyncio.CancelledError:  # timed out
            self._send_message({"cancel": request_id})
            self._run_task(self._kill_unless_it_answers())
            raise
        finally:
            self._pending.pop(request_id, None)

    def change_command(self, command: list[str]) -> None:
        """Set the command line for future processes.

        An idle process is killed, so that the next request starts a new one.
        """
        is_changed = command != self.command
        self.command = command
        if is_changed and not self._pending:
            self._kill_process(self.process)

    async def close(self) -> None:
        process = self.process
        self.process = None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
        for task in [*self._tasks, *([self._reader] if self._reader else [])]:
            task.cancel()
        # The next event loop may be another one.
        self._starting = asyncio.Lock()
        self._has_answered = asyncio.Event()

    def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_process(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self.process is not None and self.process.returncode is None:
                return self.process
            pipe = asyncio.subprocess.PIPE
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=pipe,
                stdout=pipe,
                limit=MAX_MESSAGE_BYTES,
                env=self.environment,
            )
            self._reader = asyncio.create_task(self._read_messages(self.process))
            self._run_task(self._watch_process(self.process))
            return self.process

    def _send_message(self, message: dict[str, Any]) -> None:
        if self.process is not None and self.process.stdin is not None:
            # The worker has died: `_read_messages` reports it.
            with contextlib.suppress(ConnectionError, RuntimeError):
                self.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read_messages(self, process: asyncio.subprocess.Process) -> None:
        while line := await self._read_line(process):
            message: dict[str, Any] = json.loads(line)
            kind, request_id = next(iter(message.items()))
            self._last = time.monotonic()
            self._is_up = True
            if kind != "alive":
                self._has_answered.set()
            pending = self._pending.get(request_id)
            if pending is None or pending.future.done():
                continue
            if kind == "chat" and pending.client is not None:
                self._run_task(self._answer_chat(request_id, pending.client, message))
            elif kind == "done":
                pending.future.set_result(message["result"])
            else:
                pending.future.set_exception(RuntimeError(message["message"]))
        error = ConnectionError(f"the worker of {self.name} {describe_exit(await process.wait())}")
        for pending in self._pending.values():
            # Other requests belong to its successor.
            if pending.process is process and not pending.future.done():
                pending.future.set_exception(error)

    async def _read_line(self, process: asyncio.subprocess.Process) -> bytes:
        """Return the next message; kill a worker whose message is too long, and return nothing."""
        assert process.stdout is not None
        try:
            return await process.stdout.readline()
        except ValueError:
            log.warning(
                "The worker of %s (%d) sent more than %d MiB at once: it is killed, and its %d rollouts are retried",
                self.name,
                process.pid,
                MAX_MESSAGE_BYTES // 2**20,
                len(self._pending),
            )
            self._kill_process(process)
            return b""

    async def _answer_chat(
        self, request_id: int, client: ModelClient, message: dict[str, Any]
    ) -> None:
        reply: dict[str, Any] = {"reply": request_id, "question": message["question"]}
        sampling = Sampling.from_json(message["sampling"])
        try:
            turn = await client.chat(message["messages"], sampling, message.get("tools"))
        except Exception as error:  # reported to the environment
            code = "context_full" if isinstance(error, ContextFull) else "failed"
            self._send_message({**reply, "code": code, "error": f"{type(error).__name__}: {error}"})
        else:
            self._send_message({**reply, "turn": asdict(turn)})

    async def _watch_process(self, process: asyncio.subprocess.Process) -> None:
        """Kill the process if it sends no message for too long, not even an answer to `alive`."""
        self._last = time.monotonic()
        self._is_up = False
        while process.returncode is None:
            before = time.monotonic()
            self._send_message({"alive": -1})
            await asyncio.sleep(CHECK_SECONDS)
            if time.monotonic() - before > 2 * CHECK_SECONDS:  # this process itself was suspended
                self._last = time.monotonic()
            limit = machine.silence_seconds() if self._is_up else START_SECONDS
            if time.monotonic() - self._last > limit and process.returncode is None:
                log.warning(
                    "The worker of %s (%d) has not responded for %.0f s: it is killed, and its %d rollouts are "
                    "retried",
                    self.name,
                    process.pid,
                    limit,
                    len(self._pending),
                )
                process.kill()

    async def _kill_unless_it_answers(self) -> None:
        """Kill the worker if its event loop hangs, which would block its other rollouts."""
        process = self.process
        self._has_answered.clear()
        self._send_message({"ping": -1})
        try:
            await asyncio.wait_for(self._has_answered.wait(), ANSWER_SECONDS)
        except TimeoutError:
            self._kill_process(process)

    @staticmethod
    def _kill_process(process: asyncio.subprocess.Process | None) -> None:
        if process is not None and process.returncode is None:
            process.kill()


class WorkerEnvironment(Environment):
    """Base class of environments whose rollouts are made by worker processes.

    Args:
        name: the environment's id.
        command: command line of a worker.
        arguments: keyword arguments of the environment.
        workers: number of processes.
    """

    def __init__(
        self, name: str, command: Sequence[str], arguments: dict[str, Any], workers: int
    ) -> None:
        super().__init__(dataset=[])
        self.name = name
        self.workers = [
            WorkerProcess(name, list(command), arguments) for _ in range(max(1, workers))
        ]

    def choose_worker(self) -> WorkerProcess:
        """Return the worker with the fewest pending requests."""
        return min(self.workers, key=lambda worker: worker.pending_count)

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()
