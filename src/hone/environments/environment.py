"""Base class of environments: a data set of tasks, the rollout of a task, and its reward.

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
# What is known of a rollout in progress, for its environment and reward functions.
State = dict[str, Any]
HARMLESS = {  # arguments of v0 that Hone configures elsewhere
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
    """Interface through which environments request answers from a model."""

    async def chat(
        self, messages: list[Message], sampling: Sampling, tools: list[Tool] | None = None
    ) -> Turn:
        """Request an answer. Raises ContextFull if `messages` fill the context length."""
        ...


def check_rollout(rollout: Any) -> Rollout:
    """Convert a rollout's reward and metrics to floats. Raises TypeError if it is not a Rollout."""
    if not isinstance(rollout, Rollout):
        raise TypeError(f"rollout() gave {type(rollout).__name__}, not a Rollout")
    rollout.reward = float(rollout.reward)
    rollout.metrics = {name: float(value) for name, value in rollout.metrics.items()}
    return rollout


class Environment(ABC):
    """Base class of environments.

    Args:
        dataset: training rows: a Hugging Face data set, a list of rows, or a function that returns one of these.
        eval_dataset: evaluation rows, in the same form.
        system_prompt: put before prompts that have no system message.
        few_shot: messages put before the `question` of a row without `prompt`.
        parser: extracts the answer from a completion; by default the whole text.
        rubric: computes rewards; empty by default.
        call_timeout: seconds that an environment response, a tool or a reward function may take.

    Raises ValueError for unknown arguments, and for rows that have neither `prompt` nor `question`
    or are malformed.
    """

    name = ""  # the id it was loaded by
    # Arguments of the chat template for its prompts.
    template_arguments: Mapping[str, Any] = MappingProxyType({})

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
            raise ValueError('message_type: Hone only supports chat messages ("chat")')
        unknown = sorted(set(others) - HARMLESS)
        if unknown:
            raise ValueError(f"{type(self).__name__} takes no argument {unknown[0]!r}")
        self.system_prompt = system_prompt
        self.few_shot = few_shot or []
        self.parser = parser or Parser()
        self.rubric = rubric or Rubric(parser=self.parser)
        self.call_timeout = call_timeout
        self._train, self._eval = self._build_examples(dataset), self._build_examples(eval_dataset)

    def get_dataset(self, n: int = -1, seed: int | None = None) -> list[Example]:
        """Return the training examples, or the evaluation examples if there is no training data.

        Args:
            n: number of examples to return; -1 for all.
            seed: seed of a shuffle before the selection; None keeps the order.
        """
        return _select_examples(
            self._train if self._train is not None else self._eval or [], n, seed
        )

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> list[Example]:
        """Return the evaluation examples, or the training examples if there is no evaluation data.

        `n` and `seed` are as in `get_dataset`.
        """
        return _select_examples(
            self._eval if self._eval is not None else self._train or [], n, seed
        )

    @abstractmethod
    async def rollout(self, client: ModelClient, example: Example, sampling: Sampling) -> Rollout:
        """Run and score one attempt at an example."""

    def demonstrate(
        self, messages: list[Message], example: Example, rng: random.Random
    ) -> Message | str | None:
        """Return a good answer to `messages`: text or a message with tool calls; None if unknown.

        The default is the example's answer in the parser's format. `hone env data` makes SFT data
        from these answers, and `hone env check` checks their rewards.
        """
        return None if example.answer == "" else self.parser.write(str(example.answer))

    def first_tools(self, example: Example) -> list[Tool] | None:
        """Return the tools offered with an example's prompt, or None."""
        return None

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Add rewards of functions that compare the rollouts of one example. Raises RewardError."""
        scored = [rollout for rollout in rollouts if not rollout.error]
        if scored and self.has_group_rewards:
            available = [self._scoring_arguments(rollout) for rollout in scored]
            found = await self.rubric.score_group(available, self.call_timeout)
            for rollout, (reward, metrics) in zip(scored, found, strict=True):
                rollout.reward += reward
                rollout.metrics |= metrics

    async def close(self) -> None:
        """Release resources that the environment has started, such as processes."""
        return None

    def add_rubric(self, rubric: Rubric) -> None:
        """Add the rewards and metrics of another rubric."""
        self.rubric = RubricGroup([self.rubric, rubric])

    async def score(self, rollout: Rollout, state: State) -> Rollout:
        """Set a rollout's reward and metrics. Raises RewardError if a function returns no number."""
        rollout.state = state
        rollout.reward, rollout.metrics = await self.rubric.score(
            self.call_timeout, **self._scoring_arguments(rollout)
        )
        state["reward"], state["metrics"] = rollout.reward, rollout.metrics
        return rollout

    @property
    def has_group_rewards(self) -> bool:
        """Return True if `score_group` adds rewards."""
        return self.rubric.has_group_functions

    def check(self) -> None:
        """Raise ValueError if a reward function needs an argument that is not available."""
        self.rubric.check()

    def on_reward_error(self, what: str) -> None:
        """Set the effect of a failed reward function.

        `what` is "fail" (the rollout fails) or "zero" (the function counts as 0).
        """
        self.rubric.set_on_error(what)

    def _scoring_arguments(self, rollout: Rollout) -> dict[str, Any]:
        example = rollout.example
        state = rollout.state
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
        answer = row.get("answer")
        info = row.get("info")
        try:
            info = json.loads(info) if isinstance(info, str) and info else info
        except ValueError as error:
            raise ValueError(
                f"row {index} of the dataset: info is text that is not JSON: {error}"
            ) from None
        example_id = row.get("example_id", index)
        return Example(example_id, prompt, _as_json(answer), info or {}, row.get("task") or "")


def _checked_prompt(prompt: Any, index: int) -> list[Message]:
    """Return the messages of a row's prompt without keys whose value is None.

    Raises ValueError, which names row `index`, if `prompt` is not a list of messages with roles.
    """
    if not isinstance(prompt, list) or not all(
        isinstance(one, dict) and one.get("role") for one in prompt
    ):
        raise ValueError(
            f"row {index} of the dataset: its prompt is no list of messages with roles: {prompt!r:.100}"
        )
    return [{key: value for key, value in one.items() if value is not None} for one in prompt]


def _as_json(answer: Any) -> Any:
    """Convert an answer to JSON values: None becomes "", other objects become text."""
    answer = "" if answer is None else to_plain(answer)
    try:
        json.dumps(answer)
    except (TypeError, ValueError):
        return str(answer)
    return answer


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of an Arrow table with nulls removed from its prompt.

    Arrow fills keys that a message lacks, but other messages have, with nulls.
    """
    return {key: drop_nulls(value) if key == "prompt" else value for key, value in row.items()}


def _select_examples(examples: list[Example], n: int, seed: int | None) -> list[Example]:
    if seed is not None:
        examples = random.Random(seed).sample(examples, len(examples))
    return examples if n < 0 else examples[:n]
