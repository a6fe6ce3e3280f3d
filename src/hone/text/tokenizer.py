"""A model's tokenizer: text to ids and back, conversations to ids, and which of them are the assistant's.

Reads what an HF directory has (`tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`,
`generation_config.json`) with the `tokenizers` library; transformers is not needed.
"""

import json
from collections import OrderedDict
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Encoder

from hone.records import Completion, Message, Prompt, Turn
from hone.text.chat import ChatTemplate
from hone.text.tool_calls import TAGS, parse_tool_calls


class Tokenizer:
    """Text and ids of one model directory.

    `stop_ids` end a generation: eos of the tokenizer and of the generation config.
    Raises ValueError, naming the file, for a directory without a usable tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{directory} has no tokenizer.json; save the tokenizer in that directory (HF fast format)"
            )
        try:
            self.encoder = Encoder.from_file(str(path))
        except Exception as error:  # the library raises a plain Exception for a malformed file
            raise ValueError(f"{path} is not a readable tokenizer: {error}") from None
        config = _read_json(directory / "tokenizer_config.json")
        specials = {k: _content(v) for k, v in config.items() if k.endswith("_token") and _content(v) is not None}
        template_file = directory / "chat_template.jinja"
        source = template_file.read_text() if template_file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = next((t["template"] for t in source if t["name"] == "default"), None)
        self.template = ChatTemplate(source, specials) if source else None  # type: ignore[arg-type]
        self.directory = directory
        self.vocab_size = self.encoder.get_vocab_size(with_added_tokens=True)
        self.stop_ids = self._stop_ids(specials, _read_json(directory / "generation_config.json"))
        added = self.encoder.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        tags = {number for number in special if added[number].content in TAGS}
        self._dropped = special - tags if tags else None  # without special tokens; None: as the library does
        self.kept: dict[Any, Any] = {}  # what servers know of its tokens
        self._chat_cache: OrderedDict[str, list[int]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process, which reads and writes tokens there: no template, nothing kept."""
        return self.__dict__ | {"template": None, "kept": {}, "_chat_cache": OrderedDict()}

    def _stop_ids(self, specials: dict[str, str | None], generation: dict[str, Any]) -> list[int]:
        eos = generation.get("eos_token_id")
        ids = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        token = specials.get("eos_token")
        token_id = self.encoder.token_to_id(token) if token else None
        if token_id is not None:
            ids.add(token_id)
        if not ids:
            raise ValueError(
                f"{self.directory}: neither tokenizer_config.json nor generation_config.json names an eos token"
            )
        return sorted(ids)

    @cached_property
    def longest(self) -> int:
        """Characters of its longest token."""
        return max(map(len, self.encoder.get_vocab(with_added_tokens=True)))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of the text as it stands, unless those are to be added that the tokenizer puts around a text.

        Raises ValueError for what is not valid Unicode."""
        text.encode()  # lone surrogates, as JSON can carry them, end here
        return list(self.encoder.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens. Tags of tool calls are a part of it also where the tokenizer counts them as special."""
        if skip_special_tokens and self._dropped is not None:
            ids, skip_special_tokens = [i for i in ids if i not in self._dropped], False
        return str(self.encoder.decode(ids, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str:
        """The text of one token, special or not."""
        return self.decode([token_id], skip_special_tokens=False)

    def prompt_ids(self, prompt: Prompt, **template_args: Any) -> list[int]:
        """The ids of a conversation up to where the assistant is to speak; recent ones are kept, a group asks often.

        Those of its earlier turns (`prompt.before`) stay as they were, and what the template adds comes after, unless
        it rewrites their text (some drop earlier thinking).
        """
        template, messages, args = self.require_template(), prompt.messages, {"tools": prompt.tools, **template_args}
        before, covered = prompt.before, prompt.covered
        if before and 0 < covered <= len(messages) and all(0 <= i < self.vocab_size for i in before):
            text = template.continuation(messages, covered, **args)
            if text is not None:
                rest = self.encode(text)
                return before + rest[rest[:1] == before[-1:] :]  # without the end of the turn, if it was sampled
        key = repr((messages, args))  # a tenth of the time that JSON takes
        ids = self._chat_cache.get(key)
        if ids is None:
            ids = self.encode(template.render(messages, add_generation_prompt=True, **args))
            self._chat_cache[key] = ids
            if len(self._chat_cache) > 1024:
                self._chat_cache.popitem(last=False)
        return ids

    def conversation_ids(
        self, messages: list[Message], roles: Collection[str] = ("assistant",), **template_args: Any
    ) -> tuple[list[int], list[bool]]:
        """The ids of a whole conversation, and for each whether one of these roles wrote it (the loss mask)."""
        text, spans = self.require_template().spans(messages, roles, **template_args)
        encoding = self.encoder.encode(text, add_special_tokens=False)
        first, behind = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(first), dtype=bool)
        for start, end in spans:
            mask |= (start <= first) & (behind <= end)
        return list(encoding.ids), mask.tolist()

    def turn(self, prompt: Prompt, prompt_ids: list[int], completion: Completion, text: str | None = None) -> Turn:
        """What the model answered, with the tools that it calls where some were given. `text`: if not as decoded."""
        text = self.decode(completion.ids) if text is None else text
        if not prompt.tools:
            return Turn(prompt_ids, completion, text)
        style, number = self.require_template().call_style, len(prompt.messages)
        return Turn(prompt_ids, completion, *parse_tool_calls(text, style, number))

    def require_template(self) -> ChatTemplate:
        if self.template is None:
            raise ValueError(
                f"{self.directory} has no chat template (chat_template.jinja or tokenizer_config.json), "
                "so messages cannot be rendered"
            )
        return self.template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    return value


def _content(token: Any) -> str | None:
    """Special tokens stand as plain strings or as {"content": …}."""
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None
