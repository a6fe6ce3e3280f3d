"""Normalize chat messages before rendering, whatever their source.

SFT rows, environment prompts and requests write the same message differently: `None` for an absent
key, content as a list of text parts, tool-call arguments as JSON or as an object, reasoning under
one of three names. Every rendering uses `normalize_messages`, so that each of these forms becomes
the same tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hone.records import Message

# Types of parts with text, and the key that holds it.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class MessageError(ValueError):
    """A message that cannot be rendered; the text names the message and the key."""


def normalize_messages(messages: Any) -> list[Message]:
    """Return plain copies of chat messages in the form that chat templates expect.

    Keys without a value are removed, text parts joined, tool-call arguments parsed, and missing
    assistant content becomes "". Raises MessageError for content that a text model cannot read.
    """
    messages = to_plain(messages)
    if not isinstance(messages, list):
        raise MessageError(f"messages: a list of messages is needed, found {messages!r:.80}")
    return [_normalize_message(message, f"message {i}") for i, message in enumerate(messages)]


def _normalize_message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise MessageError(
            f"{place}: it is no message (an object with role and content), found {message!r:.80}"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise MessageError(f"{place}: role is {role!r}, not the name of a role")
    result = {key: value for key, value in message.items() if value is not None}
    if "function_call" in result:
        raise MessageError(
            f"{place} ({role}): function_call is OpenAI's older form of tool_calls; write it as those"
        )
    calls = result.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise MessageError(
                f"{place} ({role}), tool_calls: a list is needed, found {calls!r:.80}"
            )
        result["tool_calls"] = [
            _normalize_call(call, f"{place}, tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    if "content" in result:
        result["content"] = join_parts(
            result["content"], f"{place} ({role}), content", is_tool=role == "tool"
        )
    elif role == "assistant":
        result["content"] = ""
    else:
        raise MessageError(f"{place} ({role}) has no content")
    reasoning = next((result[key] for key in REASONING_KEYS if key in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def show_message(message: Mapping[str, Any]) -> str:
    """Return a message's text for people, followed by its tool calls, a line each.

    What is no text, such as an image, is shown as its type in brackets.
    """
    calls = message.get("tool_calls")
    lines = [_show_content(message.get("content"))]
    for call in calls if isinstance(calls, list) else []:
        called = call.get("function", call) if isinstance(call, dict) else call
        lines.append(json.dumps(called, ensure_ascii=False, default=str))
    return "\n".join(line for line in lines if line)


def show_role(message: Mapping[str, Any]) -> str:
    """Return a message's role for people, with the agent if there are several."""
    agent = message.get("agent")
    return f"{message['role']} ({agent})" if agent else str(message["role"])


def _show_content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False, default=str)
    parts = [part if isinstance(part, dict) else {"text": str(part)} for part in content]
    return " ".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)


def join_parts(content: Any, place: str, is_tool: bool = False) -> Any:
    """Return the text of a message's content: a string, or joined text parts.

    Results of tools may also be numbers or objects, which templates write as JSON.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_text_of_part(part, f"{place}[{i}]") for i, part in enumerate(content))
    if is_tool and isinstance(content, int | float | dict):
        return content
    raise MessageError(f"{place}: text or a list of text parts is needed, found {content!r:.80}")


def _text_of_part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        found = f"a part of type {kind!r}" if isinstance(part, dict) else f"{part!r:.80}"
        raise MessageError(
            f"{place}: messages may contain text parts only (type text), found {found}"
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise MessageError(f"{place}: the text of a part is needed, found {text!r:.80}")
    return text


def _normalize_call(call: Any, place: str) -> dict[str, Any]:
    """Remove keys whose value is None from a tool call, and parse its arguments from JSON.

    Templates expect arguments as an object; text that is not JSON stays text. Raises MessageError.
    """
    if not isinstance(call, dict):
        raise MessageError(
            f"{place}: it is no tool call (an object with function), found {call!r:.80}"
        )
    call = {key: value for key, value in call.items() if value is not None}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError(
            f"{place}: function with name and arguments is needed, found {call!r:.80}"
        )
    function = {key: value for key, value in function.items() if value is not None}
    function["arguments"] = _read_arguments(function.get("arguments", {}))
    return {**call, "function": function} if "function" in call else function


def _read_arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments  # the template prints it as it is


def drop_nulls(value: Any) -> Any:
    """Return a value of an Arrow table without nulls that stand for keys absent from the row.

    A struct column has the keys of all rows; a key that a row lacks is null there. Nulls in lists
    are kept: they are data.
    """
    if isinstance(value, Mapping):
        return {key: drop_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [drop_nulls(one) for one in value]
    return value


def to_plain(value: Any) -> Any:
    """Return a value as dicts, lists and scalars: templates see no other objects.

    Reads mappings, sequences, numpy arrays and scalars, and pydantic models such as those of the
    OpenAI client.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [to_plain(one) for one in value]
    for name in ("tolist", "model_dump"):
        convert: Callable[[], Any] | None = getattr(value, name, None)
        if callable(convert):
            return to_plain(convert())
    return value
