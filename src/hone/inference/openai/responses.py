"""Serve `/v1/responses` for plain text by means of chat requests and chat answers."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from hone.inference.openai.answers import ChatAnswer
from hone.inference.openai.schema import ChatRequest, refuse_ignored
from hone.records import Completion

ABSENT: tuple[Any, ...] = (None, False, [], {}, "", "disabled")
REFUSED = (  # keys that would change the answer and are not supported
    "stream",
    "tools",
    "previous_response_id",
    "conversation",
    "background",
    "prompt",
    "reasoning",
    "truncation",
    "max_tool_calls",
    "top_logprobs",
    "include",
)


class Text(BaseModel):
    model_config = ConfigDict(extra="allow")
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> "Text":
        refuse_ignored(self.model_extra)
        return self


class ResponsesRequest(BaseModel):
    model_config = ConfigDict(extra="allow")
    model: str
    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: FiniteFloat | None = None
    top_p: float | None = None
    text: Text | None = None
    metadata: dict[str, Any] | None = None
    tool_choice: Literal["none", "auto"] | None = None

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> "ResponsesRequest":
        for key in REFUSED:
            value = (self.model_extra or {}).get(key)
            if value not in ABSENT:
                raise ValueError(
                    f"{key} = {value!r} is not supported by /v1/responses; /v1/chat/completions has more"
                )
        refuse_ignored(
            {key: value for key, value in (self.model_extra or {}).items() if key not in REFUSED}
        )
        return self

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat request. Raises ValueError for unsupported input items."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [_convert_item(item) for item in self.input]
        form = (self.text and self.text.format) or {"type": "text"}
        if form.get("type") == "json_schema":
            form = {
                "type": "json_schema",
                "json_schema": {k: v for k, v in form.items() if k != "type"},
            }
        asked: dict[str, Any] = {"model": self.model, "messages": messages, "response_format": form}
        asked |= {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_completion_tokens": self.max_output_tokens,
        }
        return ChatRequest.model_validate(asked)


def _convert_item(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type", "message") != "message" or not isinstance(item.get("role"), str):
        raise ValueError(f"input: {item.get('type', 'an item')!r} is not a message with a role")
    known = ("type", "role", "content", "id", "status")
    ignored = [key for key, value in item.items() if key not in known and value not in ABSENT]
    if ignored:
        raise ValueError(f"input: {ignored[0]} of a message is not supported by /v1/responses")
    return {"role": item["role"], "content": item.get("content")}


class ResponsesAnswer(ChatAnswer):
    prefix = "resp"

    def build_body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        (done,) = completions
        is_whole = done.finish_reason == "stop"
        part = {
            "type": "output_text",
            "text": self.completion_text(done),
            "annotations": [],
            "logprobs": [],
        }
        status = "completed" if is_whole else "incomplete"
        number = str(self.head["id"]).partition("-")[2]
        message = {
            "type": "message",
            "id": f"msg-{number}",
            "status": status,
            "role": "assistant",
            "content": [part],
        }
        used = self.count_usage(len(done.ids))
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "status": status,
            "error": None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "model": self.head["model"],
            "output": [message],
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "temperature": self.request.temperature,
            "top_p": self.request.top_p,
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            },
        }
