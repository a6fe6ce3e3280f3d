"""Routes of the OpenAI API, and vLLM's routes for token ids.

request ─► token ids (long texts in a thread) ─► GenerateRequests ─► service ─► answer, whole or streamed
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
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
from hone.text.structured_outputs import Following, FormEnds, form_of_call
from hone.text.tokenizer import CONTEXT

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)
MOST = 4096  # completions of one request
LONG = 32768  # characters of a request from which on a thread makes tokens of it: the loop serves others meanwhile


class Refusal(ValueError):
    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


def build_refusal(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> JSONResponse:
    return JSONResponse(error_body(code or status, message, kind, param), status_code=status)


def refuse_request(error: ValueError) -> JSONResponse:
    """Return the error response for an error, with OpenAI's code if there is one."""
    if isinstance(error, ContextFull):
        return build_refusal(400, str(error), code="context_length_exceeded")
    return build_refusal(400, str(error))


Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def add_openai(app: FastAPI, served: Served) -> None:
    sampler = served.sampler

    def add_post_route(path: str) -> Callable[[Handler], Handler]:
        """Add a route ahead of others that reads its body itself; FastAPI's handling doubles its
        time.
        """

        def register_handler(handler: Handler) -> Handler:
            app.router.routes.insert(0, Route(path, handler, methods=["POST"]))
            return handler

        return register_handler

    def build_model_card(name: str) -> dict[str, Any]:
        card = {
            "object": "model",
            "created": 0,
            "owned_by": "hone",
            "max_model_len": sampler.max_context,
        }
        return {"id": name, **card, **({} if name == served.name else {"parent": served.name})}

    def check_model(name: str | None) -> None:
        if name is not None and name not in served.model_names:
            known = ", ".join(map(repr, served.model_names))
            raise Refusal(
                404, f"model {name!r} is not served here; this server has {known}", param="model"
            )

    @app.exception_handler(Refusal)
    async def answer_refusal(_: Request, error: Refusal) -> JSONResponse:
        return build_refusal(error.status, str(error), param=error.param)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [build_model_card(name) for name in served.model_names]}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        check_model(name)
        return build_model_card(name)

    @add_post_route("/v1/chat/completions")
    async def chat_completions(connection: Request) -> Response:
        return await answer_chat(await read_body(connection, ChatRequest), connection, None)

    @add_post_route("/v1/chat/completions/tokens")
    async def chat_of_tokens(connection: Request) -> Response:
        body = await read_body(connection, TokensRequest)
        return await answer_chat(body, connection, body.tokens)

    @add_post_route("/v1/responses")
    async def create_response(connection: Request) -> Response:
        body = await read_body(connection, ResponsesRequest)
        try:
            asked = body.as_chat()
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        except ValueError as error:
            return refuse_request(error)
        return await answer_chat(asked, connection, None, ResponsesAnswer)

    async def answer_chat(
        body: ChatRequest,
        connection: Request,
        prompt_ids: list[int] | None,
        kind: type[ChatAnswer] = ChatAnswer,
    ) -> Response:
        check_model(body.model)
        tokenizer = served.tokenizer
        try:
            if body.return_routing:
                sampler.require_capability("routing")
            prompt = body.build_prompt()
            if prompt_ids is None:
                prompt_ids = await run_beside_loop(
                    lambda: tokenizer.prompt_ids(prompt),
                    _count_characters(body.messages)
                    + len(str(body.tools or ""))
                    + len(str(body.chat_template_kwargs or "")),
                    served,
                )
            room, wanted = sampler.max_context, body.max_completion_tokens or body.max_tokens
            if body.max_total_tokens is not None:
                room = min(room, body.max_total_tokens)
                wanted = max(1, min(wanted or room, room - len(prompt_ids)))
            requests = await _build_requests(body, [prompt_ids], served, wanted, room)
            answer = kind(body, prompt, prompt_ids, tokenizer)
            if body.stream:
                return await stream_answer(connection, sampler, answer, requests)
            completions = await unless_gone(
                connection, *(sampler.generate(request) for request in requests)
            )
            if body.so_far:
                completions = [
                    join_completions(one, rest)
                    for one, rest in zip(body.so_far, completions, strict=True)
                ]
            check_forms(requests)
            return build_whole_response(answer, completions)
        except HungUp:
            return Response(status_code=499)  # nobody reads it
        except ValueError as error:
            return refuse_request(error)

    @add_post_route("/v1/completions")
    async def create_completions(connection: Request) -> Response:
        body = await read_body(connection, CompletionRequest)
        check_model(body.model)
        tokenizer, room = served.tokenizer, sampler.max_context
        texts = body.list_prompts()
        try:

            def encode_prompt(one: str | list[int]) -> list[int]:
                return (
                    tokenizer.encode(one, body.add_special_tokens) if isinstance(one, str) else one
                )

            prompts = await run_beside_loop(
                lambda: [encode_prompt(one) for one in texts], sum(map(len, texts)), served
            )
            wanted = body.max_tokens if "max_tokens" in body.model_fields_set else 16
            requests = await _build_requests(body, prompts, served, wanted, room)
            if body.stream and body.max_tokens != 0:
                return await stream_answer(
                    connection, sampler, TextAnswer(body, prompts, tokenizer), requests
                )
            echoed = None
            if body.echo and body.logprobs is not None:
                adapter = None if body.model == served.name else body.model
                (echoed,) = await unless_gone(
                    connection, _score_prompts(body, prompts, sampler, adapter)
                )
            if body.max_tokens == 0:
                done = [Completion([], [], [], "length", []) for _ in requests]
            else:
                done = await unless_gone(
                    connection, *(sampler.generate(request) for request in requests)
                )
            check_forms(requests)
            return build_whole_response(TextAnswer(body, prompts, tokenizer, echoed), done)
        except HungUp:
            return Response(status_code=499)  # nobody reads it
        except ValueError as error:
            return refuse_request(error)

    @app.post("/tokenize", response_model=None)
    async def tokenize_prompt(body: TokenizeRequest) -> Any:
        check_model(body.model)
        tokenizer = served.tokenizer

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

        try:
            ids = await run_beside_loop(
                encode_prompt,
                len(body.prompt or "") + _count_characters(body.messages or []),
                served,
            )
        except ValueError as error:
            return build_refusal(400, str(error))
        strings = [tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": sampler.max_context,
            "tokens": ids,
            "token_strs": strings,
        }

    @app.post("/detokenize", response_model=None)
    async def detokenize_tokens(body: DetokenizeRequest) -> Any:
        check_model(body.model)
        if len(body.tokens) > sampler.max_context:
            return build_refusal(
                400,
                f"tokens: {len(body.tokens)} are more than the model's context of {sampler.max_context}",
            )
        beyond = [i for i in body.tokens if not 0 <= i < served.tokenizer.vocab_size]
        if beyond:
            return build_refusal(
                400,
                f"tokens: {beyond[0]} is not one of the tokenizer's {served.tokenizer.vocab_size}",
            )
        return {"prompt": served.tokenizer.decode(body.tokens, skip_special_tokens=False)}


def build_whole_response(answer: Answer, completions: Sequence[Completion]) -> Response:
    return Response(
        answer.encode_json(answer.build_body(completions)), media_type="application/json"
    )


async def read_body(connection: Request, kind: type[B]) -> B:
    """Read and validate a body without FastAPI's handling, which would double the time of a
    request.
    """
    try:
        return kind.model_validate_json(await connection.body())
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


async def run_beside_loop(work: Callable[[], T], size: int, served: Served | None = None) -> T:
    """Run work on a text of `size` characters, in a thread if it is large.

    Raises ValueError, before any work, for a text that cannot fit into the served model's context.
    """
    if size <= LONG:
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
    """Return about how many characters messages have."""
    return sum(
        len(one.content) if isinstance(one.content, str) else len(str(one.content))
        for one in messages
    )


async def _build_requests(
    body: schema.Request, prompts: list[list[int]], served: Served, wanted: int | None, room: int
) -> list[GenerateRequest]:
    """Build the requests of all prompts. Raises ValueError.

    The grammar of an output format is compiled in a thread: it may be large, and the first one
    scans the whole vocabulary.
    """

    if len(prompts) * (body.n or 1) > MOST:
        raise ValueError(
            f"{len(prompts)} prompts x n = {body.n or 1}: a request may ask for {MOST} completions"
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

    `wanted` is the requested number of tokens, `room` the context for prompt and completion.
    """
    if wanted is not None and len(prompt_ids) + wanted > room:
        raise ContextFull(
            f"This model's maximum context length is {room} tokens, but {len(prompt_ids) + wanted} were "
            f"requested ({len(prompt_ids)} in the prompt, {wanted} in the completion)"
        )
    seed = body.seed if body.seed is not None else int.from_bytes(os.urandom(7), "little")
    tokenizer, stop_ids = served.tokenizer, served.stop_ids | set(body.stop_token_ids or ())
    vocab_size = served.sampler.vocab_size
    so_far = (body.so_far if isinstance(body, ChatRequest) else None) or []
    name = body.request_name if isinstance(body, ChatRequest) else None

    form = body.requested_form()
    if isinstance(body, ChatRequest) and body.must_call:
        form = form_of_call(
            body.callable_tools(), tokenizer.require_template().call_format, tokenizer
        )
    if form is not None:
        served.sampler.require_capability("forms")
    follows = None if form is None else Following(form, tokenizer, vocab_size, sorted(stop_ids))
    decode, first = partial(tokenizer.decode, skip_special_tokens=False), None
    if isinstance(body, CompletionRequest):  # whose text goes on from the prompt's
        first = partial(tokenizer.decode_after, prompt_ids[-CONTEXT:], skip_special_tokens=False)

    def build_request(i: int) -> GenerateRequest:
        before, draws = so_far[i].ids if so_far else [], seed + i
        if before:  # draws of its own: those of its first tokens are used up
            draws = other_seed(draws, len(before))
        sampling = body.build_sampling(
            max(1, (room if wanted is None else wanted) - len(before)), draws, vocab_size
        )
        ends: Any = StopStrings(decode, body.stop, first) if body.stop else None
        allows = None if follows is None else follows.start_another(before)
        if allows is not None:  # the form says what the end is, not a number of tokens
            sampling, ends = replace(sampling, min_tokens=0), FormEnds(ends, allows)
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


def join_completions(before: schema.Written, rest: Completion) -> Completion:
    """Join a partial completion from elsewhere with the rest."""
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
        nothing: Any = None  # as OpenAI tells that there is none
        return Completion(ids, [nothing, *own], [0] * len(ids), "", [[], *others])

    if not all(prompts):
        raise ValueError("prompt: it is empty")
    return await asyncio.gather(*map(score_prompt, prompts))
