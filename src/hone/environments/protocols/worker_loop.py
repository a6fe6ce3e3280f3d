"""Worker's side of the protocol between Hone and an environment's process.

`worker_process.py` is the other side and describes the protocol. Only the standard library is
imported: a worker for verifiers runs with the Python of verifiers, which need not have Hone.
"""

import asyncio
import itertools
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

ARGUMENTS_VARIABLE = "HONE_ENV_ARGUMENTS"  # other users can read a command line

Message = dict[str, Any]


class WorkerLoop:
    """Read requests from standard input, run their handlers concurrently, write the results.

    Attributes:
        arguments: keyword arguments of the environment.
    """

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = json.loads(os.environ.pop(ARGUMENTS_VARIABLE, "{}"))
        # What the environment prints goes to stderr, not between the messages.
        self._output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._sending = threading.Lock()
        # It exists before the environment is loaded, so that the reading thread can hand it messages.
        self._loop = asyncio.new_event_loop()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._questions: dict[int, asyncio.Future[Message]] = {}
        self._question_ids = itertools.count()

    def send_message(self, message: Any) -> None:
        """Write a message to the parent. Any thread may call it."""
        with self._sending:
            self._output.write(json.dumps(message) + "\n")
            self._output.flush()

    def start_reading(self) -> None:
        """Read messages in a thread, which answers `alive` even while the environment blocks."""
        threading.Thread(target=self._read_lines, daemon=True).start()

    async def ask_parent(self, request_id: int, question: Message) -> Message:
        """Send a question of a running request to the parent and return the reply."""
        question_id = next(self._question_ids)
        reply = self._questions[question_id] = asyncio.get_running_loop().create_future()
        try:
            self.send_message({"chat": request_id, "question": question_id, **question})
            return await reply
        finally:
            del self._questions[question_id]

    def serve_requests(self, handlers: dict[str, Callable[[Message], Awaitable[Any]]]) -> None:
        """Serve requests until the parent ends; `handlers` has a handler per kind of request."""
        self._handlers = handlers
        self._loop.run_forever()

    def _handle_message(self, message: Message) -> None:
        kind, request_id = next(iter(message.items()))
        if kind in self._handlers:
            work = self._run_request(request_id, self._handlers[kind](message))
            self._running[request_id] = self._loop.create_task(work)
        elif kind == "ping":
            self.send_message({"pong": request_id})
        elif kind == "cancel" and request_id in self._running:
            self._running[request_id].cancel()
        elif kind == "reply":
            reply = self._questions.get(message["question"])
            if reply is not None and not reply.done():
                reply.set_result(message)

    async def _run_request(self, request_id: int, work: Awaitable[Any]) -> None:
        try:
            self.send_message({"done": request_id, "result": await work})
        except BaseException as error:  # exit() too: it fails this request only
            self.send_message({"error": request_id, "message": f"{type(error).__name__}: {error}"})
        finally:
            self._running.pop(request_id, None)

    def _read_lines(self) -> None:
        for line in sys.stdin:
            if line.startswith('{"alive"'):
                self.send_message({"alive": -1})
            else:
                self._loop.call_soon_threadsafe(self._handle_message, json.loads(line))
        os._exit(0)  # the parent is gone
