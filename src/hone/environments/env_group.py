"""Combine environments into one: a joint data set, and rollouts run by each task's environment."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hone.environments.environment import Environment, ModelClient
from hone.environments.rubric import Rubric
from hone.records import Example, Message, Rollout, Sampling, Tool


class EnvGroup(Environment):
    """Several environments as one, with the examples of all.

    Args:
        envs: the environments.
        env_names: their names, which become the `task` of examples and the prefix of metrics;
            "env_0", "env_1", … by default.
        options: arguments of Environment.

    Raises ValueError unless each environment has a name of its own.
    """

    def __init__(
        self, envs: Sequence[Environment], env_names: Sequence[str] | None = None, **options: Any
    ) -> None:
        names = list(env_names or [f"env_{i}" for i in range(len(envs))])
        if len(names) != len(envs) or len(set(names)) != len(names) or not names:
            raise ValueError(
                f"EnvGroup: {len(envs)} environments and the names {names}; each needs a distinct name"
            )
        super().__init__(dataset=[], **options)
        self.envs = list(envs)
        self.env_names = names
        self.of = dict(zip(names, envs, strict=True))
        # (own, members') examples for training and for evaluation.
        self._owned: list[tuple[list[Example], list[Example]]] = []
        self._train = self._number_examples([env.get_dataset() for env in envs])
        self._eval = self._number_examples([env.get_eval_dataset() for env in envs])

    async def rollout(self, client: ModelClient, example: Example, sampling: Sampling) -> Rollout:
        rollout = await self.of[example.task].rollout(client, self._own_of(example), sampling)
        rollout.example = example
        rollout.metrics[f"{example.task}/reward"] = rollout.reward
        return rollout

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        if rollouts:
            await self.of[rollouts[0].example.task].score_group(rollouts)

    @property
    def has_group_rewards(self) -> bool:
        return any(env.has_group_rewards for env in self.envs)

    def on_reward_error(self, what: str) -> None:
        for env in self.envs:
            env.on_reward_error(what)

    def add_rubric(self, rubric: Rubric) -> None:
        """Add the rewards and metrics of a rubric to those of each environment."""
        for env in self.envs:
            env.add_rubric(rubric)

    def check(self) -> None:
        for env in self.envs:
            env.check()

    async def close(self) -> None:
        for env in self.envs:
            await env.close()

    def first_tools(self, example: Example) -> list[Tool] | None:
        return self.of[example.task].first_tools(self._own_of(example))

    def demonstrate(
        self, messages: list[Message], example: Example, rng: random.Random
    ) -> Message | str | None:
        return self.of[example.task].demonstrate(messages, self._own_of(example), rng)

    def _own_of(self, example: Example) -> Example:
        """Return the member environment's example that corresponds to an example of the group.

        The two differ in `id`; they differ in `task` only if the member is an EnvGroup. Raises
        ValueError if `example` is not in the group.
        """
        for examples, owned in self._owned:
            if example.id < len(owned) and _is_same(examples[example.id], example):
                return owned[example.id]
        raise ValueError(f"example {example.id} of {example.task} is not one of this group's")

    def _number_examples(self, of_each: list[list[Example]]) -> list[Example]:
        found: list[Example] = []
        for name, examples in zip(self.env_names, of_each, strict=True):
            found += [replace(one, id=len(found) + i, task=name) for i, one in enumerate(examples)]
        each = zip(self.env_names, self.envs, of_each, strict=True)
        owned = [
            one if isinstance(env, EnvGroup) else replace(one, task=name)
            for name, env, ones in each
            for one in ones
        ]
        self._owned.append((found, owned))
        return found


def _is_same(one: Example, other: Example) -> bool:
    """Return True if two examples have the same task, prompt, answer and info.

    Comparing ids is not enough, since they repeat between training and evaluation examples.
    """
    return (one.task, one.prompt, one.answer, one.info) == (
        other.task,
        other.prompt,
        other.answer,
        other.info,
    )
