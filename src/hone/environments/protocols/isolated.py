"""Run an environment of Hone in worker processes (`env.workers`)."""

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hone.environments.environment import Environment, ModelClient
from hone.environments.protocols.worker_process import WorkerEnvironment
from hone.environments.rubric import Rubric
from hone.records import Example, Message, Rollout, Sampling, Tool

COMMAND = (sys.executable, "-P", "-m", "hone.environments.protocols.isolated_worker")


class Isolated(WorkerEnvironment):
    """Environment written for Hone whose rollouts run in worker processes.

    Each worker loads the environment by id and arguments. Examples, tools and demonstrations come
    from `environment` in this process. Rubrics added by `add_rubric` also run in this process, and
    see only those values of a rollout's state that JSON can represent.
    """

    def __init__(
        self,
        environment: Environment,
        name: str,
        arguments: dict[str, Any],
        workers: int,
        on_reward_error: str | None = None,
    ) -> None:
        self._command = [*COMMAND, name]
        super().__init__(name, [*self._command, on_reward_error or "fail"], arguments, workers)
        self.environment = environment
        self.added = list[Rubric]()
        self.name = environment.name
        self.parser = environment.parser
        self.rubric = environment.rubric
        self.call_timeout = environment.call_timeout
        self.system_prompt = environment.system_prompt

    def get_dataset(self, n: int = -1, seed: int | None = None) -> list[Example]:
        return self.environment.get_dataset(n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> list[Example]:
        return self.environment.get_eval_dataset(n, seed)

    def first_tools(self, example: Example) -> list[Tool] | None:
        return self.environment.first_tools(example)

    def demonstrate(
        self, messages: list[Message], example: Example, rng: random.Random
    ) -> Message | str | None:
        return self.environment.demonstrate(messages, example, rng)

    def check(self) -> None:
        self.environment.check()
        for rubric in self.added:
            rubric.check()

    def add_rubric(self, rubric: Rubric) -> None:
        if rubric.has_group_functions:
            raise ValueError(
                f"{self.name}: a rubric that compares rollouts cannot be added to one with env.workers"
            )
        self.added.append(rubric)

    def on_reward_error(self, what: str) -> None:
        """Set the effect of a failed reward function, "fail" or "zero", here and in the workers.

        Idle workers are restarted with the new setting; a busy worker keeps the old one until its
        process is replaced.
        """
        self.environment.on_reward_error(what)
        for rubric in self.added:
            rubric.set_on_error(what)
        for worker in self.workers:
            worker.change_command([*self._command, what])

    @property
    def has_group_rewards(self) -> bool:
        return self.environment.has_group_rewards

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Score a group; reward functions see only state values that JSON can represent."""
        scored = [rollout for rollout in rollouts if not rollout.error]
        if scored and self.has_group_rewards:
            message = {"rollouts": [rollout.to_json() for rollout in scored]}
            scores = await self.choose_worker().send_request("score", message)
            for rollout, (reward, metrics) in zip(scored, scores, strict=True):
                rollout.reward = reward
                rollout.metrics = metrics

    async def rollout(self, client: ModelClient, example: Example, sampling: Sampling) -> Rollout:
        message = {"example": asdict(example), "sampling": asdict(sampling)}
        done = await self.choose_worker().send_request("rollout", message, client)
        rollout = Rollout.from_json({**done, "example": example})
        for rubric in self.added:
            reward, metrics = await rubric.score(
                self.call_timeout, **self._scoring_arguments(rollout)
            )
            rollout.reward += reward
            rollout.metrics |= metrics
        return rollout
