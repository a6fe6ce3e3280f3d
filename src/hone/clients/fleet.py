"""Spread requests for one policy over several servers, and recover when a server is lost.

A run is a set of rollouts of one prompt with consecutive seeds, sent as one request.

    chat, chat … in one turn of the event loop ─ same messages, consecutive seeds ─► a run ─► queue ─► least busy server
    a server that is lost, silent, or at an older version ─► its runs return to the head of the queue
                      └─► comes back ─ revive: current weights, verified ─► serves again

A server receives as many rollouts as it can generate at once, plus a small reserve. Other runs wait
in the fleet's queue for any server; runs of evaluations go first. The fleet polls the servers for
the tokens generated so far. If a run has to be sent again and `goes_on` is set, it continues from
these tokens; otherwise it starts again from its prompt, so that results are bitwise repeatable.
"""

import asyncio
import heapq
import itertools
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from hone import machine
from hone.clients.http import HttpClient, ServerLost
from hone.records import Completion, Prompt, Sampling, Turn
from hone.transport.deadlines import Wait

T = TypeVar("T")
POLL_SECONDS = 2.0  # seconds between looks at a server
# Rollouts (or an eighth of those running, if more) queued at a server to keep it busy.
QUEUE_RESERVE = 16


class _Asked(NamedTuple):
    prompt: Prompt
    sampling: Sampling
    is_urgent: bool
    future: asyncio.Future[Turn]


@dataclass(order=True)
class _Run:
    """Rollouts of one prompt with consecutive seeds, requested together."""

    place: tuple[int, int]  # place in the queue: urgent or not, then order of arrival
    prompt: Prompt = field(compare=False)
    sampling: Sampling = field(compare=False)  # of the first rollout
    futures: list[asyncio.Future[Turn]] = field(compare=False, default_factory=list)
    name: str = field(compare=False, default="")  # name of the request in flight
    # Weights version of the server when the request was sent
    version: int = field(compare=False, default=-1)
    # Tokens of each as last reported.
    so_far: list[Completion] = field(compare=False, default_factory=list)
    # How many tokens of each were sent with the request
    begun: list[int] = field(compare=False, default_factory=list)

    @property
    def is_over(self) -> bool:
        return all(future.done() for future in self.futures)


class OutdatedServer(ServerLost):
    """A server generated with older weights than it had when the request was sent."""


class Server:
    def __init__(self, client: HttpClient) -> None:
        self.client = client
        self.busy = 0
        self.version = -1
        self.is_up = True
        self.limit = math.inf  # rollouts sent to the server at once
        self.runs: dict[str, _Run] = {}  # requests in flight there
        self.why = ""  # why it was lost
        self._at_work: set[asyncio.Task[Any]] = set()

    def has_room_for(self, count: int) -> bool:
        return self.is_up and (self.busy + count <= self.limit or not self.busy)

    async def unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`. Raises ServerLost if the server is lost meanwhile."""
        task = asyncio.ensure_future(work)
        self._at_work.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is None or me.cancelling():
                raise
            raise ServerLost(self.why) from None
        finally:
            self._at_work.discard(task)

    def mark_lost(self, why: str) -> None:
        self.is_up = False
        self.why = why
        for task in self._at_work:
            task.cancel()

    def update_progress(self, state: dict[str, Any]) -> None:
        """Update the rollout limit and the partial completions from a /progress response.

        The limit is the number of rollouts sent to the server at once. It is lowered only if
        requests lack a slot or KV cache pages, not if they merely wait for admission: a server that
        has just begun to prefill a step's requests is not full.
        """
        running = state["running"]
        reserve = max(QUEUE_RESERVE, state["running"] // 8)
        if state["without_room"] > reserve:
            self.limit = running + reserve
        elif not state["waiting"] and self.busy >= self.limit - reserve:
            self.limit = 2 * self.limit
        for name, new in state["partials"].items():
            run, _, i = name.partition("/")
            # A server that was restarted unnoticed serves older weights: its tokens are ignored.
            if (
                run in self.runs
                and min(new["versions"], default=self.version) >= self.runs[run].version
            ):
                known = self.runs[run].so_far[int(i)]
                known.ids += new["ids"]
                known.logprobs += new["logprobs"]
                known.versions += new["versions"]


class Fleet:
    """Send requests to the servers of one policy.

    Args:
        clients: one client per server.
        revive: loads the current weights into a server that came back, and returns their version.
        deadline: seconds to wait for a lost server to come back.
        log: logger for messages about lost and returned servers.
        goes_on: when a request is sent again, continue from the tokens generated so far.
    """

    def __init__(
        self,
        clients: list[HttpClient],
        revive: Callable[[HttpClient], Awaitable[int]],
        deadline: float,
        log: logging.Logger,
        goes_on: bool = False,
    ) -> None:
        self.servers = [Server(client) for client in clients]
        self.revive = revive
        self.deadline = deadline
        self.log = log
        self.goes_on = goes_on
        self.urgent = Urgent(self)
        self._asked: dict[str, list[_Asked]] = {}
        self._queue: list[_Run] = []
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        # Raises if no server is left.
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def live_servers(self) -> list[Server]:
        return [server for server in self.servers if server.is_up]

    async def chat(self, prompt: Prompt, sampling: Sampling, is_urgent: bool = False) -> Turn:
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._send_pending)
        asked = _Asked(prompt, sampling, is_urgent, loop.create_future())
        key = repr((prompt, is_urgent, replace(sampling, seed=0)))
        self._asked.setdefault(key, []).append(asked)
        return await asked.future

    def report_lost(self, server: Server, why: str) -> None:
        """Send no requests to a server until it is up again and has verified current weights.

        `why` is the reason, for the log.
        """
        if server.is_up:
            server.mark_lost(why)
            self.log.warning(
                "Lost the server at %s (%s); its requests are retried",
                server.client.base_url,
                why,
            )
            self._start_task(self._revive_server(server, why))

    async def watch_servers(self) -> None:
        """Poll the servers: detect those that no longer answer, and update the load of the others."""
        await asyncio.gather(
            self._for_each_server(self._is_there), self._for_each_server(self._poll_progress)
        )

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self.servers:
            await server.client.__aexit__()

    # ------------------------------------------------------------------------------------------ requests

    def _send_pending(self) -> None:
        """Group the new requests into runs (same prompt, consecutive seeds), and queue the runs."""
        asked = self._asked
        self._asked = {}
        for same in asked.values():
            same.sort(key=lambda one: one.sampling.seed)
            last = None
            for one in same:
                if last is None or one.sampling.seed != last + 1:
                    run = _Run((not one.is_urgent, next(self._numbers)), one.prompt, one.sampling)
                    heapq.heappush(self._queue, run)
                run.futures.append(one.future)
                last = one.sampling.seed
        self._dispatch_runs()

    def _dispatch_runs(self) -> None:
        if self.ended.done():  # no server is left
            for run in self._queue:
                _fail_waiters(run, self.ended.exception())
        while self._queue:
            run = self._queue[0]
            free = [server for server in self.servers if server.has_room_for(len(run.futures))]
            if not free and not run.is_over:
                return
            heapq.heappop(self._queue)
            if not run.is_over:
                server = min(free, key=lambda server: server.busy)
                server.busy += len(run.futures)
                self._start_task(self._run_requests(server, run))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_requests(self, server: Server, run: _Run) -> None:
        run.name = uuid.uuid4().hex[:12]
        run.version = server.version
        server.runs[run.name] = run
        try:
            turns = await self._request_turns(server, run)
        except ServerLost as error:
            # A named request is not retried by the client: maybe only the connection failed, not the server.
            is_lost = isinstance(error, OutdatedServer) or not (
                self.goes_on and server.is_up and await server.client.is_up()
            )
            if is_lost:
                self.report_lost(server, str(error))
            if not self.goes_on:
                run.so_far = []
            heapq.heappush(self._queue, run)
        except asyncio.CancelledError:
            if not run.is_over:
                raise
        except Exception as error:  # a refusal: each rollout that waits gets it
            _fail_waiters(run, error)
        else:
            for future, turn in zip(run.futures, turns, strict=True):
                if not future.done():
                    future.set_result(turn)
        finally:
            server.busy -= len(run.futures)
            server.runs.pop(run.name, None)
            self._dispatch_runs()

    async def _request_turns(self, server: Server, run: _Run) -> list[Turn]:
        """Send a run's request to a server; return the run's turns.

        The request is cancelled when all futures of the run are done. Raises OutdatedServer if the
        server generated with weights older than `run.version`, for example after an unnoticed
        restart.
        """
        count = len(run.futures)
        name = run.name if self.goes_on else ""
        run.begun = [len(one.ids) for one in run.so_far] or [0] * count
        request = server.client.chat_group(run.prompt, run.sampling, count, name, run.so_far)
        asking = asyncio.ensure_future(server.unless_lost(request))
        run.so_far = run.so_far or [Completion([], [], [], "") for _ in range(count)]

        def cancel_if_over(_: object) -> None:
            if run.is_over:
                asking.cancel()  # the server sees the disconnect

        for future in run.futures:
            future.add_done_callback(cancel_if_over)
        turns = await asking
        new = [
            version
            for turn, begun in zip(turns, run.begun, strict=True)
            for version in turn.completion.versions[begun:]
        ]
        if min(new, default=run.version) < run.version:
            raise OutdatedServer(f"it serves version {min(new)}, it had taken {run.version}")
        return turns

    # ------------------------------------------------------------------------------------------ servers

    async def _for_each_server(self, look: Callable[[Server], Awaitable[None]]) -> None:
        while True:
            await asyncio.gather(asyncio.sleep(POLL_SECONDS), *map(look, self.live_servers))

    async def _is_there(self, server: Server) -> None:
        why = await server.client.why_down(machine.silence_seconds())
        if why:
            self.report_lost(server, why)

    async def _poll_progress(self, server: Server) -> None:
        known = {
            f"{run.name}/{i}": len(one.ids) - begun
            for run in (server.runs.values() if self.goes_on else ())
            for i, (one, begun) in enumerate(zip(run.so_far, run.begun, strict=True))
        }
        try:
            server.update_progress(
                await server.unless_lost(server.client.call_control("progress", {"known": known}))
            )
        except ServerLost as error:
            self.report_lost(server, str(error))
        except RuntimeError:  # another kind of server, without this route
            return
        self._dispatch_runs()

    async def _revive_server(self, server: Server, why: str) -> None:
        what = f"the server at {server.client.base_url}, lost ({why}), to come up again"
        wait = Wait(what, self.deadline, self.log, "was it started again?")
        try:
            while True:
                if await server.client.is_up():
                    try:
                        server.version = await self.revive(server.client)
                        break
                    except ServerLost:
                        pass  # lost again
                wait.is_check_due()
                await asyncio.sleep(0.2)
        except ConnectionError as error:
            self.log.warning("%s", error)
            if not self.live_servers and not self.ended.done():
                self.ended.set_exception(error)
                self._dispatch_runs()  # waiters get the error
            return
        server.is_up = True
        server.limit = math.inf
        self.log.info(
            "The server at %s is back, with version %d", server.client.base_url, server.version
        )
        self._dispatch_runs()


def _fail_waiters(run: _Run, error: BaseException | None) -> None:
    """Set the error on every future that waits for this run."""
    for future in run.futures:
        if not future.done():
            future.set_exception(error or ConnectionError("no server is left"))


class Urgent:
    """Client for evaluations: its requests to the fleet are sent before all others."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    async def chat(self, prompt: Prompt, sampling: Sampling) -> Turn:
        return await self.fleet.chat(prompt, sampling, is_urgent=True)
