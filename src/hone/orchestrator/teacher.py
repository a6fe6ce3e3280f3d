"""A teacher: a model on servers of its own, that writes completions or judges the tokens of the policy's.

writing: env.rollout(teacher) ─► completions to learn as they stand (loss sft)
score:   samples ─ POST /score ─► logprobs of their tokens under the teacher (loss opd)
"""

import asyncio
import itertools
from typing import Any

from hone.config.orchestrator import TeacherConfig
from hone.inference.client import HttpClient, connect
from hone.records import Message, Sample, Sampling, Turn


class Teacher:
    def __init__(self, config: TeacherConfig, timeout: float, extra_body: dict[str, Any]) -> None:
        self.config = config
        self.clients = connect(config, config.model, timeout=timeout, extra_body=extra_body)
        self._turns = itertools.cycle(self.clients)

    async def check(self) -> None:
        """Raises ConnectionError or ValueError, in words, unless every server of it answers and has the model."""
        for client in self.clients:
            await client.check()

    def writing(self, version: int) -> "Writer":
        """The teacher as an environment sees a model; what it writes counts as of this version."""
        return Writer(next(self._turns), version)

    async def score(self, samples: list[Sample]) -> None:
        """Gives samples the teacher's logprobs of their tokens, at the temperature that they were drawn with."""
        client = next(self._turns)

        async def one(sample: Sample) -> None:
            body = {"ids": sample.ids, "temperature": sample.temperature}
            sample.teacher_logprobs = [0.0, *(await client.control("score", body))["logprobs"]]

        await asyncio.gather(*map(one, samples))

    async def close(self) -> None:
        for client in self.clients:
            await client.__aexit__()


class Writer:
    def __init__(self, client: HttpClient, version: int) -> None:
        self.client, self.version = client, version

    async def chat(self, messages: list[Message], sampling: Sampling, before: list[int] | None = None) -> Turn:
        turn = await self.client.chat(messages, sampling, before)
        turn.completion.versions = [self.version] * len(turn.completion.ids)
        return turn
