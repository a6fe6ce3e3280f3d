"""Structured outputs: token masks for a JSON schema, regex, choice, grammar or tool call.

    request ─► Form (kind, value) ─► Following (state of one sequence) ─ tokens so far ─► mask of the next token

llguidance provides the grammars; it reads JSON Schema, Rust's regular expressions and Lark.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hone.records import Tool
from hone.text.stop_strings import StopStrings
from hone.text.tokenizer import Tokenizer
from hone.text.tool_calls import CallFormat

SPACE = "\\n? {0,16}"  # between parts of JSON: enough for readable output, but bounded
# Python, as templates call it.
AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
Kind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Form:
    """An output format.

    For the kinds json, regex, choice and grammar, `value` is a JSON schema, a regular expression,
    the list of choices, and a Lark grammar.
    """

    kind: Kind
    value: Any

    def to_grammar(self) -> str:
        """Return the grammar for llguidance. Raises ValueError for an invalid format."""
        matcher = _import_llguidance().LLMatcher
        try:
            if self.kind == "json":
                return str(
                    matcher.grammar_from_json_schema(
                        json.dumps(self.value), {"whitespace_pattern": SPACE}
                    )
                )
            if self.kind == "regex":
                return str(matcher.grammar_from_regex(self.value))
            lark = (
                self.value
                if self.kind == "grammar"
                else "start: " + " | ".join(map(json.dumps, self.value))
            )
            return str(matcher.grammar_from_lark(lark))
        except (ValueError, TypeError) as error:
            raise ValueError(f"the {self.kind} that answers are to follow: {error}") from None


class Following:
    """State of one sequence under an output format.

    Call it with the tokens so far: it returns the mask of the tokens that may follow.

    Args:
        form: the output format.
        vocabulary: number of token ids of the model.
        stops: ids of stop tokens, allowed where the format may end.

    Raises ValueError for a format that cannot be enforced.
    """

    def __init__(
        self, form: Form, tokenizer: Tokenizer, vocabulary: int, stops: Sequence[int]
    ) -> None:
        self.form = form
        self.vocabulary = vocabulary
        self.stops = [i for i in stops if i < vocabulary]
        self.tokenizer = tokenizer
        self.before = list[int]()
        self.tokens = _get_vocabulary(tokenizer)
        self.matcher = _import_llguidance().LLMatcher(self.tokens, form.to_grammar(), log_level=0)
        self.read = 0
        self.failure = ""
        self.may: NDArray[np.bool_] | None = None  # allowed tokens after those that were read
        if self.matcher.is_error():
            first = next(line for line in self.matcher.get_error().splitlines() if line.strip())
            raise ValueError(f"the {form.kind} that answers are to follow: {first.strip()}")

    def start_another(self, before: Sequence[int] = ()) -> "Following":
        """Return a copy of this state for another sequence, advanced by the tokens `before`."""
        other = copy.copy(self)
        other.matcher = self.matcher.deep_copy()
        other.before = [*self.before, *before]
        if before:
            other.matcher.try_consume_tokens(list(before))
        return other

    def __call__(self, ids: Sequence[int]) -> NDArray[np.bool_]:
        if self.may is not None and len(ids) == self.read:
            return self.may
        self.matcher.try_consume_tokens(list(ids[self.read :]))
        self.read = len(ids)
        may = self.may = np.zeros(self.vocabulary, dtype=bool)
        packed = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        # The format is beyond llguidance: report it.
        if self.matcher.is_error():
            self.failure = self.failure or self.matcher.get_error().strip().splitlines()[0]
            may[self.stops] = True
            return may
        bits = np.unpackbits(
            packed, bitorder="little", count=min(8 * len(packed), self.vocabulary)
        ).astype(bool)
        may[: len(bits)] = bits
        if may[self.tokens.eos_token]:
            may[self.stops] = True
        return may

    def is_over(self, ids: Sequence[int]) -> bool:
        """Return True if only the end-of-sequence token may follow these tokens.

        Also True after an error of llguidance.
        """
        self(ids)
        return bool(self.failure or self.matcher.is_stopped())


class FormEnds:
    """Callable that ends a completion at a stop string or when the output is complete.

    It returns how many ids to keep, or None to continue.
    """

    def __init__(self, stops: StopStrings | None, follows: Following) -> None:
        self.stops = stops
        self.follows = follows
        self.strings = [] if stops is None else stops.strings

    def __call__(self, ids: list[int]) -> int | None:
        kept = None if self.stops is None else self.stops(ids)
        return len(ids) if kept is None and self.follows.is_over(ids) else kept


@dataclass(frozen=True)
class Json:
    """Part of a tool call: JSON that follows a schema."""

    schema: Any


@dataclass(frozen=True)
class TextUntil:
    """Part of a tool call: any text, ended by `before`, `tag` and `after`."""

    tag: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Choice:
    """Part of a tool call: one of several texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Maybe:
    """Optional parts of a tool call."""

    parts: list[Any]


Part = str | Json | TextUntil | Choice


def form_of_call(tools: Sequence[Tool], call_format: CallFormat, tokenizer: Tokenizer) -> Form:
    """Return the output format of one call of one of these tools, in the template's call format.

    Raises ValueError for a call format that cannot be enforced.
    """
    if call_format.name not in SPELLINGS:
        raise ValueError(
            f"tool_choice: calls in the format {call_format.name} can be read, but not asked for"
        )
    rules = [
        _build_lark_rule(SPELLINGS[call_format.name](tool["function"]), call_format, tokenizer, i)
        for i, tool in enumerate(tools)
    ]
    names = " | ".join(f"call{i}" for i in range(len(rules)))
    return Form("grammar", "\n".join([f"start: {names}", *rules]))


def _get_parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object"}


def _call_schema(function: dict[str, Any], key: str = "arguments") -> Json:
    properties = {"name": {"const": function["name"]}, key: _get_parameters(function)}
    return Json(
        {
            "type": "object",
            "properties": properties,
            "required": ["name", key],
            "additionalProperties": False,
        }
    )


def _calls_schema(function: dict[str, Any]) -> Json:
    return Json(
        {"type": "array", "items": _call_schema(function).schema, "minItems": 1, "maxItems": 1}
    )


def _each_argument(
    function: dict[str, Any], spell: Callable[[str, list[Part]], list[Part]], end: TextUntil
) -> list[list[Part]]:
    """Return, for each argument in the order of the schema, its grammar parts.

    Args:
        spell: called with a key and the parts of its value; returns the parts of the argument, tags included.
        end: the tag that ends a value.
    """
    closing = [part for part in (end.before, end.tag, end.after) if part]
    found = []
    for key, schema in (_get_parameters(function).get("properties") or {}).items():
        is_text = (
            isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema
        )
        value: list[Part] = [end] if is_text else [Json(schema), *closing]
        if isinstance(schema, dict) and schema.get("type") == "string" and "enum" in schema:
            value = [Choice(tuple(schema["enum"])), *closing]
        found.append(spell(key, value))
    return found


def _with_optional(function: dict[str, Any], of_each: list[list[Any]]) -> list[Any]:
    required = _get_parameters(function).get("required") or []
    keys = _get_parameters(function).get("properties") or {}
    found: list[Any] = []
    for key, parts in zip(keys, of_each, strict=True):
        found += parts if key in required else [Maybe(parts)]
    return found


def _spell_qwen3_coder(function: dict[str, Any]) -> list[Any]:
    end = TextUntil("</parameter>", "\n", "\n")
    each = _each_argument(function, lambda key, value: [f"<parameter={key}>\n", *value], end)
    head = ["<tool_call>", f"\n<function={function['name']}>\n"]
    return [*head, *_with_optional(function, each), "</function>\n", "</tool_call>"]


def _spell_glm(function: dict[str, Any]) -> list[Any]:
    def spell_argument(key: str, value: list[Part]) -> list[Part]:
        return ["<arg_key>", key, "</arg_key>", "\n", "<arg_value>", *value]

    each = _each_argument(function, spell_argument, TextUntil("</arg_value>", after="\n"))
    return ["<tool_call>", f"{function['name']}\n", *_with_optional(function, each), "</tool_call>"]


SPELLINGS: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "hermes": lambda function: ["<tool_call>", "\n", _call_schema(function), "\n", "</tool_call>"],
    "json": lambda function: [_call_schema(function, "parameters")],
    "qwen3_coder": _spell_qwen3_coder,
    "glm": _spell_glm,
    "mistral": lambda function: ["[TOOL_CALLS]", _calls_schema(function)],
    "mistral_args": lambda function: [
        "[TOOL_CALLS]",
        function["name"],
        "[ARGS]",
        Json(_get_parameters(function)),
    ],
    "list": lambda function: ["<TOOLCALL>", _calls_schema(function), "</TOOLCALL>"],
    "granite": lambda function: ["<|tool_call|>", _calls_schema(function)],
    "function": lambda function: [
        f"<function={function['name']}>",
        Json(_get_parameters(function)),
        "</function>",
    ],
    "deepseek": lambda function: [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        function["name"],
        "<｜tool▁sep｜>",
        Json(_get_parameters(function)),
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
    "kimi": lambda function: [
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        f"functions.{function['name']}:0",
        "<|tool_call_argument_begin|>",
        Json(_get_parameters(function)),
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ],
}


def _build_lark_rule(
    parts: Sequence[Any], call_format: CallFormat, tokenizer: Tokenizer, number: int
) -> str:
    """Return the Lark rule of a call, and the rules that it needs."""
    more: list[str] = []

    def spell_part(part: Any) -> str:
        if isinstance(part, str):
            return _spell_tag(tokenizer, part) if part in call_format.tags else json.dumps(part)
        if isinstance(part, Choice):
            return "(" + " | ".join(json.dumps(str(text)) for text in part.texts) + ")"
        if isinstance(part, Maybe):
            return "(" + " ".join(map(spell_part, part.parts)) + ")?"
        name = f"part{number}_{len(more)}"
        if isinstance(part, TextUntil):
            tag = (
                _spell_tag(tokenizer, part.tag)
                if part.tag in call_format.tags
                else json.dumps(part.tag)
            )
            if tag.startswith("<"):  # a special token, which does not occur in text
                more.append(f"{name}: /(?s:.*)/ {' '.join([tag, json.dumps(part.after)])}")
            else:
                more.append(
                    f"{name}[suffix={json.dumps(part.before + part.tag + part.after)}]: /(?s:.*)/"
                )
        else:
            schema = part.schema if isinstance(part.schema, dict) else {}
            more.append(f"{name}: %json {json.dumps({**schema, 'x-guidance': AS_WRITTEN})}")
        return name

    rule = " ".join(map(spell_part, parts))
    return "\n".join([f"call{number}: {rule}", *more])


def _spell_tag(tokenizer: Tokenizer, tag: str) -> str:
    """Return a tag in Lark: by id if it is a special token, else as text."""
    number = tokenizer.encoder.token_to_id(tag)
    is_special = number is not None and _get_vocabulary(tokenizer).is_special_token(number)
    return f"<[{number}]>" if is_special else json.dumps(tag)


def _get_vocabulary(tokenizer: Tokenizer) -> Any:
    """Return llguidance's view of a tokenizer, cached."""
    if "forms" not in tokenizer.kept:
        text = tokenizer.encoder.to_str()
        tokenizer.kept["forms"] = _import_llguidance().LLTokenizer(
            text, eos_token=tokenizer.stop_ids[0]
        )
    return tokenizer.kept["forms"]


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise ValueError(
            'answers of a given form need llguidance: pip install "hone-rl[forms]"'
        ) from None
    return llguidance
