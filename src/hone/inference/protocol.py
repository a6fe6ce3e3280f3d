"""The OpenAI chat protocol as far as the engine serves it: what is read, what is answered."""

import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hone.records import Completion, Prompt, Sampling
from hone.text.stops import cut
from hone.text.tokenizer import Tokenizer

NEUTRAL: dict[str, tuple[Any, ...]] = {  # what the engine cannot do, with the values that ask for nothing
    "stream": (None, False),
    "response_format": (None, {"type": "text"}),
}


DRAW_KEYS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "ignore_eos", "raw_logprobs", "top_logprobs",
)  # fmt: skip


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[dict[str, Any]] | None = None

    def as_message(self) -> dict[str, Any]:
        """The message for the template: text parts joined, keys without a value left out."""
        message = {k: v for k, v in self.model_dump().items() if v is not None or k == "content"}
        if isinstance(self.content, list):
            if any(part.get("type") != "text" for part in self.content):
                raise ValueError("messages may contain text parts only")
            message["content"] = "".join(str(part.get("text", "")) for part in self.content)
        return message


class Written(BaseModel):
    """The tokens of a completion that is not at its end."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]

    @model_validator(mode="after")
    def _of_equal_length(self) -> "Written":
        if not len(self.ids) == len(self.logprobs) == len(self.versions):
            raise ValueError("ids, logprobs and versions are of different lengths")
        return self


class ChatRequest(BaseModel):
    """A request; null counts as absent, keys that the engine does not know are ignored."""

    model_config = ConfigDict(extra="allow")
    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_total_tokens: int | None = Field(None, ge=1)  # prompt and completion; cuts max_tokens to what that leaves
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0: all
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    timeout: float | None = Field(None, gt=0)  # seconds until it ends with what it has
    n: int | None = Field(None, ge=1, le=1024)
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    raw_logprobs: bool | None = None  # at temperature 1
    return_token_ids: bool | None = None
    return_token_logprobs: bool | None = None  # plain numbers, beside or instead of the entries of `logprobs`
    return_tokens_as_token_ids: bool | None = None
    return_routing: bool | None = None  # experts that the tokens went through (records.Completion)
    request_name: str | None = None  # by which POST /progress knows it
    conversation_ids: list[int] | None = None  # of the first turns, kept unless the template rewrites their text
    conversation_messages: int | None = Field(None, ge=1)  # so many of the messages: the last is the assistant's
    so_far: list[Written] | None = None  # of each of the n: what was written elsewhere, to go on from
    skip_special_tokens: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("stop")
    @classmethod
    def _as_list(cls, value: str | list[str] | None) -> list[str]:
        strings = [value] if isinstance(value, str) else value or []
        return [string for string in strings if string]

    @field_validator("chat_template_kwargs")
    @classmethod
    def _keep_to_the_template(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = {"self", "messages", "tools", "documents", "before", "add_generation_prompt"} & set(value or {})
        if taken:
            raise ValueError(f"{', '.join(sorted(taken))} cannot be set here")
        return value

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> "ChatRequest":
        for key, neutral in NEUTRAL.items():
            value = (self.model_extra or {}).get(key)
            if value not in neutral:
                raise ValueError(f"{key} = {value!r} is not supported by this server; leave it out")
        if self.so_far is not None and (len(self.so_far) != (self.n or 1) or self.stop or self.top_logprobs):
            raise ValueError("so_far is for each of n, without stop and top_logprobs")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        return self

    def prompt(self) -> Prompt:
        messages = [message.as_message() for message in self.messages]
        tools = None if self.tool_choice == "none" else self.tools
        return Prompt(messages, tools, self.conversation_ids, self.conversation_messages or 0)

    def sampling(self, max_tokens: int, seed: int, vocab_size: int) -> Sampling:
        """How to draw. Raises ValueError for tokens that the model does not have."""
        beyond = [i for i in [*(self.logit_bias or {}), *(self.stop_token_ids or [])] if not 0 <= i < vocab_size]
        if beyond:
            raise ValueError(f"token id {beyond[0]} is not one of the model's: it has {vocab_size}")
        given = {name: value for name in DRAW_KEYS if (value := getattr(self, name)) is not None}
        given["top_k"] = max(given.get("top_k", 0), 0)
        return Sampling(max_tokens=max_tokens, seed=seed, logit_bias=tuple((self.logit_bias or {}).items()), **given)


def chat_response(
    request: ChatRequest,
    prompt: Prompt,
    prompt_ids: list[int],
    completions: list[Completion],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """The answer to a chat request, with token ids and logprobs where they were asked for."""
    skip = request.skip_special_tokens is not False
    choices = []
    for index, completion in enumerate(completions):
        text = tokenizer.decode(completion.ids, skip_special_tokens=skip)
        if request.stop:
            text = cut(text, request.stop, keep=bool(request.include_stop_str_in_output))
        turn = tokenizer.turn(prompt, prompt_ids, completion, text)
        called = bool(turn.tool_calls) and completion.finish_reason == "stop"
        choice: dict[str, Any] = {
            "index": index,
            "message": turn.message,
            "finish_reason": "tool_calls" if called else completion.finish_reason,
            "logprobs": None,
        }
        if request.logprobs:
            by_id = bool(request.return_tokens_as_token_ids)
            choice["logprobs"] = {"content": _logprob_entries(completion, tokenizer, by_id)}
        if request.return_token_logprobs:
            choice["token_logprobs"] = completion.logprobs
        if request.return_token_ids:
            choice["token_ids"] = completion.ids
            choice["policy_versions"] = completion.versions
        if request.return_routing:
            choice["routing"] = completion.routing
        choices.append(choice)
    generated = sum(len(completion.ids) for completion in completions)
    response = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),  # noqa: TID251
        "model": request.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": generated,
            "total_tokens": len(prompt_ids) + generated,
        },
    }
    if request.return_token_ids:
        response["prompt_token_ids"] = prompt_ids
    return response


def _logprob_entries(completion: Completion, tokenizer: Tokenizer, by_id: bool) -> list[dict[str, Any]]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token = tokenizer.token(token_id)
        name = f"token_id:{token_id}" if by_id else token
        return {"token": name, "logprob": logprob, "bytes": list(token.encode())}

    likeliest = completion.alternatives or [[]] * len(completion.ids)
    return [
        {**entry(token_id, logprob), "top_logprobs": [entry(*other) for other in others]}
        for token_id, logprob, others in zip(completion.ids, completion.logprobs, likeliest, strict=True)
    ]


def error_body(
    status: int, message: str, kind: str = "invalid_request_error", param: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
