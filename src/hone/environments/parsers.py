"""Parsers: extract the answer from a model's text."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from hone.records import Message
from hone.text.tool_calls import cut_blocks

Completion = list[Message] | str


def assistant_texts(completion: Completion) -> list[str]:
    """Return the texts of the assistant's messages."""
    if isinstance(completion, str):
        return [completion]
    return [
        message.get("content") or "" for message in completion if message["role"] == "assistant"
    ]


class Parser:
    """Parser that applies `extract_fn` to the last assistant message; by default keeps its text."""

    def __init__(self, extract_fn: Callable[[str], str] = str) -> None:
        self.extract_fn = extract_fn

    def parse(self, text: str) -> Any:
        return self.extract_fn(text)

    def parse_answer(self, completion: Completion) -> str | None:
        texts = assistant_texts(completion)
        return self.parse(texts[-1]) if texts else None

    def write(self, answer: str) -> str:
        """Return a text whose parsed answer is `answer`."""
        return answer

    def get_format_reward_func(self) -> Callable[[Completion], float]:
        """Return a reward function for the output format: always 1, since any text is accepted."""

        def format_reward(completion: Completion) -> float:
            return 1.0

        return format_reward

    def get_assistant_messages(self, completion: list[Message]) -> list[Message]:
        return [message for message in completion if message["role"] == "assistant"]

    def get_user_messages(self, completion: list[Message]) -> list[Message]:
        return [message for message in completion if message["role"] == "user"]

    def get_system_messages(self, completion: list[Message]) -> list[Message]:
        return [message for message in completion if message["role"] == "system"]

    def get_tool_messages(self, completion: list[Message]) -> list[Message]:
        return [message for message in completion if message["role"] == "tool"]


class ThinkParser(Parser):
    """Parse the text after `</think>`; without the tag there is no answer."""

    def parse(self, text: str) -> str:
        _, found, after = text.rpartition("</think>")
        return self.extract_fn(after.strip()) if found else ""

    def write(self, answer: str) -> str:
        return f"<think>\n</think>\n{answer}"

    def get_format_reward_func(self) -> Callable[[Completion], float]:
        """Return a reward function for the format `<think>…</think>…`.

        Its value is the share of assistant messages that begin with `<think>`, have each tag once,
        and have text after `</think>`.
        """

        def format_reward(completion: Completion) -> float:
            texts = [text.strip() for text in assistant_texts(completion)]
            good = [
                text.startswith("<think>")
                and text.count("<think>") == text.count("</think>") == 1
                and bool(text.partition("</think>")[2].strip())
                for text in texts
            ]
            return sum(good) / len(good) if good else 0.0

        return format_reward


class MaybeThinkParser(Parser):
    """Parse the text after any thinking."""

    def parse(self, text: str) -> str:
        return self.extract_fn(text.rpartition("</think>")[2].strip())


def extract_hash_answer(text: str) -> str:
    """Return the text after the first ####, as GSM8K writes answers, or the whole text."""
    return text.split("####")[1].strip() if "####" in text else text


def extract_boxed_answer(text: str, strict: bool = False) -> str:
    """Return the content of the last LaTeX command `boxed{…}`.

    For text without it, return the whole text, or "" if `strict`.
    """
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for i, letter in enumerate(rest if found else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[:i]
    return "" if strict else text


class XMLParser(Parser):
    """Parse fields written as `<field>…</field>`.

    A field given as a list of names matches a tag with any of these names. `parse` returns an
    object with one attribute per name, which is None if the tag is missing. `parse_answer` returns
    the content of `answer_field` in the last assistant message that has this field; the default of
    `answer_field` is `answer`, or the last field if there is no `answer`.
    """

    def __init__(
        self,
        fields: Sequence[str | Sequence[str]],
        answer_field: str | None = None,
        extract_fn: Callable[[str], str] = str,
    ) -> None:
        super().__init__(extract_fn)
        self.fields = [[field] if isinstance(field, str) else list(field) for field in fields]
        names = [name for alternatives in self.fields for name in alternatives]
        if len(set(names)) != len(names) or not names:
            raise ValueError(
                f"XMLParser fields must be given and differ from each other, found {fields!r}"
            )
        self.answer_field = answer_field or ("answer" if "answer" in names else self.fields[-1][0])
        if self.answer_field not in names:
            raise ValueError(
                f"answer_field {answer_field!r} is not one of the fields: {', '.join(names)}"
            )

    def parse(self, text: str, strip: bool = True, last: bool = False) -> SimpleNamespace:
        found: dict[str, str | None] = {}
        for name in (name for alternatives in self.fields for name in alternatives):
            written = cut_blocks(text, f"<{name}>", f"</{name}>")[1]
            value = written[-1 if last else 0] if written else None
            found[name] = value.strip() if strip and value is not None else value
        return SimpleNamespace(**found)

    def parse_answer(self, completion: Completion) -> str | None:
        for text in reversed(assistant_texts(completion)):
            answer: str | None = getattr(self.parse(text, last=True), self.answer_field)
            if answer is not None:
                return self.extract_fn(answer)
        return None

    def write(self, answer: str) -> str:
        return f"<{self.answer_field}>{answer}</{self.answer_field}>"

    def get_fields(self) -> list[str]:
        """Return the first name of each field."""
        return [names[0] for names in self.fields]

    def format(self, **values: str) -> str:
        """Return the text that a model would write for these field values (keyword arguments)."""
        return "\n".join(f"<{name}>\n{value}\n</{name}>" for name, value in values.items())

    def get_format_str(self) -> str:
        """Return the expected tags as text to insert into a prompt."""
        return "\n".join(f"<{'|'.join(names)}>\n...\n</{'|'.join(names)}>" for names in self.fields)

    def get_format_reward_func(self) -> Callable[[Completion], float]:
        """Return a reward function in [0, 1] for the format, a mean over assistant messages.

        A message gets 0.4 times the share of fields that are present, 0.2 if every tag is closed,
        0.2 if it starts with the first field, and 0.2 if it ends with the last.
        """

        def format_reward(completion: Completion) -> float:
            scores = [self._format_score(text.strip()) for text in assistant_texts(completion)]
            return sum(scores) / len(scores) if scores else 0.0

        return format_reward

    def _format_score(self, text: str) -> float:
        parsed = self.parse(text)
        present = [
            any(getattr(parsed, name) is not None for name in names) for names in self.fields
        ]
        names = [name for alternatives in self.fields for name in alternatives]
        paired = all(text.count(f"<{name}>") == text.count(f"</{name}>") for name in names)
        starts = any(text.startswith(f"<{name}>") for name in self.fields[0])
        ends = any(text.endswith(f"</{name}>") for name in self.fields[-1])
        return (
            0.4 * sum(present) / len(present)
            + 0.2 * (paired and any(present))
            + 0.2 * starts
            + 0.2 * ends
        )
