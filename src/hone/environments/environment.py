"""Environments: a data set of tasks, how a conversation goes, and what it is worth.

row {question | prompt, answer, info, task} ─► Example ─ rollout(client, example, sampling) ─► Rollout with reward
                                                            └─ client.chat(messages) ─► Turn
rollouts of one example ─ score_group ─► rewards of functions that compare them
"""

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from hone.environments.parsers import Parser
from hone.environments.rubric import Rubric, RubricGroup
from hone.records import Example, Message, Rollout, Sampling, Tool, Turn
from hone.text.messages import drop_nulls, to_plain

Rows = Iterable[dict[str, Any]]
State = dict[
    str, Any
]  # what is known of a rollout under way, for its environment and its reward functions
HARMLESS = {  # keys of v0 that say how it runs things, which Hone settles elsewhere
    "env_args",
    "env_id",
    "interleaved_rollouts",
    "map_kwargs",
    "max_concurrent",
    "max_seq_len",
    "max_workers",
    "score_rollouts",
}


class ModelClient(Protocol):
    """All that an environment knows of a model."""

    async def chat(
        self, messages: list[Message], sampling: Sampling, tools: list[Tool] | None = None
    ) -> Turn:
        """Raises ContextFull where the conversation leaves no room for an answer."""
        ...


def check_rollout(rollout: Any) -> Rollout:
    """What an environment gave, with numbers as Python has them. Raises TypeError where it is no rollout."""
    if not isinstance(rollout, Rollout):
        raise TypeError(f"rollout() gave {type(rollout).__name__}, not a Rollout")
    rollout.reward = float(rollout.reward)
    rollout.metrics = {name: float(value) for name, value in rollout.metrics.items()}
    return rollout


class Environment(ABC):
    """Base of environments. `dataset` and `eval_dataset` are Hugging Face data sets, lists of rows, or functions that
    give one. `call_timeout`: seconds that an answer of the environment, a tool or a reward function may take."""

    name = ""  # the id that it was loaded by
    template_arguments: Mapping[str, Any] = MappingProxyType(
        {}
    )  # of the chat template, for its prompts

    def __init__(
        self,
        dataset: Rows | Callable[[], Rows] | None = None,
        eval_dataset: Rows | Callable[[], Rows] | None = None,
        system_prompt: str | None = None,
        few_shot: list[Message] | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        call_timeout: float | None = None,
        **others: Any,
    ) -> None:
        if dataset is None and eval_dataset is None:
            raise ValueError("an environment needs a dataset or an eval_dataset")
        if others.pop("message_type", "chat") != "chat":
            raise ValueError('message_type: Hone speaks to models in messages ("chat") alone')
        unknown = sorted(set(others) - HARMLESS)
        if unknown:
            raise ValueError(f"{type(self).__name__} takes no argument {unknown[0]!r}")
        self.system_prompt, self.few_shot = system_prompt, few_shot or []
        self.parser = parser or Parser()
        self.rubric = rubric or Rubric(parser=self.parser)
        self.call_timeout = call_timeout
        self._train, self._eval = self._build_examples(dataset), self._build_examples(eval_dataset)

    def get_dataset(self, n: int = -1, seed: int | None = None) -> list[Example]:
        """The examples to train on (those for evaluation where there are no others)."""
        return _select_examples(
            self._train if self._train is not None else self._eval or [], n, seed
        )

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> list[Example]:
        """The examples to evaluate on (those for training where none are held out)."""
        return _select_examples(
            self._eval if self._eval is not None else self._train or [], n, seed
        )

    @abstractmethod
    async def rollout(self, client: ModelClient, example: Example, sampling: Sampling) -> Rollout:
        """One scored attempt at an example."""

    def demonstrate(
        self, messages: list[Message], example: Example, rng: random.Random
    ) -> Message | str | None:
        """What a good answer to `messages` is: its text, or a message with tool calls. None where that is not known.

        From it come data for SFT (`hone env data`) and the check of rewards (`hone env check`). Unless overridden it is
        the example's answer as the parser writes it.
        """
        return None if example.answer == "" else self.parser.write(str(example.answer))

    def first_tools(self, example: Example) -> list[Tool] | None:
        """Return the tools that the model is told of with an example's prompt; None where there are none."""
        return None

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Adds to the rewards of an example's rollouts what functions give that compare them. Raises RewardError."""
        scored = [rollout for rollout in rollouts if not rollout.error]
        if scored and self.has_group_rewards:
            available = [self._scoring_arguments(rollout) for rollout in scored]
            found = await self.rubric.score_group(available, self.call_timeout)
            for rollout, (reward, metrics) in zip(scored, found, strict=True):
                rollout.reward += reward
                rollout.metrics |= metrics

    async def close(self) -> None:
        """Ends what was started for it."""
        return None

    def add_rubric(self, rubric: Rubric) -> None:
        """Adds the rewards and metrics of another rubric to those of its own."""
        self.rubric = RubricGroup([self.rubric, rubric])

    async def score(self, rollout: Rollout, state: State) -> Rollout:
        """Gives a rollout its reward and metrics. Raises RewardError for a function that gives no number."""
        rollout.state = state
        rollout.reward, rollout.metrics = await self.rubric.score(
            self.call_timeout, **self._scoring_arguments(rollout)
        )
        state["reward"], state["metrics"] = rollout.reward, rollout.metrics
        return rollout

    @property
    def has_group_rewards(self) -> bool:
        """Whether `score_group` has something to add."""
        return self.rubric.has_group_functions

    def check(self) -> None:
        """Raises ValueError for a reward function that asks for what is not there."""
        self.rubric.check()

    def on_reward_error(self, what: str) -> None:
        """What a reward function that gives no number does to its rollout: "fail" it, or count "zero" in it."""
        self.rubric.set_on_error(what)

    def _scoring_arguments(self, rollout: Rollout) -> dict[str, Any]:
        example, state = rollout.example, rollout.state
        return {
            "prompt": state.get("prompt", example.prompt),
            "completion": rollout.messages,
            "parser": self.parser,
            "answer": state.get("answer", example.answer),
            "info": state.get("info", example.info),
            "state": state,
            "task": example.task,
        }

    def _build_examples(self, rows: Rows | Callable[[], Rows] | None) -> list[Example] | None:
        rows = rows() if callable(rows) else rows
        if rows is None:
            return None
        is_arrow = hasattr(rows, "features")  # a datasets.Dataset: its columns add nulls
        return [
            self._build_example(i, _without_nulls(row) if is_arrow else row)
            for i, row in enumerate(rows)
        ]

    def _build_example(self, index: int, row: dict[str, Any]) -> Example:
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        prompt = prompt if prompt is None else _checked_prompt(to_plain(prompt), index)
        if (
            prompt is not None
            and self.system_prompt
            and not any(one["role"] == "system" for one in prompt)
        ):
            prompt = [{"role": "system", "content": self.system_prompt}, *prompt]
        if prompt is None:
            if "question" not in row:
                raise ValueError(
                    f"row {index} of the dataset has neither 'prompt' nor 'question': {sorted(row)}"
                )
            prompt = [*self.few_shot, {"role": "user", "content": row["question"]}]
            if self.system_prompt:
                prompt = [{"role": "system", "content": self.system_prompt}, *prompt]
        answer, info = row.get("answer"), row.get("info")
        try:
            info = json.loads(info) if isinstance(info, str) and info else info
        except ValueError as error:
            raise ValueError(
                f"row {index} of the dataset: info is text that is not JSON: {error}"
            ) from None
        example_id = row.get("example_id", index)
        return Example(example_id, prompt, _as_json(answer), info or {}, row.get("task") or "")


def _checked_prompt(prompt: Any, index: int) -> list[Message]:
    """Return a prompt without keys of no value. Raises ValueError for what is no list of messages."""
    if not isinstance(prompt, list) or not all(
        isinstance(one, dict) and one.get("role") for one in prompt
    ):
        raise ValueError(
            f"row {index} of the dataset: its prompt is no list of messages with roles: {prompt!r:.100}"
        )
    return [{key: value for key, value in one.items() if value is not None} for one in prompt]


def _as_json(answer: Any) -> Any:
    """Return an answer as JSON has it, text of what JSON has no form for, and empty text for None."""
    answer = "" if answer is None else to_plain(answer)
    try:
        json.dumps(answer)
    except (TypeError, ValueError):
        return str(answer)
    return answer


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of an Arrow table whose prompt has no nulls that the type of its column added."""
    return {key: drop_nulls(value) if key == "prompt" else value for key, value in row.items()}


def _select_examples(examples: list[Example], n: int, seed: int | None) -> list[Example]:
    if seed is not None:
        examples = random.Random(seed).sample(examples, len(examples))
    return examples if n < 0 else examples[:n]
