"""Worker of `isolated.py`: `python -m hone.environments.protocols.isolated_worker ENV ON_REWARD_ERROR`."""

import sys
from dataclasses import asdict
from typing import Any

from hone.environments.environment import Environment, check_rollout
from hone.environments.protocols.native import load_native, module_of
from hone.environments.protocols.worker_loop import WorkerLoop
from hone.records import ContextFull, Example, Message, Rollout, Sampling, Tool, Turn
from hone.users_code import CONTAINED


class ParentClient:
    """Model client that sends each request to the parent process, which has the policy."""

    def __init__(self, loop: WorkerLoop, request_id: int) -> None:
        self.loop = loop
        self.request_id = request_id

    async def chat(
        self, messages: list[Message], sampling: Sampling, tools: list[Tool] | None = None
    ) -> Turn:
        asked = {"messages": messages, "sampling": asdict(sampling), "tools": tools}
        reply = await self.loop.ask_parent(self.request_id, asked)
        if "turn" not in reply:
            kind = ContextFull if reply["code"] == "context_full" else RuntimeError
            raise kind(reply["error"])
        return Turn.from_json(reply["turn"])


class EnvironmentWorker:
    """Handlers of a worker's requests: run a rollout, score a group."""

    def __init__(self, environment: Environment, loop: WorkerLoop) -> None:
        self.environment = environment
        self.loop = loop

    async def rollout(self, message: dict[str, Any]) -> dict[str, Any]:
        client = ParentClient(self.loop, message["rollout"])
        example = Example(**message["example"])
        with CONTAINED:
            rollout = await self.environment.rollout(
                client, example, Sampling.from_json(message["sampling"])
            )
        return check_rollout(rollout).to_json()

    async def score(self, message: dict[str, Any]) -> list[tuple[float, dict[str, float]]]:
        rollouts = [Rollout.from_json(found) for found in message["rollouts"]]
        with CONTAINED:
            await self.environment.score_group(rollouts)
        return [(rollout.reward, rollout.metrics) for rollout in rollouts]


def main() -> None:
    env_id, on_reward_error = sys.argv[1:3]
    loop = WorkerLoop()
    loop.start_reading()
    environment = load_native(env_id, module_of(env_id), loop.arguments)
    environment.on_reward_error(on_reward_error)
    worker = EnvironmentWorker(environment, loop)
    loop.serve_requests({"rollout": worker.rollout, "score": worker.score})


if __name__ == "__main__":
    main()
