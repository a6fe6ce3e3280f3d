"""The OpenAI chat protocol as far as the engine serves it: what is read, what is answered."""

import time
import uuid
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hone.records import Completion
from hone.text.tokenizer import Tokenizer

NEUTRAL: dict[str, tuple[Any, ...]] = {  # what the engine cannot do, with the values that ask for nothing
    "top_p": (None, 1, 1.0),
    "top_k": (None, -1, 0),
    "min_p": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "stop": (None, [], ""),
    "stream": (None, False),
    "top_logprobs": (None, 0),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
}


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


class ChatRequest(BaseModel):
    """A request; null counts as absent, keys that the engine does not know are ignored."""

    model_config = ConfigDict(extra="allow")
    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_total_tokens: int | None = Field(None, ge=1)  # prompt and completion; cuts max_tokens to what that leaves
    temperature: float | None = Field(None, ge=0, le=100)
    n: int | None = Field(None, ge=1, le=1024)
    seed: int | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    return_token_logprobs: bool | None = None  # plain numbers, beside or instead of the entries of `logprobs`
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _keep_to_the_template(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = {"self", "messages", "tools", "documents", "add_generation_prompt"} & set(value or {})
        if taken:
            raise ValueError(f"{', '.join(sorted(taken))} cannot be set here")
        return value

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> "ChatRequest":
        for key, neutral in NEUTRAL.items():
            value = (self.model_extra or {}).get(key)
            if value not in neutral:
                raise ValueError(f"{key} = {value!r} is not supported by this server; leave it out")
        return self


def chat_response(
    request: ChatRequest, prompt_ids: list[int], completions: list[Completion], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The answer to a chat request, with token ids and logprobs where they were asked for."""
    skip = request.skip_special_tokens is not False
    choices = []
    for index, completion in enumerate(completions):
        text = tokenizer.decode(completion.ids, skip_special_tokens=skip)
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": text},
            "finish_reason": completion.finish_reason,
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
        choices.append(choice)
    generated = sum(len(completion.ids) for completion in completions)
    response = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
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
    entries = []
    for token_id, logprob in zip(completion.ids, completion.logprobs, strict=True):
        token = tokenizer.token(token_id)
        name = f"token_id:{token_id}" if by_id else token
        entries.append({"token": name, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
    return entries


def error_body(
    status: int, message: str, kind: str = "invalid_request_error", param: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
