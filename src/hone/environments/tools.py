"""Environments whose model calls tools: Python functions described by signature and docstring."""

import functools
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from pydantic import Field, create_model

from hone.environments.calls import OutOfTime, call_function
from hone.environments.environment import State
from hone.environments.rubric import Rubric, name_of
from hone.environments.turns import MultiTurnEnv, stop
from hone.records import Example, Message, Tool
from hone.users_code import ExitInUserCode

ToolFunction = Callable[..., Any]


def schema_of(function: ToolFunction, skip: Sequence[str] = ()) -> Tool:
    """Return the OpenAI tool schema of a function, with texts from its Google-style docstring.

    Parameters named in `skip` are left out. Raises ValueError if the annotations cannot be
    resolved, and for reserved parameter names (`model_config` and names that begin with "_").
    """
    text, of_parameters = _parse_docstring(inspect.getdoc(_unwrap_partial(function)) or "")
    try:
        types = get_type_hints(_unwrap_partial(function))
    except Exception as error:  # annotations are users' code
        raise ValueError(
            f"tool {name_of(function)}: its annotations cannot be read: {error}"
        ) from None
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if (
            name in skip
            or name == "self"
            or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ):
            continue
        if name.startswith("_") or name == "model_config":
            raise ValueError(
                f"tool {name_of(function)}: a parameter cannot be named {name!r}; rename it"
            )
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[name] = (types.get(name, str), Field(default, description=of_parameters.get(name)))
    schema = create_model(name_of(function), **fields).model_json_schema()
    for one in schema.get("properties", {}).values():
        one.pop("title", None)
    parameters = {
        key: value for key, value in schema.items() if key not in ("title", "description")
    }
    parameters.setdefault("properties", {})
    return {
        "type": "function",
        "function": {"name": name_of(function), "description": text, "parameters": parameters},
    }


def _unwrap_partial(function: ToolFunction) -> ToolFunction:
    """Return the original function of a partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the sections, and the description of each parameter."""
    head, _, rest = text.partition("\nArgs:")
    head = re.split(r"\n(?:Returns|Raises|Examples?|Yields|Note)s?:", head)[0]
    rest = re.split(r"\n\S", rest)[0]
    found: dict[str, str] = {}
    name = ""
    for line in rest.splitlines():
        match = re.match(r"\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
        if match:
            name = match[1]
            found[name] = match[2]
        elif name and line.strip():
            found[name] += " " + line.strip()
    return head.strip(), found


class ToolRubric(Rubric):
    """Rubric with metrics only: the number of tool calls, in total and per tool."""

    def __init__(self, tools: Sequence[ToolFunction] = ()) -> None:
        super().__init__()
        self.add_metric(self.total_tool_calls)
        for tool in tools:
            self.add_tool(name_of(tool))

    def add_tool(self, name: str) -> None:
        def count_calls(completion: list[Message]) -> float:
            return float(sum(call["function"]["name"] == name for call in _list_calls(completion)))

        count_calls.__name__ = f"{name}_calls"
        self.add_metric(count_calls)

    async def total_tool_calls(self, completion: list[Message]) -> float:
        return float(len(_list_calls(completion)))


def _list_calls(completion: list[Message]) -> list[dict[str, Any]]:
    return [call for message in completion for call in message.get("tool_calls") or []]


class ToolEnv(MultiTurnEnv):
    """Environment whose model calls `tools` until it answers without a call.

    A rollout also ends after `max_turns`. If a tool raises, the model receives the text that
    `error_formatter` makes of the exception; exceptions of the types `stop_errors` fail the rollout
    instead.
    """

    times_its_calls = True

    def __init__(
        self,
        tools: Sequence[ToolFunction] | None = None,
        max_turns: int = 10,
        error_formatter: Callable[[Exception], str] = str,
        stop_errors: Sequence[type[Exception]] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, **others)
        self.tools: list[ToolFunction] = []
        self.tool_map: dict[str, ToolFunction] = {}
        self.oai_tools: list[Tool] = []
        self.error_formatter = error_formatter
        self.stop_errors = tuple(stop_errors or ())
        self.tool_rubric = ToolRubric()
        self.add_rubric(self.tool_rubric)
        for tool in tools or []:
            self.add_tool(tool)

    def add_tool(self, tool: ToolFunction, args_to_skip: Sequence[str] = ()) -> None:
        name = name_of(tool)
        if name in self.tool_map:
            raise ValueError(f"two tools are named {name!r}; the model could not tell them apart")
        schema = schema_of(tool, args_to_skip)
        self.tools.append(tool)
        self.tool_map[name] = tool
        self.oai_tools.append(schema)
        self.tool_rubric.add_tool(name)

    def remove_tool(self, tool: ToolFunction) -> None:
        name = name_of(tool)
        self.tools.remove(tool)
        self.tool_map.pop(name)
        self.oai_tools = [one for one in self.oai_tools if one["function"]["name"] != name]

    def tools_of(self, state: State) -> list[Tool] | None:
        return self.oai_tools or None

    def first_tools(self, example: Example) -> list[Tool] | None:
        return self.oai_tools or None

    @stop
    async def no_tools_called(self, state: State) -> bool:
        return bool(state["trajectory"]) and not state["trajectory"][-1]["completion"][-1].get(
            "tool_calls"
        )

    async def env_response(self, messages: list[Message], state: State) -> list[Message]:
        return [
            await self._answer_call(call, messages, state)
            for call in messages[-1].get("tool_calls") or []
        ]

    async def _answer_call(
        self, call: dict[str, Any], messages: list[Message], state: State
    ) -> Message:
        name = call["function"]["name"]
        written = call["function"]["arguments"]
        try:
            arguments = json.loads(written or "{}") if isinstance(written, str) else written
            if name not in self.tool_map:
                raise ValueError(
                    f"there is no tool {name!r}; the tools are: {', '.join(self.tool_map)}"
                )
            arguments = await self.arguments_of(name, arguments, messages, state)
            return await self.call_tool(name, arguments, call["id"])
        except Exception as error:  # reported to the model
            if isinstance(error, (*self.stop_errors, ExitInUserCode)):
                raise
            return {
                "role": "tool",
                "content": self.error_formatter(error),
                "tool_call_id": call["id"],
            }

    async def arguments_of(
        self, name: str, arguments: dict[str, Any], messages: list[Message], state: State
    ) -> dict[str, Any]:
        """Return the arguments for a tool call: those of the model, unless a subclass changes them."""
        return arguments

    async def call_tool(
        self, tool_name: str, tool_args: dict[str, Any], tool_call_id: str, **_: Any
    ) -> Message:
        tool = self.tool_map[tool_name]
        try:
            inspect.signature(tool).bind(**tool_args)
        except TypeError as error:
            raise ValueError(f"{tool_name}: {error}") from None
        try:
            result = await call_function(tool, tool_args, self.call_timeout)
        except OutOfTime:
            raise ValueError(f"{tool_name} did not end within {self.call_timeout} s") from None
        content = (
            result
            if isinstance(result, str)
            else json.dumps(result, default=str, ensure_ascii=False)
        )
        return {"role": "tool", "content": content, "tool_call_id": tool_call_id}


class StatefulToolEnv(ToolEnv):
    """ToolEnv whose tools have arguments that the model does not see or set.

    `add_tool(tool, args_to_skip=["path"])` hides the argument `path` of a tool. Override
    `update_tool_args(tool_name, tool_args, messages, state)` to return the model's arguments
    together with the hidden ones, for example from the rollout's state.
    """

    def update_tool_args(
        self,
        tool_name: str,
        tool_args: dict[str, Any],
        messages: list[Message],
        state: State,
        **_: Any,
    ) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} has no update_tool_args(tool_name, tool_args, messages, state)"
        )

    async def arguments_of(
        self, name: str, arguments: dict[str, Any], messages: list[Message], state: State
    ) -> dict[str, Any]:
        return await call_function(
            self.update_tool_args, {}, None, (name, arguments, messages, state)
        )
