"""Serve `/inference/v1/generate`, vLLM's route from token ids to token ids.

Clients that tokenize by themselves use it, such as the train client of verifiers 0.4.
"""

import uuid
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hone.inference.openai.schema import CompletionRequest, Ids
from hone.records import Completion

# Keys of vLLM's sampling parameters that change nothing here: the answer has no text.
WITHOUT_EFFECT = {
    "detokenize",
    "flat_logprobs",
    "output_kind",
    "return_token_ids",
    "routed_experts_prompt_start",
    "skip_special_tokens",
    "spaces_between_special_tokens",
}
UNSUPPORTED = ("prompt_logprobs", "stream")


class GenerateTokensRequest(BaseModel):
    """Token ids to continue.

    Attributes:
        model: name of the served model or of an adapter; absent: the model.
        sampling_params: as in vLLM's SamplingParams; without `max_tokens` a completion may fill
            the context.
        cache_salt: accepted without effect: prompts of another version of the weights are never
            reused.
    """

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    token_ids: Ids
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _refuse_other_inputs(self) -> "GenerateTokensRequest":
        for key in ("content_parts", "features", "stream"):
            if (self.model_extra or {}).get(key):
                raise ValueError(f"{key}: this route takes token ids and answers in one piece")
        for key in UNSUPPORTED:
            if self.sampling_params.get(key):
                raise ValueError(f"sampling_params.{key} is not supported by this server")
        return self

    def as_completion(self, default_model: str) -> CompletionRequest:
        """Return the same request in the form of `/v1/completions`. Raises ValidationError."""
        params = {k: v for k, v in self.sampling_params.items() if k not in WITHOUT_EFFECT}
        return CompletionRequest.model_validate(
            {"max_tokens": None}
            | params
            | {"model": self.model or default_model, "prompt": self.token_ids}
        )


def build_generate_body(
    request: CompletionRequest, prompt_ids: list[int], completions: Sequence[Completion]
) -> dict[str, Any]:
    """Return the answer: token ids with logprobs of each completion."""
    written = sum(len(one.ids) for one in completions)
    return {
        "request_id": f"generate-{uuid.uuid4().hex}",
        "choices": [_build_choice(i, request, one) for i, one in enumerate(completions)],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": written,
            "total_tokens": len(prompt_ids) + written,
        },
    }


def _build_choice(index: int, request: CompletionRequest, completion: Completion) -> dict[str, Any]:
    logprobs = None
    if request.logprobs is not None:
        others = completion.alternatives or [[] for _ in completion.ids]
        rows = zip(completion.ids, completion.logprobs, others, strict=True)
        logprobs = {
            "content": [
                _name_token(i, p) | {"top_logprobs": [_name_token(*one) for one in likeliest]}
                for i, p, likeliest in rows
            ]
        }
    return {
        "index": index,
        "token_ids": completion.ids,
        "finish_reason": completion.finish_reason,
        "logprobs": logprobs,
    }


def _name_token(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": logprob}
