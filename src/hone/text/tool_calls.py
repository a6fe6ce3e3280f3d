"""Tool calls in what a model wrote: the two ways that chat templates teach, read without a model.

hermes (Qwen, Hermes)   text <tool_call>{"name": …, "arguments": {…}}</tool_call> <tool_call>…
json   (Llama 3)        {"name": …, "parameters": {…}}, alone or between semicolons
"""

import json
import re
from typing import Any

TAGS = ("<tool_call>", "</tool_call>", "<|python_tag|>")
HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def style_of(template: str) -> str:
    """Which of them a chat template teaches."""
    return (
        "json"
        if "<tool_call>" not in template and ("python_tag" in template or '"parameters"' in template)
        else "hermes"
    )


def parse_tool_calls(text: str, style: str, turn: int = 0) -> tuple[str, list[dict[str, Any]]]:
    """The text without its calls, and the calls as OpenAI has them. What cannot be read as a call stays text.

    `turn` makes the ids of calls differ from those of other turns of the conversation.
    """
    found = _hermes(text) if style == "hermes" else _json(text)
    if found is None:
        return text, []
    rest, calls = found
    return rest, [
        {"id": f"call_{turn}_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]


def _hermes(text: str) -> tuple[str, list[tuple[str, Any]]] | None:
    calls = [_call(written) for written in HERMES.findall(text)]
    good = [call for call in calls if call is not None]
    return (HERMES.sub("", text).strip(), good) if good and len(good) == len(calls) else None


def _json(text: str) -> tuple[str, list[tuple[str, Any]]] | None:
    calls = [_call(part) for part in text.strip().removeprefix("<|python_tag|>").split(";\n")]
    good = [call for call in calls if call is not None]
    return ("", good) if good and len(good) == len(calls) else None


def _call(written: str) -> tuple[str, Any] | None:
    try:
        value = json.loads(written)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return (value["name"], arguments) if isinstance(arguments, dict) else None
