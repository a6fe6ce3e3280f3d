"""Several servers of one policy as one model, which outlives the loss of any of them.

chat, chat … of one turn of the event loop ─ same messages, seeds in a row ─► one request ─► the least busy server
a server that is lost, falls silent, or serves older weights than it took ─► its requests asked again elsewhere or later
                  └─► comes up again ─ revive: the current weights, proven ─► serves again
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, replace
from typing import Any, TypeVar

from hone.inference.client import HttpClient, ServerLost
from hone.records import Message, Sampling, Turn
from hone.transport.waiting import Wait

Asked = tuple[Sampling, list[Message], asyncio.Future[Turn]]
T = TypeVar("T")
LOOK, SILENCE = 2.0, 15.0  # seconds between looks at a server; without an answer, until it is lost


class Server:
    def __init__(self, client: HttpClient) -> None:
        self.client = client
        self.busy, self.version, self.is_up = 0, -1, True
        self.why = ""  # it was lost
        self._at_work: set[asyncio.Task[Any]] = set()

    async def unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """What it answers. Raises ServerLost when it is lost meanwhile."""
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

    def lose(self, why: str) -> None:
        self.is_up, self.why = False, why
        for task in self._at_work:
            task.cancel()


class Fleet:
    """`revive` gives a server that came up again the current weights, and says which version they are."""

    def __init__(
        self,
        clients: list[HttpClient],
        revive: Callable[[HttpClient], Awaitable[int]],
        deadline: float,
        log: logging.Logger,
    ) -> None:
        self.servers = [Server(client) for client in clients]
        self.revive, self.deadline, self.log = revive, deadline, log
        self._asked: dict[str, list[Asked]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # raises when no server is left

    @property
    def up(self) -> list[Server]:
        return [server for server in self.servers if server.is_up]

    async def chat(self, messages: list[Message], sampling: Sampling) -> Turn:
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._send)
        future: asyncio.Future[Turn] = loop.create_future()
        key = json.dumps([messages, asdict(replace(sampling, seed=0))])
        self._asked.setdefault(key, []).append((sampling, messages, future))
        return await future

    def lost(self, server: Server, why: str) -> None:
        """Nothing is asked of it until it has come up again and proven that it has the current weights."""
        if server.is_up:
            server.lose(why)
            self.log.warning(
                "Lost the server at %s (%s); what was asked of it is asked again", server.client.base_url, why
            )
            self._start(self._revive(server, why))

    async def watch(self) -> None:
        """Loses servers that do not answer any more: a process that was stopped, a machine that went away."""

        async def look(server: Server) -> None:
            if not await server.client.is_up(SILENCE):
                self.lost(server, f"/health did not answer within {SILENCE:.0f} s")

        while True:
            await asyncio.gather(asyncio.sleep(LOOK), *(look(server) for server in self.up))

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self.servers:
            await server.client.__aexit__()

    def _send(self) -> None:
        asked, self._asked = self._asked, {}
        for same in asked.values():
            same.sort(key=lambda one: one[0].seed)
            run = [same[0]]
            for one in same[1:]:
                if one[0].seed != run[-1][0].seed + 1:
                    self._start(self._ask(run))
                    run = []
                run.append(one)
            self._start(self._ask(run))

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, run: list[Asked]) -> None:
        sampling, messages, _ = run[0]
        while any(not future.done() for _, _, future in run):
            if not self.up:
                self._changed.clear()
                await self._changed.wait()
                continue
            server = min(self.up, key=lambda one: one.busy)
            server.busy += len(run)
            version = server.version
            try:
                turns = await server.unless_lost(server.client.chat_group(messages, sampling, len(run)))
            except ServerLost as error:
                self.lost(server, str(error))
            except Exception as error:  # a refusal: each rollout that waits learns of it
                for _, _, future in run:
                    if not future.done():
                        future.set_exception(error)
            else:
                oldest = min((v for turn in turns for v in turn.completion.versions), default=version)
                if oldest < version:  # restarted between two requests: not the weights that it was given
                    self.lost(server, f"it serves version {oldest}, it had taken {version}")
                    continue
                for (_, _, future), turn in zip(run, turns, strict=True):
                    if not future.done():
                        future.set_result(turn)
            finally:
                server.busy -= len(run)

    async def _revive(self, server: Server, why: str) -> None:
        what = f"the server at {server.client.base_url}, lost ({why}), to come up again"
        wait = Wait(what, self.deadline, self.log, "was it started again?")
        try:
            while True:
                if await server.client.is_up():
                    try:
                        server.version = await self.revive(server.client)
                        break
                    except ServerLost:
                        pass  # gone once more
                wait.check()
                await asyncio.sleep(0.2)
        except ConnectionError as error:
            self.log.warning("%s", error)
            if not self.up and not self.ended.done():
                self.ended.set_exception(error)
            return
        server.is_up = True
        self.log.info("The server at %s is back, with version %d", server.client.base_url, server.version)
        self._changed.set()
