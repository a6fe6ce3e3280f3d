"""Worker of `isolated.py`: `python -m hone.environments.isolated_worker ENV ON_REWARD_ERROR`."""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from hone.environments.environment import Environment, check_rollout
from hone.environments.isolated import (
    ARGUMENTS_VARIABLE,
    encode_rollout,
    rollout_of,
    sampling_of,
    turn_of,
)
from hone.environments.registry import load_environment
from hone.records import ContextFull, Example, Message, Sampling, Tool, Turn
from hone.users_code import CONTAINED


class Client:
    """The model, reached through the pipe."""

    def __init__(self, number: int, send: Any) -> None:
        self.number = number
        self.send = send
        self.answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def chat(
        self, messages: list[Message], sampling: Sampling, tools: list[Tool] | None = None
    ) -> Turn:
        number = len(self.answers)
        answer = self.answers[number] = asyncio.get_running_loop().create_future()
        asked = {"messages": messages, "sampling": asdict(sampling), "tools": tools}
        self.send({"chat": self.number, "question": number, **asked})
        return turn_of(await answer)


class EnvironmentWorker:
    def __init__(self, environment: Environment, send: Any) -> None:
        self.environment = environment
        self.send = send
        self.running: dict[int, tuple[asyncio.Task[None], Client]] = {}

    def handle_line(self, line: str) -> None:
        message = json.loads(line)
        kind, number = next(iter(message.items()))
        if kind in ("begin", "score"):
            client = Client(number, self.send)
            work = (
                self._run_rollout(client, message)
                if kind == "begin"
                else self._run_scoring(message)
            )
            self.running[number] = (
                asyncio.get_running_loop().create_task(self._run_request(number, work)),
                client,
            )
        elif kind == "ping":
            self.send({"pong": number})
        elif number in self.running:
            task, client = self.running[number]
            if kind == "cancel":
                task.cancel()
            elif not (answer := client.answers[message["question"]]).done():
                if kind == "turn":
                    answer.set_result(message["value"])
                else:
                    kind = ContextFull if message["is_full"] else RuntimeError
                    answer.set_exception(kind(message["words"]))

    async def _run_rollout(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        done = await self.environment.rollout(
            client, Example(**message["example"]), sampling_of(message)
        )
        return encode_rollout(check_rollout(done))

    async def _run_scoring(self, message: dict[str, Any]) -> dict[str, Any]:
        rollouts = [rollout_of(found, Example(**found["example"])) for found in message["rollouts"]]
        await self.environment.score_group(rollouts)
        return {"scores": [(rollout.reward, rollout.metrics) for rollout in rollouts]}

    async def _run_request(self, number: int, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        try:
            with CONTAINED:
                self.send({"done": number, "result": await work})
        except (
            Exception,
            asyncio.CancelledError,
        ) as error:  # users' code may raise anything
            self.send({"error": number, "words": f"{type(error).__name__}: {error}"})
        finally:
            self.running.pop(number, None)


def main() -> None:
    name, on_reward_error = sys.argv[1:3]
    arguments = json.loads(os.environ.pop(ARGUMENTS_VARIABLE, "{}"))
    # Output of the environment goes to stderr, not between the messages.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    sending = threading.Lock()

    def send_message(message: dict[str, Any]) -> None:
        with sending:
            out.write(json.dumps(message) + "\n")
            out.flush()

    async def run_worker() -> None:
        loop = asyncio.get_running_loop()
        lines: asyncio.Queue[str] = asyncio.Queue()

        def read_lines() -> None:
            for line in sys.stdin:
                if line.startswith('{"alive"'):  # answered even while the environment blocks
                    send_message({"alive": -1})
                    continue
                loop.call_soon_threadsafe(lines.put_nowait, line)
            os._exit(0)  # the parent is gone

        threading.Thread(target=read_lines, daemon=True).start()
        environment = load_environment(name, **arguments)
        environment.on_reward_error(on_reward_error)
        worker = EnvironmentWorker(environment, send_message)
        while True:
            worker.handle_line(await lines.get())

    asyncio.run(run_worker())


if __name__ == "__main__":
    main()
