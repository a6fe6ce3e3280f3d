"""Environments: a data set of tasks, how a conversation goes, and what it is worth.

row {question | prompt, answer, info} ─► Example ─ rollout(client, example, sampling) ─► Rollout with reward
                                                      └─ client.chat(messages) ─► Turn
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

from hone.environments.parsers import Parser
from hone.environments.rubric import Rubric
from hone.records import Example, Message, Rollout, Sampling, Turn


class ModelClient(Protocol):
    """All that an environment knows of a model."""

    async def chat(self, messages: list[Message], sampling: Sampling) -> Turn: ...


def checked(rollout: Any) -> Rollout:
    """What an environment gave, with numbers as Python has them. Raises TypeError where it is no rollout."""
    if not isinstance(rollout, Rollout):
        raise TypeError(f"rollout() gave {type(rollout).__name__}, not a Rollout")
    rollout.reward = float(rollout.reward)
    rollout.metrics = {name: float(value) for name, value in rollout.metrics.items()}
    return rollout


class Environment(ABC):
    """Base of environments. `dataset` and `eval_dataset` are Hugging Face data sets or lists of rows."""

    def __init__(
        self,
        dataset: Iterable[dict[str, Any]] | None = None,
        eval_dataset: Iterable[dict[str, Any]] | None = None,
        system_prompt: str | None = None,
        few_shot: list[Message] | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
    ) -> None:
        if dataset is None and eval_dataset is None:
            raise ValueError("an environment needs a dataset or an eval_dataset")
        self.system_prompt, self.few_shot = system_prompt, few_shot or []
        self.parser = parser or Parser()
        self.rubric = rubric or Rubric(parser=self.parser)
        self._train = None if dataset is None else [self._example(i, row) for i, row in enumerate(dataset)]
        self._eval = None if eval_dataset is None else [self._example(i, row) for i, row in enumerate(eval_dataset)]

    def get_dataset(self) -> list[Example]:
        """The examples to train on (those for evaluation where there are no others)."""
        return self._train if self._train is not None else self._eval or []

    def get_eval_dataset(self) -> list[Example]:
        """The examples to evaluate on (those for training where none are held out)."""
        return self._eval if self._eval is not None else self._train or []

    @abstractmethod
    async def rollout(self, client: ModelClient, example: Example, sampling: Sampling) -> Rollout:
        """One scored attempt at an example."""

    async def close(self) -> None:
        """Ends what was started for it."""
        return None

    async def score(self, rollout: Rollout, state: dict[str, Any]) -> Rollout:
        example = rollout.example
        rollout.reward, rollout.metrics = await self.rubric.score(
            prompt=example.prompt, completion=rollout.messages, answer=example.answer,
            info=example.info, state=state, parser=self.parser,
        )  # fmt: skip
        return rollout

    def _example(self, index: int, row: dict[str, Any]) -> Example:
        prompt = row.get("prompt")
        if prompt is None:
            if "question" not in row:
                raise ValueError(f"row {index} of the dataset has neither 'prompt' nor 'question': {sorted(row)}")
            prompt = [*self.few_shot, {"role": "user", "content": row["question"]}]
            if self.system_prompt:
                prompt = [{"role": "system", "content": self.system_prompt}, *prompt]
        return Example(row.get("example_id", index), prompt, str(row.get("answer", "")), row.get("info") or {})


class SingleTurnEnv(Environment):
    """One question, one answer."""

    async def rollout(self, client: ModelClient, example: Example, sampling: Sampling) -> Rollout:
        start = time.perf_counter()
        turn = await client.chat(example.prompt, sampling)
        messages: list[Message] = [{"role": "assistant", "content": turn.text}]
        rollout = await self.score(Rollout(example, [turn], messages), state={})
        rollout.seconds = time.perf_counter() - start
        return rollout
