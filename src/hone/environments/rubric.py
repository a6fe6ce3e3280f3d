"""Rubrics: weighted sums of reward functions.

per rollout   f(completion, answer, …) -> float               when the rollout has ended
per group     f(completions, answers, …) -> list of floats    when all rollouts of an example have ended
"""

import difflib
import functools
import logging
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from hone.environments.calls import OutOfTime, call_function, required_names
from hone.environments.parsers import Parser
from hone.users_code import ExitInUserCode

log = logging.getLogger("hone.environments")

RewardFunction = Callable[..., Any]
RAISED = "reward_raised"  # metric: how many functions returned no number
OF_ONE = ("prompt", "completion", "answer", "state", "info", "task", "parser")
OF_GROUP = {
    "prompts": "prompt",
    "completions": "completion",
    "answers": "answer",
    "states": "state",
    "infos": "info",
    "tasks": "task",
}
_said: set[tuple[str, str]] = set()


class RewardError(ValueError):
    """Raised when a reward function fails or returns no finite number."""


class Rubric:
    """Weighted sum of reward functions; each value is also a metric, by the function's name.

    The parameters of a function select its arguments: prompt, completion, answer, state, info,
    task, parser, and names registered with `add_class_object` (`**kwargs` receives all of them). A
    function returns a float and may be async. A function with a required parameter in the plural
    (completions, states, …) is a group function: it receives lists over all rollouts of an example
    and returns a list of floats. A function of weight 0 is only a metric.

    A function that raises or returns no finite number fails its rollout, which is then retried. If
    `on_error` is "zero", the function counts as 0 instead, and the metric `reward_raised` counts
    the functions that failed. In both cases the failure is logged once.
    """

    on_error = "fail"

    def __init__(
        self,
        funcs: Sequence[RewardFunction] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        **others: Any,
    ) -> None:
        unknown = sorted(set(others) - {"parallelize_scoring"})
        if unknown:
            raise ValueError(f"{type(self).__name__} takes no argument {unknown[0]!r}")
        self.funcs = list(funcs or [])
        self.weights = list(weights) if weights is not None else [1.0] * len(self.funcs)
        if len(self.weights) != len(self.funcs):
            raise ValueError(
                f"Rubric has {len(self.funcs)} functions but {len(self.weights)} weights"
            )
        self.parser = parser or Parser()
        self._has_parser = parser is not None
        self.class_objects: dict[str, Any] = {}

    def add_reward_func(self, func: RewardFunction, weight: float = 1.0) -> None:
        self.funcs.append(func)
        self.weights.append(weight)

    def add_metric(self, func: RewardFunction, weight: float = 0.0) -> None:
        self.add_reward_func(func, weight)

    def add_class_object(self, name: str, value: Any) -> None:
        """Pass `value` to reward functions that have a parameter called `name`."""
        self.class_objects[name] = value

    @property
    def has_group_functions(self) -> bool:
        return any(map(_is_of_group, self.funcs))

    def set_on_error(self, on_error: str) -> None:
        self.on_error = on_error

    def check(self) -> None:
        """Raise ValueError if a function needs an argument that is not available."""
        for func in self.funcs:
            names = OF_GROUP if _is_of_group(func) else OF_ONE
            known = [*names, "parser", *self.class_objects]
            for name in required_names(func):
                if name not in known:
                    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                    hint = f"did you mean {near[0]}? " if near else ""
                    raise ValueError(
                        f"reward function {name_of(func)} needs {name!r}, which is not available; {hint}"
                        f"(there are: {', '.join(dict.fromkeys(known))})"
                    )

    async def score(
        self, timeout: float | None = None, **available: Any
    ) -> tuple[float, dict[str, float]]:
        """Return the reward of one rollout, and the value of each function by name.

        `timeout` is in seconds per call; other keywords are the values that functions can receive.
        Raises RewardError.
        """
        available = {"parser": self.parser, **available, **self.class_objects}
        if self._has_parser:  # otherwise the environment's parser
            available["parser"] = self.parser
        found: dict[int, float | None] = {}
        for i, func in enumerate(self.funcs):
            if not _is_of_group(func):
                values = await self._call_function(func, available, timeout, _one_number)
                found[i] = values[0] if values else None
        return self._sum_scores(found)

    async def score_group(
        self, available: Sequence[dict[str, Any]], timeout: float | None = None
    ) -> list[tuple[float, dict[str, float]]]:
        """Return each rollout's reward from group functions, and the functions' values.

        Args:
            available: for each rollout of the group, the values that functions can receive.
            timeout: seconds per function call.

        Raises RewardError.
        """
        every: dict[str, Any] = {
            many: [one[name] for one in available] for many, name in OF_GROUP.items()
        }
        every |= {"parser": self.parser, **self.class_objects}
        mine = [i for i, func in enumerate(self.funcs) if _is_of_group(func)]
        found = {
            i: await self._call_for_all(self.funcs[i], every, len(available), timeout) for i in mine
        }
        return [
            self._sum_scores({i: values[k] for i, values in found.items()})
            for k in range(len(available))
        ]

    async def _call_for_all(
        self, func: RewardFunction, available: dict[str, Any], count: int, timeout: float | None
    ) -> list[float | None]:
        def read_numbers(value: Any) -> list[float]:
            values = [_read_number(one) for one in value]
            if len(values) != count:
                raise TypeError(f"gave {len(values)} values for {count} rollouts")
            return values

        found = await self._call_function(func, available, timeout, read_numbers)
        return list(found) if found else [None] * count

    async def _call_function(
        self,
        func: RewardFunction,
        available: dict[str, Any],
        timeout: float | None,
        read: Callable[[Any], list[float]],
    ) -> list[float] | None:
        try:
            return read(await call_function(func, available, timeout))
        except Exception as error:  # users' code may raise anything
            what = (
                str(error)
                if isinstance(error, _NoNumber)
                else f"raised {type(error).__name__}: {error}"
            )
            what = (
                f"wanted to end the process: {error}" if isinstance(error, ExitInUserCode) else what
            )
            what = f"gave no value within {timeout:g} s" if isinstance(error, OutOfTime) else what
            at = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
            place = "" if isinstance(error, _NoNumber) else f" ({at.filename}:{at.lineno})"
            self._warn_once(func, what + place, at.lineno)
            if self.on_error == "zero":
                return None
            raise RewardError(f"reward function {name_of(func)} {what}") from error

    def _warn_once(self, func: RewardFunction, what: str, where: object) -> None:
        name = name_of(func)
        if (name, str(where)) not in _said:
            _said.add((name, str(where)))
            then = "counts 0" if self.on_error == "zero" else "fails its rollouts"
            log.warning("reward function %s %s; that %s, here and from now on", name, what, then)

    def _sum_scores(self, found: dict[int, float | None]) -> tuple[float, dict[str, float]]:
        names = self.function_names()
        values = {i: 0.0 if value is None else value for i, value in found.items()}
        metrics = {names[i]: value for i, value in values.items()}
        reward = sum(self.weights[i] * value for i, value in values.items())
        lost = sum(value is None for value in found.values())
        return reward, metrics | ({RAISED: float(lost)} if lost else {})

    def function_names(self) -> list[str]:
        """Return the functions' names; a repeated name becomes NAME_2."""
        return list(make_unique(tuple(map(name_of, self.funcs))))

    get_reward_func_names = function_names


class RubricGroup(Rubric):
    """Several rubrics as one, with the sum of their rewards."""

    def __init__(self, rubrics: Sequence[Rubric], **others: Any) -> None:
        if not rubrics:
            raise ValueError("RubricGroup needs at least one rubric")
        super().__init__(**others)
        self.rubrics = list(rubrics)

    def add_reward_func(self, func: RewardFunction, weight: float = 1.0) -> None:
        self.rubrics[0].add_reward_func(func, weight)

    def add_class_object(self, name: str, value: Any) -> None:
        for rubric in self.rubrics:
            rubric.add_class_object(name, value)

    @property
    def has_group_functions(self) -> bool:
        return any(rubric.has_group_functions for rubric in self.rubrics)

    def set_on_error(self, on_error: str) -> None:
        for rubric in self.rubrics:
            rubric.set_on_error(on_error)

    def check(self) -> None:
        for rubric in self.rubrics:
            rubric.check()

    async def score(
        self, timeout: float | None = None, **available: Any
    ) -> tuple[float, dict[str, float]]:
        return _merge_scores([await rubric.score(timeout, **available) for rubric in self.rubrics])

    async def score_group(
        self, available: Sequence[dict[str, Any]], timeout: float | None = None
    ) -> list[tuple[float, dict[str, float]]]:
        found = [await rubric.score_group(available, timeout) for rubric in self.rubrics]
        return [_merge_scores(of_one) for of_one in zip(*found, strict=True)]

    def function_names(self) -> list[str]:
        return list(
            make_unique(tuple(name for rubric in self.rubrics for name in rubric.function_names()))
        )

    get_reward_func_names = function_names


def _merge_scores(
    scores: Sequence[tuple[float, dict[str, float]]],
) -> tuple[float, dict[str, float]]:
    items = [
        (name, value) for _, metrics in scores for name, value in metrics.items() if name != RAISED
    ]
    names = make_unique(tuple(name for name, _ in items))
    metrics = {name: value for name, (_, value) in zip(names, items, strict=True)}
    lost = sum(metrics.get(RAISED, 0.0) for _, metrics in scores)
    return sum(reward for reward, _ in scores), metrics | ({RAISED: lost} if lost else {})


@functools.lru_cache(maxsize=256)
def make_unique(given: tuple[str, ...]) -> tuple[str, ...]:
    """Make names unique: the second occurrence of NAME becomes NAME_2."""
    names: list[str] = []
    for name in given:
        own = name
        number = 1
        while own in names or (number > 1 and own in given):
            number += 1
            own = f"{name}_{number}"
        names.append(own)
    return tuple(names)


def name_of(func: RewardFunction) -> str:
    while isinstance(func, functools.partial):
        func = func.func
    return str(getattr(func, "__name__", type(func).__name__))


def _is_of_group(func: RewardFunction) -> bool:
    return bool(OF_GROUP.keys() & set(required_names(func)))


class _NoNumber(TypeError):
    pass


def _one_number(value: Any) -> list[float]:
    return [_read_number(value)]


def _read_number(value: Any) -> float:
    """Convert a value to a finite float. Raises _NoNumber with the reason otherwise."""
    if isinstance(value, str) or value is None:
        raise _NoNumber(f"returned {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _NoNumber(f"returned {type(value).__name__}, not a number") from None
    if not math.isfinite(number):
        raise _NoNumber(f"returned {value}")
    return number
