"""An environment in worker processes: a worker that blocks or crashes costs a rollout and no more.

    Isolated ── {"begin": 7, example, sampling} ──►  worker: environment.rollout(client)    (or {"score": 7, rollouts})
             ◄─ {"chat": 7, messages, sampling} ───       client.chat
             ── {"turn": 7, …} or {"error": 7} ───►
             ◄─ {"done": 7, rollout} or {"error": 7} ──

Messages are lines of JSON over the worker's standard input and output. A dead worker is replaced;
its rollouts fail and are retried like others. A stopped worker is killed, and so is one that blocks
while a rollout is out of time.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hone import machine
from hone.environments.environment import Environment, ModelClient
from hone.environments.rubric import Rubric
from hone.records import Completion, ContextFull, Example, Message, Rollout, Sampling, Tool, Turn

ANSWER_SECONDS = 5.0  # seconds in which a responsive worker answers
# Seconds between checks of a busy worker; a thread answers even if its loop blocks.
CHECK_SECONDS = 3.0
START_SECONDS = 120.0  # seconds in which a worker has to import its environment and respond

ARGUMENTS_VARIABLE = "HONE_ENV_ARGUMENTS"

log = logging.getLogger("hone.environments")
MAX_MESSAGE_BYTES = 2**28  # bytes of a message, at most


def sampling_of(message: dict[str, Any]) -> Sampling:
    given = message["sampling"]
    return Sampling(**given | {"logit_bias": tuple(map(tuple, given["logit_bias"]))})


def encode_rollout(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as JSON values, with the part of its state that JSON can hold."""
    found = {key: value for key, value in vars(rollout).items() if key not in ("turns", "state")}
    state = {key: value for key, value in rollout.state.items() if _is_json(value)}
    turns = [asdict(turn) for turn in rollout.turns]
    return found | {"example": asdict(rollout.example), "turns": turns, "state": state}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def turn_of(found: dict[str, Any]) -> Turn:
    return Turn(**found | {"completion": Completion(**found["completion"])})


def rollout_of(found: dict[str, Any], example: Example) -> Rollout:
    return Rollout(
        **found | {"example": example, "turns": [turn_of(turn) for turn in found["turns"]]}
    )


class Isolated(Environment):
    """An environment whose rollouts are made by workers that load it by id and arguments.

    `environment` answers everything else in this process. Rubrics added here score what the workers
    return, with the part of the state that JSON can hold.
    """

    def __init__(
        self,
        environment: Environment,
        name: str,
        arguments: dict[str, Any],
        workers: int,
        on_reward_error: str | None = None,
    ) -> None:
        super().__init__(dataset=[])
        self.environment = environment
        self.added = list[Rubric]()
        self.name = environment.name
        self.parser = environment.parser
        self.rubric = environment.rubric
        self.call_timeout = environment.call_timeout
        self.system_prompt = environment.system_prompt
        self._words = [sys.executable, "-P", "-m", "hone.environments.isolated_worker", name]
        given = json.dumps(arguments)
        self.workers = [
            WorkerProcess(name, [*self._words, on_reward_error or "fail"], given)
            for _ in range(workers)
        ]

    def get_dataset(self, n: int = -1, seed: int | None = None) -> list[Example]:
        return self.environment.get_dataset(n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> list[Example]:
        return self.environment.get_eval_dataset(n, seed)

    def first_tools(self, example: Example) -> list[Tool] | None:
        return self.environment.first_tools(example)

    def demonstrate(
        self, messages: list[Message], example: Example, rng: random.Random
    ) -> Message | str | None:
        return self.environment.demonstrate(messages, example, rng)

    def check(self) -> None:
        self.environment.check()
        for rubric in self.added:
            rubric.check()

    def add_rubric(self, rubric: Rubric) -> None:
        if rubric.has_group_functions:
            raise ValueError(
                f"{self.name}: a rubric that compares rollouts cannot be added to one with env.workers"
            )
        self.added.append(rubric)

    def on_reward_error(self, what: str) -> None:
        """Set the choice here and in the workers, which restart with it when they are idle."""
        self.environment.on_reward_error(what)
        for rubric in self.added:
            rubric.set_on_error(what)
        for worker in self.workers:
            worker.change_words([*self._words, what])

    @property
    def has_group_rewards(self) -> bool:
        return self.environment.has_group_rewards

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Score a group. Functions see the part of `states` that JSON can hold."""
        scored = [rollout for rollout in rollouts if not rollout.error]
        if scored and self.has_group_rewards:
            done = await min(self.workers, key=lambda one: one.pending_count).score(scored)
            for rollout, (reward, metrics) in zip(scored, done, strict=True):
                rollout.reward = reward
                rollout.metrics = metrics

    async def rollout(self, client: ModelClient, example: Example, sampling: Sampling) -> Rollout:
        worker = min(self.workers, key=lambda one: one.pending_count)
        rollout = await worker.rollout(client, example, sampling)
        for rubric in self.added:
            reward, metrics = await rubric.score(
                self.call_timeout, **self._scoring_arguments(rollout)
            )
            rollout.reward += reward
            rollout.metrics |= metrics
        return rollout

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()


@dataclass
class _Waiting:
    """A rollout in a worker: the future that awaits it, its client, and its process."""

    future: asyncio.Future[dict[str, Any]]
    client: ModelClient | None
    process: asyncio.subprocess.Process | None = None


class WorkerProcess:
    """A worker process that is restarted when it dies. `arguments`: those of its environment, as
    JSON.
    """

    def __init__(self, name: str, words: list[str], arguments: str = "{}") -> None:
        self.name = name
        self.words = words
        # Other users can read a command line
        self.environment = os.environ | {ARGUMENTS_VARIABLE: arguments}
        self.process: asyncio.subprocess.Process | None = None
        self.waiting: dict[int, _Waiting] = {}
        self.numbers = itertools.count()
        self._reader: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        self._heard = asyncio.Event()
        self._last, self._is_up = 0.0, False  # when it last responded, and if it ever has

    @property
    def pending_count(self) -> int:
        return len(self.waiting)

    async def rollout(self, client: ModelClient, example: Example, sampling: Sampling) -> Rollout:
        """Run a rollout. Raises ConnectionError if the worker dies, RuntimeError if the environment
        raises.
        """
        done = await self.send_request(
            {"begin": 0, "example": asdict(example), "sampling": asdict(sampling)}, client
        )
        return rollout_of(done, example)

    async def score(self, rollouts: list[Rollout]) -> list[tuple[float, dict[str, float]]]:
        """Return rewards and metrics of a group, group functions included. Raises like `rollout`."""
        return (
            await self.send_request(
                {"score": 0, "rollouts": [encode_rollout(rollout) for rollout in rollouts]}, None
            )
        )["scores"]

    async def send_request(
        self, message: dict[str, Any], client: ModelClient | None = None
    ) -> dict[str, Any]:
        """Send a message and return its result. Its first key becomes the number of the request."""
        number = next(self.numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        one = self.waiting[number] = _Waiting(future, client)
        try:
            one.process = await self._start_process()
            self._send_message(message | {next(iter(message)): number})
            return await future
        except asyncio.CancelledError:  # timed out
            self._send_message({"cancel": number})
            self._run_task(self._kill_unless_it_answers())
            raise
        finally:
            self.waiting.pop(number, None)

    def change_words(self, words: list[str]) -> None:
        """Set the command of future processes; an idle process is ended for it."""
        is_changed = words != self.words
        self.words = words
        if (
            is_changed
            and self.process is not None
            and self.process.returncode is None
            and not self.waiting
        ):
            self.process.kill()

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
        self._heard = asyncio.Event()

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
                *self.words, stdin=pipe, stdout=pipe, limit=MAX_MESSAGE_BYTES, env=self.environment
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
        assert process.stdout is not None
        while line := await process.stdout.readline():
            message: dict[str, Any] = json.loads(line)
            kind, number = next(iter(message.items()))
            self._last = time.monotonic()
            self._is_up = True
            if kind != "alive":
                self._heard.set()
            one = self.waiting.get(number)
            if one is None or one.future.done():
                continue
            if kind == "chat" and one.client is not None:
                self._run_task(self._answer_chat(number, one.client, message))
            elif kind == "done":
                one.future.set_result(message["result"])
            else:
                one.future.set_exception(RuntimeError(message["words"]))
        code = await process.wait()
        how = (
            f"was killed ({signal.Signals(-code).name})"
            if code < 0
            else f"ended with exit code {code}"
        )
        for one in self.waiting.values():
            # Other requests belong to its successor.
            if one.process is process and not one.future.done():
                one.future.set_exception(ConnectionError(f"the worker of {self.name} {how}"))

    async def _answer_chat(self, number: int, client: ModelClient, message: dict[str, Any]) -> None:
        try:
            turn = await client.chat(
                message["messages"], sampling_of(message), message.get("tools")
            )
        except Exception as error:  # reported to the environment
            is_full = isinstance(error, ContextFull)
            words = f"{type(error).__name__}: {error}"
            self._send_message(
                {
                    "error": number,
                    "question": message["question"],
                    "words": words,
                    "is_full": is_full,
                }
            )
        else:
            self._send_message(
                {"turn": number, "question": message["question"], "value": asdict(turn)}
            )

    async def _watch_process(self, process: asyncio.subprocess.Process) -> None:
        """Kill the process if it shows no sign of life while it has work."""
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
                    "tried again",
                    self.name,
                    process.pid,
                    limit,
                    len(self.waiting),
                )
                process.kill()

    async def _kill_unless_it_answers(self) -> None:
        """Kill the worker if its event loop hangs, which would block its other rollouts."""
        process = self.process
        self._heard.clear()
        self._send_message({"ping": -1})
        try:
            await asyncio.wait_for(self._heard.wait(), ANSWER_SECONDS)
        except TimeoutError:
            if process is not None and process.returncode is None:
                os.kill(process.pid, signal.SIGKILL)
