"""Multi-turn conversations between a model and an environment.

setup_state ─► [ is_completed? ─► env_response ─► client.chat ] … ─► cleanup ─► score
                      └ max_turns_reached, prompt_too_long, has_final_env_response, methods marked `@stop`
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hone.environments.calls import call_function, positional_names
from hone.environments.environment import Environment, ModelClient, State
from hone.records import ContextFull, Example, Message, Rollout, Sampling, Tool, Turn

log = logging.getLogger("hone.environments")
F = TypeVar("F", bound=Callable[..., Any])


def _make_decorator(kind: str, words: str) -> Callable[..., Any]:
    """Return a decorator that marks methods as `kind`, with an optional `priority`.

    Methods of higher priority run first. `words` are inserted into the decorator's docstring.
    """

    def mark_method(method: F | None = None, *, priority: int = 0) -> Any:
        def with_priority(method: F) -> F:
            setattr(method, f"hone_{kind}", priority)
            return method

        return with_priority if method is None else with_priority(method)

    mark_method.__doc__ = f"Mark a method {words} Methods of higher priority run first."
    return mark_method


stop = _make_decorator(
    "stop", "`condition(self, state) -> bool`: the conversation ends when it holds."
)
cleanup = _make_decorator(
    "cleanup", "`clean(self, state)` that is called when a rollout has ended, however it did."
)
teardown = _make_decorator("teardown", "that is called when the environment is no longer needed.")


class MultiTurnEnv(Environment):
    """A model and an environment take turns, with at most `max_turns` model turns (-1: no limit).

    Override `env_response(messages, state)` to answer the model's last message, and
    `setup_state(state)` to prepare a rollout. A rollout ends when a method marked `@stop` returns
    True, or when `env_response` sets `state["final_env_response"]` to closing messages, which the
    model does not answer. All these methods may be sync or async.

    `state` has prompt, completion (messages so far), answer, info, task, example_id, turn (number
    of model turns), trajectory (prompt and completion of each turn), and what the environment adds.
    """

    times_its_calls = False  # True if env_response applies `call_timeout` itself to what it calls

    def __init__(self, max_turns: int = -1, **others: Any) -> None:
        super().__init__(**others)
        self.max_turns = max_turns
        self._told = False
        self._stops = dict(self._marked_methods("stop"))
        self._cleanups = list(self._marked_methods("cleanup"))

    # ------------------------------------------------------------------------------------------ overridden

    async def setup_state(self, state: State) -> State:
        return state

    async def env_response(self, messages: list[Message], state: State) -> Any:
        """Return the environment's answer to `messages`, whose last one is the model's."""
        raise NotImplementedError(f"{type(self).__name__} has no env_response(messages, state)")

    async def is_completed(self, *given: Any) -> bool:
        """Return True if the conversation is over; `state["stop_condition"]` then says why.

        An override takes (state) or (messages, state).
        """
        state: State = given[-1]
        for name, holds in BUILT_IN.items():
            if holds(self, state):
                state["stop_condition"] = name
                return True
        for name, condition in self._stops.items():
            if await call_function(condition, {"state": state, "environment": self}):
                state["stop_condition"] = name
                return True
        return False

    def tools_of(self, state: State) -> list[Tool] | None:
        """Return the tools offered to the model."""
        return None

    # ------------------------------------------------------------------------------------------ the loop

    async def rollout(self, client: ModelClient, example: Example, sampling: Sampling) -> Rollout:
        # The rollouts of a group share the example.
        start = time.perf_counter()
        state = _first_state(example.copy())
        turns: list[Turn] = []
        asked = 0.0  # seconds spent in the model
        try:
            if not self._is_ours("setup_state"):
                state = await self._call_hook("setup_state", state) or state
            while not await self._is_over(state):
                messages = [*state["prompt"], *state["completion"]]
                if turns:
                    answers = _parse_messages(
                        await self._call_hook("env_response", state, messages), state
                    )
                    if state.get("final_env_response") is not None:
                        state["completion"] += _parse_messages(state["final_env_response"], state)
                        continue
                    state["completion"] += answers
                    messages += answers
                now = time.perf_counter()
                try:
                    turn = await client.chat(messages, sampling, self.tools_of(state))
                except ContextFull:
                    if not turns:
                        raise
                    state["prompt_too_long"] = True
                    self._tell_of_room(len(turns))
                    continue
                finally:
                    asked += time.perf_counter() - now
                turns.append(turn)
                state["turn"] += 1
                state["completion"].append(turn.assistant_message)
                state["trajectory"].append(
                    {"prompt": messages, "completion": [turn.assistant_message]}
                )
            state["is_completed"] = True
        finally:
            for _, clean in self._cleanups:
                await call_function(clean, {"state": state})
        ended = time.perf_counter()
        rollout = Rollout(example, turns, state["completion"], stop=state["stop_condition"] or "")
        await self.score(rollout, state)
        now = time.perf_counter()
        rollout.seconds = now - start
        rollout.timings = {
            "model": asked,
            "environment": ended - start - asked,
            "scoring": now - ended,
        }
        return rollout

    def _tell_of_room(self, turns: int) -> None:
        if not self._told:
            log.warning(
                "a conversation of %s ended after %d turns since it leaves no room in the model's context, and so will "
                "others (stop: prompt_too_long); a longer seq_len (max_model_len of a server) lets them go on",
                type(self).__name__,
                turns,
            )
        self._told = True

    async def close(self) -> None:
        for _, end in self._marked_methods("teardown"):
            await call_function(end, {})

    async def _is_over(self, state: State) -> bool:
        if self._is_ours("is_completed"):
            return await self.is_completed(state)
        over = bool(
            await self._call_hook("is_completed", state, [*state["prompt"], *state["completion"]])
        )
        if over and not state["stop_condition"]:
            state["stop_condition"] = "is_completed"
        return over

    def _is_ours(self, name: str) -> bool:
        """Return True if no subclass overrides the method `name`; `_call_hook` is then not needed."""
        return getattr(getattr(self, name), "__func__", None) is getattr(MultiTurnEnv, name)

    async def _call_hook(
        self, name: str, state: State, messages: list[Message] | None = None
    ) -> Any:
        """Call a method that a user may have overridden, with (messages, state) or (state)."""
        method = getattr(self, name)
        takes_messages = messages is not None and positional_names(method)[:1] not in (
            ("state",),
            (),
        )
        positional = (messages, state) if takes_messages else (state,)
        timeout = self.call_timeout if name == "env_response" and not self.times_its_calls else None
        return await call_function(method, {}, timeout, positional)

    def _marked_methods(self, kind: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        found = []
        for name in dir(type(self)):
            method = getattr(type(self), name, None)
            if hasattr(method, f"hone_{kind}"):
                found.append((-getattr(method, f"hone_{kind}"), name))
        for _, name in sorted(found):
            yield name, getattr(self, name)


BUILT_IN: dict[str, Callable[[MultiTurnEnv, State], bool]] = {
    "prompt_too_long": lambda _, state: bool(state.get("prompt_too_long")),
    "max_turns_reached": lambda environment, state: state["turn"] >= environment.max_turns > 0,
    "has_final_env_response": lambda _, state: state.get("final_env_response") is not None,
}


def _first_state(example: Example) -> State:
    return {
        "prompt": example.prompt,
        "completion": [],
        "answer": example.answer,
        "info": example.info,
        "task": example.task,
        "example_id": example.id,
        "turn": 0,
        "trajectory": [],
        "metrics": {},
        "is_completed": False,
        "stop_condition": None,
    }


def _parse_messages(given: Any, state: State) -> list[Message]:
    """Convert the result of `env_response` to a list of messages.

    The result is a list, one message or a text (a user message), alone or in a tuple with a dict
    that updates the state. Raises TypeError otherwise.
    """
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict):
        given, changed = given
        state.update(changed)
    if isinstance(given, str):
        given = {"role": "user", "content": given}
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list) or not all(
        isinstance(one, dict) and "role" in one for one in given
    ):
        raise TypeError(
            f"env_response gave {given!r:.100}, not messages (dicts with role and content)"
        )
    return given


class SingleTurnEnv(MultiTurnEnv):
    """An environment of one question and one answer."""

    def __init__(self, **others: Any) -> None:
        super().__init__(max_turns=1, **others)
