"""Serve `/inference/v1/generate`, vLLM's route from token ids to token ids.

Clients that tokenize by themselves use it, such as the train client of verifiers 0.4.
"""

import base64
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from hone.inference.openai.schema import CompletionRequest, Ids
from hone.inference.samplers.base import Sampler
from hone.records import MAX_MASK_IDS, Completion, GenerateRequest

# Keys of vLLM's sampling parameters that change nothing here: the answer has no text.
WITHOUT_EFFECT = {
    "detokenize",
    "flat_logprobs",
    "output_kind",
    "return_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
}
UNSUPPORTED = ("prompt_logprobs", "stream")


class TokenDetails(BaseModel):
    """What an answer says of its tokens beside ids and logprobs.

    Attributes:
        return_routed_experts: the experts that the tokens of a mixture went through.
        routed_experts_prompt_start: first token of the prompt whose experts are returned.
        return_sampling_mask: the ids that top_p, top_k and min_p left to draw from; without any of
            them an answer has no mask.
    """

    return_routed_experts: bool = False
    routed_experts_prompt_start: int = Field(0, ge=0)
    return_sampling_mask: bool = False

    def add_to_requests(
        self, requests: list[GenerateRequest], sampler: Sampler
    ) -> list[GenerateRequest]:
        """Return requests that ask the sampler for these details.

        Raises ValueError if it cannot give them.
        """
        if self.return_routed_experts:
            sampler.require_capability("routing")
            if not sampler.routing_shape[0]:
                raise ValueError("return_routed_experts: the model is not a mixture of experts")
        if not self.return_sampling_mask:
            return requests
        sampler.require_capability("masks")
        return [replace(one, sampling=replace(one.sampling, returns_mask=True)) for one in requests]


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
        dropped = WITHOUT_EFFECT | TokenDetails.model_fields.keys()
        params = {k: v for k, v in self.sampling_params.items() if k not in dropped}
        return CompletionRequest.model_validate(
            {"max_tokens": None}
            | params
            | {"model": self.model or default_model, "prompt": self.token_ids}
        )

    def requested_details(self) -> TokenDetails:
        """Return which details of the tokens are wanted. Raises ValidationError."""
        keys = self.sampling_params.keys() & TokenDetails.model_fields.keys()
        return TokenDetails.model_validate({key: self.sampling_params[key] for key in keys})


def build_generate_body(
    request: CompletionRequest,
    asked: Sequence[GenerateRequest],
    completions: Sequence[Completion],
    details: TokenDetails,
    routing_shape: tuple[int, int],
) -> dict[str, Any]:
    """Return the answer: token ids of each completion, with logprobs and the wanted details.

    `asked` has the sampler's request for each completion, `routing_shape` is the sampler's. Raises
    ValueError if a sampling mask is too large.
    """
    prompt_tokens = len(asked[0].prompt_ids)
    written = sum(len(one.ids) for one in completions)
    return {
        "request_id": f"generate-{uuid.uuid4().hex}",
        "choices": [
            _build_choice(i, request, one) | _build_details(one, own, details, routing_shape)
            for i, (one, own) in enumerate(zip(completions, asked, strict=True))
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": written,
            "total_tokens": prompt_tokens + written,
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


def _build_details(
    completion: Completion,
    request: GenerateRequest,
    details: TokenDetails,
    routing_shape: tuple[int, int],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if details.return_routed_experts:
        count = len(request.prompt_ids) + len(completion.ids) - 1
        first = min(details.routed_experts_prompt_start, count)
        found["routed_experts"] = encode_routing(completion.routing, (count, *routing_shape), first)
    if request.sampling.has_mask:
        if completion.mask is None:
            raise ValueError(
                f"return_sampling_mask: more than {MAX_MASK_IDS:,} token ids could be drawn in one completion; "
                "take a smaller top_p or top_k"
            )
        found["sampling_mask"] = completion.mask
    return found


def encode_routing(routing: str, shape: tuple[int, int, int], first: int) -> dict[str, Any]:
    """Return the experts of the tokens from `first` on in the form of vLLM's answers.

    The last block does not compute the experts of prompt tokens, since nothing depends on them;
    the first of its experts are given for them.

    Args:
        routing: `Completion.routing`.
        shape: number of its tokens, of blocks with experts, and of experts per token.
        first: first token that is returned.
    """
    rows_TR: NDArray[np.int16] = np.frombuffer(base64.b64decode(routing), dtype=np.int16)
    rows_TLK = rows_TR.reshape(shape)[first:]
    rows_TLK = np.where(rows_TLK < 0, np.arange(shape[2], dtype=np.int16), rows_TLK)
    kind = np.uint8 if rows_TLK.max(initial=0) < 256 else np.uint16
    return {
        "data": base64.b64encode(rows_TLK.astype(kind).tobytes()).decode(),
        "shape": list(rows_TLK.shape),
        "start": first,
        "dtype": np.dtype(kind).name,
    }


def _name_token(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": logprob}
