"""Routes of the OpenAI API, and vLLM's routes for token ids.

request ─► token ids (long texts in a thread) ─► GenerateRequests ─► sampler ─► answer, whole or streamed
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.routing import Route

from hone.inference.connection import HungUp, unless_gone
from hone.inference.openai import schema
from hone.inference.openai.answers import Answer, ChatAnswer, TextAnswer, error_body
from hone.inference.openai.event_stream import check_forms, stream_answer
from hone.inference.openai.generate import GenerateTokensRequest, build_generate_body
from hone.inference.openai.responses import ResponsesAnswer, ResponsesRequest
from hone.inference.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    TokensRequest,
)
from hone.inference.samplers.base import Sampler
from hone.inference.served_model import Served
from hone.records import Completion, ContextFull, GenerateRequest, other_seed
from hone.text.stop_strings import StopStrings
from hone.text.structured_outputs import Following, Form, FormEnds, form_of_call
from hone.text.tokenizer import CONTEXT_TOKENS

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
MAX_COMPLETIONS = 4096  # completions per request
MARK_CHARACTERS = 16  # counted for the marks that a template puts around a message
THREAD_CHARACTERS = 32768  # characters from which a request is tokenized in a thread


class Refusal(ValueError):
    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


def build_refusal(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> JSONResponse:
    return JSONResponse(error_body(code or status, message, kind, param), status_code=status)


def refuse_request(error: ValueError) -> JSONResponse:
    """Return a 400 response; for ContextFull with OpenAI's code `context_length_exceeded`."""
    if isinstance(error, ContextFull):
        return build_refusal(400, str(error), code="context_length_exceeded")
    return build_refusal(400, str(error))


def add_openai(app: FastAPI, served: Served) -> None:
    """Add the routes of the OpenAI API, and vLLM's routes for token ids."""
    routes = OpenAIRoutes(served)
    app.add_exception_handler(Refusal, answer_refusal)
    app.get("/v1/models")(routes.list_models)
    app.get("/v1/models/{name:path}")(routes.get_model)
    app.post("/tokenize", response_model=None)(routes.tokenize_prompt)
    app.post("/detokenize", response_model=None)(routes.detokenize_tokens)
    # These come first and read their bodies themselves; FastAPI's handling doubles their time.
    handlers = {
        "/v1/chat/completions": routes.create_chat_completion,
        "/v1/chat/completions/tokens": routes.create_chat_completion_of_tokens,
        "/v1/responses": routes.create_response,
        "/v1/completions": routes.create_completion,
        "/inference/v1/generate": routes.generate_tokens,
    }
    for path, handler in handlers.items():
        app.router.routes.insert(0, Route(path, handler, methods=["POST"]))


async def answer_refusal(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return build_refusal(error.status, str(error), param=error.param)


class OpenAIRoutes:
    """The handlers of the routes, for one served model."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.sampler = served.sampler

    def build_model_card(self, name: str) -> dict[str, Any]:
        card = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "hone",
            "max_model_len": self.sampler.max_context,
        }
        return card if name == self.served.name else card | {"parent": self.served.name}

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.served.model_names:
            known = ", ".join(map(repr, self.served.model_names))
            message = f"model {name!r} is not served here; this server has {known}"
            raise Refusal(404, message, param="model")

    async def list_models(self) -> dict[str, Any]:
        cards = [self.build_model_card(name) for name in self.served.model_names]
        return {"object": "list", "data": cards}

    async def get_model(self, name: str) -> dict[str, Any]:
        self.check_model(name)
        return self.build_model_card(name)

    async def create_chat_completion(self, connection: Request) -> Response:
        return await self.answer_chat(await read_body(connection, ChatRequest), connection)

    async def create_chat_completion_of_tokens(self, connection: Request) -> Response:
        body = await read_body(connection, TokensRequest)
        return await self.answer_chat(body, connection, body.tokens)

    async def create_response(self, connection: Request) -> Response:
        body = await read_body(connection, ResponsesRequest)
        try:
            request = body.as_chat()
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        except ValueError as error:
            return refuse_request(error)
        return await self.answer_chat(request, connection, kind=ResponsesAnswer)

    async def answer_chat(
        self,
        body: ChatRequest,
        connection: Request,
        prompt_ids: list[int] | None = None,
        kind: type[ChatAnswer] = ChatAnswer,
    ) -> Response:
        self.check_model(body.model)
        tokenizer = self.served.tokenizer
        sampler = self.sampler
        try:
            if body.return_routing:
                sampler.require_capability("routing")
            prompt = body.build_prompt()
            if prompt_ids is None:
                size = _count_characters(body.messages) + len(str(body.tools or ""))
                size += len(str(body.chat_template_kwargs or ""))
                prompt_ids = await run_beside_loop(
                    lambda: tokenizer.prompt_ids(prompt), size, self.served
                )
            room = sampler.max_context
            wanted = body.max_completion_tokens or body.max_tokens
            if body.max_total_tokens is not None:
                room = min(room, body.max_total_tokens)
                wanted = max(1, min(wanted or room, room - len(prompt_ids)))
            requests = await _build_requests(body, [prompt_ids], self.served, wanted, room)
            answer = kind(body, prompt, prompt_ids, tokenizer)
            if body.stream:
                return await stream_answer(connection, sampler, answer, requests)
            completions = await unless_gone(connection, *map(sampler.generate, requests))
            if body.so_far:
                completions = list(map(join_completions, body.so_far, completions))
            check_forms(requests)
            return build_whole_response(answer, completions)
        except HungUp:
            return Response(status_code=499)  # the client is gone
        except ValueError as error:
            return refuse_request(error)

    async def create_completion(self, connection: Request) -> Response:
        body = await read_body(connection, CompletionRequest)
        self.check_model(body.model)
        tokenizer = self.served.tokenizer
        sampler = self.sampler
        texts = body.list_prompts()

        def encode_prompt(one: str | list[int]) -> list[int]:
            return tokenizer.encode(one, body.add_special_tokens) if isinstance(one, str) else one

        try:
            prompts = await run_beside_loop(
                lambda: list(map(encode_prompt, texts)), sum(map(len, texts)), self.served
            )
            wanted = body.max_tokens if "max_tokens" in body.model_fields_set else 16
            requests = await _build_requests(
                body, prompts, self.served, wanted, sampler.max_context
            )
            if body.stream and body.max_tokens != 0:
                answer = TextAnswer(body, prompts, tokenizer)
                return await stream_answer(connection, sampler, answer, requests)
            echoed = None
            if body.echo and body.logprobs is not None:
                adapter = None if body.model == self.served.name else body.model
                scoring = _score_prompts(body, prompts, sampler, adapter)
                (echoed,) = await unless_gone(connection, scoring)
            done = [Completion([], [], [], "length", []) for _ in requests]
            if body.max_tokens != 0:
                done = await unless_gone(connection, *map(sampler.generate, requests))
            check_forms(requests)
            return build_whole_response(TextAnswer(body, prompts, tokenizer, echoed), done)
        except HungUp:
            return Response(status_code=499)  # the client is gone
        except ValueError as error:
            return refuse_request(error)

    async def generate_tokens(self, connection: Request) -> Response:
        body = await read_body(connection, GenerateTokensRequest)
        try:
            request = body.as_completion(self.served.name)
            details = body.requested_details()
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        self.check_model(request.model)
        sampler = self.sampler
        try:
            requests = await _build_requests(
                request, [body.token_ids], self.served, request.max_tokens, sampler.max_context
            )
            requests = details.add_to_requests(requests, sampler)
            done = await unless_gone(connection, *map(sampler.generate, requests))
            check_forms(requests)
            answer = build_generate_body(request, requests, done, details, sampler.routing_shape)
        except HungUp:
            return Response(status_code=499)  # the client is gone
        except ValueError as error:
            return refuse_request(error)
        return JSONResponse(answer)

    async def tokenize_prompt(self, body: TokenizeRequest) -> Any:
        self.check_model(body.model)
        tokenizer = self.served.tokenizer

        def encode_prompt() -> list[int]:
            if body.messages is None:
                return tokenizer.encode(body.prompt or "", body.add_special_tokens)
            return tokenizer.encode(
                tokenizer.require_template().render_conversation(
                    [message.model_dump() for message in body.messages],
                    add_generation_prompt=body.add_generation_prompt,
                    tools=body.tools or None,
                    **(body.chat_template_kwargs or {}),
                )
            )

        size = len(body.prompt or "") + _count_characters(body.messages or [])
        size += len(str(body.tools or "")) + len(str(body.chat_template_kwargs or ""))
        try:
            ids = await run_beside_loop(encode_prompt, size, self.served)
        except ValueError as error:
            return build_refusal(400, str(error))
        return {
            "count": len(ids),
            "max_model_len": self.sampler.max_context,
            "tokens": ids,
            "token_strs": list(map(tokenizer.token_text, ids)) if body.return_token_strs else None,
        }

    async def detokenize_tokens(self, body: DetokenizeRequest) -> Any:
        self.check_model(body.model)
        tokenizer = self.served.tokenizer
        room = self.sampler.max_context
        if len(body.tokens) > room:
            return build_refusal(
                400, f"tokens: {len(body.tokens)} are more than the model's context of {room}"
            )
        unknown = [i for i in body.tokens if not 0 <= i < tokenizer.vocab_size]
        if unknown:
            return build_refusal(
                400, f"tokens: {unknown[0]} is not one of the tokenizer's {tokenizer.vocab_size}"
            )
        return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}


def build_whole_response(answer: Answer, completions: Sequence[Completion]) -> Response:
    return Response(
        answer.encode_json(answer.build_body(completions)), media_type="application/json"
    )


async def read_body(connection: Request, kind: type[B]) -> B:
    """Read and validate a JSON body.

    FastAPI's own handling would double the time of a request.
    """
    try:
        return kind.model_validate_json(await connection.body())
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


async def run_beside_loop(work: Callable[[], T], size: int, served: Served | None = None) -> T:
    """Run `work`, which processes a text of `size` characters; in a thread if the text is long.

    Raises ValueError, before `work` begins, for a text that cannot fit into the served model's
    context length.
    """
    if size <= THREAD_CHARACTERS:
        return work()

    def check_then_work() -> T:
        if (
            served is not None
            and size > served.sampler.max_context * served.tokenizer.longest_token
        ):
            raise ContextFull(
                f"This model's maximum context length is {served.sampler.max_context} tokens, but the prompt has "
                f"{size} characters, and none of its tokens more than {served.tokenizer.longest_token}"
            )
        return work()

    return await asyncio.to_thread(check_then_work)


def _count_characters(messages: Sequence[schema.ChatMessage]) -> int:
    """Estimate the characters of messages, including the template's marks around each."""
    return sum(
        MARK_CHARACTERS
        + len(one.role)
        + (len(one.content) if isinstance(one.content, str) else len(str(one.content)))
        + (len(str(one.model_extra)) if one.model_extra else 0)
        for one in messages
    )


async def _build_requests(
    body: schema.Request, prompts: list[list[int]], served: Served, wanted: int | None, room: int
) -> list[GenerateRequest]:
    """Build the requests of all prompts, `n` per prompt. Raises ValueError.

    `wanted` is the requested number of completion tokens (None: no limit), `room` the maximum
    number of tokens of a prompt and its completion together. The grammar of an output format is
    compiled in a thread: it may be large, and the first grammar requires a scan of the whole
    vocabulary.
    """

    if len(prompts) * (body.n or 1) > MAX_COMPLETIONS:
        raise ValueError(
            f"{len(prompts)} prompts x n = {body.n or 1}: a request may ask for {MAX_COMPLETIONS} completions"
        )

    def build_all() -> list[GenerateRequest]:
        return [
            request
            for ids in prompts
            for request in _build_requests_of_prompt(body, ids, served, wanted, room)
        ]

    return await asyncio.to_thread(build_all) if body.has_form else build_all()


def _build_requests_of_prompt(
    body: schema.Request, prompt_ids: list[int], served: Served, wanted: int | None, room: int
) -> list[GenerateRequest]:
    """Build the `n` requests of a prompt. Raises ValueError.

    `wanted` is the requested number of completion tokens (None: no limit), `room` the maximum
    number of tokens of the prompt and a completion together.
    """
    if wanted is not None and len(prompt_ids) + wanted > room:
        raise ContextFull(
            f"This model's maximum context length is {room} tokens, but {len(prompt_ids) + wanted} were "
            f"requested ({len(prompt_ids)} in the prompt, {wanted} in the completion)"
        )
    seed = body.seed if body.seed is not None else int.from_bytes(os.urandom(7), "little")
    tokenizer = served.tokenizer
    stop_ids = served.stop_ids | set(body.stop_token_ids or ())
    vocab_size = served.sampler.vocab_size
    chat = body if isinstance(body, ChatRequest) else None
    so_far, name = (chat.so_far or [], chat.request_name) if chat else ([], None)
    form = _choose_form(body, served)
    follows = None if form is None else Following(form, tokenizer, vocab_size, sorted(stop_ids))
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    first = None
    if chat is None:  # the text of a completion continues the prompt's
        first = partial(
            tokenizer.decode_after, prompt_ids[-CONTEXT_TOKENS:], skip_special_tokens=False
        )

    def build_request(i: int) -> GenerateRequest:
        before = so_far[i].ids if so_far else []
        draws = seed + i
        if before:  # the draws of its first tokens are used up
            draws = other_seed(draws, len(before))
        most = max(1, (room if wanted is None else wanted) - len(before))
        sampling = body.build_sampling(most, draws, vocab_size)
        ends: Any = StopStrings(decode, body.stop, first) if body.stop else None
        allows = None if follows is None else follows.start_another(before)
        if allows is not None:  # the form decides where the end is, not a number of tokens
            sampling = replace(sampling, min_tokens=0)
            ends = FormEnds(ends, allows)
        return GenerateRequest(
            prompt_ids + before,
            sampling,
            stop_ids,
            ends,
            body.timeout,
            None if body.model == served.name else body.model,
            f"{name}/{i}" if name else "",
            allows,
        )

    return [build_request(i) for i in range(body.n or 1)]


def _choose_form(body: schema.Request, served: Served) -> Form | None:
    """Return the requested output format, or that of a forced tool call, or None.

    Raises ValueError if the format is invalid or the sampler does not support formats.
    """
    form = body.requested_form()
    if isinstance(body, ChatRequest) and body.must_call:
        call_format = served.tokenizer.require_template().call_format
        form = form_of_call(body.callable_tools(), call_format, served.tokenizer)
    if form is not None:
        served.sampler.require_capability("forms")
    return form


def join_completions(before: schema.Written, rest: Completion) -> Completion:
    """Join the tokens that another server has generated with the rest of the completion."""
    return Completion(
        before.ids + rest.ids,
        before.logprobs + rest.logprobs,
        before.versions + rest.versions,
        rest.finish_reason,
        routing=rest.routing,
    )


async def _score_prompts(
    body: CompletionRequest, prompts: list[list[int]], sampler: Sampler, adapter: str | None
) -> list[Completion]:
    """Return prompts as completions with logprobs; the first token has none."""

    async def score_prompt(ids: list[int]) -> Completion:
        own, others = (
            await sampler.find_likeliest(ids, body.logprobs or 0, adapter)
            if len(ids) > 1
            else ([], [])
        )
        nothing: Any = None  # OpenAI's value for a missing logprob
        return Completion(ids, [nothing, *own], [0] * len(ids), "", [[], *others])

    if not all(prompts):
        raise ValueError("prompt: it is empty")
    return await asyncio.gather(*map(score_prompt, prompts))
