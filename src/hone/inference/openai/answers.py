"""Response bodies of the OpenAI API, whole or as chunks of a stream.

    completions ─► ChatAnswer | TextAnswer ─► build_body          one JSON object
    pieces      ─►                          ─► build_first_delta, build_delta, build_last_delta    chunks of a stream

The same tokens give the same text, logprobs and tool calls in both forms.
"""

import codecs
import itertools
import json
import math
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from hone.inference.openai.schema import ChatRequest, CompletionRequest, Request
from hone.inference.samplers.partial_completions import Spelling
from hone.records import Completion, Prompt
from hone.text.detokenizer import name_of
from hone.text.stop_strings import cut_at_stop
from hone.text.tokenizer import Tokenizer

Choice = dict[str, Any]
# Some stream readers treat the last three as ends of lines.
ODD = ("NaN", "Infinity", "\x85", "\u2028", "\u2029")
PLACE = uuid.uuid4().hex  # a placeholder whose second half is secret
NUMBERS = itertools.count()


class Answer:
    """Base class of chat and text answers.

    `prompts` holds the token ids of each prompt. For each prompt there are `request.n` completions.
    """

    kind = ""
    chunk_kind = ""
    prefix = ""

    def __init__(self, request: Request, prompts: list[list[int]], tokenizer: Tokenizer) -> None:
        self.request = request
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.skip = request.skip_special_tokens is not False
        self.has_form = request.has_form
        self._written: dict[str, str] = {}  # JSON text by placeholder
        self._chunk_head = ""
        self.head = {
            "id": f"{self.prefix}-{PLACE[:16]}{next(NUMBERS):016x}",
            "created": int(time.time()),  # noqa: TID251
            "model": request.model,
        }

    def encode_json(self, value: dict[str, Any]) -> str:
        """Encode a value as JSON; insert the texts passed to `embed_json` at their placeholders."""
        text = _dump_json(value)
        while self._written:
            place, written = self._written.popitem()
            text = text.replace(f'"{place}"', written, 1)
        return text

    def embed_json(self, text: str) -> str:
        """Return a placeholder that `encode_json` replaces with `text`, which is JSON already."""
        place = f"{PLACE}{len(self._written)}"
        self._written[place] = text
        return place

    def prompt_of(self, index: int) -> list[int]:
        return self.prompts[index // (self.request.n or 1)]

    def build_body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Build the body of a response that is not streamed."""
        choices = [
            {"index": i, **self.build_choice(i, one), **self.build_token_fields(one)}
            for i, one in enumerate(completions)
        ]
        usage = self.count_usage(sum(len(one.ids) for one in completions))
        return {
            **self.head,
            "object": self.kind,
            "choices": choices,
            "usage": usage,
            **self.build_envelope(),
        }

    def count_usage(self, written: int) -> dict[str, int]:
        read = sum(map(len, self.prompts))
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def build_envelope(self) -> dict[str, Any]:
        return {}

    def build_choice(self, index: int, completion: Completion) -> Choice:
        raise NotImplementedError

    def context_tokens(self, index: int) -> list[int]:
        """Return the tokens before completion `index` that affect its decoded text.

        The list is empty if there are none, as in a chat.
        """
        return []

    def completion_text(self, completion: Completion, index: int = 0) -> str:
        """Return the text of a completion up to a stop string."""
        request = self.request
        ids = completion.ids
        # The format applies to what comes before.
        if ids and self.has_form and ids[-1] in self.tokenizer.stop_ids:
            ids = ids[:-1]
        text = self.tokenizer.decode_after(self.context_tokens(index), ids, self.skip)
        return (
            cut_at_stop(text, request.stop, keep=bool(request.include_stop_str_in_output))
            if request.stop
            else text
        )

    def build_token_fields(self, completion: Completion) -> dict[str, Any]:
        """Return the requested token fields: logprobs, token ids, policy versions."""
        extras: dict[str, Any] = {}
        if self.request.return_token_logprobs:
            extras["token_logprobs"] = completion.logprobs
        if self.request.return_token_ids:
            extras |= {"token_ids": completion.ids, "policy_versions": completion.versions}
        return extras

    def token_name(self, token_id: int, piece: bytes, prefix: str = "") -> str:
        """Return a token's name: its text, or `token_id:N` if the request wants ids.

        `piece` holds the bytes that the token contributes to the text.
        """
        return (
            f"token_id:{token_id}"
            if self.request.return_tokens_as_token_ids
            else name_of(piece, prefix)
        )

    # -------------------------------------------------------------------------------------------- in pieces

    def start_spelling(self, index: int) -> Spelling:
        stops: list[str] = list(self.request.stop or [])
        shown = [] if self.request.include_stop_str_in_output else stops
        return Spelling(
            self.tokenizer,
            self.skip,
            shown,
            self.held_back_strings,
            self.tokenizer.context_of(self.context_tokens(index), self.skip),
        )

    @property
    def held_back_strings(self) -> list[str]:
        """Return strings at which a streamed text is held back, such as the start of a tool call."""
        return []

    def encode_chunk(self, choices: list[Choice], **more: Any) -> str:
        """Encode a chunk as JSON; the fields that all chunks of the stream share are encoded once."""
        self._chunk_head = (
            self._chunk_head or _dump_json({**self.head, "object": self.chunk_kind})[:-1]
        )
        return f"{self._chunk_head},{self.encode_json({'choices': choices, **more})[1:]}"

    def build_first_delta(self, index: int) -> Choice | None:
        """Return the delta before the first token."""
        return None

    def build_delta(self, index: int, said: str, piece: Completion) -> Choice:
        """Return the choice to stream for new tokens of completion `index`.

        Args:
            said: text that became final with these tokens.
            piece: the new tokens.
        """
        raise NotImplementedError

    def build_last_delta(
        self, index: int, spelling: Spelling, piece: Completion, whole: Completion
    ) -> Choice:
        """Return the last choice to stream: tokens of `piece`, finish reason of `whole`."""
        raise NotImplementedError


class ChatAnswer(Answer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(
        self, request: ChatRequest, prompt: Prompt, prompt_ids: list[int], tokenizer: Tokenizer
    ) -> None:
        super().__init__(request, [prompt_ids], tokenizer)
        self.chat = request
        self.prompt = prompt
        self._begun: set[int] = set()  # completions with tokens so far

    def build_envelope(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[0]} if self.request.return_token_ids else {}

    def _build_message(self, completion: Completion) -> tuple[dict[str, Any], str]:
        """Return the message and its finish reason."""
        most = 1 if self.chat.parallel_tool_calls is False else None
        turn = self.tokenizer.build_turn(
            self.prompt, self.prompts[0], completion, self.completion_text(completion), most
        )
        called = bool(turn.tool_calls) and completion.finish_reason == "stop"
        return turn.assistant_message, "tool_calls" if called else completion.finish_reason

    def build_choice(self, index: int, completion: Completion) -> Choice:
        message, reason = self._build_message(completion)
        choice = {
            "message": message,
            "finish_reason": reason,
            "logprobs": self._build_logprobs(index, completion),
        }
        return choice | ({"routing": completion.routing} if self.chat.return_routing else {})

    @property
    def held_back_strings(self) -> list[str]:
        if not self.prompt.tools:
            return []
        return list(self.tokenizer.require_template().call_format.openings)

    def build_first_delta(self, index: int) -> Choice:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "finish_reason": None,
        }
        return choice | {"logprobs": None}

    def build_delta(self, index: int, said: str, piece: Completion) -> Choice:
        choice = {"index": index, "delta": {"content": said}, "finish_reason": None}
        return choice | {
            "logprobs": self._build_logprobs(index, piece),
            **self.build_token_fields(piece),
        }

    def build_last_delta(
        self, index: int, spelling: Spelling, piece: Completion, whole: Completion
    ) -> Choice:
        message, reason = self._build_message(whole)
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or [])]
        said = spelling.finish_text(message["content"])
        delta = {**({"content": said} if said else {}), **({"tool_calls": calls} if calls else {})}
        done = {"index": index, "delta": delta, "finish_reason": reason}
        return done | {
            "logprobs": self._build_logprobs(index, piece),
            **self.build_token_fields(piece),
        }

    def _build_logprobs(self, index: int, completion: Completion) -> dict[str, Any] | None:
        """Return the `logprobs` field of new tokens; the `bytes` of all entries join to the text."""
        if not self.chat.logprobs:
            return None
        is_first = index not in self._begun and self.tokenizer.token_texts.drops_first_space
        if completion.ids:
            self._begun.add(index)
        if completion.alternatives is None and not is_first:
            return {"content": self.embed_json(self._encode_entries(completion))}
        content = []
        for i, (token_id, logprob) in enumerate(
            zip(completion.ids, completion.logprobs, strict=True)
        ):
            begins = is_first and i == 0
            others = completion.alternatives[i] if completion.alternatives else []
            tops = [self._build_entry(*other, begins) for other in others]
            content.append({**self._build_entry(token_id, logprob, begins), "top_logprobs": tops})
        return {"content": content}

    def _encode_entries(self, completion: Completion) -> str:
        """Encode logprob entries as JSON; for speed, the fragments of each token are cached.

        Raises ValueError for logprobs that are not finite.
        """
        by_id = bool(self.request.return_tokens_as_token_ids)
        known: dict[int, tuple[str, str]] = self.tokenizer.kept.setdefault(("entries", by_id), {})
        if not math.isfinite(sum(completion.logprobs)):
            raise ValueError("the model gives logprobs that are not finite")
        for token_id in completion.ids:
            if token_id not in known:
                head, tail = json.dumps(
                    self._build_entry(token_id, 0.0) | {"top_logprobs": []}
                ).split(': 0.0, "bytes"')
                known[token_id] = (head + ": ", ', "bytes"' + tail)
        around = map(known.__getitem__, completion.ids)
        parts = [
            f"{head}{value!r}{tail}"
            for (head, tail), value in zip(around, completion.logprobs, strict=True)
        ]
        return f"[{', '.join(parts)}]"

    def _build_entry(self, token_id: int, logprob: float, begins: bool = False) -> dict[str, Any]:
        texts = self.tokenizer.token_texts
        piece = texts.first_bytes_of(token_id) if begins else texts.bytes_of(token_id)
        return {"token": self.token_name(token_id, piece), "logprob": logprob, "bytes": list(piece)}


class TextAnswer(Answer):
    """Answer of /v1/completions. `echoed` holds logprobs and likeliest tokens of echoed prompts."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self,
        request: CompletionRequest,
        prompts: list[list[int]],
        tokenizer: Tokenizer,
        echoed: list[Completion] | None = None,
    ) -> None:
        super().__init__(request, prompts, tokenizer)
        self.ask = request
        self.echoed = echoed
        self._counts: dict[int, Characters] = {}

    def context_tokens(self, index: int) -> list[int]:
        return self.prompt_of(index)

    def echoed_text(self, index: int) -> str:
        """Return the prompt's text if it is echoed, else ""."""
        return (
            self.tokenizer.decode(self.prompt_of(index), skip_special_tokens=self.skip)
            if self.ask.echo
            else ""
        )

    def build_choice(self, index: int, completion: Completion) -> Choice:
        count = Characters(len(self.echoed_text(index)))
        logprobs = self._build_logprobs(completion, count, follows=True)
        if logprobs is not None and self.echoed is not None:
            echoed = self.echoed[index // (self.request.n or 1)]
            ahead = self._build_logprobs(echoed, Characters(0), follows=False)
            assert ahead is not None
            logprobs = {key: ahead[key] + logprobs[key] for key in logprobs}
        text = self.echoed_text(index) + self.completion_text(completion, index)
        ids = {"prompt_token_ids": self.prompt_of(index)} if self.request.return_token_ids else {}
        return {
            "text": text,
            "finish_reason": completion.finish_reason,
            "logprobs": logprobs,
            **ids,
        }

    def build_first_delta(self, index: int) -> Choice | None:
        if not (self.ask.echo or self.request.return_token_ids):
            return None
        ids = {"prompt_token_ids": self.prompt_of(index)} if self.request.return_token_ids else {}
        return {
            "index": index,
            "text": self.echoed_text(index),
            "finish_reason": None,
            "logprobs": None,
            **ids,
        }

    def build_delta(self, index: int, said: str, piece: Completion) -> Choice:
        count = self._counts.setdefault(index, Characters(len(self.echoed_text(index))))
        choice = {"index": index, "text": said, "finish_reason": None}
        return choice | {
            "logprobs": self._build_logprobs(piece, count, follows=True),
            **self.build_token_fields(piece),
        }

    def build_last_delta(
        self, index: int, spelling: Spelling, piece: Completion, whole: Completion
    ) -> Choice:
        said = self.build_delta(
            index, spelling.finish_text(self.completion_text(whole, index)), piece
        )
        return said | {"finish_reason": whole.finish_reason}

    def _build_logprobs(
        self, completion: Completion, count: "Characters", follows: bool
    ) -> dict[str, Any] | None:
        """Return the `logprobs` field of a completion's tokens, None if not requested.

        Args:
            count: counter of the characters before these tokens; advanced past them.
            follows: True if other tokens precede these.
        """
        if self.ask.logprobs is None:
            return None
        texts = self.tokenizer.token_texts
        ids = completion.ids
        pieces = texts.token_bytes(ids, follows)
        offsets = []
        names = []
        tops = list[dict[str, float] | None]()
        for i, (token_id, piece, logprob) in enumerate(
            zip(ids, pieces, completion.logprobs, strict=True)
        ):
            offsets.append(count.so_far)
            count.add(b"" if self.skip and self.tokenizer.is_dropped(token_id) else piece)
            names.append(self.token_name(token_id, piece, "bytes:"))
            others = completion.alternatives[i] if completion.alternatives else []
            begins = not follows and i == 0
            tops.append(
                None
                if logprob is None
                else self._build_top_logprobs(token_id, names[-1], logprob, others, begins)
            )
        return {
            "tokens": names,
            "token_logprobs": completion.logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _build_top_logprobs(
        self,
        token_id: int,
        name: str,
        logprob: float,
        others: Sequence[tuple[int, float]],
        begins: bool,
    ) -> dict[str, float]:
        """Return {token name: logprob} of the likeliest tokens and of the actual token.

        If two tokens have the same name, one of them is named `token_id:N`.

        Args:
            token_id: the actual token.
            others: ids and logprobs of the likeliest tokens.
            begins: True if the token is the first of its text.
        """
        texts = self.tokenizer.token_texts
        found = dict[str, float]()
        for other, value in others:
            piece = texts.first_bytes_of(other) if begins else texts.bytes_of(other)
            other_name = self.token_name(other, piece, "bytes:")
            taken = other_name in found or (other_name == name and other != token_id)
            found[f"token_id:{other}" if taken else other_name] = value
        return found | {name: logprob}


class Characters:
    """Counter of the characters in a text that arrives as bytes."""

    def __init__(self, start: int) -> None:
        self.so_far = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes) -> None:
        self.so_far += len(self._decoder.decode(piece))


def _dump_json(value: dict[str, Any]) -> str:
    """Encode a value as JSON, with pydantic if possible: it is five times faster than `json`.

    `json` encodes values that pydantic rejects or writes differently: lone surrogates and line
    separators. Raises ValueError for numbers that are not finite.
    """
    with suppress(PydanticSerializationError):
        text = to_json(value).decode()
        if not any(part in text for part in ODD):
            return text
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def error_body(
    code: int | str, message: str, kind: str = "invalid_request_error", param: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
