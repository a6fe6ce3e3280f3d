"""Call users' functions (sync or async), within a timeout, with the arguments that they name."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from hone.users_code import CONTAINED

T = TypeVar("T")


def by_identity(look: Callable[[Callable[..., Any]], T]) -> Callable[[Callable[..., Any]], T]:
    """Cache the results of `look` by the identity of its argument, which may be unhashable."""
    known: dict[int, tuple[Callable[..., Any], T]] = {}

    def look_up(function: Callable[..., Any]) -> T:
        own = getattr(function, "__func__", function)  # a bound method is a new object every time
        found = known.get(id(own))
        if found is None or found[0] is not own:
            if len(known) > 4096:
                known.clear()
            found = known[id(own)] = own, look(function)
        return found[1]

    return look_up


@by_identity
def parameter_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return a function's parameter names, or None if it accepts any."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters)


@by_identity
def required_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of parameters without a default."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(function).parameters.values()
    return tuple(
        p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in kinds
    )


@by_identity
def positional_names(function: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)


class OutOfTime(TimeoutError):
    """Raised when a call exceeds its timeout."""


async def call_function(
    function: Callable[..., Any],
    available: dict[str, Any],
    timeout: float | None = None,
    positional: tuple[Any, ...] = (),
) -> Any:
    """Call a function with the `available` values that its parameters name.

    Args:
        available: values by parameter name; a function with `**kwargs` receives all of them.
        timeout: seconds; None for no limit.
        positional: further arguments, passed by position.

    Raises OutOfTime after `timeout` seconds; a sync function then continues in its thread,
    unattended. Raises ExitInUserCode if the function tries to end the process.
    """
    names = parameter_names(function)
    arguments = available if names is None else {k: available[k] for k in names if k in available}
    if timeout is None:
        with CONTAINED:
            value = function(*positional, **arguments)
            return (
                value if isinstance(value, float) or not inspect.isawaitable(value) else await value
            )
    with CONTAINED:
        return await _ask_within(timeout, function, positional, arguments)


async def _ask_within(
    timeout: float,
    function: Callable[..., Any],
    positional: tuple[Any, ...],
    arguments: dict[str, Any],
) -> Any:
    deadline = asyncio.timeout(timeout)
    try:
        async with deadline:
            if inspect.iscoroutinefunction(function):
                return await function(*positional, **arguments)
            value = await asyncio.to_thread(function, *positional, **arguments)
            return await value if inspect.isawaitable(value) else value
    except TimeoutError:
        if deadline.expired():
            raise OutOfTime from None
        raise  # raised by the function itself
