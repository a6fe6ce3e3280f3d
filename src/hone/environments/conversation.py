"""Model client of one rollout: prompts begin with the token ids of earlier turns.

    turn 1: messages ─► prompt ids, completion ids
    turn 2: messages that begin with the messages and the answer of turn 1
            ─► prompt ids: all ids of turn 1, then those of the chat template's text after them

Each turn has its own seed.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from hone.records import Message, Prompt, Sampling, Tool, Turn, other_seed


class TokenClient(Protocol):
    """Interface of a model client whose prompts can begin with token ids of earlier turns."""

    async def chat(self, prompt: Prompt, sampling: Sampling) -> Turn: ...


class Conversation:
    """Model client of one rollout. `turns` lists the messages and the answer of each request."""

    def __init__(
        self, client: TokenClient, template_arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.client = client
        self.template_arguments = dict(template_arguments or {})
        self.turns: list[tuple[list[Message], Turn]] = []
        self._begun = 0

    async def chat(
        self, messages: list[Message], sampling: Sampling, tools: list[Tool] | None = None
    ) -> Turn:
        if self._begun:
            sampling = replace(sampling, seed=other_seed(sampling.seed, self._begun))
        self._begun += 1
        asked = list(messages)  # a copy: the environment may change its own
        turn = await self.client.chat(self._build_prompt(asked, tools), sampling)
        self.turns.append((asked, turn))
        return turn

    def _build_prompt(self, messages: list[Message], tools: list[Tool] | None) -> Prompt:
        """Build a prompt; reuse the token ids of the longest turn with which `messages` begins."""
        found = Prompt(messages, tools, template_arguments=self.template_arguments)
        for asked, turn in self.turns:
            n = len(asked)
            is_longer = n >= found.covered and len(messages) > n
            if (
                is_longer
                and messages[:n] == asked
                and _is_message_of_turn(messages[n], turn)
                and turn.prompt_ids
            ):
                found = replace(found, before=turn.prompt_ids + turn.completion.ids, covered=n + 1)
        return found


def _is_message_of_turn(message: Message, turn: Turn) -> bool:
    """Return True if a message is what the model generated in a turn."""
    said = (
        message.get("role"),
        message.get("content") or "",
        _list_calls(message.get("tool_calls") or []),
    )
    return said == ("assistant", turn.text or "", _list_calls(turn.tool_calls))


def _list_calls(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
