"""A teacher: a model on separate servers that writes completions or scores the policy's tokens.

writing: env.rollout(teacher) ─► completions to imitate (loss sft)
score:   samples ─ POST /score ─► logprobs of their tokens under the teacher (loss opd)
"""

import itertools
import logging
from typing import Any

import numpy as np

from hone.clients.fleet import Fleet
from hone.clients.http import HttpClient, ServerLost, connect_clients
from hone.config.orchestrator_config import TeacherConfig
from hone.records import Prompt, Sample, Sampling, Turn


class Teacher:
    def __init__(
        self, config: TeacherConfig, timeout: float, extra_body: dict[str, Any], log: logging.Logger
    ) -> None:
        self.clients = connect_clients(config, config.model, timeout=timeout, extra_body=extra_body)
        self.fleet = Fleet(self.clients, _as_it_is, config.ready_timeout, log)
        self._turns = itertools.cycle(self.clients)

    async def check_servers(self) -> None:
        """Raise ConnectionError or ValueError unless every server answers and has the model."""
        for client in self.clients:
            await client.wait_until_serving()

    def writer_of_version(self, version: int) -> "Writer":
        """Return a client that samples from the teacher and labels its tokens with `version`."""
        return Writer(self.fleet, version)

    async def score_samples(self, samples: list[Sample]) -> None:
        """Add the teacher's logprobs to a group's samples, at their sampling temperature."""
        body = {
            "ids": [sample.ids.tolist() for sample in samples],
            "temperature": samples[0].temperature,
        }
        answer = await self._call_control("score", body)
        for sample, logprobs in zip(samples, answer["logprobs"], strict=True):
            sample.teacher_logprobs = np.array([0.0, *logprobs])

    async def _call_control(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call a control route of the next server that answers. Raises ConnectionError."""
        for client in itertools.islice(self._turns, len(self.clients)):
            try:
                answer: dict[str, Any] = await client.call_control(route, body)
                return answer
            except ServerLost as error:
                lost = error
            except RuntimeError as error:
                raise ConnectionError(f"orchestrator.teacher: {error}") from None
        raise lost

    async def close(self) -> None:
        await self.fleet.close()


class Writer:
    def __init__(self, fleet: Fleet, version: int) -> None:
        self.fleet = fleet
        self.version = version

    async def chat(self, prompt: Prompt, sampling: Sampling) -> Turn:
        turn = await self.fleet.chat(prompt, sampling)
        turn.completion.versions = [self.version] * len(turn.completion.ids)
        return turn


async def _as_it_is(client: HttpClient) -> int:
    """Return version 0 for a restarted teacher server: its weights never change."""
    return 0
