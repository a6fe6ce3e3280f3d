"""A model's tokenizer: text to ids and back, conversations to ids and loss masks.

Reads a Hugging Face directory (`model_text.py`) with the `tokenizers` library, without
transformers.
"""

import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hone.config.sections import ModelConfig
from hone.records import Completion, Message, Prompt, Turn
from hone.text.chat import DEFAULT, ChatTemplate
from hone.text.detokenizer import TokenTexts, name_of
from hone.text.model_text import (
    find_templates,
    load_encoder,
    read_config,
    read_end_ids,
    read_special_tokens,
    resolve_template,
)
from hone.text.tool_calls import opens_thought, parse_tool_calls

log = logging.getLogger("hone.text")
# No threads of its own, and no warnings after a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
BEFORE = "\x01"  # a separator before text that continues tokens; it is a token of its own
LONG_TEXT_CHARACTERS = 4096  # characters from which a text is encoded without the GIL
CONTEXT_TOKENS = 8  # preceding tokens that can change the text of the next ones
CACHED_PROMPTS = 1024  # rendered conversations whose ids are kept
CACHED_BYTES = 65536  # of a conversation and its ids; longer ones are not kept
PROMPT_END_TOKENS = 16  # last tokens of a prompt that are searched for an open thought


def leading_tokens(text: str, added: Collection[str]) -> list[str]:
    """Return the added tokens at the beginning of a text."""
    found: list[str] = []
    ordered = sorted(filter(None, added), key=len, reverse=True)
    while mark := next((token for token in ordered if text.startswith(token)), ""):
        found.append(mark)
        text = text[len(mark) :]
    return found


class Tokenizer:
    """The tokenizer and chat template of a model directory.

    `stop_ids` end a generation: eos of the tokenizer and of the generation config, and the
    template's end-of-turn token. `chat_template` replaces the directory's own; `template_arguments`
    are passed to it in every rendering. Raises ValueError, naming the file, for a directory without
    a usable tokenizer.
    """

    def __init__(
        self,
        directory: Path,
        chat_template: str | None = None,
        template_arguments: dict[str, Any] | None = None,
        call_format: str = "auto",
    ) -> None:
        config = read_config(directory)
        self.encoder = load_encoder(directory, config)
        specials = read_special_tokens(config)
        self.directory = directory
        self.chat_template = chat_template
        self.template_arguments = template_arguments
        self.call_format = call_format
        templates = {DEFAULT: chat_template} if chat_template else find_templates(directory, config)
        self.template = (
            ChatTemplate(templates, specials, template_arguments, call_format)
            if templates
            else None
        )
        self.vocab_size = self.encoder.get_vocab_size(with_added_tokens=True)
        added = self.encoder.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.stop_ids = self._stop_ids(
            specials, {token.content: number for number, token in added.items()}
        )
        self._special = special = {number for number, token in added.items() if token.special}
        kept = self.template.call_format.tags if self.template else ()
        tags = {number for number in special if added[number].content in kept}
        # Without special tokens; None: the library's default.
        self._dropped = special - tags if tags else None
        self.kept: dict[Any, Any] = {}  # caches of servers, by purpose
        self._chat_cache: OrderedDict[str, list[int]] = OrderedDict()
        self._beyond: dict[int, str] = {}  # tokens without an embedding in the model

    def fit_vocabulary(self, vocab_size: int) -> None:
        """Set the model's vocabulary size; text with tokens beyond it is refused.

        Added tokens, such as a padding token, often exceed it. Raises ValueError if the tokenizer
        has more tokens than the model even without its added ones.
        """
        own = self.encoder.get_vocab_size(with_added_tokens=False)
        if own > vocab_size:
            raise ValueError(
                f"{self.directory}: the tokenizer has {own} tokens, the model's vocab_size is {vocab_size}"
            )
        added = self.encoder.get_added_tokens_decoder()
        self._beyond = {
            number: token.content for number, token in added.items() if number >= vocab_size
        }
        if self._beyond:
            names = ", ".join(list(self._beyond.values())[:5])
            log.warning(
                "%s: the model has no embedding for tokens of its tokenizer: %s",
                self.directory,
                names,
            )

    def _require_known(self, ids: list[int]) -> list[int]:
        if (
            self._beyond
            and (unknown := next((self._beyond[i] for i in ids if i in self._beyond), None))
            is not None
        ):
            raise ValueError(
                f"the text has the token {unknown}, for which the model has no embedding"
            )
        return ids

    @staticmethod
    def for_model(directory: Path, config: ModelConfig) -> "Tokenizer":
        """Return a model's tokenizer with the configured template. Raises ValueError."""
        template = None if config.chat_template is None else resolve_template(config.chat_template)
        return Tokenizer(directory, template, config.template_arguments, config.tool_calls)

    def reload_from(self, directory: Path) -> "Tokenizer":
        """Return the tokenizer of another directory, configured like this one.

        A chat template is kept only if it was given explicitly.
        """
        other = Tokenizer(directory, self.chat_template, self.template_arguments, self.call_format)
        other._beyond = self._beyond
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without template and caches."""
        return self.__dict__ | {"template": None, "kept": {}, "_chat_cache": OrderedDict()}

    def _stop_ids(self, specials: dict[str, str], added: dict[str, int]) -> list[int]:
        ids = set(read_end_ids(self.directory))
        token = specials.get("eos_token")
        token_id = self.encoder.token_to_id(token) if token else None
        if token_id is not None:
            ids.add(token_id)
        marks = leading_tokens(self.template.turn_end().lstrip(), added) if self.template else []
        if marks and not any(added[mark] in ids for mark in marks):
            said = f"the chat template ends a turn with {marks[0]}, which the model's files do not name as an end"
            log.info("%s: %s: generation stops there too", self.directory, said)
            ids.add(added[marks[0]])
        if not ids:
            raise ValueError(
                f"{self.directory}: neither tokenizer_config.json nor generation_config.json names an eos token"
            )
        return sorted(ids)

    @cached_property
    def longest_token(self) -> int:
        """Return the number of characters of the longest token."""
        return max(map(len, self.encoder.get_vocab(with_added_tokens=True)))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text; `add_special_tokens` adds the tokenizer's, such as bos.

        Long texts are encoded without the GIL. Raises ValueError for invalid Unicode.
        """
        text.encode()  # refuses lone surrogates, which JSON can carry
        if len(text) < LONG_TEXT_CHARACTERS:
            encoding = self.encoder.encode(text, add_special_tokens=add_special_tokens)
        else:
            (encoding,) = self.encoder.encode_batch([text], add_special_tokens=add_special_tokens)
        return self._require_known(list(encoding.ids))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens. Tool-call tags are kept even if they are special tokens."""
        if skip_special_tokens and self._dropped is not None:
            ids = [i for i in ids if i not in self._dropped]
            skip_special_tokens = False
        return str(self.encoder.decode(ids, skip_special_tokens=skip_special_tokens))

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Return the `TokenTexts` of this tokenizer: the bytes that each token adds to a text."""
        return TokenTexts(self.encoder)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special or not, within a text."""
        return name_of(self.token_texts.bytes_of(token_id))

    def is_dropped(self, token_id: int) -> bool:
        """Return True for a special token that `decode` omits."""
        if self._dropped is not None:
            return token_id in self._dropped
        return token_id in self._special

    def context_of(self, before: list[int], skip_special_tokens: bool = True) -> list[int]:
        """Return the last tokens of `before` that can change the text of the next ones.

        With `skip_special_tokens`, special tokens that `decode` omits are left out.
        """
        if not skip_special_tokens:
            return before[-CONTEXT_TOKENS:]
        return [token for token in before[-4 * CONTEXT_TOKENS :] if not self.is_dropped(token)][
            -CONTEXT_TOKENS:
        ]

    def decode_after(
        self, before: list[int], ids: list[int], skip_special_tokens: bool = True
    ) -> str:
        """Return the text that tokens add after earlier tokens."""
        context = self.context_of(before, skip_special_tokens)
        start = self.decode(context, skip_special_tokens)
        whole = self.decode(context + ids, skip_special_tokens)
        return (
            whole[len(start) :]
            if whole.startswith(start)
            else self.decode(ids, skip_special_tokens)
        )

    def prompt_ids(self, prompt: Prompt, **template_args: Any) -> list[int]:
        """Return the ids of a conversation up to the next assistant turn.

        The ids of earlier turns (`prompt.before`) are reused, and only the text after them is
        encoded, unless the template rewrites earlier text (some drop earlier thinking). Recent
        encodings of whole conversations are cached.
        """
        template = self.require_template()
        messages = prompt.messages
        args = {"tools": prompt.tools, **(prompt.template_arguments or {}), **template_args}
        before = prompt.before
        covered = prompt.covered
        if (
            before
            and 0 < covered <= len(messages)
            and all(0 <= i < self.vocab_size for i in before)
        ):
            text = template.render_continuation(messages, covered, **args)
            if text is not None:
                return before + self._encode_after(before, text)
        key = repr((messages, args))  # ten times faster than JSON
        ids = self._chat_cache.get(key)
        if ids is None:
            ids = self.encode(
                template.render_conversation(messages, add_generation_prompt=True, **args)
            )
            if sys.getsizeof(key) + 8 * len(ids) <= CACHED_BYTES:
                self._chat_cache[key] = ids
            if len(self._chat_cache) > CACHED_PROMPTS:
                self._chat_cache.popitem(last=False)
        return ids

    def _encode_after(self, before: list[int], text: str) -> list[int]:
        """Return the ids of `text`, which continues the tokens `before`.

        An end-of-turn token at the end of `before` is not repeated.
        """
        last = self.token_texts.bytes_of(before[-1]).decode(errors="replace")
        is_ended = before[-1] in self._added and text.lstrip().startswith(last)
        if is_ended:  # encoded with it, since tokenizers look at the preceding text
            return self.encode(text.lstrip())[1:]
        if self.token_texts.has_spaces:  # otherwise it would put a space before a separate text
            start = self.encode(BEFORE)
            whole = self.encode(BEFORE + text)
            if whole[: len(start)] == start:
                return whole[len(start) :]
        return self.encode(text)

    def conversation_ids(
        self,
        messages: list[Message],
        roles: Collection[str] = ("assistant",),
        last_only: bool = False,
        first_marked: int = 0,
        **template_args: Any,
    ) -> list[tuple[list[int], list[bool]]]:
        """Return (ids, loss mask) pairs of a conversation; messages of these roles have a loss.

        Messages before number `first_marked` have none.
        There are several pairs if the template rewrites earlier turns as the conversation continues
        (`ChatTemplate.mark_messages`), unless `last_only` is set. A token that spans two messages
        belongs to the first.
        """
        found = []
        for marked in self.require_template().mark_messages(
            messages, roles, last_only, first_marked, **template_args
        ):
            encoding = self.encoder.encode(marked.text, add_special_tokens=False)
            first = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)[:, 0]
            mask = np.zeros(len(first), dtype=bool)
            for start, end in marked.spans:
                mask |= (start <= first) & (first < end)
            found.append((self._require_known(list(encoding.ids)), mask.tolist()))
        return found

    def build_turn(
        self,
        prompt: Prompt,
        prompt_ids: list[int],
        completion: Completion,
        text: str | None = None,
        most_calls: int | None = None,
    ) -> Turn:
        """Return the model's answer, with tool calls if tools were given.

        `text` replaces the decoded text; at most `most_calls` calls are returned, and no more than
        the template can render.
        """
        text = self.decode(completion.ids) if text is None else text
        if not prompt.tools:
            return Turn(prompt_ids, completion, text)
        template = self.require_template()
        thinks = opens_thought(
            self.decode(prompt_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        )
        limits = [limit for limit in (most_calls, template.most_calls) if limit is not None]
        most = min(limits, default=None)
        number = len(prompt.messages)
        calls = parse_tool_calls(text, template.call_format, number, prompt.tools, thinks, most)
        return Turn(prompt_ids, completion, *calls)

    def require_template(self) -> ChatTemplate:
        if self.template is None:
            raise ValueError(
                f"{self.directory} has no chat template (chat_template.jinja or tokenizer_config.json), so messages "
                "cannot be rendered; give one: --model.chat-template chatml, or a file (docs/configuration.md)"
            )
        return self.template
