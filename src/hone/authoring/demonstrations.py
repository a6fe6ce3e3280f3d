"""Build SFT data from an environment's rollouts; the environment writes the assistant turns.

example ─► environment.rollout(Demonstrator) ─► {"messages": […]}, one line each
                        └─ environment.demonstrate(messages, example, rng)
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hone.environments import Environment
from hone.records import Completion, Example, Message, Rollout, Sampling, Tool, Turn


class NotKnown(ValueError):
    """Raised if the environment has no demonstration for an example."""


class Demonstrator:
    """A model that gives the environment's demonstrated answers."""

    def __init__(self, environment: Environment, example: Example, seed: int) -> None:
        self.environment = environment
        self.example = example
        self.rng = random.Random(f"{seed} {example.id}")
        self.tools: list[Tool] | None = None

    async def chat(
        self, messages: list[Message], sampling: Sampling, tools: list[Tool] | None = None
    ) -> Turn:
        self.tools = tools
        said = self.environment.demonstrate(messages, self.example, self.rng)
        if said is None:
            raise NotKnown(
                f"{type(self.environment).__name__} does not know what to say to {messages[-1]['content']!r}: give its "
                "rows an answer, or write demonstrate(messages, example, rng)"
            )
        message: Message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        for i, call in enumerate(message.get("tool_calls") or []):
            call.setdefault("id", f"call_{len(messages)}_{i}")
            call.setdefault("type", "function")
        completion = Completion([0], [0.0], [0], "stop")
        return Turn([0], completion, message.get("content") or "", message.get("tool_calls") or [])


async def demonstrate_rollout(
    environment: Environment, example: Example, seed: int
) -> tuple[Rollout, list[Tool] | None]:
    model = Demonstrator(environment, example, seed)
    return await environment.rollout(model, example, Sampling()), model.tools


async def demonstrated_rows(
    environment: Environment, count: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Return an iterator over `count` rows of SFT data, cycling through the training examples.

    A row has `messages` and, if the environment offers tools, `tools` as JSON text. Raises NotKnown
    if an example has no demonstration.
    """
    examples = environment.get_dataset()
    found = []
    for i in range(count):
        rollout, tools = await demonstrate_rollout(
            environment, examples[i % len(examples)], seed + i // len(examples)
        )
        last = max(
            (n for n, m in enumerate(rollout.messages) if m["role"] == "assistant"), default=-1
        )
        messages = [*rollout.example.prompt, *rollout.messages[: last + 1]]
        found.append({"messages": messages, **({"tools": json.dumps(tools)} if tools else {})})
    return iter(found)


def write_rows(rows: Iterator[dict[str, Any]], file: Path) -> int:
    file.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with file.open("w") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count
