"""Parsers: from what the model wrote to the part that counts as its answer."""

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from hone.records import Message

Completion = list[Message] | str


def assistant_texts(completion: Completion) -> list[str]:
    """What the assistant said, turn by turn."""
    if isinstance(completion, str):
        return [completion]
    return [message["content"] or "" for message in completion if message["role"] == "assistant"]


class Parser:
    """The whole last answer, as it stands."""

    def parse(self, text: str) -> Any:
        return text

    def parse_answer(self, completion: Completion) -> str | None:
        texts = assistant_texts(completion)
        return texts[-1] if texts else None


class XMLParser(Parser):
    """Fields written as `<field>…</field>`; a field may be a tuple of names of which any one will do.

    `parse` gives an attribute for every name, None where the tags are missing. `parse_answer` gives
    `answer_field` (the last field unless named) of the last assistant message that has it.
    """

    def __init__(self, fields: Sequence[str | Sequence[str]], answer_field: str | None = None) -> None:
        self.fields = [[field] if isinstance(field, str) else list(field) for field in fields]
        names = [name for alternatives in self.fields for name in alternatives]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"XMLParser fields must be given and differ from each other, found {fields!r}")
        self.answer_field = answer_field or ("answer" if "answer" in names else self.fields[-1][0])
        if self.answer_field not in names:
            raise ValueError(f"answer_field {answer_field!r} is not one of the fields: {', '.join(names)}")

    def parse(self, text: str, strip: bool = True) -> SimpleNamespace:
        space = r"\s*" if strip else ""
        found: dict[str, str | None] = {}
        for name in (name for alternatives in self.fields for name in alternatives):
            match = re.search(rf"<{name}>{space}(.*?){space}</{name}>", text, re.DOTALL)
            found[name] = match.group(1) if match else None
        return SimpleNamespace(**found)

    def parse_answer(self, completion: Completion) -> str | None:
        for text in reversed(assistant_texts(completion)):
            answer: str | None = getattr(self.parse(text), self.answer_field)
            if answer is not None:
                return answer
        return None

    def get_format_str(self) -> str:
        """The format as a prompt can state it."""
        return "\n".join(f"<{'|'.join(names)}>\n...\n</{'|'.join(names)}>" for names in self.fields)

    def get_format_reward_func(self) -> Callable[[Completion], float]:
        """A reward in [0, 1]: 0.4 for the share of fields present, 0.2 each for clean tags, start and end."""

        def format_reward(completion: Completion) -> float:
            scores = [self._format_score(text.strip()) for text in assistant_texts(completion)]
            return sum(scores) / len(scores) if scores else 0.0

        return format_reward

    def _format_score(self, text: str) -> float:
        parsed = self.parse(text)
        present = [any(getattr(parsed, name) is not None for name in names) for names in self.fields]
        names = [name for alternatives in self.fields for name in alternatives]
        paired = all(text.count(f"<{name}>") == text.count(f"</{name}>") for name in names)
        starts = any(text.startswith(f"<{name}>") for name in self.fields[0])
        ends = any(text.endswith(f"</{name}>") for name in self.fields[-1])
        return 0.4 * sum(present) / len(present) + 0.2 * (paired and any(present)) + 0.2 * starts + 0.2 * ends
