"""Parse tool calls in model output, in the formats that chat templates teach.

hermes       text <tool_call>{"name": …, "arguments": {…}}</tool_call> …            Qwen2.5, Qwen3, Hermes
json         {"name": …, "parameters": {…}}, alone or between semicolons            Llama 3
qwen3_coder  <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…            Qwen3-Coder, Seed-OSS
glm          <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…     GLM-4.5 and later
mistral      [TOOL_CALLS][{"name": …, "arguments": {…}}, …]                         Mistral v3 to v7
mistral_args [TOOL_CALLS]NAME[ARGS]{…} …                                            Mistral v11 and later
deepseek     …NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…                                DeepSeek V3.1
kimi         …functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…     Kimi K2
list         <TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>                Nemotron
granite      <|tool_call|>[{"name": …, "arguments": {…}}, …]                        Granite 3, Phi-4-mini
function     <function=NAME>{…}</function>                                          Functionary 3.1
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hone.records import Tool

Call = tuple[str, dict[str, Any]]  # name and arguments
Read = Callable[[str, Sequence[Tool]], tuple[str, list[Call]] | None]
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls.

    Attributes:
        taught_by: strings that a template with this format contains.
        openings: beginnings of a call, which a stream holds back until the call is complete.
        tags: special tokens to keep in the text.
        read: returns the text without calls, and the calls; None if they cannot be parsed.
    """

    name: str
    taught_by: tuple[str, ...]
    openings: tuple[str, ...]
    tags: tuple[str, ...]
    read: Read


def parse_tool_calls(
    text: str,
    call_format: CallFormat,
    turn: int = 0,
    tools: Sequence[Tool] = (),
    thinks: bool = False,
    most: int | None = None,
) -> tuple[str, list[dict[str, Any]]]:
    """Return the text without its calls, and the calls in OpenAI's form; invalid calls stay text.

    Args:
        text: model output. Calls inside thinking blocks are ignored.
        call_format: the format taught to the model.
        turn: number of the turn, which makes call ids unique in a conversation.
        tools: the offered tools, whose schemas give the types of plain-text arguments.
        thinks: the prompt ends inside a thinking block.
        most: number of calls to return; further ones are dropped.
    """
    start = thought_end(text, thinks, call_format.openings)
    found = call_format.read(text[start:], tools)
    if found is None or not found[1]:
        return text, []
    rest, calls = found
    return (text[:start] + rest).strip(), [
        {
            "id": f"call_{turn}_{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(calls[:most])
    ]


def thought_end(text: str, thinks: bool = False, openings: Sequence[str] = ()) -> int:
    """Return the index where the thinking blocks of a text end.

    It is 0 if there are none, and the text's length if one is not closed. Thinking tags after the
    beginning of a tool call (`openings`) are ignored. `thinks`: the text begins inside a block.
    """
    begins = _Places(text, [one for one, _ in THINKING])
    closes = _Places(text, [one for _, one in THINKING])
    calls = _Places(text, openings)
    at = 0
    is_open = thinks
    while True:
        closed, closed_end = closes.next_after(at)
        if is_open:
            if closed < 0:
                return len(text)
            at = closed_end
            is_open = False
            continue
        begun, begun_end = begins.next_after(at)
        first_call = calls.next_after(at)[0]
        limit = len(text) if first_call < 0 else first_call
        if 0 <= begun < limit:
            at = begun_end
            is_open = True
        elif 0 <= closed < limit:  # closes a thought that the prompt opened
            at = closed_end
        else:
            return at


class _Places:
    """Positions of strings in a text; queries in ascending order need one pass over the text."""

    def __init__(self, text: str, strings: Sequence[str]) -> None:
        self.text = text
        self.found = {string: text.find(string) for string in strings}

    def next_after(self, at: int) -> tuple[int, int]:
        """Return (start, end) of the first string found from index `at` on, else (-1, -1)."""
        best = -1, -1
        for string, place in self.found.items():
            if 0 <= place < at:
                place = self.found[string] = self.text.find(string, at)
            if place >= 0 and (best[0] < 0 or place < best[0]):
                best = place, place + len(string)
        return best


def opens_thought(prompt: str) -> bool:
    """Return True if the prompt ends with the opening tag of a thinking block."""
    return any(prompt.rstrip().endswith(opening) for opening, _ in THINKING)


# ------------------------------------------------------------------------------------------------------ readers


def cut_blocks(text: str, opening: str, closing: str) -> tuple[str, list[str]]:
    """Return a text without the blocks between two tags, and the blocks; linear time."""
    rest = []
    inside = []
    at = 0
    while (start := text.find(opening, at)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            break
        rest.append(text[at:start])
        inside.append(text[start + len(opening) : end])
        at = end + len(closing)
    return "".join([*rest, text[at:]]), inside


def _tagged_reader(
    opening: str,
    closing: str,
    read_one: Callable[[str, Sequence[Tool]], Call | None],
    around: Sequence[str] = (),
) -> Read:
    """Return a function that reads each call between two tags with `read_one`.

    The tags in `around` enclose all calls.
    """

    def read_tagged(text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]] | None:
        rest, inside = cut_blocks(text, opening, closing)
        found = [read_one(one, tools) for one in inside]
        good = [call for call in found if call is not None]
        if not good or len(good) < len(found):
            return None
        for tag in around:
            rest = rest.replace(tag, "")
        return rest, good

    return read_tagged


def _read_object(written: str, needs_arguments: bool = False) -> Call | None:
    """Read {"name": …, "arguments" | "parameters": {…}}.

    Without `needs_arguments`, the arguments may be missing.
    """
    try:
        return _read_call(json.loads(written), needs_arguments)
    except (ValueError, RecursionError):
        return None


def _read_call(value: Any, needs_arguments: bool = False) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", None if needs_arguments else {}))
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def _read_named(name: str, written: str) -> Call | None:
    """Return a call of `name` with the JSON arguments in `written`."""
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):
        return None
    return (name.strip(), arguments) if isinstance(arguments, dict) and name.strip() else None


def _read_json(text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]] | None:
    calls = [
        _read_object(part, needs_arguments=True)
        for part in text.strip().removeprefix("<|python_tag|>").split(";\n")
    ]
    good = [call for call in calls if call is not None]
    return ("", good) if good and len(good) == len(calls) else None


def _list_reader(opening: str, closing: str) -> Read:
    """Return a function that reads a JSON list of calls after an opening tag."""

    def read_list(text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]] | None:
        before, found, written = text.partition(opening)
        if not found:
            return None
        try:
            values, end = json.JSONDecoder().raw_decode(written.lstrip())
        except (ValueError, RecursionError):
            return None
        calls = (
            [_read_call(value) for value in values]
            if isinstance(values, list)
            else [_read_call(values)]
        )
        good = [call for call in calls if call is not None]
        if not good or len(good) < len(calls):
            return None
        after = written.lstrip()[end:].lstrip()
        return before + (after.removeprefix(closing) if closing else after), good

    return read_list


def _read_parameters(written: str, tools: Sequence[Tool]) -> Call | None:
    """Read NAME><parameter=KEY>VALUE</parameter>…, of Qwen3-Coder."""
    name, found, body = written.partition(">")
    if not found or "\n" in name or not name.strip():
        return None
    types = argument_types(name.strip(), tools)
    arguments = dict[str, Any]()
    for one in cut_blocks(body, "<parameter=", "</parameter>")[1]:
        key, found, value = one.partition(">")
        if found and "\n" not in key:
            arguments[key.strip()] = _parse_typed(_one_line_less(value), types.get(key.strip()))
    return name.strip(), arguments


def _read_arguments(written: str, tools: Sequence[Tool]) -> Call | None:
    """Read NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…, of GLM."""
    name = written.partition("<arg_key>")[0].strip()
    if not name or "\n" in name or "<" in name:
        return None
    keys = [key.strip() for key in cut_blocks(written, "<arg_key>", "</arg_key>")[1]]
    values = cut_blocks(written, "<arg_value>", "</arg_value>")[1]
    if len(keys) != len(values):
        return None
    types = argument_types(name, tools)
    return name, {
        key: _parse_typed(value, types.get(key)) for key, value in zip(keys, values, strict=True)
    }


def _read_kimi(written: str, tools: Sequence[Tool]) -> Call | None:
    name, found, arguments = written.partition("<|tool_call_argument_begin|>")
    name = name.strip().removeprefix("functions.")
    before, colon, number = name.rpartition(":")
    return _read_named(before if colon and number.isdigit() else name, arguments) if found else None


def _read_deepseek(written: str, tools: Sequence[Tool]) -> Call | None:
    """Read a DeepSeek call.

    V3.1 writes NAME<｜tool▁sep｜>{…}; R1 and V3 write function<｜tool▁sep｜>NAME, then a block of JSON.
    """
    name, found, rest = written.partition("<｜tool▁sep｜>")
    if name.strip() == "function" and "```json\n" in rest:
        name, _, rest = rest.partition("```json\n")
        rest = rest.rstrip().removesuffix("```")
    return _read_named(name, rest) if found and "\n" not in name.strip() else None


def _read_function(written: str, tools: Sequence[Tool]) -> Call | None:
    name, found, arguments = written.partition(">")
    return _read_named(name, arguments) if found and "\n" not in name else None


def _read_mistral_args(text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]] | None:
    rest, *parts = text.split("[TOOL_CALLS]")
    calls = []
    for part in parts:
        name, found, arguments = part.partition("[ARGS]")
        call = _read_named(name.partition("[CALL_ID]")[0], arguments) if found else None
        if call is None:
            return None
        calls.append(call)
    return (rest, calls) if calls else None


def _one_line_less(value: str) -> str:
    """Strip one line break after the opening and one before the closing tag."""
    return value.removeprefix("\n").removesuffix("\n")


def argument_types(name: str, tools: Sequence[Tool]) -> dict[str, set[str]]:
    """Return the JSON-schema types of each argument of a tool, if its schema has them."""
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict) or function.get("name") != name:
            continue
        parameters = function.get("parameters")
        if not isinstance(parameters, dict):
            return {}
        properties = parameters.get("properties")
        if not isinstance(properties, dict):
            return {}
        return {key: _types_of(one, parameters) for key, one in properties.items()}
    return {}


def _types_of(schema: Any, root: dict[str, Any]) -> set[str]:
    """Return the types that a schema allows; empty if unspecified. Visits each subschema once."""
    found: set[str] = set()
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        kind = one.get("type")
        found |= {name for name in _list_of(kind) if isinstance(name, str)}
        found |= {kind} if isinstance(kind, str) else set()
        values = [*_list_of(one.get("enum")), one.get("const")]
        found |= {"string" for value in values if isinstance(value, str)}
        for key in ("anyOf", "oneOf", "allOf"):
            waiting += _list_of(one.get(key))
        reference = one.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            place: Any = root
            for part in reference[2:].split("/"):
                place = place.get(part) if isinstance(place, dict) else None
            waiting.append(place)
    return found


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _parse_typed(value: str, types: set[str] | None) -> Any:
    """Convert a plain-text argument: text if `types` has string, else JSON if valid, else text."""
    text = value.strip()
    if types and "string" in types:
        return None if "null" in types and text in ("null", "None") else value
    constants: dict[str, Any] = {"True": True, "False": False, "None": None}
    if text in constants:
        return constants[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return value


FORMATS = {
    one.name: one
    for one in (
        CallFormat(
            "qwen3_coder",
            ("<function=", "<parameter="),
            ("<tool_call>", "<seed:tool_call>", "<function="),
            ("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
            _tagged_reader(
                "<function=",
                "</function>",
                _read_parameters,
                ("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
            ),
        ),
        CallFormat(
            "glm",
            ("<arg_key>", "<arg_value>"),
            ("<tool_call>",),
            (
                "<tool_call>",
                "</tool_call>",
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "</arg_value>",
            ),
            _tagged_reader("<tool_call>", "</tool_call>", _read_arguments),
        ),
        CallFormat(
            "kimi",
            ("<|tool_call_argument_begin|>",),
            ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
            (
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
            ),
            _tagged_reader(
                "<|tool_call_begin|>",
                "<|tool_call_end|>",
                _read_kimi,
                ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            ),
        ),
        CallFormat(
            "deepseek",
            ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
            ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
            (
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
            ),
            _tagged_reader(
                "<｜tool▁call▁begin｜>",
                "<｜tool▁call▁end｜>",
                _read_deepseek,
                ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            ),
        ),
        CallFormat(
            "mistral_args",
            ("[TOOL_CALLS]", "[ARGS]"),
            ("[TOOL_CALLS]",),
            ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
            _read_mistral_args,
        ),
        CallFormat(
            "mistral",
            ("[TOOL_CALLS]",),
            ("[TOOL_CALLS]",),
            ("[TOOL_CALLS]",),
            _list_reader("[TOOL_CALLS]", ""),
        ),
        CallFormat(
            "list",
            ("<TOOLCALL>",),
            ("<TOOLCALL>",),
            ("<TOOLCALL>", "</TOOLCALL>"),
            _list_reader("<TOOLCALL>", "</TOOLCALL>"),
        ),
        CallFormat(
            "granite",
            ("<|tool_call|>",),
            ("<|tool_call|>",),
            ("<|tool_call|>", "<|/tool_call|>"),
            _list_reader("<|tool_call|>", "<|/tool_call|>"),
        ),
        CallFormat(
            "hermes",
            ("<tool_call>",),
            ("<tool_call>",),
            ("<tool_call>", "</tool_call>"),
            _tagged_reader("<tool_call>", "</tool_call>", lambda written, _: _read_object(written)),
        ),
        CallFormat(
            "function",
            ("<function=",),
            ("<function=",),
            (),
            _tagged_reader("<function=", "</function>", _read_function),
        ),
        CallFormat(
            "json", ('"parameters"',), ("{", "<|python_tag|>"), ("<|python_tag|>",), _read_json
        ),
    )
}


def format_of(template: str) -> CallFormat:
    """Return the format that a chat template teaches, hermes by default."""
    taught = (one for one in FORMATS.values() if all(mark in template for mark in one.taught_by))
    return next(taught, FORMATS["json" if "python_tag" in template else "hermes"])
