"""Chat templates: messages to the text that a model reads, as transformers renders them, without importing it.

Source of the environment (filters, globals, block trimming, the `generation` tag): the chat-template
documentation of transformers; equality with it is tested on several templates.
"""

import json
from collections.abc import Collection
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hone.records import Message
from hone.text.tool_calls import for_template, style_of

MARK = "\ue000"  # a character that no text has


class ChatTemplate:
    """A compiled chat template. Raises ValueError for a template that does not compile."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self.template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not compile: {error}") from None
        self.special_tokens = special_tokens
        self.call_style = style_of(source)

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **template_args: Any,
    ) -> str:
        """The conversation as text; `template_args` reach the template (`enable_thinking=False`, …).

        Raises ValueError when the template refuses the messages (roles out of order, unknown role).
        """
        try:
            return self.template.render(
                messages=[for_template(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
                **template_args,
            )
        except Exception as error:  # a template is a program of its own: it may raise anything
            raise ValueError(f"the chat template refuses these messages: {error}") from None

    def continuation(self, messages: list[Message], covered: int, **template_args: Any) -> str | None:
        """What follows the text of message `covered` - 1, which the assistant wrote: the mark that ends its turn, and
        all up to where the assistant is to speak again. None where the template rewrites what was before that (some
        drop earlier thinking)."""
        whole = self.render(messages, add_generation_prompt=True, **template_args)
        asked = self.render(messages[: covered - 1], add_generation_prompt=True, **template_args)
        answered = self.render(messages[:covered], **template_args)
        if not (whole.startswith(answered) and answered.startswith(asked)):
            return None
        marked = [*messages[: covered - 1], {"role": "assistant", "content": MARK}]
        _, found, end = self.render(marked, **template_args).partition(MARK)
        return end + whole[len(answered) :] if found else None

    def spans(
        self, messages: list[Message], roles: Collection[str] = ("assistant",), **template_args: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """The rendered conversation and the character spans of these roles' messages, end-of-turn mark included.

        What an assistant wrote is what its message adds to the text that prompted it; of others it is all that their
        message adds. Raises ValueError when the template rewrites earlier turns, since what comes before a message is
        then no prefix of the conversation.
        """
        text = self.render(messages, **template_args)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] not in roles:
                continue
            prompts = message["role"] == "assistant"
            prompt = self.render(messages[:i], add_generation_prompt=prompts, **template_args) if i or prompts else ""
            answered = text if i == len(messages) - 1 else self.render(messages[: i + 1], **template_args)
            if not (answered.startswith(prompt) and text.startswith(answered)):
                raise ValueError(
                    f"the chat template renders message {i} differently once the conversation goes on "
                    "(some drop earlier thinking), so its tokens cannot be marked for the loss; "
                    "train on single-turn data or use a template that only appends"
                )
            spans.append((len(prompt), len(answered.rstrip())))  # the line break after a turn is not the model's
        return text, spans


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text in some templates; it renders as its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
