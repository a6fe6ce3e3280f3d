"""Render chat messages to the text that a model reads, as transformers does, without importing it.

The Jinja environment (filters, globals, block trimming, the `generation` tag, named templates)
follows the chat-template documentation of transformers. Tests compare both renderings for several
templates.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hone.records import Message
from hone.text.messages import MessageError, normalize_messages
from hone.text.tool_calls import FORMATS, format_of

MARK = "\ue000"  # a character that does not occur in text
# Marks around the `generation` tag's contents while spans are computed.
GENERATED = "\ue001"
GENERATED_END = "\ue002"
GENERATION_TAG = re.compile(r"{%-?\s*generation\s*-?%}")
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates, as transformers knows them
Span = tuple[int, int]  # first character, and the one after the last


@dataclass(frozen=True)
class MarkedText:
    """A rendered conversation and the character spans that are trained on."""

    text: str
    spans: list[Span]


class ChatTemplate:
    """The compiled chat template of a model, or its named templates.

    Args:
        source: the text of a template, or texts by name; `tool_use`, if there is one, renders
            conversations with tools.
        special_tokens: text of the special tokens by their names in templates (`bos_token`, …).
        arguments: default variables of every rendering.
        call_format: name of the format of tool calls; "auto" detects it from the template.

    Raises ValueError for a template that does not compile, and for named templates without
    `default`.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: dict[str, str],
        arguments: dict[str, Any] | None = None,
        call_format: str = "auto",
    ) -> None:
        sources = {DEFAULT: source} if isinstance(source, str) else dict(source)
        if DEFAULT not in sources:
            raise ValueError(
                f"no chat template is named {DEFAULT!r}; there are {', '.join(sources)}"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.sources = sources
        self.templates = {}
        for name, text in sources.items():
            try:
                self.templates[name] = environment.from_string(text)
            except TemplateSyntaxError as error:
                raise ValueError(f"the chat template does not compile: {error}") from None
        self.special_tokens = special_tokens
        self.arguments = arguments or {}
        taught = format_of(sources.get(TOOL_USE, sources[DEFAULT]))
        self.call_format = taught if call_format == "auto" else FORMATS[call_format]
        self._has_generation_tags = any(GENERATION_TAG.search(text) for text in sources.values())
        self._knows_developer = any("developer" in text for text in sources.values())
        self._takes_json = False
        self._needs_none = False
        self._takes_parts = self._needs_parts()
        self._takes_json = self._needs_json()
        if not self._takes_calls(1):  # some templates render calls only without content
            self._needs_none = True
            self._takes_json = self._needs_json()
            self._needs_none = self._takes_calls(1)
        self.most_calls = 1 if self._takes_calls(1) and not self._takes_calls(2) else None
        # Positions of messages whose content is known to be rendered.
        self._shown: set[tuple[Any, ...]] = set()

    # ------------------------------------------------------------------------------------------------- rendering

    def render_conversation(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **template_args: Any,
    ) -> str:
        """Return the conversation as text.

        `template_args` are further variables of the template, such as `enable_thinking=False`.
        Raises ValueError for messages that cannot be normalized, that the template refuses (roles
        out of order, unknown role), or that it silently omits.
        """
        args = {"add_generation_prompt": add_generation_prompt, "tools": tools, **template_args}
        return self._render_checked(self._normalize_messages(messages), args)

    def _normalize_messages(self, messages: Any) -> list[Message]:
        result = normalize_messages(messages)
        if not self._knows_developer:
            result = [
                {**one, "role": "system"} if one["role"] == "developer" else one for one in result
            ]
        return result

    def _render_checked(self, messages: list[Message], args: dict[str, Any], start: int = 0) -> str:
        """Render normalized messages, and require that those from `start` on appear in the text."""
        text = self._render_raw(messages, args)
        for i in range(start, len(messages)):
            message = messages[i]
            role = messages[i]["role"]
            before = messages[i - 1]["role"] if i else None
            after = messages[i + 1]["role"] if i + 1 < len(messages) else None
            calls = message.get("tool_calls") or []
            content = message["content"]
            has_content = isinstance(content, str) and bool(content.strip())
            place = (before, role, after, len(calls), has_content, bool(args.get("tools")))
            if place in self._shown:
                continue
            if has_content and not self._is_rendered(
                messages, i, {**message, "content": MARK}, args
            ):
                what = "content beside tool calls" if calls else f"role {role!r} there"
                raise MessageError(
                    f"the chat template leaves out message {i}: it has no place for {what}"
                )
            for k in range(len(calls)):
                marked = [_marked_call(call) if j == k else call for j, call in enumerate(calls)]
                if not self._is_rendered(messages, i, {**message, "tool_calls": marked}, args):
                    what = (
                        "tool calls of its messages"
                        if len(calls) == 1
                        else f"{len(calls)} tool calls"
                    )
                    raise MessageError(
                        f"the chat template leaves out message {i}: it has no place for {what}"
                    )
            self._shown.add(place)
        return text

    def _is_rendered(
        self, messages: list[Message], i: int, marked: Message, args: dict[str, Any]
    ) -> bool:
        """Return True if the rendering has the marker in `marked`, which replaces message i.

        Also True if the template rejects `marked`.
        """
        try:
            return MARK in self._render_raw([*messages[:i], marked, *messages[i + 1 :]], args)
        except ValueError:  # it reads the content, so it does not omit it
            return True

    def _render_raw(self, messages: list[Message], args: dict[str, Any]) -> str:
        """Render normalized messages, without a check that the text has all of them."""
        if self._takes_parts:
            messages = [_with_parts(message) for message in messages]
        if self._takes_json:
            messages = [_with_json(message) for message in messages]
        if self._needs_none:
            messages = [_without_content(message) for message in messages]
        name = TOOL_USE if args.get("tools") is not None and TOOL_USE in self.templates else DEFAULT
        try:
            return self.templates[name].render(
                **{
                    "documents": None,
                    **self.special_tokens,
                    **self.arguments,
                    **args,
                    "messages": messages,
                }
            )
        except Exception as error:  # templates are programs and may raise anything
            raise ValueError(f"the chat template refuses these messages: {error}") from None

    def _needs_parts(self) -> bool:
        """Return True if the template renders lists of text parts, but not plain strings."""
        self._takes_parts = False
        question = [{"role": "user", "content": MARK}]
        try:
            if MARK in self._render_raw(question, {"add_generation_prompt": True}):
                return False
        except ValueError:
            pass
        self._takes_parts = True
        try:
            return MARK in self._render_raw(question, {"add_generation_prompt": True})
        except ValueError:
            return False

    def _takes_calls(self, count: int) -> bool:
        """Return True if the template renders an answer with `count` tool calls."""
        for marked in range(count):
            plain = [
                {"id": f"call0000{i}", "type": "function", "function": dict(PLAIN_CALL)}
                for i in range(count)
            ]
            calls = [_marked_call(call) if i == marked else call for i, call in enumerate(plain)]
            called = {"role": "assistant", "content": "", "tool_calls": calls}
            try:
                text = self._render_raw(
                    [{"role": "user", "content": "?"}, called], {"add_generation_prompt": False}
                )
            except ValueError:
                return False
            if MARK not in text:
                return False
        return True

    def _needs_json(self) -> bool:
        """Return True for a template that prints tool-call arguments as given, and so needs JSON."""
        self._takes_json = False
        call = {
            "id": "call00000",
            "type": "function",
            "function": {"name": "f", "arguments": {"a": MARK}},
        }
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        for takes_json in (False, True):
            self._takes_json = takes_json
            try:
                text = self._render_raw(
                    [{"role": "user", "content": "?"}, called], {"add_generation_prompt": False}
                )
            except ValueError:
                continue
            # Neither omitted nor printed as a Python dict.
            if MARK in text and f"'{MARK}'" not in text:
                return takes_json
        return False

    def render_continuation(
        self, messages: list[Message], covered: int, **template_args: Any
    ) -> str | None:
        """Return the text that follows the content of assistant message `covered` - 1.

        This text has the end-of-turn mark and everything up to the next assistant turn. Returns
        None if the template rewrites earlier text (some drop earlier thinking).
        """
        messages = self._normalize_messages(messages)
        asking = {"add_generation_prompt": True, **template_args}
        answering = {"add_generation_prompt": False, **template_args}
        # Earlier messages are in the tokens already.
        whole = self._render_checked(messages, asking, covered)
        asked = self._render_raw(messages[: covered - 1], asking)
        answered = self._render_raw(messages[:covered], answering)
        if not (whole.startswith(answered) and answered.startswith(asked)):
            return None
        _, found, end = self._render_raw(
            [*messages[: covered - 1], ASSISTANT_MARK], answering
        ).partition(MARK)
        return end + whole[len(answered) :] if found else None

    def turn_end(self) -> str:
        """Return what the template writes after an assistant's last message; "" if unknown."""
        try:
            text = self._render_raw(
                [{"role": "user", "content": "?"}, ASSISTANT_MARK], {"add_generation_prompt": False}
            )
        except ValueError:
            return ""
        return text.partition(MARK)[2]

    # ------------------------------------------------------------------------------------------------- loss masks

    def mark_messages(
        self,
        messages: list[Message],
        roles: Collection[str] = ("assistant",),
        last_only: bool = False,
        first_marked: int = 0,
        **template_args: Any,
    ) -> list[MarkedText]:
        """Render a conversation and mark the messages of these roles, for training.

        Messages before number `first_marked` are context only.

        Each of these messages is marked once, together with its end-of-turn token. One rendering
        suffices unless the template rewrites earlier turns as the conversation continues (some drop
        thinking). A rewritten turn is marked in a further rendering, of the conversation up to that
        turn, which shows the turn as the model wrote it; `last_only` omits these further
        renderings. A template with `{% generation %}` marks assistant text itself. Raises
        ValueError like `render_conversation`.
        """
        messages = self._normalize_messages(messages)
        args = {"add_generation_prompt": False, **template_args}
        text = self._render_checked(messages, args)
        if set(roles) == {"assistant"}:
            spans = self._find_generated(messages, args)
            if spans:
                before = self._find_generated(messages[:first_marked], args) if first_marked else []
                return [MarkedText(text, spans[len(before) :])]
        turns = [
            self._render_turn(messages, i, args)
            for i, message in enumerate(messages)
            if i >= first_marked and message["role"] in roles
        ]
        found: list[MarkedText] = []
        while turns:
            held = [turn for turn in turns if text.startswith(turn[0])]
            if held:
                found.append(MarkedText(text, [span for _, span in held]))
            turns = [turn for turn in turns if turn not in held]
            if last_only:
                break
            text = turns[-1][0] if turns else ""
        return found[::-1]

    def _find_generated(self, messages: list[Message], args: dict[str, Any]) -> list[Span]:
        """Return the spans inside the `generation` tag; empty if the template has none."""
        if not self._has_generation_tags:
            return []
        marked = self._render_raw(messages, {**args, "generation_marks": True})
        spans = []
        start = 0
        position = 0
        for character in marked:
            if character == GENERATED:
                start = position
            elif character == GENERATED_END:
                spans.append((start, position))
            else:
                position += 1
        return spans

    def _render_turn(
        self, messages: list[Message], i: int, args: dict[str, Any]
    ) -> tuple[str, Span]:
        """Return the rendering that ends with message i, and the span of what that message adds."""
        is_answer = messages[i]["role"] == "assistant"
        before = messages[:i]
        asking = {**args, "add_generation_prompt": is_answer}
        prompt = self._render_raw(before, asking) if i or is_answer else ""
        answered = self._render_raw(messages[: i + 1], args)
        start = len(prompt)
        # The prompt begins with text that the answer lacks, such as an open <think>.
        if not answered.startswith(prompt):
            start = _common_length(prompt, answered)
            marked = self._render_raw([*before, {**messages[i], "content": MARK}], args)
            content = marked.partition(MARK)[0]
            if MARK in marked and answered.startswith(content):
                start = min(start, len(content))
            if not answered.startswith(self._render_raw(before, args) if i else ""):
                raise ValueError(
                    f"the chat template writes what is before message {i} differently with its answer"
                )
        # The line break after a turn is not generated.
        return answered, (start, len(answered.rstrip()))


PLAIN_CALL = {"name": "f", "arguments": {"a": "b"}}
ASSISTANT_MARK: Message = {"role": "assistant", "content": MARK}


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, str)
        else message
    )


def _marked_call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": MARK, "arguments": {"a": MARK}}
    return {**call, "function": function} if "function" in call else {**call, **function}


def _without_content(message: Message) -> Message:
    return (
        {**message, "content": None}
        if message.get("tool_calls") and not message["content"]
        else message
    )


def _with_json(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_call_with_json(call) for call in message["tool_calls"]]}


def _call_with_json(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if isinstance(function.get("arguments"), str):
        return call
    function = {
        **function,
        "arguments": json.dumps(function.get("arguments", {}), ensure_ascii=False),
    }
    return {**call, "function": function} if "function" in call else function


def _common_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` encloses assistant text; it renders as its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_enclose_body", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _enclose_body(self, context: Context, caller: Callable[[], str]) -> str:
        text = caller()
        return f"{GENERATED}{text}{GENERATED_END}" if context.get("generation_marks") else text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
