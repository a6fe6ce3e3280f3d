"""The model as one rollout sees it: what was said stays in the tokens that said it, and every turn has its own draws.

turn 1: messages ─► prompt ids, completion ids      turn 2: messages, of which the first are turn 1's and its reply
                              └────────────────────────────► those ids, then what the template adds after them
"""

from dataclasses import replace
from typing import Protocol

from hone.records import Message, Sampling, Turn, other_seed


class TokenClient(Protocol):
    """A model that goes on from the ids of a conversation's earlier turns."""

    async def chat(self, messages: list[Message], sampling: Sampling, before: list[int] | None = None) -> Turn: ...


class Conversation:
    def __init__(self, client: TokenClient) -> None:
        self.client = client
        self._turns: list[tuple[list[Message], Turn]] = []

    async def chat(self, messages: list[Message], sampling: Sampling) -> Turn:
        if self._turns:
            sampling = replace(sampling, seed=other_seed(sampling.seed, len(self._turns)))
        asked = list(messages)  # the environment may go on with its own
        turn = await self.client.chat(messages, sampling, self._before(messages))
        self._turns.append((asked, turn))
        return turn

    def _before(self, messages: list[Message]) -> list[int] | None:
        """The ids of the longest of the turns so far that these messages go on from."""
        found: list[int] = []
        for asked, turn in self._turns:
            n = len(asked)
            reply = messages[n] if len(messages) > n and messages[:n] == asked else {}
            if reply.get("role") == "assistant" and reply.get("content") == turn.text:
                ids = turn.prompt_ids + turn.completion.ids
                found = max(found, ids, key=len)
        return found or None
