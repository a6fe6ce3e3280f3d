"""Answers of a given form: which tokens may come next so that the text is of a JSON schema, a regular expression, one
of several choices, a grammar, or a call of a tool.

    request ─► Form (kind, value) ─► Following, of a tokenizer: asked of the tokens so far which may come next

The grammars are llguidance's, which reads JSON Schema, Rust's regular expressions and Lark.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hone.records import Tool
from hone.text.stops import StopStrings
from hone.text.tokenizer import Tokenizer

SPACE = "\\n? {0,16}"  # between the parts of JSON: what is written by hand, and no more without an end
AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # by Python, in templates
Kind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Form:
    """`value`: a JSON schema, a regular expression, the choices, a grammar in Lark."""

    kind: Kind
    value: Any

    def grammar(self) -> str:
        """As llguidance has it. Raises ValueError for what cannot be read."""
        matcher = _library().LLMatcher
        try:
            if self.kind == "json":
                return str(matcher.grammar_from_json_schema(json.dumps(self.value), {"whitespace_pattern": SPACE}))
            if self.kind == "regex":
                return str(matcher.grammar_from_regex(self.value))
            lark = self.value if self.kind == "grammar" else "start: " + " | ".join(map(json.dumps, self.value))
            return str(matcher.grammar_from_lark(lark))
        except (ValueError, TypeError) as error:
            raise ValueError(f"the {self.kind} that answers are to follow: {error}") from None


class Following:
    """Asked of the tokens so far, more each time, which may come next: true at those token ids. For one sequence.

    `vocabulary`: how many token ids the model has. Raises ValueError, in words, for a form that cannot be followed.
    """

    def __init__(self, form: Form, tokenizer: Tokenizer, vocabulary: int, stops: Sequence[int]) -> None:
        self.form, self.vocabulary, self.stops = form, vocabulary, [i for i in stops if i < vocabulary]
        self.tokenizer, self.before = tokenizer, list[int]()
        self.tokens = _vocabulary(tokenizer)
        self.matcher = _library().LLMatcher(self.tokens, form.grammar(), log_level=0)
        self.read, self.failure = 0, ""
        self.may: NDArray[np.bool_] | None = None  # after as many tokens as were read
        if self.matcher.is_error():
            first = next(line for line in self.matcher.get_error().splitlines() if line.strip())
            raise ValueError(f"the {form.kind} that answers are to follow: {first.strip()}")

    def another(self, before: Sequence[int] = ()) -> "Following":
        """For one more sequence, that goes on from these tokens."""
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
        if self.matcher.is_error():  # the form is beyond what llguidance follows: whoever asked is told
            self.failure = self.failure or self.matcher.get_error().strip().splitlines()[0]
            may[self.stops] = True
            return may
        bits = np.unpackbits(packed, bitorder="little", count=min(8 * len(packed), self.vocabulary)).astype(bool)
        may[: len(bits)] = bits
        if may[self.tokens.eos_token]:
            may[self.stops] = True
        return may

    def is_over(self, ids: Sequence[int]) -> bool:
        """Whether nothing but the end may follow these tokens."""
        self(ids)
        return bool(self.failure or self.matcher.is_stopped())


class FormEnds:
    """Asked of the tokens so far, as `records.GenerateRequest.ends`: stop strings, and the end of a form."""

    def __init__(self, stops: StopStrings | None, follows: Following) -> None:
        self.stops, self.follows = stops, follows
        self.strings = [] if stops is None else stops.strings

    def __call__(self, ids: list[int]) -> int | None:
        kept = None if self.stops is None else self.stops(ids)
        return len(ids) if kept is None and self.follows.is_over(ids) else kept


def of_call(tools: Sequence[Tool], style: str, tokenizer: Tokenizer) -> Form:
    """A call of one of these tools, as the model's template teaches to write it."""
    key = "arguments" if style == "hermes" else "parameters"
    of_each = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                key: tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = json.dumps({**(of_each[0] if len(of_each) == 1 else {"anyOf": of_each}), "x-guidance": AS_WRITTEN})
    if style != "hermes":
        return Form("grammar", f"start: call\ncall: %json {schema}")
    opening, closing = (_word(tokenizer, tag) for tag in ("<tool_call>", "</tool_call>"))
    return Form("grammar", f'start: {opening} "\\n" call "\\n" {closing}\ncall: %json {schema}')


def _word(tokenizer: Tokenizer, tag: str) -> str:
    """A tag in Lark: where it is a special token, as that token."""
    number = tokenizer.encoder.token_to_id(tag)
    is_special = number is not None and _vocabulary(tokenizer).is_special_token(number)
    return tag if is_special else json.dumps(tag)


def _vocabulary(tokenizer: Tokenizer) -> Any:
    """llguidance's view of a tokenizer, made once."""
    if "forms" not in tokenizer.kept:
        text = tokenizer.encoder.to_str()
        tokenizer.kept["forms"] = _library().LLTokenizer(text, eos_token=tokenizer.stop_ids[0])
    return tokenizer.kept["forms"]


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise ValueError('answers of a given form need llguidance: pip install "hone-rl[forms]"') from None
    return llguidance
