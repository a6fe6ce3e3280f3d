"""Rubrics: a weighted sum of reward functions."""

import functools
import inspect
import logging
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from hone.environments.parsers import Parser

log = logging.getLogger("hone.environments")

RewardFunction = Callable[..., Any]
RAISED = "reward_raised"  # how many functions gave no number
_said: set[tuple[str, str]] = set()


class Rubric:
    """reward = sum of weight x value over the functions; the values are kept as metrics by function name.

    A function takes by name what it needs of prompt, completion, answer, state, info and parser (or all with
    `**kwargs`) and returns a float, or awaits one. One that raises or returns no finite number counts 0, is
    logged the first time, and counted in the metric `reward_raised`. Functions of weight 0 are metrics only.
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunction] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
    ) -> None:
        self.funcs = list(funcs or [])
        self.weights = list(weights) if weights is not None else [1.0] * len(self.funcs)
        if len(self.weights) != len(self.funcs):
            raise ValueError(f"Rubric has {len(self.funcs)} functions but {len(self.weights)} weights")
        self.parser = parser or Parser()

    def add_reward_func(self, func: RewardFunction, weight: float = 1.0) -> None:
        self.funcs.append(func)
        self.weights.append(weight)

    async def score(self, **available: Any) -> tuple[float, dict[str, float]]:
        """The reward and the value of every function; `available` is what functions may ask for."""
        available.setdefault("parser", self.parser)
        found = [await _call(func, available) for func in self.funcs]
        values = [0.0 if value is None else value for value in found]
        reward = sum(w * v for w, v in zip(self.weights, values, strict=True))
        metrics = dict(zip(self._names(), values, strict=True))
        return reward, metrics | ({RAISED: float(found.count(None))} if None in found else {})

    def _names(self) -> list[str]:
        """Of the functions; the second of a name is NAME_2."""
        names: list[str] = []
        for func in self.funcs:
            name = _name(func)
            same = sum(one == name or one.startswith(f"{name}_") for one in names)
            names.append(f"{name}_{same + 1}" if name in names else name)
        return names


def _name(func: RewardFunction) -> str:
    while isinstance(func, functools.partial):
        func = func.func
    return str(getattr(func, "__name__", type(func).__name__))


@functools.lru_cache(maxsize=256)
def _wanted(func: RewardFunction) -> frozenset[str] | None:
    """Names of the parameters of a reward function; None when it takes everything."""
    parameters = inspect.signature(func).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters)


async def _call(func: RewardFunction, available: dict[str, Any]) -> float | None:
    wanted = _wanted(func)
    arguments = available if wanted is None else {k: v for k, v in available.items() if k in wanted}
    try:
        value = func(**arguments)
        value = float(await value if inspect.isawaitable(value) else value)
    except Exception as error:  # a user's function: whatever it raises must not end the run
        at = traceback.extract_tb(error.__traceback__)[-1]
        _say_once(f"raised {type(error).__name__}: {error} ({at.filename}:{at.lineno})", func, at.lineno)
        return None
    if not math.isfinite(value):
        _say_once(f"returned {value}", func, value)
        return None
    return value


def _say_once(what: str, func: RewardFunction, where: object) -> None:
    name = _name(func)
    if (name, str(where)) not in _said:
        _said.add((name, str(where)))
        log.warning("reward function %s %s; it counts 0, here and from now on (metric %s)", name, what, RAISED)
